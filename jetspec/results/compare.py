"""Two cells set against each other, and what a reader may conclude."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jetspec.evaluation.pooling import paired_tau_ratio, speedup
from jetspec.evaluation.statistics import Estimate
from jetspec.results.inputs import Record

HOLDS, FAILS, OPEN, UNMEASURED = VERDICTS = (
    "holds", "does not hold", "not decided", "not measured",
)  # fmt: skip
BOOTSTRAP = {"samples": 2000, "seed": 0}


@dataclass(frozen=True)
class Claim:
    """A sentence and what the figures say about it.

    Attributes:
        text: the claim; verdict: one of `VERDICTS`; evidence: the figures, in words.
    """

    text: str
    verdict: str
    evidence: str

    def as_json(self) -> dict[str, Any]:
        return {"claim": self.text, "verdict": self.verdict, "evidence": self.evidence}


def find(records: Iterable[Record], **fields: Any) -> list[Record]:
    """Records whose fields have these values; a set is looked up as `slice`, `None` matches
    records that have no such field."""
    return [r for r in records if all(r.get(name) == value for name, value in fields.items())]


def tau_ratio(ours: Sequence[Record], theirs: Sequence[Record]) -> Estimate | None:
    """tau of ours over theirs, on the prompts that both have, paired."""
    return paired_tau_ratio(ours, theirs, **BOOTSTRAP)[0]


def speed_ratio(ours: Sequence[Record], theirs: Sequence[Record]) -> Estimate | None:
    """Throughput of ours over theirs, of cells that one run decoded.

    A cell whose output check failed has no speed.
    """
    pairs = [
        (a, b)
        for a in ours
        for b in theirs
        if (a["slice"], a["batch_size"], a["temperature"], a.get("evaluation_key"))
        == (b["slice"], b["batch_size"], b["temperature"], b.get("evaluation_key"))
        and all((r["output_check"] or {}).get("passed") for r in (a, b))
    ]
    if not pairs:
        return None
    mine, other = (list(side) for side in zip(*pairs, strict=True))
    return speedup(mine, other, **BOOTSTRAP, clock="decode")


def judge(ratios: Sequence[Estimate | None]) -> str:
    """Whether every ratio is above 1: it holds where every interval is, and does not where one
    interval is wholly below."""
    if not ratios or any(ratio is None for ratio in ratios):
        return UNMEASURED
    spans = [r.ci or (float("-inf"), float("inf")) for r in ratios if r is not None]
    if any(high < 1 for _, high in spans):
        return FAILS
    return HOLDS if all(low > 1 for low, _ in spans) else OPEN


def words(estimate: Estimate | None, digits: int = 2) -> str:
    """`1.23 [1.10, 1.36]`, or a dash."""
    if estimate is None:
        return "-"
    text = f"{estimate.value:.{digits}f}"
    if estimate.ci is None:
        return text
    return f"{text} [{estimate.ci[0]:.{digits}f}, {estimate.ci[1]:.{digits}f}]"
