"""Producers of edge scores: how likely a candidate is once its parent on the branch is known.

Slot scores are marginals: they do not know which token the branch chose. An edge producer adds a
correction S(parent, child) over each slot's top-K candidates. Every producer here is of low rank:
S is a product of one factor a parent and one factor a child, so a lattice of D slots with K
candidates costs D·K factors and one batched product.

A producer is a class under `EdgeProducer` with `of`, `reset` and `factors`, named in
heads/producers.py.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from jetspec.heads.linear import Linear
from jetspec.heads.rows import Embed, LearnedRows, ProjectedRows, TokenRows
from jetspec.trees.draft import log_sums

if TYPE_CHECKING:
    from jetspec.heads.config import HeadConfig, Normaliser

_BLOCKS = 128  # blocks whose whole lattice exists at one time in training, at least
_LATTICE_BYTES = 2 << 30  # fp32 embeddings of the blocks that a GPU takes at one time
_VOCABULARY_ROWS = 1024  # parents whose vocabulary row exists at one time in drafting


class Factors(NamedTuple):
    """S_t(a, b) = <parents[t, a], children[t, b]>, both [B, D, K, r]; at slot 0 every parent row
    is the anchor's."""

    parents: Tensor
    children: Tensor


class Places(NamedTuple):
    """Where training slots lie in their blocks: all long [M], depth 0 the one behind the anchor.

    Attributes:
        labels: the true token of each slot.
        parents: the true token before it.
        shape: (blocks, depths) there are, host numbers, so that a GPU need not be read.
    """

    blocks: Tensor
    depths: Tensor
    parents: Tensor
    labels: Tensor
    shape: tuple[int, int]


class EdgeProducer(nn.Module):
    """What all producers share; an untrained one must score every edge 0."""

    # Whether `head.edge_rows` says where its factors come from.
    has_rows: ClassVar[bool] = False
    # `head.edge_normaliser`: over what an edge's probability is made to sum to one.
    normaliser: "Normaliser" = "candidates"

    @classmethod
    def of(cls, config: "HeadConfig", hidden_size: int, vocab_size: int) -> Self:
        """The producer that `config` describes; hidden_size: d of the embedding and of slots;
        vocab_size: V."""
        raise NotImplementedError

    def reset(self) -> None:
        """Set what must not start at random: S must be zero."""
        raise NotImplementedError

    def factors(
        self, tokens: Tensor, log_q: Tensor, anchors: Tensor, hidden: Tensor, embed: Embed
    ) -> Factors:
        """Factors of the edges between neighbouring slots; arguments as in `edge_scores`.

        A slot's factors may depend on itself and on earlier slots only, so that a draft may be
        longer or shorter than a training block.
        """
        raise NotImplementedError

    def log_mass(self, parents: Tensor, slot_logits: Tensor, embed: Embed) -> Tensor:
        """log sum over the vocabulary of slot probability times exp S, of every parent.

        Only a producer whose S is defined for every token has it.

        Args:
            parents: [B, D, K, r], from `factors`; slot_logits: [B, D, V].

        Returns:
            fp32 [B, D, K].
        """
        raise NotImplementedError

    def edge_scores(
        self,
        tokens: Tensor,
        log_q: Tensor,
        anchors: Tensor,
        hidden: Tensor,
        embed: Embed,
        slot_logits: Tensor | None = None,
    ) -> Tensor:
        """log q(child | parent) over the candidates of neighbouring slots.

        S is added to the slots' log-probabilities. With the normaliser `candidates` the sum is
        renormalised over the K candidates of the slot, which keep their joint probability under
        the slot: the rest of the vocabulary is never scored. `vocabulary` is softmax(slot logits
        + S) over all tokens.

        Args:
            slot_logits: [B, D, V], which the normaliser `vocabulary` needs.
            tokens: long [B, D, K], best first.
            log_q: [B, D, K], their log-probabilities under the slot.
            anchors: long [B], the only parent of slot 0.
            hidden: [B, D, d], the slots' hidden states.
            embed: the target's embedding.

        Returns:
            fp32 [B, D, K, K]; at slot 0 every parent row is the anchor's.
        """
        parents, children = self.factors(tokens, log_q, anchors, hidden, embed)
        bias = parents @ children.transpose(2, 3)  # [B, D, parents, children]
        if self.normaliser == "vocabulary":
            if slot_logits is None:
                raise ValueError("the normaliser `vocabulary` needs the slots' logits")
            mass = self.log_mass(parents, slot_logits, embed)
            scores = log_q.float()[:, :, None] + bias.float() - mass[..., None]
        else:
            scores = renormalise(log_q[:, :, None], bias)
        # Rounding must not make a child likelier than its parent: builders rely on that.
        return scores.clamp(max=0)

    def teacher_forced(
        self,
        tokens: Tensor,
        log_q: Tensor,
        hidden: Tensor,
        places: Places,
        embed: Embed,
        vocab_size: int,
    ) -> Callable[[slice], Tensor]:
        """S of every training slot's candidates under its true parent, slice by slice.

        Here the slots are put back into their blocks; a producer whose factors need no neighbours
        can do with less.

        Args:
            tokens: long [M, K]; log_q: [M, K]; the true token is always among the candidates.
            hidden: [M, d], detached slot hidden states.
            vocab_size: tokens that `embed` knows.

        Returns:
            a function from a slice of the M slots to S [m, K].
        """
        return self._by_blocks(partial(self.factors, embed=embed), tokens, log_q, hidden, places)

    def _by_blocks(
        self,
        factors: Callable[[Tensor, Tensor, Tensor, Tensor], Factors],
        tokens: Tensor,
        log_q: Tensor,
        hidden: Tensor,
        places: Places,
    ) -> Callable[[slice], Tensor]:
        """`teacher_forced` from `factors(tokens, log_q, anchors, hidden)` of whole blocks."""
        if not len(tokens):
            return lambda here: log_q[here]
        spot = places.blocks, places.depths
        blocks, depth = places.shape

        def laid(values: Tensor) -> Tensor:
            return values.new_zeros(blocks, depth, *values.shape[1:]).index_put_(spot, values)

        anchors = laid(places.parents)[:, :1].flatten()
        lattice = laid(tokens), laid(log_q), anchors, laid(hidden), laid(places.labels)

        step = _BLOCKS
        if tokens.is_cuda:  # launches cost more there than memory
            step = max(step, _LATTICE_BYTES // (4 * depth * tokens.shape[1] * hidden.shape[1]))

        def rows(begin: int) -> Tensor:
            part = (values[begin : begin + step] for values in lattice)
            return _under_true_parents(factors, *part)

        pieces = [_recomputed(rows, begin) for begin in range(0, blocks, step)]
        scores = torch.cat(pieces)[spot]
        return lambda here: scores[here]


class MarkovEdges(EdgeProducer):
    """S_t(a, b) = <A[a] * g(h_t), B[b]>, a low-rank bias from the parent's identity.

    DSpark's Markov head (arXiv 2607.05147). A token's rows A and B are projections of its frozen
    embedding, or learned (`head.edge_rows`); h_t is the slot's hidden state. The gate
    g = 2·sigmoid(W h) starts at one, B at zero.

    Args:
        hidden_size: d of the embedding and of the slots.
        rank: r.
        gate: whether g exists; without it S depends on the two tokens alone (DSpark's form).
        vocab_size: V of learned rows; None projects the embedding.
    """

    has_rows = True
    sees_parents: ClassVar[bool] = True

    def __init__(
        self, hidden_size: int, rank: int, *, gate: bool, vocab_size: int | None = None
    ) -> None:
        super().__init__()
        self.rank = rank
        self.parent_proj = _rows(hidden_size, rank, vocab_size if self.sees_parents else None)
        self.child_proj = _rows(hidden_size, rank, vocab_size)
        self.gate_proj = Linear(hidden_size, rank, bias=False) if gate else None

    @classmethod
    def of(cls, config: "HeadConfig", hidden_size: int, vocab_size: int) -> Self:
        return cls(
            hidden_size, config.edge_rank, gate=config.edge_gate, **_learned(config, vocab_size)
        )

    @torch.no_grad()
    def reset(self) -> None:
        self._reset_rows()
        if self.gate_proj is not None:
            self.gate_proj.weight.zero_()

    def _reset_rows(self) -> None:
        self.child_proj.weight.zero_()
        if isinstance(self.parent_proj, LearnedRows):
            self.parent_proj.spread()

    def gate(self, hidden: Tensor) -> Tensor | None:
        """Slot hidden states [..., d] -> gates [..., r], or None."""
        if self.gate_proj is None:
            return None
        return 2 * torch.sigmoid(self.gate_proj(hidden))

    def factors(
        self, tokens: Tensor, log_q: Tensor, anchors: Tensor, hidden: Tensor, embed: Embed
    ) -> Factors:
        root = anchors[:, None, None].expand(-1, 1, tokens.shape[2])
        seen = torch.cat([root, tokens[:, :-1]], dim=1)  # [B, D, K]
        states = hidden.to(self.child_proj.weight.dtype)[:, :, None]
        return Factors(self.behind(seen, states, embed), self.child_proj.of(tokens, embed))

    def behind(self, parents: Tensor, hidden: Tensor, embed: Embed) -> Tensor:
        """Gated factors [..., r] of parents, tokens long [...], under slots' states [..., d]."""
        rows, gate = self.parent_proj.of(parents, embed), self.gate(hidden)
        return rows if gate is None else rows * gate

    def true_parents(self, hidden: Tensor, places: Places, embed: Embed) -> Tensor:
        """Gated factors [M, r] of training slots' true parents."""
        return self.behind(places.parents, hidden, embed)

    def log_mass(self, parents: Tensor, slot_logits: Tensor, embed: Embed) -> Tensor:
        table = self.child_proj.table(embed, slot_logits.shape[-1])
        rows, width = parents.flatten(0, 1), parents.shape[2]  # [B D, K, r]
        slots = slot_logits.flatten(0, 1).float()
        step = max(1, _VOCABULARY_ROWS // width)
        sums = [
            log_sums(rows[i : i + step] @ table.T + slots[i : i + step, None])
            for i in range(0, len(rows), step)
        ]
        mass = torch.cat(sums) - log_sums(slots)[:, None]
        return mass.unflatten(0, parents.shape[:2])

    def teacher_forced(
        self,
        tokens: Tensor,
        log_q: Tensor,
        hidden: Tensor,
        places: Places,
        embed: Embed,
        vocab_size: int,
    ) -> Callable[[slice], Tensor]:
        children, place = self.child_proj.holding(tokens, embed, vocab_size)
        parents = self.true_parents(hidden, places, embed).to(children.dtype)

        if parents.is_cuda:
            from kernels.edge_products import edge_products

            return lambda here: edge_products(parents[here], children, place[here])

        def scores(here: slice) -> Tensor:
            return torch.einsum("mr,mkr->mk", parents[here], children[place[here]])

        return lambda here: _recomputed(scores, here)


class SelectorEdges(MarkovEdges):
    """S_t(a, b) = <A[a] * H(h_t), B[b]>: DFlash2's context-gated selector.

    A and B are rows as of Markov edges, H is linear in the slot's hidden state: the context can
    turn a factor's sign, which a Markov gate cannot. The selector's own unary term U_t(b) is the
    slot's log-probability. B starts at zero.
    """

    def __init__(self, hidden_size: int, rank: int, *, vocab_size: int | None = None) -> None:
        super().__init__(hidden_size, rank, gate=True, vocab_size=vocab_size)

    @classmethod
    def of(cls, config: "HeadConfig", hidden_size: int, vocab_size: int) -> Self:
        return cls(hidden_size, config.edge_rank, **_learned(config, vocab_size))

    @torch.no_grad()
    def reset(self) -> None:
        self._reset_rows()

    def gate(self, hidden: Tensor) -> Tensor:
        assert self.gate_proj is not None
        return self.gate_proj(hidden)


class ContextEdges(MarkovEdges):
    """S_t(b) = <(P h_t) * g(h_t), B[b]>: Markov edges that cannot see the parent.

    The control of every comparison between path and slot scores: as many weights as gated Markov
    edges of the same rank, in the same place and under the same loss, but equal rows, so that what
    it adds to a tree comes from the weights and not from the branch. Of learned rows it has the
    children's only: it can know as much of a token as Markov edges do, and P stays r x d.
    """

    sees_parents = False

    @classmethod
    def of(cls, config: "HeadConfig", hidden_size: int, vocab_size: int) -> Self:
        return cls(hidden_size, config.edge_rank, gate=True, **_learned(config, vocab_size))

    def behind(self, parents: Tensor, hidden: Tensor, embed: Embed) -> Tensor:
        gate = self.gate(hidden)
        assert gate is not None
        return (self.parent_proj(hidden) * gate).expand(*parents.shape, -1)


def _learned(config: "HeadConfig", vocab_size: int) -> dict[str, int]:
    """The argument that asks for learned rows, where `config` does."""
    return {"vocab_size": vocab_size} if config.edge_rows == "learned" else {}


def _rows(hidden_size: int, rank: int, vocab_size: int | None) -> TokenRows:
    if vocab_size is None:
        return ProjectedRows(hidden_size, rank)
    return LearnedRows(vocab_size, rank)


def _under_true_parents(
    factors: Callable[[Tensor, Tensor, Tensor, Tensor], Factors],
    tokens: Tensor,
    log_q: Tensor,
    anchors: Tensor,
    hidden: Tensor,
    labels: Tensor,
) -> Tensor:
    """S [N, D, K] of the candidates under the true parent, from whole blocks."""
    parents, children = factors(tokens, log_q, anchors, hidden)
    # The true token of a slot is the next one's parent; slot 0's rows are all the anchor's.
    true = (tokens == labels[..., None]).to(torch.int8).argmax(-1)  # [N, D]
    rank = F.pad(true[:, :-1], (1, 0))[..., None, None]
    chosen = parents.gather(2, rank.expand(-1, -1, 1, parents.shape[-1]))[:, :, 0]
    return torch.einsum("ndr,ndkr->ndk", chosen, children)


def _recomputed(function: Callable[[Any], Tensor], argument: Any) -> Tensor:
    """What `function` gives; the backward pass computes again what it needs of it."""
    result: Tensor = checkpoint(
        function, argument, use_reentrant=False, preserve_rng_state=False
    )  # nothing here is random
    return result


def renormalise(log_q: Tensor, bias: Tensor) -> Tensor:
    """log q + bias, its mass over the last dimension brought back to that of log q; fp32."""
    log_q = log_q.float()
    mass = torch.logsumexp(log_q, dim=-1, keepdim=True)
    return F.log_softmax(log_q + bias.float(), dim=-1) + mass
