"""What a drafter hands to a tree builder: each slot's candidates and the edges between them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MOST_ROWS = 1 << 16  # of a launch


@dataclass(frozen=True)
class Draft:
    """Candidates of D slots and the log-probability of every edge between neighbouring slots.

    One abstraction holds the released method and its repairs: `slot` scoring (arXiv 2606.18394
    eq. 6) has equal rows, since a slot's distribution does not know the parent; `path` scoring
    (eq. 10) has a row of its own for every parent.

    Attributes:
        tokens: long [B, D, K], the candidates of each slot, best first.
        edge_scores: float [B, D, K, K], log q(child j at slot d | parent i at slot d - 1). At slot
            0 the parent is the anchor: row 0 is used. -inf marks a candidate that does not exist.
        confidence: float [B, D, K], the drafter's own calibrated estimate that slot d is accepted
            once parent i at slot d - 1 was (DSpark, arXiv 2607.05147); None where it makes none.
        slot_scores: float [B, D, K], log q of the candidates before the edges that path scores
            come from; None where the edges are no correction of slot scores. Trees do not read it.
    """

    tokens: Tensor
    edge_scores: Tensor
    confidence: Tensor | None = None
    slot_scores: Tensor | None = None

    def __post_init__(self) -> None:
        batch, depth, width = self.tokens.shape
        if self.edge_scores.shape != (batch, depth, width, width):
            raise ValueError(
                f"edge_scores {tuple(self.edge_scores.shape)} must be [B, D, K, K] for tokens "
                f"{tuple(self.tokens.shape)}"
            )

    @property
    def depth(self) -> int:
        return self.tokens.shape[1]

    @property
    def width(self) -> int:
        return self.tokens.shape[2]

    @classmethod
    def from_slot_logits(cls, logits: Tensor, width: int) -> "Draft":
        """Slot scoring: the `width` best tokens of log_softmax(logits) in every slot.

        Args:
            logits: [B, D, V]; slot d predicts the token at depth d + 1.
            width: candidates a slot, at most V of them exist.
        """
        return cls.from_slot_scores(*best_tokens(logits, width))

    @classmethod
    def from_slot_scores(cls, tokens: Tensor, log_q: Tensor) -> "Draft":
        """Slot scoring from candidates [B, D, K] and their log-probabilities [B, D, K]."""
        width = tokens.shape[-1]
        return cls(tokens, log_q[:, :, None, :].expand(-1, -1, width, -1))

    def without_edges(self) -> "Draft | None":
        """The slot draft of the same pass: what the head drafts when its edges are taken out."""
        if self.slot_scores is None:
            return None
        return Draft.from_slot_scores(self.tokens, self.slot_scores)

    def narrow(self, width: int, depth: int | None, widths: Sequence[int] = ()) -> "Draft":
        """The first `depth` slots (None: all) with their `width` best candidates.

        Args:
            widths: at slot d only the first `widths[d]` candidates exist, where it has an entry.
        """
        tokens = self.tokens[:, :depth, :width]
        edges = self.edge_scores[:, :depth, :width, :width]
        if widths:
            depth, width = tokens.shape[1:]
            wanted = [*widths[:depth], *[width] * (depth - len(widths))]
            caps = torch.tensor(wanted, device=tokens.device)[:, None, None]
            ranks = torch.arange(width, device=tokens.device)
            edges = edges.masked_fill(ranks >= caps, -torch.inf)
        confidence, slots = (
            None if scores is None else scores[:, :depth, :width]
            for scores in (self.confidence, self.slot_scores)
        )
        return Draft(tokens, edges, confidence, slots)


def best_tokens(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` best tokens of every row, best first, and their fp32 log-probabilities.

    Args:
        logits: [..., V] in any float type; what is rounded already gives what its fp32 copy gives.
        width: candidates, at most V of them exist.

    Returns:
        tokens long [..., K], log q fp32 [..., K].
    """
    width = min(width, logits.shape[-1])
    if width <= 32 and _in_one_launch(logits):
        return _read_once(logits, width)
    logits = logits.float()
    best, tokens = logits.topk(width, dim=-1)
    return tokens, best - torch.logsumexp(logits, dim=-1, keepdim=True)


def _read_once(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """`best_tokens` as the engine has it: no copy in fp32, and of equal logits the lower token."""
    from kernels.topk import topk_logsumexp

    best, tokens, lse = topk_logsumexp(logits.flatten(0, -2), width)
    log_q = best - lse[:, None]
    shape = logits.shape[:-1]
    return tokens.unflatten(0, shape), log_q.unflatten(0, shape)


def log_sums(logits: Tensor) -> Tensor:
    """The fp32 log-sum-exp of every row; logits: [..., V] in any float type."""
    if _in_one_launch(logits):
        return _summed_once(logits)
    return torch.logsumexp(logits.float(), dim=-1)


def _summed_once(logits: Tensor) -> Tensor:
    from kernels.topk import topk_logsumexp

    return topk_logsumexp(logits.flatten(0, -2), 1)[2].unflatten(0, logits.shape[:-1])


def _in_one_launch(logits: Tensor) -> bool:
    rows = logits.numel() // logits.shape[-1]
    plain = logits.is_cuda and logits.is_contiguous() and not logits.requires_grad
    return plain and 0 < rows < _MOST_ROWS
