"""The serving table against every fixed budget, over all loads that were measured.

A load range is all measured batch sizes, weighted equally. A choice is scored by the mean over them
of its throughput relative to plain decoding at the same batch size, so that large batches, whose
tokens a second are larger for every method, do not count more than small ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jetspec.evaluation.budgets import CONTENDERS, Choice, serving_table, speeds_by_choice
from jetspec.evaluation.cells import cell_label
from jetspec.evaluation.pooling import Record, as_served

PLAIN: Choice = ("plain", None, 0, None)


@dataclass(frozen=True)
class Load:
    """One batch size of the serving table.

    Attributes:
        choice: what the table decodes with there; best: the fastest of the fixed choices.
        tok_s, best_tok_s, plain_tok_s: tokens a second of each, pooled over sets.
    """

    batch_size: int
    choice: Choice
    best: Choice
    tok_s: float
    best_tok_s: float
    plain_tok_s: float

    @property
    def loss(self) -> float:
        """How much slower the table's choice is than the best fixed one, as a fraction."""
        return 1 - self.tok_s / self.best_tok_s


@dataclass(frozen=True)
class Serving:
    """The table and its rivals.

    Attributes:
        sets: whose prompts are pooled, the same at every load; left_out: batch sizes that were
            measured on other sets.
        loads: by batch size.
        speeds: tokens a second of every choice, by batch size.
        table_score: of the table over the load range; fixed_scores: of each choice that was
            measured at every load.
        held_out: (largest loss, table's score, best fixed score) where the table was chosen on
            one half of the batches of prompts and judged on the other, both ways; None where
            there are not two of each.
    """

    sets: tuple[str, ...]
    left_out: tuple[int, ...]
    loads: list[Load]
    speeds: dict[int, dict[Choice, float]]
    table_score: float
    fixed_scores: dict[Choice, float]
    held_out: tuple[float, float, float] | None

    @property
    def worst_loss(self) -> float:
        return max(load.loss for load in self.loads)

    @property
    def best_fixed(self) -> Choice:
        return max(self.fixed_scores, key=lambda choice: self.fixed_scores[choice])

    def as_json(self) -> dict[str, Any]:
        return {
            "sets": list(self.sets),
            "load_range": [load.batch_size for load in self.loads],
            "left_out": list(self.left_out),
            "rows": [
                {
                    "batch": load.batch_size,
                    "choice": label(load.choice),
                    "tok_s": load.tok_s,
                    "best_fixed": label(load.best),
                    "best_fixed_tok_s": load.best_tok_s,
                    "plain_tok_s": load.plain_tok_s,
                    "loss": load.loss,
                }
                for load in self.loads
            ],
            "table_score": self.table_score,
            "fixed_scores": {label(c): score for c, score in self.fixed_scores.items()},
            "worst_loss": self.worst_loss,
            "held_out": self.held_out
            and dict(
                zip(("worst_loss", "table_score", "best_fixed_score"), self.held_out, strict=True)
            ),
        }


def serving(records: Sequence[Record], hysteresis: float) -> Serving | None:
    """The serving report of greedy cells; None where no load has plain cells to compare with.

    Args:
        records: of one run at each batch size (`Subject.one_run`).
        hysteresis: as `budgets.serving_table` has it.
    """
    served, sets, left_out = _same_sets(as_served(records))
    chosen = _table(served, hysteresis)
    speeds = _speeds(served, list(chosen))
    if not chosen:
        return None
    loads = []
    for batch, choice in chosen.items():
        here = speeds[batch]
        best = max(here, key=lambda c: here[c])
        loads.append(Load(batch, choice, best, here[choice], here[best], here[PLAIN]))
    fixed = _scores(speeds)
    score = sum(load.tok_s / load.plain_tok_s for load in loads) / len(loads)
    held_out = _held_out(served, hysteresis)
    return Serving(sets, left_out, loads, speeds, score, fixed, held_out)


def _same_sets(
    records: Sequence[Record],
) -> tuple[list[Record], tuple[str, ...], tuple[int, ...]]:
    """(greedy records of loads that share their sets, those sets, the loads left out): the sets
    that most loads have in full, and the largest of those."""
    own = [r for r in records if r["temperature"] == 0]
    by_load: dict[int, set[str]] = {}
    for r in own:
        if r["method"] == "plain":
            by_load.setdefault(r["batch_size"], set()).add(r["slice"])
    ranked = sorted(
        by_load.values(),
        key=lambda sets: (sum(sets <= other for other in by_load.values()), len(sets)),
    )
    chosen = ranked[-1] if ranked else set()
    kept = {batch for batch, sets in by_load.items() if chosen <= sets}
    found = [r for r in own if r["batch_size"] in kept and r["slice"] in chosen]
    return found, tuple(sorted(chosen)), tuple(sorted(by_load.keys() - kept))


def _table(records: Sequence[Record], hysteresis: float) -> dict[int, Choice]:
    return {
        row["batch_size"]: (row["method"], row["builder"], row["budget"], row.get("scores"))
        for row in serving_table(records, hysteresis)
    }


def _speeds(records: Sequence[Record], batches: Sequence[int]) -> dict[int, dict[Choice, float]]:
    good = [r for r in records if (r["output_check"] or {}).get("passed")]
    return {b: speeds_by_choice([r for r in good if r["batch_size"] == b]) for b in batches}


def _scores(speeds: dict[int, dict[Choice, float]]) -> dict[Choice, float]:
    """Of every choice that was measured at all loads."""
    everywhere = set.intersection(*(set(here) for here in speeds.values()))
    return {
        choice: sum(here[choice] / here[PLAIN] for here in speeds.values()) / len(speeds)
        for choice in sorted(everywhere, key=label)
    }


def _held_out(records: Sequence[Record], hysteresis: float) -> tuple[float, float, float] | None:
    rivals = [r for r in records if r["method"] in CONTENDERS]
    halves = [_half(rivals, parity) for parity in (0, 1)]
    if any(not r["batches"] for half in halves for r in half):
        return None
    losses, scores, fixed = [], [], []
    for chosen_on, judged_on in (halves, reversed(halves)):
        table = _table(chosen_on, hysteresis)
        speeds = _speeds(judged_on, list(table))
        if not table or any(choice not in speeds[b] for b, choice in table.items()):
            return None
        losses += [1 - speeds[b][choice] / max(speeds[b].values()) for b, choice in table.items()]
        gains = [speeds[b][choice] / speeds[b][PLAIN] for b, choice in table.items()]
        scores.append(sum(gains) / len(gains))
        # The rival budget too is chosen where the table was.
        known, own = _scores(_speeds(chosen_on, list(table))), _scores(speeds)
        rival = max(known, key=lambda choice: known[choice])
        fixed.append(own.get(rival, 0.0))
    return max(losses), sum(scores) / 2, sum(fixed) / 2


def _half(records: Sequence[Record], parity: int) -> list[Record]:
    return [{**r, "batches": r["batches"][parity::2]} for r in records]


def label(choice: Choice) -> str:
    """The choice as tables name it."""
    method, builder, budget, scores = choice
    return cell_label({"method": method, "builder": builder, "budget": budget, "scores": scores})
