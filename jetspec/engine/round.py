"""One round on the device: draft, build, verify, accept, commit, without a host in between.

Every tensor has a fixed shape and address, so that a round can be one CUDA graph; lengths live on
the device. Plain decoding and chains are the same round with smaller trees.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.drafters import LookupDrafter
from jetspec.engine.layers import Rows, product
from jetspec.engine.model import EngineHead, EngineModel
from jetspec.engine.paged_cache import PagedCache
from jetspec.engine.parallel import MOST_CANDIDATES
from jetspec.sampling import SamplingParams, sample
from jetspec.trees.config import TreeConfig
from kernels.commit import accept_greedy, advance, compact_kv
from kernels.edges import best_chain
from kernels.exact_attention import TAIL
from kernels.lookup import look_up
from kernels.place import gather_rows, place_rows
from kernels.tree_build import BuiltTree, build_best_first, list_ancestors, pack_ancestors


@dataclass
class State:
    """What a round reads and writes, one row a slot.

    Attributes:
        prefix: int32 [B], committed rows in the caches; the anchor's row does not exist yet.
        anchors: long [B], the last committed tokens.
        ids: long [B, S], the draft's slots: the anchor, then mask tokens.
        active: int32 [B], 1 where a sequence runs.
        keys: long [B], request keys of the sampling noise.
        limits: long [B], draft nodes of each slot's rounds, at least 1.
        out: long [B, depth + 2]: how many tokens the round committed (0 where no sequence runs),
            then the tokens: the path's, then the bonus.
        forced: long [B], path lengths to commit whatever the target says; None in real use.
        history: int32 [B, rows], each sequence's tokens up to its anchor; None where no drafter
            reads them.
    """

    prefix: Tensor
    anchors: Tensor
    ids: Tensor
    active: Tensor
    keys: Tensor
    limits: Tensor
    out: Tensor
    forced: Tensor | None = None
    history: Tensor | None = None

    @classmethod
    def idle(
        cls, slots: int, depth: int, device: torch.device, forced: bool, history: int = 0
    ) -> "State":
        """No sequence runs. `history` rows of tokens are kept of each; 0 keeps none."""

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            prefix=zeros(slots, dtype=torch.int32),
            anchors=zeros(slots),
            ids=zeros(slots, 1),
            active=zeros(slots, dtype=torch.int32),
            keys=zeros(slots),
            limits=zeros(slots),
            out=zeros(slots, depth + 2),
            forced=torch.ones(slots, dtype=torch.long, device=device) if forced else None,
            history=zeros(slots, history, dtype=torch.int32) if history else None,
        )


class Round:
    """The steps of a round over one set of buffers.

    Args:
        head: None decodes plainly, unless there is a `lookup`.
        tree: builder `chain` or `best_first`, budget, depth and width.
        max_context: longest prefix plus the nodes of a round.
        lookup: drafts chains from the state's history, in place of a head.
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
        lookup: LookupDrafter | None = None,
    ) -> None:
        self.model, self.head, self.tree, self.sampling = model, head, tree, sampling
        self.lookup = lookup
        self.cache, self.state, self.max_context = cache, state, max_context
        self.head_cache = head.new_cache(cache) if head else None
        self._edge_tables = head.edge_tables(model.embedding) if head else None
        self.taps = head.taps if head else ()
        self.depth = draft_depth(head or lookup, tree)
        self.nodes = 1 + (self.depth if tree.builder == "chain" or head is None else tree.budget)
        batch, device = len(state.anchors), state.anchors.device
        self._slot_bits: Tensor | None = None
        if head is not None:
            causal = head.head.config.mask == "causal"
            slots = 1 + (self.depth if causal else head.depth)
            state.ids = torch.full((batch, slots), head.head.mask_token_id, device=device)
            # A causal block lets slot v see slots 0..v; a bidirectional one lets it see all.
            self._slot_bits = None if causal else full_bits(batch, slots, device)
        # A chain's shape never changes; only its tokens do.
        order = torch.arange(self.nodes, device=device).expand(batch, -1).contiguous()
        self._chain = (order - 1, order, torch.zeros(batch, self.nodes, device=device))
        state.limits.fill_(max(self.nodes - 1, 1))
        self._root_only = torch.ones(batch, dtype=torch.long, device=device)

    def run(self) -> None:
        """Commit one round of every active sequence."""
        tree = self.draft_and_build()
        following, taps = self.verify(tree)
        path, lengths, bonus = self.accept(tree, following)
        self.commit(tree, taps, path, lengths, bonus)

    def draft_and_build(self) -> BuiltTree:
        state = self.state
        if self.lookup is not None and state.history is not None:
            tokens, sizes = look_up(
                state.history, state.prefix, state.limits, ngram=self.lookup.max_ngram,
                depth=self.depth,
            )  # fmt: skip
            return BuiltTree(tokens, *self._chain, sizes)
        if self.head is None or self.head_cache is None:
            return BuiltTree(state.anchors[:, None], *self._chain, self._root_only)
        hidden = self.draft_hidden()
        tokens, edges = self.candidates(hidden)
        if self.tree.builder == "chain":
            drafted = tokens[:, :, 0] if edges is None else best_chain(tokens, edges)
            whole = torch.cat([state.anchors[:, None], drafted], 1)
            return BuiltTree(whole, *self._chain, state.limits + 1)
        assert edges is not None
        return build_best_first(tokens, edges, state.anchors, self.nodes - 1, state.limits)

    def draft_hidden(self) -> Tensor:
        """The head's pass over every sequence's slots: [B, depth, d]."""
        assert self.head is not None and self.head_cache is not None
        ids = self.state.ids
        rows = self.rows(ids.shape[1], self._slot_bits)
        embedded = gather_rows([self.model.embedding], ids.flatten())
        hidden = self.head.forward(embedded, rows, self.head_cache)
        return hidden.view(*ids.shape, -1)[:, 1 : 1 + self.depth]

    def candidates(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """(tokens long [B, D, K], edge scores [B, D, K, K]; None where rank alone decides)."""
        assert self.head is not None
        model, edges = self.model, self.head.head.edges
        batch = len(hidden)
        rows = hidden.flatten(0, 1).contiguous()
        rows_in = rows.to(model.embedding.dtype)
        width = min(self.tree.width, model.target.vocab_size, MOST_CANDIDATES)
        ranked = self.tree.builder == "chain" and edges is None
        best, tokens, lse = model.best(
            rows_in, 1 if ranked else width, self.head.products, self.head.projection,
            sums=not ranked,
        )  # fmt: skip
        tokens = tokens.view(batch, self.depth, -1)
        if ranked:
            return tokens, None
        if self._edge_tables is not None:
            weight = self._edge_tables.weight
            gates = None if weight is None else product(rows, weight, self.head.products)
            scored = self._edge_tables.scores(tokens, best, lse, self.state.anchors, gates)
            return tokens, scored
        log_q = (best - lse[:, None]).view(batch, self.depth, -1)
        if edges is None:
            return tokens, log_q[:, :, None].expand(-1, -1, width, -1)
        scores = edges.edge_scores(
            tokens, log_q, self.state.anchors, hidden, lambda t: F.embedding(t, model.embedding)
        )
        return tokens, scores.contiguous()

    def verify(self, tree: BuiltTree) -> tuple[Tensor, list[Tensor]]:
        """(the target's token after every node, long [B, N]; each tap [B N, d])."""
        bits = ancestors = None  # a chain is causal
        if self.tree.builder != "chain" and self.nodes > 1:
            if self.model.products.exact:
                ancestors = list_ancestors(tree.parents, tree.sizes, TAIL)
            else:
                bits = pack_ancestors(tree.parents, tree.sizes, self.depth)
        rows = replace(self.rows(self.nodes, bits, tree.depths, tree.sizes), ancestors=ancestors)
        hidden, taps = self.model.forward(tree.tokens.flatten(), rows, self.cache, self.taps)
        if self.sampling.greedy:
            following = self.model.best(hidden, 1, sums=False)[1]
        else:
            logits, keys = self.model.logits(hidden), self.state.keys.repeat_interleave(self.nodes)
            following = sample(logits.float(), self.sampling, keys, rows.positions.long() + 1)
        return following.view(tree.tokens.shape), taps

    def accept(self, tree: BuiltTree, following: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state = self.state
        return accept_greedy(
            tree.tokens, tree.parents, tree.sizes, following, self.depth, state.forced, state.active
        )

    def commit(
        self, tree: BuiltTree, taps: list[Tensor], path: Tensor, lengths: Tensor, bonus: Tensor
    ) -> None:
        state, cache = self.state, self.cache
        if self.tree.builder != "chain" and self.nodes > 1:  # a chain's rows lie in place
            compact_kv(cache.kv, cache.table, state.prefix, path, lengths)
        positions, cache_rows, picked = advance(
            tree.tokens, path, lengths, bonus, cache.table, cache.page_size, state.prefix,
            state.anchors, state.ids, state.out, state.history,
        )  # fmt: skip
        if self.head is not None and self.head_cache is not None:
            self.head.extend(gather_rows(taps, picked), positions, cache_rows, self.head_cache)

    def rows(
        self, nodes: int, bits: Tensor | None, depths: Tensor | None = None,
        sizes: Tensor | None = None,
    ) -> Rows:  # fmt: skip
        """Rows of every slot behind its prefix; depths [B, N] place them in the sequence."""
        state, cache = self.state, self.cache
        positions, cache_rows, counts = place_rows(
            state.prefix, state.active, cache.table, cache.page_size, nodes, depths, sizes
        )
        return Rows(
            len(state.prefix), nodes, positions, cache_rows, cache.table, state.prefix, counts,
            bits, self.max_context,
        )  # fmt: skip


def full_bits(batch: int, rows: int, device: torch.device) -> Tensor:
    """Ancestor bits int32 [B, rows, words] that let every row see every row."""
    words = -(-rows // 32)
    bits = torch.full((batch, rows, words), -1, dtype=torch.int32, device=device)
    if rows % 32:
        bits[..., -1] = (1 << rows % 32) - 1
    return bits


def draft_depth(drafts: EngineHead | LookupDrafter | None, tree: TreeConfig) -> int:
    """Levels of the tree below the root."""
    if drafts is None:
        return 0
    depth = tree.depth or drafts.depth
    if isinstance(drafts, LookupDrafter):
        return min(depth, drafts.depth, tree.budget)
    if drafts.head.config.mask != "causal":
        depth = min(depth, drafts.depth)
    return min(depth, 64, tree.budget) if tree.builder == "chain" else min(depth, 64)
