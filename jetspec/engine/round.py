"""One round on the device: draft, build, verify, accept, commit, without a host in between.

Every tensor has a fixed shape and address, so that a round can be one CUDA graph; lengths live on
the device. Plain decoding and chains are the same round with smaller trees.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.engine.layers import Rows
from jetspec.engine.model import EngineHead, EngineModel
from jetspec.engine.paged_cache import PagedCache
from jetspec.sampling import SamplingParams, sample
from jetspec.trees.config import TreeConfig
from kernels.commit import accept_greedy, compact_kv
from kernels.topk import topk_logsumexp
from kernels.tree_build import BuiltTree, build_best_first, pack_ancestors


@dataclass
class State:
    """What a round reads and writes, one row a slot.

    Attributes:
        prefix: int32 [B], committed rows in the caches; the anchor's row does not exist yet.
        anchors: long [B], the last committed tokens.
        active: int32 [B], 1 where a sequence runs.
        keys: long [B], request keys of the sampling noise.
        tokens: long [B, depth + 1], the round's committed tokens: the path's, then the bonus.
        lengths: long [B], how many of `tokens` count; 0 where no sequence runs.
        forced: long [B], path lengths to commit whatever the target says; None in real use.
    """

    prefix: Tensor
    anchors: Tensor
    active: Tensor
    keys: Tensor
    tokens: Tensor
    lengths: Tensor
    forced: Tensor | None = None

    @classmethod
    def idle(cls, slots: int, depth: int, device: torch.device, forced: bool) -> "State":
        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            prefix=zeros(slots, dtype=torch.int32),
            anchors=zeros(slots),
            active=zeros(slots, dtype=torch.int32),
            keys=zeros(slots),
            tokens=zeros(slots, depth + 1),
            lengths=zeros(slots),
            forced=torch.ones(slots, dtype=torch.long, device=device) if forced else None,
        )


class Round:
    """The five steps over one set of buffers.

    Args:
        head: None decodes plainly.
        tree: builder `chain` or `best_first`, budget, depth and width.
        max_context: longest prefix plus the nodes of a round.
    """

    def __init__(
        self,
        model: EngineModel,
        head: EngineHead | None,
        tree: TreeConfig,
        sampling: SamplingParams,
        cache: PagedCache,
        state: State,
        max_context: int,
    ) -> None:
        self.model, self.head, self.tree, self.sampling = model, head, tree, sampling
        self.cache, self.state, self.max_context = cache, state, max_context
        self.head_cache = head.new_cache(cache) if head else None
        self.taps = head.taps if head else ()
        self.depth = draft_depth(head, tree)
        self.nodes = 1 + (0 if head is None else budget(head, tree))

    def run(self) -> None:
        """Commit one round of every active sequence."""
        tree = self.draft_and_build()
        following, taps = self.verify(tree)
        path, lengths, bonus = self.accept(tree, following)
        self.commit(tree, taps, path, lengths, bonus)

    def draft_and_build(self) -> BuiltTree:
        anchors = self.state.anchors
        if self.head is None or self.head_cache is None:
            root = anchors[:, None]
            zero = torch.zeros_like(root)
            return BuiltTree(root, zero - 1, zero, zero.float(), torch.ones_like(anchors))
        model, head = self.model, self.head
        slots = 1 + (self.depth if head.head.config.mask == "causal" else head.depth)
        batch = len(anchors)
        ids = torch.full_like(anchors, head.head.mask_token_id)[:, None].repeat(1, slots)
        ids[:, 0] = anchors
        # A causal block lets slot v see slots 0..v; a bidirectional one lets it see all of them.
        bits = None
        if head.head.config.mask != "causal":
            bits = torch.full(
                (batch, slots, 1), (1 << slots) - 1, dtype=torch.int32, device=ids.device
            )
        rows = self.rows(torch.arange(slots, device=ids.device).expand(batch, -1), bits, None)
        hidden = head.forward(F.embedding(ids.flatten(), model.embedding), rows, self.head_cache)
        hidden = hidden.view(batch, slots, -1)[:, 1 : 1 + self.depth]
        logits = model.logits(hidden.flatten(0, 1).contiguous().to(model.embedding.dtype))
        width = min(self.tree.width, logits.shape[-1], 32)
        if self.tree.builder == "chain" and head.head.edges is None:
            width = 1
        best, tokens, lse = topk_logsumexp(logits, width)
        log_q = (best - lse[:, None]).view(batch, self.depth, width)
        tokens = tokens.view(batch, self.depth, width)
        if head.head.edges is None:
            edges = log_q[:, :, None].expand(-1, -1, width, -1)
        else:
            edges = head.head.edges.edge_scores(
                tokens, log_q, anchors, hidden, lambda t: F.embedding(t, model.embedding)
            )
        if self.tree.builder == "chain":
            tokens, edges = best_chain(tokens, edges)
        return build_best_first(tokens, edges, anchors, self.nodes - 1)

    def verify(self, tree: BuiltTree) -> tuple[Tensor, Tensor | None]:
        """(the target's token after every node, long [B, N]; taps [B, N, n·d] or None)."""
        bits = pack_ancestors(tree.parents, tree.sizes, self.depth) if self.nodes > 1 else None
        rows = self.rows(tree.depths, bits, tree.sizes)
        hidden, taps = self.model.forward(tree.tokens.flatten(), rows, self.cache, self.taps)
        logits = self.model.logits(hidden)
        if self.sampling.greedy:
            following = topk_logsumexp(logits, 1)[1]
        else:
            keys = self.state.keys.repeat_interleave(self.nodes)
            following = sample(logits.float(), self.sampling, keys, rows.positions.long() + 1)
        shape = tree.tokens.shape
        return following.view(shape), None if taps is None else taps.view(*shape, -1)

    def accept(self, tree: BuiltTree, following: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return accept_greedy(
            tree.tokens, tree.parents, tree.sizes, following, self.depth, self.state.forced
        )

    def commit(
        self, tree: BuiltTree, taps: Tensor | None, path: Tensor, lengths: Tensor, bonus: Tensor
    ) -> None:
        state = self.state
        lengths = lengths * state.active
        compact_kv(self.cache.kv, self.cache.table, state.prefix, path, lengths)
        nodes = path.clamp(min=0)
        committed = tree.tokens.gather(1, nodes).roll(-1, 1)  # the root was committed before
        last = torch.arange(path.shape[1], device=path.device) == (lengths - 1)[:, None]
        state.tokens.copy_(torch.where(last, bonus[:, None], committed))
        if self.head is not None and self.head_cache is not None and taps is not None:
            order = torch.arange(path.shape[1], device=path.device).expand_as(path)
            positions = state.prefix[:, None] + order
            rows = self.cache.rows_at(positions, order < lengths[:, None])
            chosen = taps.gather(1, nodes[..., None].expand(-1, -1, taps.shape[-1]))
            self.head.extend(
                chosen.flatten(0, 1), positions.flatten(), rows.flatten(), self.head_cache
            )
        state.lengths.copy_(lengths)
        state.anchors.copy_(torch.where(lengths > 0, bonus, state.anchors))
        state.prefix.add_(lengths.int())

    def rows(self, depths: Tensor, bits: Tensor | None, sizes: Tensor | None) -> Rows:
        """Rows of every slot behind its prefix; depths [B, N] place them in the sequence."""
        state = self.state
        batch, nodes = depths.shape
        order = torch.arange(nodes, device=depths.device)
        counts = state.active * (nodes if sizes is None else sizes.int())
        live = order < counts[:, None]
        cache_rows = self.cache.rows_at(state.prefix[:, None] + order, live)
        positions = (state.prefix[:, None] + depths).int()
        return Rows(
            batch, nodes, positions.flatten(), cache_rows.flatten(), self.cache.table,
            state.prefix, counts.int(), bits, self.max_context,
        )  # fmt: skip


def draft_depth(head: EngineHead | None, tree: TreeConfig) -> int:
    """Levels of the tree below the root."""
    if head is None:
        return 0
    depth = tree.depth or head.depth
    if head.head.config.mask != "causal":
        depth = min(depth, head.depth)
    return min(depth, 64, tree.budget) if tree.builder == "chain" else min(depth, 64)


def budget(head: EngineHead, tree: TreeConfig) -> int:
    """Draft nodes of a round."""
    return draft_depth(head, tree) if tree.builder == "chain" else tree.budget


def best_chain(tokens: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest child of the likeliest child ...: ([B, D, 1], [B, D, 1, 1])."""
    rank = torch.zeros_like(tokens[:, 0, :1])  # [B, 1]
    chosen, scores = [], []
    for slot in range(tokens.shape[1]):
        row = edges[:, slot].gather(1, rank[..., None].expand(-1, -1, edges.shape[-1]))[:, 0]
        score, rank = row.max(-1, keepdim=True)
        chosen.append(tokens[:, slot].gather(1, rank))
        scores.append(score)
    return torch.stack(chosen, 1), torch.stack(scores, 1)[..., None]
