"""The figures that this project set out to reach, and by how much they are met or missed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jetspec.evaluation.cells import ALL_SLICES
from jetspec.evaluation.statistics import Estimate
from jetspec.results.cells import SETS, Subject
from jetspec.results.compare import FAILS, HOLDS, find, judge, speed_ratio, tau_ratio, words
from jetspec.results.inputs import Record
from jetspec.results.serving import Serving

TAU = {"gsm8k": 8.5, "math500": 8.0, "humaneval": 5.5, "mbpp": 6.2, "mt_bench": 4.5}
TAU_BUDGET = 128
RISING = (16, 64, 128, 256)
SPEEDUP = {"gsm8k": 3.0}
LEAST_SPEEDUP = 2.0
LARGEST_LOSS = 0.05
GREEDY_ALONE = {"batch_size": 1, "temperature": 0.0}


@dataclass(frozen=True)
class Goal:
    """One goal.

    Attributes:
        wanted: in words; measured: in words, a dash where it was not measured.
        met: None where it was not measured, or where its interval decides nothing.
        margin: how far beyond the goal (short of it where negative), as a fraction of it; None
            where it is no number.
    """

    name: str
    wanted: str
    measured: str
    met: bool | None
    margin: float | None = None

    @property
    def outcome(self) -> str:
        if self.met is None:
            return "not measured" if self.measured == "-" else "not decided"
        word = "met" if self.met else "missed"
        return word if self.margin is None else f"{word}, {self.margin:+.1%}"

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "outcome": self.outcome}


def goals(subject: Subject, served: Serving | None) -> list[Goal]:
    """All goals, for one head on the target that they were set for."""
    named = [name for name in subject.sets if name in SETS]
    sets = named or [name for name in subject.sets if name != ALL_SLICES]
    return [
        *[_tau(subject, name, wanted) for name, wanted in TAU.items()],
        *[_rising(subject, name) for name in sets],
        *[_speed(subject, name) for name in sets],
        *[_over_chain(subject, name) for name in sets],
        _never_far_behind(served),
        _beats_fixed(served),
    ]


def served_trees(records: Sequence[Record], **fields: Any) -> list[Record]:
    """Exact trees on the scores that serve: the head's path scores, or what it has."""
    trees = find(records, method="tree", builder="best_first", **fields)
    scores = next((s for s in ("path", None, "slot") if find(trees, scores=s)), None)
    return find(trees, scores=scores)


def fastest_tree(records: Sequence[Record], batch_size: int) -> int | None:
    """The budget whose trees are fastest at a batch size, pooled over the sets that all budgets
    have."""
    trees = [r for r in served_trees(records, batch_size=batch_size) if r["tok_s_decode"]]
    budgets = sorted({r["budget"] for r in trees})
    sets = [set(r["slice"] for r in find(trees, budget=b)) for b in budgets]
    shared = set.intersection(*sets) if sets else set()
    speed = {
        b: sum(r["tok_s_decode"] for r in find(trees, budget=b) if r["slice"] in shared)
        for b in budgets
    }
    return max(budgets, key=lambda b: speed[b]) if budgets else None


def _tau(subject: Subject, name: str, wanted: float) -> Goal:
    found = served_trees(subject.decoded, slice=name, budget=TAU_BUDGET, **GREEDY_ALONE)
    title = f"tau on {name}, budget {TAU_BUDGET}, batch 1, temperature 0, decoded"
    if not found:
        return Goal(title, f">= {wanted:g}", "-", None)
    value, ci = found[0]["tau"], found[0]["tau_ci"]
    shown = words(Estimate(value, tuple(ci) if ci else None))
    return Goal(title, f">= {wanted:g}", shown, value >= wanted, value / wanted - 1)


def _rising(subject: Subject, name: str) -> Goal:
    title = f"tau on {name} rises from budget to budget ({', '.join(map(str, RISING))})"
    steps = list(zip(RISING, RISING[1:], strict=False))
    cells = {b: served_trees(subject.decoded, slice=name, budget=b, **GREEDY_ALONE) for b in RISING}
    ratios = [tau_ratio(cells[b], cells[a]) for a, b in steps]
    if any(ratio is None for ratio in ratios):
        return Goal(title, "each above 1", "-", None)
    shown = ", ".join(words(ratio) for ratio in ratios)
    return Goal(title, "each above 1", shown, all(r.value > 1 for r in ratios if r))


def _speed(subject: Subject, name: str) -> Goal:
    wanted = SPEEDUP.get(name, LEAST_SPEEDUP)
    graphed = find(subject.one_run(), decoder="engine")
    budget = fastest_tree(graphed, 1)
    found = served_trees(graphed, slice=name, budget=budget, **GREEDY_ALONE)
    title = f"speed-up on {name} over graphed AR, batch 1, decode only"
    figure = found[0]["speedup"]["vs_plain"] if found else {"value": None}
    if figure["value"] is None:
        return Goal(title, f">= {wanted:g}x", "-", None)
    ci = figure["ci"]
    shown = f"{words(Estimate(figure['value'], tuple(ci) if ci else None))} at budget {budget}"
    return Goal(
        title, f">= {wanted:g}x", shown, figure["value"] >= wanted, figure["value"] / wanted - 1
    )


def over_chain(records: Sequence[Record], batch: int, name: str | None) -> Estimate | None:
    """Speed of the fastest tree over the path-scored chain at a batch size; name None is all
    sets."""
    budget = fastest_tree(records, batch)
    fields = {"batch_size": batch, **({} if name is None else {"slice": name})}
    chains = find(records, method="chain", **fields)
    paths = find(chains, scores="path") or find(chains, scores=None)
    longest = max((r["budget"] for r in paths), default=0)
    trees = served_trees(records, budget=budget, **fields)
    return speed_ratio(trees, find(paths, budget=longest))


def _over_chain(subject: Subject, name: str) -> Goal:
    ratio = over_chain(subject.one_run(), 1, name)
    title = f"tree over path-scored chain on {name}, tok/s at batch 1"
    if ratio is None:
        return Goal(title, "above 1", "-", None)
    verdict = {HOLDS: True, FAILS: False}.get(judge([ratio]))
    return Goal(title, "above 1", words(ratio), verdict)


def _never_far_behind(served: Serving | None) -> Goal:
    title = "the serving table's choice against the best fixed budget, at every batch size"
    wanted = f"never more than {LARGEST_LOSS:.0%} slower"
    if served is None or len(served.loads) < 2:
        return Goal(title, wanted, "-", None)
    worst = max(served.loads, key=lambda load: load.loss)
    shown = f"{worst.loss:.1%} slower at most (batch {worst.batch_size})"
    if served.held_out:
        shown += f"; {served.held_out[0]:.1%} where chosen and judged on different prompts"
    return Goal(title, wanted, shown, worst.loss <= LARGEST_LOSS)


def _beats_fixed(served: Serving | None) -> Goal:
    title = "the serving table against every single fixed budget, over the load range"
    if served is None or len(served.loads) < 2 or not served.fixed_scores:
        return Goal(title, "faster than each", "-", None)
    best = served.fixed_scores[served.best_fixed]
    shown = f"{served.table_score:.2f}x plain against {best:.2f}x"
    if served.held_out:
        _, table, fixed = served.held_out
        shown += f"; {table:.2f}x against {fixed:.2f}x where chosen and judged on different prompts"
    return Goal(
        title, "faster than each", shown, served.table_score > best, served.table_score / best - 1
    )
