"""The parallel draft head: one pass over [anchor, MASK, MASK, ...] drafts a whole block.

arXiv 2606.18394, round step 2. The in-block mask is causal (JetSpec) or bidirectional (DFlash);
the embedding and the output projection are the target's own and live with the target.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from jetspec.heads.base import DraftHead, register
from jetspec.heads.cache import HeadCache
from jetspec.heads.config import HeadConfig
from jetspec.heads.files import DType
from jetspec.heads.formats import save_native
from jetspec.heads.layers import (
    BlockConvolution,
    HeadLayer,
    Previous,
    RMSNorm,
    RotaryEmbedding,
    block_shift,
    parent_rows,
)
from jetspec.heads.linear import Linear
from jetspec.heads.producers import make_edges
from jetspec.heads.readers import load_parallel
from jetspec.heads.rescore import Rescorer, ancestor_scores
from jetspec.heads.sizes import resolve_head_config
from jetspec.targets.target import Target
from jetspec.training.blocks import Batch
from jetspec.training.config import LossConfig
from jetspec.training.step import block_loss
from jetspec.trees.build import build_tree
from jetspec.trees.config import TreeConfig
from jetspec.trees.draft import Draft, best_tokens
from jetspec.trees.tree import Tree


@register
class ParallelHead(DraftHead):
    """A draft head over a frozen target.

    Args:
        config: resolved, no size left at None (see `resolve_head_config`).
        hidden_size: d, the target's.
        vocab_size: V, rows of the target's output projection; recorded, since the head has none.
        num_target_layers: recorded, so that a head is refused by a target of another depth.
    """

    settings = HeadConfig
    config: HeadConfig
    projection: Tensor | None = None
    """[V, d], drafts' own rounding of the target's output projection (`eight_bits`)."""

    def __init__(
        self, config: HeadConfig, *, hidden_size: int, vocab_size: int, num_target_layers: int
    ) -> None:
        super().__init__(
            config,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            num_target_layers=num_target_layers,
        )
        assert config.taps is not None and config.rms_norm_eps is not None
        self.fc = Linear(len(config.taps) * hidden_size, hidden_size, bias=False)
        self.hidden_norm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(
            HeadLayer(config, hidden_size) for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.edges = make_edges(config, hidden_size, vocab_size)
        self.rescorer = Rescorer(config, hidden_size) if config.rescore == "own" else None
        self.rotary = RotaryEmbedding(config)

    @property
    def scores_paths(self) -> bool:
        return self.edges is not None or self.rescores

    @property
    def rescores(self) -> bool:
        """Whether a second pass scores every node by its own ancestors."""
        return self.config.rescore != "none"

    @property
    def mask_token_id(self) -> int:
        assert self.config.mask_token_id is not None
        return self.config.mask_token_id

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @classmethod
    def resolve(cls, config: HeadConfig, target: Target) -> HeadConfig:
        return resolve_head_config(config, target)

    def reset(self) -> None:
        for module in self.modules():
            if isinstance(module, BlockConvolution | Rescorer):
                module.reset()
        if self.edges is not None:
            self.edges.reset()

    def added_to(self, start: Self) -> frozenset[str]:
        added = {"rescore_nodes"}
        if start.edges is None or self._produces_otherwise(start):
            added |= {"edges", "edge_rank", "edge_gate", "edge_layers", "edge_width"}
            added |= {"edge_normaliser", "edge_rows"}
        if start.rescorer is None:
            added |= {"rescore", "rescore_layers"}
        if not start.config.conv_rank:
            added |= {"conv_rank"}
        return frozenset(added)

    def inherited(self, start: Self) -> dict[str, Tensor]:
        state = start.state_dict()
        if self._produces_otherwise(start):
            # Producers share names of weights that mean different things.
            state = {name: w for name, w in state.items() if not name.startswith("edges.")}
        return state

    def left_behind(self, start: Self) -> str | None:
        if not self._produces_otherwise(start):
            return None
        ours, theirs = (f"{c.producer}, {c.edge_rows} rows" for c in (self.config, start.config))
        return f"its path scores ({theirs}) are left behind, the run's ({ours}) start fresh"

    def _produces_otherwise(self, start: Self) -> bool:
        """Whether both have edges, of different producers or from different rows."""
        if self.edges is None or start.edges is None:
            return False
        ours, theirs = ((c.producer, c.edge_rows) for c in (self.config, start.config))
        return ours != theirs

    def path_parameters(self) -> Iterable[nn.Parameter]:
        for part in (self.edges, self.rescorer):
            if part is not None:
                yield from part.parameters()

    def shards(self) -> Iterable[nn.Module]:
        return [*self.layers, *(self.rescorer.layers if self.rescorer else ())]

    def loss(
        self,
        batch: Batch,
        taps: Tensor,
        teacher_hidden: Tensor,
        target: Target,
        config: LossConfig,
    ) -> tuple[Tensor, Tensor]:
        return block_loss(self, batch, taps, teacher_hidden, target, config)

    def save(self, directory: str, *, record: dict[str, Any], dtype: DType = "fp32") -> None:
        save_native(self, directory, record, dtype)

    @classmethod
    def load(cls, raw: dict[str, Any], directory: str) -> Self:
        return load_parallel(cls, raw, directory)

    def _layers(self) -> list[HeadLayer]:
        return cast(list[HeadLayer], list(self.layers))

    def _all_layers(self) -> list[HeadLayer]:
        """The layers that keep keys and values of the context."""
        own = self.rescorer.layers if self.rescorer else ()
        return cast(list[HeadLayer], [*self.layers, *own])

    def fuse(self, taps: Tensor) -> Tensor:
        """Tapped hidden states [B, T, n·d] -> fused context [B, T, d]."""
        return self.hidden_norm(self.fc(taps))

    def forward(
        self,
        fused: Tensor,
        context_positions: Tensor,
        slot_embeddings: Tensor,
        slot_positions: Tensor,
        mask: Tensor | BlockMask,
    ) -> Tensor:
        """Many blocks at once over one context, for training and as the reference.

        Args:
            fused: [B, C, d].
            context_positions: long [B, C].
            slot_embeddings: [B, S, d], blocks one after another.
            slot_positions: long [B, S].
            mask: bool [B, S, C + S] or its BlockMask; see training/blocks.py.

        Returns:
            [B, S, d] after the final norm: the input of the target's output projection.
        """
        x = slot_embeddings
        context_rotary = self.rotary(context_positions, fused.dtype)
        slot_rotary = self.rotary(slot_positions, x.dtype)
        previous = block_shift(self.config.block_size)
        for layer in self.layers:
            x = layer(x, slot_rotary, fused, context_rotary, mask, previous)
        return self.norm(x)

    def true_hidden(
        self,
        fused: Tensor,
        context_positions: Tensor,
        true_embeddings: Tensor,
        slot_positions: Tensor,
        mask: Tensor | BlockMask,
        hidden: Tensor,
    ) -> Tensor:
        """The second pass in training: the true tokens stand in their slots (arXiv 2606.18394,
        eq. 10, along the only path that a node can be accepted on).

        Args:
            true_embeddings: [B, S, d], every block its anchor and the tokens behind it.
            mask: causal in the block, whatever the first pass's mask.
            hidden: [B, S, d], the first pass's states; the rest is as in `forward`.

        Returns:
            [B, S, d]: row k of a block, which has read k tokens, predicts the token at k + 1.
        """
        if self.rescorer is None:
            return self(fused, context_positions, true_embeddings, slot_positions, mask)
        block = self.config.block_size
        blocks = hidden.detach().unflatten(1, (-1, block))
        ahead = torch.cat([blocks[:, :, 1:], blocks[:, :, -1:]], dim=2).flatten(1, 2)
        x = self.rescorer.enter(true_embeddings, ahead)
        fused = fused.detach()
        context_rotary = self.rotary(context_positions, fused.dtype)
        slot_rotary = self.rotary(slot_positions, x.dtype)
        for layer in self.rescorer.layers:
            x = layer(x, slot_rotary, fused, context_rotary, mask, block_shift(block))
        return self.rescorer.leave(x, ahead)

    def new_cache(self, batch: int) -> HeadCache:
        """An empty context for `batch` sequences."""
        assert self.config.num_key_value_heads and self.config.head_dim
        return HeadCache(
            batch,
            len(self._all_layers()),
            self.config.num_key_value_heads,
            self.config.head_dim,
            like=self.fc.weight,
        )

    @torch.no_grad()
    def extend(
        self,
        cache: HeadCache,
        taps: Tensor,
        positions: Tensor,
        valid: Tensor,
        tokens: Tensor | None = None,
    ) -> None:
        """Project newly committed context once and append it; `tokens` are not needed."""
        fused = self.fuse(taps.to(self.dtype))
        rotary = self.rotary(positions, fused.dtype)
        places = cache.destinations(valid)
        for index, layer in enumerate(self._all_layers()):
            cache.write(index, places, layer.self_attn.keys_values(fused, rotary))
        cache.commit(valid)

    @torch.no_grad()
    def draft_hidden(
        self, cache: HeadCache, slot_embeddings: Tensor, slot_positions: Tensor
    ) -> Tensor:
        """One block a sequence behind its cached context: [B, S, d], [B, S] long -> [B, S, d]."""
        x = slot_embeddings.to(self.dtype)
        batch, slots, _ = x.shape
        block = torch.ones(slots, slots, dtype=torch.bool, device=x.device)
        if self.config.mask == "causal":
            block = block.tril()
        block = block.expand(batch, -1, -1)
        x = self._behind(cache, 0, self._layers(), x, slot_positions, block, block_shift(slots))
        return self.norm(x)

    @torch.no_grad()
    def node_hidden(
        self, cache: HeadCache, tree: Tree, tree_embeddings: Tensor, hidden: Tensor
    ) -> Tensor:
        """The second pass in decoding: a node sees the context, its ancestors and itself (eq. 8).

        Args:
            tree_embeddings: [B, N + 1, d], of the tree's tokens.
            hidden: [B, D, d], the first pass's slots; slot t predicts the nodes of depth t + 1.

        Returns:
            [B, N + 1, d]: the states that predict each node's children.
        """
        x = tree_embeddings.to(self.dtype)
        positions = cache.lengths[:, None] + tree.depths
        rest = positions, tree.ancestor_mask(), parent_rows(tree.parents)
        if self.rescorer is None:
            return self.norm(self._behind(cache, 0, self._layers(), x, *rest))
        slot = tree.depths.clamp(max=hidden.shape[1] - 1)[..., None]
        ahead = hidden.gather(1, slot.expand(-1, -1, hidden.shape[2]))
        x, first = self.rescorer.enter(x, ahead), len(self.layers)
        x = self._behind(cache, first, self._all_layers()[first:], x, *rest)
        return self.rescorer.leave(x, ahead)

    def _behind(
        self,
        cache: HeadCache,
        first: int,
        layers: list[HeadLayer],
        x: Tensor,
        positions: Tensor,
        seen: Tensor,
        previous: Previous,
    ) -> Tensor:
        """`layers`, from the cache's `first`, over rows that see the context and what `seen`,
        bool [B, S, S], lets them see of each other."""
        rotary = self.rotary(positions, x.dtype)
        context = cache.valid()[:, None].expand(-1, x.shape[1], -1)
        mask = torch.cat([context, seen], dim=2)
        for index, layer in enumerate(layers, start=first):
            x = layer.slots(x, rotary, cache.layer(index), mask, previous)
        return x

    @torch.no_grad()
    def draft(
        self,
        cache: HeadCache,
        anchors: Tensor,
        embed: Callable[[Tensor], Tensor],
        logits: Callable[[Tensor], Tensor],
        width: int,
        depth: int | None = None,
    ) -> Draft | Tree:
        """Candidates and edges of one block a sequence, or a tree that a second pass has scored.

        Args:
            cache: the context strictly before each anchor, so an anchor's position is its length.
            anchors: long [B], the last committed tokens.
            embed: the target's embedding; logits: its output projection, fp32 or in its own type.
            width: K, candidates a slot.
            depth: slots wanted; None is the training block's. A causal head may draft deeper or
                shallower; a bidirectional one always runs its whole block.

        Returns:
            Slot scoring, or path scoring when the head has edges; with a second pass, the best
            `rescore_nodes` nodes by either, each scored by its own ancestors.
        """
        if self.projection is not None:
            logits = partial(cast(Any, logits), projection=self.projection)
        depth = self.depth if depth is None else depth
        slots = 1 + (depth if self.config.mask == "causal" else max(depth, self.depth))
        ids = torch.full(
            (anchors.shape[0], slots), self.mask_token_id, device=anchors.device, dtype=torch.long
        )
        ids[:, 0] = anchors
        positions = cache.lengths[:, None] + torch.arange(slots, device=anchors.device)
        hidden = self.draft_hidden(cache, embed(ids), positions)[:, 1 : 1 + depth]
        draft = self._scored(logits(hidden), anchors, embed, hidden, width)
        if not self.rescores:
            return draft
        superset = TreeConfig(budget=self.config.rescore_nodes, width=draft.width)
        tree = build_tree(draft, anchors, superset)
        states = self.node_hidden(cache, tree, embed(tree.tokens), hidden)
        return ancestor_scores(tree, states, logits)

    def _scored(
        self,
        slot_logits: Tensor,
        anchors: Tensor,
        embed: Callable[[Tensor], Tensor],
        hidden: Tensor,
        width: int,
    ) -> Draft:
        if self.edges is None:
            return Draft.from_slot_logits(slot_logits, width)
        tokens, log_q = best_tokens(slot_logits, width)
        edges = self.edges.edge_scores(tokens, log_q, anchors, hidden, embed, slot_logits)
        return Draft(tokens, edges, slot_scores=log_q)


def new_head(config: HeadConfig, target: Target, seed: int = 0) -> ParallelHead:
    """A fresh parallel head; see `DraftHead.new`."""
    return ParallelHead.new(config, target, seed)
