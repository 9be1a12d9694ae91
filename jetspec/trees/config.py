"""The shape of a draft tree."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from jetspec.settings import Settings

Builder = Literal["chain", "algorithm1", "best_first", "static"]
Score = Literal["cumulative", "entropy", "hybrid", "survival"]
Width = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0, le=1)]


class TreeConfig(Settings):
    """How the draft becomes a tree.

    Attributes:
        builder: `chain` (one path), `algorithm1` (the paper's, as printed), `best_first` (exact) or
            `static` (one shape for all rounds, from `rank_rates`).
        budget: draft nodes, the root not counted.
        depth: deepest level; None is as deep as the head drafts. Beyond its trained block a head is
            given further MASK slots at the positions that follow: a causal head's earlier slots
            stay as they were, a bidirectional head's change.
        width: candidates a slot (top-W).
        widths: caps of single depths, from depth 1 on; deeper ones have `width` alone.
        score: what orders the frontier: cumulative log-probability, negative entropy, both, or
            calibrated survival; see scores.py.
        alpha: weight of the entropy term in the hybrid score.
        calibration: temperatures of the survival score by depth, from `fit_calibration`; deeper
            ones take the last; empty leaves probabilities as they are.
        rank_rates: how often a node's first, second, ... child is accepted once the node is.
    """

    builder: Builder = "best_first"
    budget: int = Field(64, ge=1, le=4096)
    depth: int | None = Field(None, ge=1)
    width: int = Field(32, ge=1)
    widths: tuple[Width, ...] = ()
    score: Score = "cumulative"
    alpha: float = Field(1.0, ge=0)
    calibration: tuple[Annotated[float, Field(gt=0)], ...] = ()
    rank_rates: tuple[Rate, ...] = Field(
        (0.7, 0.12, 0.05, 0.03, 0.02, 0.01, 0.01, 0.01), min_length=1
    )

    @field_validator("rank_rates")
    @classmethod
    def _descending(cls, rates: tuple[float, ...]) -> tuple[float, ...]:
        if list(rates) != sorted(rates, reverse=True) or sum(rates) > 1 + 1e-6:
            raise ValueError("must fall from rank to rank and sum to at most 1")
        return rates
