"""What costs and tau predict: speed-ups beside measured ones, and the best budget for a load."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jetspec.evaluation.cells import cell_label
from jetspec.evaluation.pooling import Record
from jetspec.theory.costs import CostTable
from jetspec.theory.formulas import expected_speedup, needed_tau, round_speedup


@dataclass(frozen=True)
class Comparison:
    """One measured cell beside its predictions.

    Attributes:
        printed: eq. 3 as printed, with c of this machine: a verification as dear as a plain step.
        dear: with the verification at its own price, nothing but forward and draft.
        measured, ci: the speed-up over plain decoding that the cell has; None where withheld.
        overhead: share of a measured round that is neither draft nor verification.
    """

    label: str
    slice: str
    batch: int
    tau: float
    needed: float
    printed: float
    dear: float
    measured: float | None
    ci: list[float] | None
    overhead: float | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(records: Sequence[Record], costs: CostTable) -> list[Comparison]:
    """Every good drafting cell of an evaluation beside what the cost table predicts for it.

    A batch runs until its slowest sequence is done, while tau is per sequence: above batch 1 the
    predictions leave that out and lie above what is measured.
    """
    found = []
    for record in records:
        drafts = record["method"] in ("chain", "tree")
        if record["status"] != "ok" or not drafts or not record["tau"]:
            continue
        batch, budget, tau = record["batch_size"], record["budget"], record["tau"]
        step = costs.forward_seconds(1, batch)
        verify, draft = costs.relative(budget + 1, batch), costs.draft_seconds(batch) / step
        figure = record["speedup"]["vs_plain"]
        shares = record.get("time_share") or {}
        found.append(
            Comparison(
                label=cell_label(dict(record)),
                slice=record["slice"],
                batch=batch,
                tau=tau,
                needed=round(needed_tau(verify, draft), 4),
                printed=round(expected_speedup(tau, budget, draft / budget), 4),
                dear=round(round_speedup(tau, verify, draft), 4),
                measured=figure["value"],
                ci=figure["ci"],
                overhead=round(1 - shares["draft"] - shares["verify"], 4) if shares else None,
            )
        )
    return found


@dataclass(frozen=True)
class Choice:
    """The fastest way to decode at one batch size.

    Attributes:
        budget: draft nodes; 0 is plain decoding.
        tok_s: tokens a second of the whole batch.
        speedup: over plain decoding at this batch size.
        margin: speed over that of the next best choice.
    """

    batch: int
    label: str
    budget: int
    tau: float
    tok_s: float
    speedup: float
    margin: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def best_budgets(
    taus: Sequence[Mapping[str, Any]], costs: CostTable, batches: Sequence[int]
) -> list[Choice]:
    """For each batch size the tree whose tau buys most: max of batch · tau / seconds of a round.

    A round is one head pass and one verification of budget + 1 tokens a sequence. Larger trees pay
    while verification is cheap, so the best budget falls as the batch grows.

    Args:
        taus: rows {tree: its label, budget, tau}, from a diagnosis or an evaluation.
        costs: of the machine that decodes.
        batches: batch sizes to answer for; between measured ones costs are interpolated.
    """
    chosen = []
    for batch in sorted(set(batches)):
        step = costs.forward_seconds(1, batch)
        speeds = [(batch / step, "plain", 0, 1.0)]
        for row in taus:
            seconds = costs.forward_seconds(row["budget"] + 1, batch) + costs.draft_seconds(batch)
            speeds.append((batch * row["tau"] / seconds, row["tree"], row["budget"], row["tau"]))
        speeds.sort(key=lambda entry: (-entry[0], entry[2]))
        speed, label, budget, tau = speeds[0]
        second = speeds[1][0] if len(speeds) > 1 else speed
        chosen.append(
            Choice(
                batch=batch,
                label=label,
                budget=budget,
                tau=round(tau, 4),
                tok_s=round(speed, 3),
                speedup=round(speed * step / batch, 4),
                margin=round(speed / second, 4),
            )
        )
    return chosen


def taus_of(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Rows {tree, budget, tau} of an evaluation, pooled over slices and batch sizes.

    tau does not depend on the batch, so every greedy cell of a method counts, each prompt once.
    """
    sums: dict[tuple[str, int], dict[str, Record]] = {}
    for record in records:
        if record["status"] != "ok" or record["method"] not in ("chain", "tree"):
            continue
        if record["temperature"] == 0:
            rows = sums.setdefault((cell_label(dict(record)), record["budget"]), {})
            rows.update({row["prompt_id"]: row for row in record["per_prompt"]})
    found = []
    for (label, budget), by_prompt in sums.items():
        tokens = sum(row["tokens"] for row in by_prompt.values())
        rounds = sum(row["rounds"] for row in by_prompt.values())
        if rounds:
            found.append({"tree": label, "budget": budget, "tau": round(tokens / rounds, 6)})
    return found
