"""EAGLE-3: an autoregressive head of one layer over fused target states.

Token t is read together with the state behind the token before it: the target's own (several
layers, fused) where the text is committed, the head's own output where it is drafted. Decoding
therefore feeds the head what it made itself, and training does the same: `unroll` takes the steps
of decoding with the true tokens and the head's own states (the paper's training-time test), so
that every depth learns from the inputs it will meet.

What differs from the published head: embedding and output projection are the target's, over the
whole vocabulary; queries and keys are normed as in Qwen3; a step's anchors are drawn, not all.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from jetspec.heads.base import DraftHead, register
from jetspec.heads.config import HeadConfig, LayerSettings
from jetspec.heads.layers import (
    HeadAttention,
    HeadMLP,
    KeysValues,
    RMSNorm,
    Rotary,
    RotaryEmbedding,
    attend,
    rotate,
)
from jetspec.heads.linear import Linear
from jetspec.heads.sizes import resolve_head_config
from jetspec.training.blocks import Batch, dense_mask
from jetspec.training.config import LossConfig
from jetspec.training.step import Statistics, distil_slots
from jetspec.trees.levels import draft_levels
from jetspec.trees.tree import Tree

if TYPE_CHECKING:
    from jetspec.targets.target import Target


class EagleConfig(LayerSettings):
    """An EAGLE-3 head; sizes left at None follow the target's.

    Attributes:
        block_size: anchor plus the steps that training unrolls; 9 is the paper's depth of 8.
        beam: nodes of a level that the next level is drafted from.
    """

    kind: str = "eagle3"
    block_size: int = Field(9, ge=2)
    beam: int = Field(10, ge=1)
    num_taps: int = Field(3, ge=1)

    @model_validator(mode="after")
    def _sizes_agree(self) -> "EagleConfig":
        self.layer()
        return self

    def layer(self) -> HeadConfig:
        """What the decoder layer is built from."""
        shared = EagleConfig.model_fields.keys() & HeadConfig.model_fields.keys()
        fields = {name: getattr(self, name) for name in shared - {"kind"}}
        return HeadConfig(num_layers=1, mask_token_id=0, **fields)


class EagleCache:
    """The committed text of B sequences: tokens, fused states, and the layer's keys and values.

    A token's keys need its embedding, which only `draft` is given, so they are projected there,
    each once.

    Attributes:
        lengths: long [B], tokens held; lowering an entry forgets its tail.
    """

    def __init__(
        self, batch: int, heads: int, head_dim: int, hidden_size: int, like: Tensor
    ) -> None:
        self.lengths = torch.zeros(batch, dtype=torch.long, device=like.device)
        self.projected = torch.zeros_like(self.lengths)  # rows whose keys and values are there
        # One row more than the capacity: what is not valid is written there.
        self.tokens = self.lengths.new_zeros(batch, 1)
        self.states = like.new_zeros(batch, 1, hidden_size)
        self.keys = like.new_zeros(batch, 1, heads, head_dim)
        self.values = like.new_zeros(batch, 1, heads, head_dim)

    def append(self, tokens: Tensor, states: Tensor, valid: Tensor) -> None:
        """Committed tokens long [B, T] and the states behind them [B, T, d]."""
        self.projected = torch.minimum(self.projected, self.lengths)
        capacity = self.tokens.shape[1] - 1
        if (needed := int((self.lengths + valid.sum(1)).max())) > capacity:
            self._grow(2 * needed)
        places = self.lengths[:, None] + valid.long().cumsum(1) - 1
        places = torch.where(valid, places, self.tokens.shape[1] - 1)
        self.tokens.scatter_(1, places, tokens)
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        self.states[rows, places] = states.to(self.states.dtype)
        self.lengths = self.lengths + valid.sum(1)

    def state_before(self, places: Tensor) -> Tensor:
        """The fused state behind the token before each place, long [B, M] -> [B, M, d].

        The first token of a text has none: zeros, which a norm leaves zeros.
        """
        index = (places - 1).clamp(min=0)[..., None].expand(-1, -1, self.states.shape[2])
        return self.states.gather(1, index) * (places > 0)[..., None]

    def missing(self) -> Tensor:
        """long [B, M], places that still need keys and values; the trash row where there are
        fewer than M."""
        counts = (self.lengths - self.projected).clamp(min=0)
        steps = torch.arange(int(counts.max()), device=counts.device)
        places = self.projected[:, None] + steps
        return torch.where(steps < counts[:, None], places, self.tokens.shape[1] - 1)

    def write(self, places: Tensor, keys_values: KeysValues) -> None:
        """Keys and values [B, M, Hkv, hd] of the `missing` places."""
        rows = torch.arange(len(places), device=places.device)[:, None]
        for store, new in zip((self.keys, self.values), keys_values, strict=True):
            store[rows, places] = new.to(store.dtype)
        self.projected = torch.maximum(self.projected, self.lengths)

    def context(self) -> tuple[Tensor, Tensor, Tensor]:
        """(keys, values [B, L, Hkv, hd], bool [B, L] where they are a sequence's own)."""
        longest = int(self.lengths.max())
        valid = torch.arange(longest, device=self.lengths.device) < self.lengths[:, None]
        return self.keys[:, :longest], self.values[:, :longest], valid

    def keep_sequences(self, rows: Tensor) -> None:
        """Drop the sequences that are not in `rows` (long), keep these in this order."""
        for name, held in vars(self).items():
            setattr(self, name, held[rows])

    def _grow(self, capacity: int) -> None:
        for name in ("tokens", "states", "keys", "values"):
            held = getattr(self, name)
            # Zeros, not rubbish: a masked NaN in an unused row would still poison attention.
            larger = held.new_zeros(held.shape[0], capacity + 1, *held.shape[2:])
            larger[:, : held.shape[1] - 1] = held[:, :-1]
            setattr(self, name, larger)


class EagleAttention(HeadAttention):
    """Attention that reads token and state side by side, [.., 2d], and writes [.., d]."""

    def __init__(self, config: HeadConfig, hidden_size: int) -> None:
        super().__init__(config, 2 * hidden_size)
        self.o_proj = Linear(self.q_proj.out_features, hidden_size, bias=False)

    def read(
        self, x: Tensor, rotary: Rotary, keys_values: KeysValues, mask: Tensor | BlockMask
    ) -> Tensor:
        """x [B, S, 2d] over keys and values [B, L, Hkv, hd], its own among them -> [B, S, d]."""
        query = rotate(self.q_norm(self._heads(self.q_proj(x))), rotary)
        return self.o_proj(attend(query, *keys_values, mask))


class EagleLayer(nn.Module):
    """The one decoder layer; the residual stream is the state, the token enters attention only."""

    def __init__(self, config: HeadConfig, hidden_size: int) -> None:
        super().__init__()
        assert config.intermediate_size and config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.self_attn = EagleAttention(config, hidden_size)
        self.post_attention_layernorm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.mlp = HeadMLP(hidden_size, config.intermediate_size)

    def inputs(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """Tokens [.., d] and the states behind their predecessors [.., d] -> [.., 2d]."""
        embeddings = embeddings.to(states.dtype)
        return torch.cat([self.input_layernorm(embeddings), self.hidden_norm(states)], dim=-1)

    def forward(
        self,
        x: Tensor,
        states: Tensor,
        rotary: Rotary,
        keys_values: KeysValues,
        mask: Tensor | BlockMask,
    ) -> Tensor:
        """The states behind the tokens of `x` (see `inputs`), [B, S, d]."""
        states = states + self.self_attn.read(x, rotary, keys_values, mask)
        return states + self.mlp(self.post_attention_layernorm(states))


@register
class EagleHead(DraftHead):
    """The draft head of EAGLE-3."""

    settings = EagleConfig
    config: EagleConfig

    def __init__(self, config: EagleConfig, **sizes: int) -> None:
        super().__init__(config, **sizes)
        assert config.rms_norm_eps is not None
        layer = config.layer()
        self.fc = Linear(len(self.taps) * self.hidden_size, self.hidden_size, bias=False)
        self.midlayer = EagleLayer(layer, self.hidden_size)
        self.norm = RMSNorm(self.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryEmbedding(layer)

    @classmethod
    def resolve(cls, config: EagleConfig, target: "Target") -> EagleConfig:
        layer = resolve_head_config(config.layer(), target)
        shared = EagleConfig.model_fields.keys() & HeadConfig.model_fields.keys()
        found = {name: getattr(layer, name) for name in shared - {"kind"}}
        return EagleConfig.model_validate(config.model_dump() | found)

    def added_to(self, start: Self) -> frozenset[str]:
        return frozenset({"beam"})  # no weight depends on it

    def unroll(
        self,
        states: Tensor,
        embeddings: Tensor,
        positions: Tensor,
        anchors: Tensor,
        starts: Tensor,
        steps: Tensor,
    ) -> Tensor:
        """Training-time test: D steps from every anchor, each on the state the last one left.

        Args:
            states: [R, T, d], fused target states.
            embeddings: [R, T, d], of the text's tokens.
            positions: long [R, T], each token's place in its document.
            anchors, starts: long [R, A], see `Batch`.
            steps: [R, A, D, d], embeddings of the tokens that are read: the anchor, then the true
                ones.

        Returns:
            [R, A, D, d], the input of the target's output projection; step k names token n + k + 1.
        """
        layer, depth = self.midlayer, steps.shape[2]
        before = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], dim=1)
        before = before * (positions > 0)[..., None]
        rotary = self.rotary(positions, states.dtype)
        context = layer.self_attn.keys_values(layer.inputs(embeddings, before), rotary)
        state = before.gather(1, anchors[..., None].expand(-1, -1, states.shape[2]))  # [R, A, d]
        first = positions.gather(1, anchors)
        keys, values = [context[0]], [context[1]]
        # One shape for all steps, so that a compiled kernel is compiled once: those to come are
        # zeros behind the mask.
        room = torch.zeros_like(context[0][:, :1]).expand(-1, anchors.shape[1] * depth, -1, -1)
        named = []
        for k in range(depth):
            x = layer.inputs(steps[:, :, k], state)
            rotary = self.rotary(first + k, x.dtype)
            key, value = layer.self_attn.keys_values(x, rotary)
            keys.append(key)
            values.append(value)
            rest = room[:, (k + 1) * anchors.shape[1] :]
            both = torch.cat([*keys, rest], dim=1), torch.cat([*values, rest], dim=1)
            mask = unroll_mask(anchors, starts, states.shape[1], k, depth)
            state = layer(x, state, rotary, both, mask)
            named.append(self.norm(state))
        return torch.stack(named, dim=2)

    def loss(
        self,
        batch: Batch,
        taps: Tensor,
        teacher_hidden: Tensor,
        target: "Target",
        config: LossConfig,
    ) -> tuple[Tensor, Tensor]:
        hidden = self.unroll(
            self.fc(taps),
            target.embed(batch.input_ids),
            batch.positions,
            batch.anchors,
            batch.starts,
            target.embed(batch.parents()),
        )
        result = distil_slots(
            batch, hidden.flatten(1, 2), teacher_hidden, target, config, slots=batch.chosen()
        )
        none = torch.zeros_like(result.loss)
        return result.loss, Statistics.of(batch, result.loss, none, result.hits).sums

    def new_cache(self, batch: int) -> EagleCache:
        assert self.config.num_key_value_heads and self.config.head_dim
        shape = (self.config.num_key_value_heads, self.config.head_dim, self.hidden_size)
        return EagleCache(batch, *shape, like=self.fc.weight)

    @torch.no_grad()
    def extend(
        self,
        cache: EagleCache,
        taps: Tensor,
        positions: Tensor,
        valid: Tensor,
        tokens: Tensor | None = None,
    ) -> None:
        """Keep the fused states of committed tokens; a token's place is its position."""
        assert tokens is not None
        cache.append(tokens, self.fc(taps.to(self.dtype)), valid)

    @torch.no_grad()
    def draft(
        self,
        cache: EagleCache,
        anchors: Tensor,
        embed: Callable[[Tensor], Tensor],
        logits: Callable[[Tensor], Tensor],
        width: int,
        depth: int | None = None,
    ) -> Tree:
        """One pass of the layer a level, over the level's `beam` best nodes."""
        layer = self.midlayer
        self._project(cache, embed)
        keys, values, committed = cache.context()
        place = cache.lengths[:, None]
        state = cache.state_before(place)  # [B, 1, d], behind each node's parent

        def expand(tokens: Tensor, parents: Tensor, mask: Tensor) -> Tensor:
            nonlocal keys, values, place, state
            state = state.gather(1, parents[..., None].expand(-1, -1, state.shape[2]))
            x = layer.inputs(embed(tokens), state)
            rotary = self.rotary(place.expand_as(tokens), x.dtype)
            key, value = layer.self_attn.keys_values(x, rotary)
            keys, values = torch.cat([keys, key], dim=1), torch.cat([values, value], dim=1)
            seen = torch.cat([committed[:, None].expand(-1, tokens.shape[1], -1), mask], dim=2)
            state = layer(x, state, rotary, (keys, values), seen)
            place = place + 1
            return logits(self.norm(state)).log_softmax(-1)

        levels = self.depth if depth is None else depth
        return draft_levels(expand, anchors, depth=levels, width=width, beam=self.config.beam)

    def _project(self, cache: EagleCache, embed: Callable[[Tensor], Tensor]) -> None:
        places = cache.missing()
        if not places.shape[1]:
            return
        x = self.midlayer.inputs(embed(cache.tokens.gather(1, places)), cache.state_before(places))
        rotary = self.rotary(places, x.dtype)
        cache.write(places, self.midlayer.self_attn.keys_values(x, rotary))


def unroll_mask(
    anchors: Tensor, starts: Tensor, context: int, step: int, depth: int
) -> Tensor | BlockMask:
    """Who step `step`'s A queries see: their document before the anchor, and their own steps so
    far. Keys are `context` tokens, then `depth` rounds of A steps. bool [R, A, L] or its BlockMask.
    """
    rows, blocks = anchors.shape
    # A tensor: a compiled mask would be compiled anew for every number.
    newest = torch.tensor(step, device=anchors.device)

    def mask(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key >= starts[row, query]) & (key < anchors[row, query])
        taken = key - context
        own = (taken >= 0) & (taken % blocks == query) & (taken // blocks <= newest)
        return ((key < context) & seen) | own

    keys = context + depth * blocks
    if anchors.device.type != "cuda":
        return dense_mask(mask, rows, blocks, keys, anchors.device)
    return create_block_mask(mask, rows, None, blocks, keys, device=str(anchors.device))
