"""The shape of a draft tree."""

from typing import Literal

from pydantic import Field

from jetspec.settings import Settings


class TreeConfig(Settings):
    """How the draft becomes a tree.

    Attributes:
        builder: `chain` (one path), `algorithm1` (the paper's, as printed) or `best_first` (exact).
        budget: draft nodes, the root not counted.
        depth: deepest level; None is as deep as the head drafts.
        width: candidates a slot (top-W).
        score: what orders the frontier: cumulative log-probability, negative entropy, or both.
        alpha: weight of the entropy term in the hybrid score.
    """

    builder: Literal["chain", "algorithm1", "best_first"] = "best_first"
    budget: int = Field(64, ge=1, le=4096)
    depth: int | None = Field(None, ge=1)
    width: int = Field(32, ge=1)
    score: Literal["cumulative", "entropy", "hybrid"] = "cumulative"
    alpha: float = Field(1.0, ge=0)
