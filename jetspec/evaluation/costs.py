"""What a head costs and when it pays: rounds, GPU-hours, break-even."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jetspec.evaluation.cells import cell_label
from jetspec.evaluation.pooling import Record
from jetspec.evaluation.record import comparable


@dataclass(frozen=True)
class RoundCost:
    """One cell's round beside one plain token of the same group.

    Attributes:
        round_seconds, plain_seconds: mean clock of a round, and of a plain step of the batch.
        needed_tau: tokens a round must commit to be as fast as plain decoding.
        draft_cost: c(N, L) = (T_draft / N) / T_verify, N the budget (JetSpec, section on costs).
    """

    label: str
    slice: str
    batch_size: int
    tau: float
    round_seconds: float
    plain_seconds: float
    needed_tau: float
    draft_cost: float | None


def round_costs(records: Sequence[Record]) -> list[RoundCost]:
    """The cost of a round of every drafting cell whose plain cell was measured."""
    plain = {
        (r["slice"], r["batch_size"], r["temperature"]): r
        for r in records
        if r["method"] == "plain" and r["status"] == "ok"
    }
    costs = []
    for record in records:
        base = plain.get((record["slice"], record["batch_size"], record["temperature"]))
        step = base and base["seconds_per_round"].get("total")
        if record["status"] != "ok" or not record["budget"] or not record["tau"]:
            continue
        if base is None or not step or not comparable(record, base):
            continue
        parts = record["seconds_per_round"]
        verify = parts.get("verify")
        costs.append(
            RoundCost(
                label=cell_label(dict(record)),
                slice=record["slice"],
                batch_size=record["batch_size"],
                tau=record["tau"],
                round_seconds=parts["total"],
                plain_seconds=step,
                needed_tau=parts["total"] / step,
                draft_cost=parts["draft"] / record["budget"] / verify if verify else None,
            )
        )
    return costs


def hours(facts: Mapping[str, Any]) -> float | None:
    """Worker-hours of a stage from its manifest's `worker_seconds`: GPU-hours where it has GPUs.

    Those of a head include its starts'; None where they are not known.
    """
    seconds = facts.get("worker_seconds")
    if seconds is None or (facts.get("warm_start") and "earlier_worker_seconds" not in facts):
        return None
    return float(seconds + facts.get("earlier_worker_seconds", 0.0)) / 3600


@dataclass(frozen=True)
class BreakEven:
    """After how many served tokens a head has paid for itself.

    Attributes:
        invested_hours: worker-hours of regeneration, training and evaluation together.
        saved_seconds_per_token: clock that one served token saves on the same machine.
        tokens: invested seconds over saved seconds; None when nothing is saved.
        reason: why there is no break-even.
    """

    invested_hours: float
    saved_seconds_per_token: float
    tokens: float | None
    reason: str | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def break_even(invested_hours: float, plain_tok_s: float, method_tok_s: float) -> BreakEven:
    """Served tokens after which the hours spent on a head are saved again.

    Args:
        invested_hours: machine-hours of the kind that serves.
        plain_tok_s, method_tok_s: throughput of one machine without and with the head.
    """
    saved = 1 / plain_tok_s - 1 / method_tok_s
    if saved <= 0:
        return BreakEven(invested_hours, saved, None, "the head is not faster: it never pays")
    return BreakEven(invested_hours, saved, invested_hours * 3600 / saved, None)
