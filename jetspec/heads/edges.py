"""Producers of edge scores: how likely a candidate is once its parent on the branch is known.

Slot scores are marginals: they do not know which token the branch chose. An edge producer adds a
correction S(parent, child) over each slot's top-K candidates. Every producer here is of low rank:
S is a product of one factor a parent and one factor a child, so a lattice of D slots with K
candidates costs D·K factors and one batched product.

A producer is a class under `EdgeProducer` with `of`, `reset` and `factors`, named in
heads/producers.py.
"""

from collections.abc import Callable
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from jetspec.heads.config import HeadConfig, Normaliser

Embed = Callable[[Tensor], Tensor]
_BLOCKS = 128  # blocks whose whole lattice exists at one time in training
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
    """

    blocks: Tensor
    depths: Tensor
    parents: Tensor
    labels: Tensor


class EdgeProducer(nn.Module):
    """What all producers share; an untrained one must score every edge 0."""

    # Whether a slot whose true token was put among its candidates may teach. It must not where a
    # producer sees all candidates at once: it would learn to spot the one that does not belong.
    learns_from_inserted = True
    # `head.edge_normaliser`: over what an edge's probability is made to sum to one.
    normaliser: Normaliser = "candidates"

    @classmethod
    def of(cls, config: HeadConfig, hidden_size: int) -> Self:
        """The producer that `config` describes; hidden_size: d of the embedding and of slots."""
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
        blocks, row = torch.unique(places.blocks, return_inverse=True)
        depth = int(places.depths.max()) + 1 if len(tokens) else 0
        spot = row, places.depths

        def laid(values: Tensor) -> Tensor:
            empty = values.new_zeros(len(blocks), depth, *values.shape[1:])
            return empty.index_put(spot, values)

        anchors = laid(places.parents)[:, :1].flatten()
        lattice = laid(tokens), laid(log_q), anchors, laid(hidden), laid(places.labels)

        def rows(begin: int) -> Tensor:
            part = (values[begin : begin + _BLOCKS] for values in lattice)
            return self._under_true_parents(embed, *part)

        pieces = [
            checkpoint(rows, begin, use_reentrant=False) for begin in range(0, len(blocks), _BLOCKS)
        ]
        scores = torch.cat(pieces)[spot] if pieces else log_q
        return lambda here: scores[here]

    def _under_true_parents(
        self,
        embed: Embed,
        tokens: Tensor,
        log_q: Tensor,
        anchors: Tensor,
        hidden: Tensor,
        labels: Tensor,
    ) -> Tensor:
        """S [N, D, K] of the candidates under the true parent, from whole blocks."""
        parents, children = self.factors(tokens, log_q, anchors, hidden, embed)
        # The true token of a slot is the next one's parent; slot 0's rows are all the anchor's.
        true = (tokens == labels[..., None]).to(torch.int8).argmax(-1)  # [N, D]
        rank = F.pad(true[:, :-1], (1, 0))[..., None, None]
        chosen = parents.gather(2, rank.expand(-1, -1, 1, parents.shape[-1]))[:, :, 0]
        return torch.einsum("ndr,ndkr->ndk", chosen, children)


class MarkovEdges(EdgeProducer):
    """S_t(a, b) = <(P_a E[a]) * g(h_t), P_b E[b]>, a low-rank bias from the parent's identity.

    DSpark's Markov head (arXiv 2607.05147). E is the target's frozen embedding, each row scaled to
    unit root-mean-square so that targets with small and with large embeddings train alike; h_t is
    the slot's hidden state. The gate g = 2·sigmoid(W h) starts at one, P_b at zero.

    Args:
        hidden_size: d of the embedding and of the slots.
        rank: r.
        gate: whether g exists; without it S depends on the two tokens alone (DSpark's form).
    """

    def __init__(self, hidden_size: int, rank: int, *, gate: bool) -> None:
        super().__init__()
        self.rank = rank
        self.parent_proj = nn.Linear(hidden_size, rank, bias=False)
        self.child_proj = nn.Linear(hidden_size, rank, bias=False)
        self.gate_proj = nn.Linear(hidden_size, rank, bias=False) if gate else None

    @classmethod
    def of(cls, config: HeadConfig, hidden_size: int) -> Self:
        return cls(hidden_size, config.edge_rank, gate=config.edge_gate)

    @torch.no_grad()
    def reset(self) -> None:
        self.child_proj.weight.zero_()
        if self.gate_proj is not None:
            self.gate_proj.weight.zero_()

    def parent_factors(self, embeddings: Tensor) -> Tensor:
        """Embedding rows [..., d] -> parent factors [..., r]."""
        return self.parent_proj(unit_rows(embeddings))

    def child_factors(self, embeddings: Tensor) -> Tensor:
        """Embedding rows [..., d] -> child factors [..., r]."""
        return self.child_proj(unit_rows(embeddings))

    def gate(self, hidden: Tensor) -> Tensor | None:
        """Slot hidden states [..., d] -> gates [..., r], or None."""
        if self.gate_proj is None:
            return None
        return 2 * torch.sigmoid(self.gate_proj(hidden))

    def factors(
        self, tokens: Tensor, log_q: Tensor, anchors: Tensor, hidden: Tensor, embed: Embed
    ) -> Factors:
        dtype = self.parent_proj.weight.dtype
        embeddings = embed(tokens).to(dtype)
        width = tokens.shape[2]
        root = embed(anchors).to(dtype)[:, None, None].expand(-1, 1, width, -1)
        seen = torch.cat([root, embeddings[:, :-1]], dim=1)  # [B, D, K, d]
        parents = self.behind(seen, hidden.to(dtype)[:, :, None])
        return Factors(parents, self.child_factors(embeddings))

    def behind(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Gated parent factors [..., r] of parents' embeddings and slots' states, both [..., d]."""
        parents, gate = self.parent_factors(embeddings), self.gate(hidden)
        return parents if gate is None else parents * gate

    def true_parents(self, hidden: Tensor, places: Places, embed: Embed) -> Tensor:
        """Gated factors [M, r] of training slots' true parents."""
        return self.behind(embed(places.parents), hidden)

    def table(self, embed: Embed, vocab_size: int, like: Tensor) -> Tensor:
        """Child factors [V, r] of every token; like: a tensor on the device."""
        every = torch.arange(vocab_size, device=like.device)
        return self.child_factors(embed(every).to(self.child_proj.weight.dtype))

    def log_mass(self, parents: Tensor, slot_logits: Tensor, embed: Embed) -> Tensor:
        table = self.table(embed, slot_logits.shape[-1], slot_logits)
        rows, width = parents.flatten(0, 1), parents.shape[2]  # [B D, K, r]
        slots = slot_logits.flatten(0, 1).float()
        step = max(1, _VOCABULARY_ROWS // width)
        sums = [
            torch.logsumexp(
                (rows[i : i + step] @ table.T).float() + slots[i : i + step, None], dim=-1
            )
            for i in range(0, len(rows), step)
        ]
        mass = torch.cat(sums) - torch.logsumexp(slots, dim=-1, keepdim=True)
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
        if tokens.numel() < vocab_size:
            distinct, place = torch.unique(tokens, return_inverse=True)
            children = self.child_factors(embed(distinct))  # a token's row is projected once
        else:
            # The whole table costs less than finding out which rows of it are needed.
            place, children = tokens, self.table(embed, vocab_size, hidden)
        parents = self.true_parents(hidden, places, embed)

        def scores(here: slice) -> Tensor:
            if parents.is_cuda:
                from kernels.edge_products import edge_products

                return edge_products(parents[here], children, place[here])
            return torch.einsum("mr,mkr->mk", parents[here], children[place[here]])

        return scores


class SelectorEdges(MarkovEdges):
    """S_t(a, b) = <A(a) * H(h_t), B(b)>: DFlash2's context-gated selector.

    A and B are projections of the target's embedding, H is linear in the slot's hidden state: the
    context can turn a factor's sign, which a Markov gate cannot. The selector's own unary term
    U_t(b) is the slot's log-probability. B starts at zero.
    """

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__(hidden_size, rank, gate=True)

    @classmethod
    def of(cls, config: HeadConfig, hidden_size: int) -> Self:
        return cls(hidden_size, config.edge_rank)

    @torch.no_grad()
    def reset(self) -> None:
        self.child_proj.weight.zero_()

    def gate(self, hidden: Tensor) -> Tensor:
        assert self.gate_proj is not None
        return self.gate_proj(hidden)


class ContextEdges(MarkovEdges):
    """S_t(b) = <(P h_t) * g(h_t), C E[b]>: Markov edges that cannot see the parent.

    The control of every comparison between path and slot scores: as many weights as gated Markov
    edges of the same rank, in the same place and under the same loss, but equal rows, so that what
    it adds to a tree comes from the weights and not from the branch.
    """

    @classmethod
    def of(cls, config: HeadConfig, hidden_size: int) -> Self:
        return cls(hidden_size, config.edge_rank, gate=True)

    def behind(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        gate = self.gate(hidden)
        assert gate is not None
        parents = self.parent_factors(hidden) * gate
        return parents.expand(*embeddings.shape[:-1], -1)


def unit_rows(embeddings: Tensor) -> Tensor:
    """Rows scaled to unit root-mean-square."""
    return F.rms_norm(embeddings, embeddings.shape[-1:])


def renormalise(log_q: Tensor, bias: Tensor) -> Tensor:
    """log q + bias, its mass over the last dimension brought back to that of log q; fp32."""
    log_q = log_q.float()
    mass = torch.logsumexp(log_q, dim=-1, keepdim=True)
    return F.log_softmax(log_q + bias.float(), dim=-1) + mass
