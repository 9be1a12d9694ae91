"""The page's plots, small PNG files. Without matplotlib there are none."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jetspec.evaluation.cells import ALL_SLICES
from jetspec.evaluation.figures import figure_axes, save_figure
from jetspec.results.cells import SETS, Subject
from jetspec.results.compare import find
from jetspec.results.goals import TAU_BUDGET, served_trees
from jetspec.results.inputs import Record
from jetspec.results.serving import Serving, label

_SCORES = (("slot", "C1"), ("path", "C0"), (None, "C0"))
_INTERVAL = "95 % intervals over prompts"


def write_plots(
    subject: Subject, served: Serving | None, curve: Sequence[Mapping[str, Any]], directory: Path
) -> dict[str, str]:
    """Write what the cells allow; returns {file name: what it shows}."""
    if importlib.util.find_spec("matplotlib") is None:
        return {}
    drawn = {
        "tau_by_budget.png": ("tau by budget, slot and path scores", tau_by_budget(subject)),
        "speedup_by_budget.png": ("speed-up by budget at batch 1", speedup_by_budget(subject)),
        "throughput_by_batch.png": ("tokens a second by batch size", throughput(served)),
        "acceptance_by_depth.png": ("acceptance by depth", acceptance(subject)),
        "training.png": ("held-out tau over training", training(curve)),
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, (_, figure) in drawn.items():
        if figure is not None:
            save_figure(figure, directory / name)
    return {name: title for name, (title, figure) in drawn.items() if figure is not None}


def tau_by_budget(subject: Subject) -> Any | None:
    """One panel a set: trees on slot and on path scores, chains as dashed lines."""
    greedy = find(subject.replayed or subject.decoded, batch_size=1, temperature=0.0)
    sets = [s for s in subject.sets if find(greedy, slice=s, method="tree") and s != ALL_SLICES]
    sets = [s for s in sets if s in SETS] or sets
    if not sets:
        return None
    figure, axes = figure_axes(2.2 * len(sets) + 0.6, 2.9, columns=len(sets), share_y=True)
    for axis, name in zip(axes, sets, strict=True):
        own = find(greedy, slice=name)
        for scores, colour in _SCORES:
            trees = find(own, method="tree", builder="best_first", scores=scores)
            trees.sort(key=lambda r: r["budget"])
            if trees:
                _line(axis, trees, colour, scores or "tree")
            for chain in find(own, method="chain", scores=scores)[-1:]:
                axis.axhline(chain["tau"], color=colour, linestyle="--", linewidth=1)
        axis.set_title(name, fontsize=9)
        _budgets(axis, sorted({r["budget"] for r in find(own, method="tree")}))
    axes[0].set_ylabel("tau (tokens per round)")
    axes[-1].legend(frameon=False, fontsize=8)
    figure.suptitle(f"tau by budget; dashed: chains; {_INTERVAL}", fontsize=9)
    return figure


def _line(axis: Any, records: Sequence[Record], colour: str, name: str) -> None:
    spans = [r["tau_ci"] or (r["tau"], r["tau"]) for r in records]
    below = [max(0.0, r["tau"] - s[0]) for r, s in zip(records, spans, strict=True)]
    above = [max(0.0, s[1] - r["tau"]) for r, s in zip(records, spans, strict=True)]
    axis.errorbar(
        [r["budget"] for r in records], [r["tau"] for r in records], yerr=[below, above],
        color=colour, fmt="o-", markersize=3, capsize=2, linewidth=1.3, label=name,
    )  # fmt: skip


def _budgets(axis: Any, ticks: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=7)
    axis.minorticks_off()
    axis.set_xlabel("nodes", fontsize=8)
    axis.grid(alpha=0.25)


def speedup_by_budget(subject: Subject) -> Any | None:
    """One line a set: trees over plain decoding, batch 1, temperature 0."""
    cells = served_trees(subject.one_run(), batch_size=1)
    cells = [r for r in cells if r["speedup"]["vs_plain"]["value"] is not None]
    if not cells:
        return None
    figure, (axis,) = figure_axes(5.2, 3.2)
    for name in dict.fromkeys(r["slice"] for r in cells):
        own = sorted(find(cells, slice=name), key=lambda r: r["budget"])
        speeds = [r["speedup"]["vs_plain"]["value"] for r in own]
        axis.plot([r["budget"] for r in own], speeds, "o-", markersize=3.5, label=name)
    _budgets(axis, sorted({r["budget"] for r in cells}))
    axis.set_ylabel("speed-up over AR")
    axis.set_title("Decode-only speed-up at batch 1, temperature 0", fontsize=9)
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def throughput(served: Serving | None) -> Any | None:
    """One line a choice; what the serving table chooses is ringed."""
    if served is None or len(served.loads) < 2:
        return None
    batches = [load.batch_size for load in served.loads]
    figure, (axis,) = figure_axes(5.6, 3.4)
    for choice in served.fixed_scores:
        speeds = [served.speeds[batch][choice] for batch in batches]
        name = "AR" if choice[0] == "plain" else label(choice)
        style = "k--" if choice[0] == "plain" else "o-"
        axis.plot(batches, speeds, style, markersize=3.5, linewidth=1.3, label=name)
    axis.plot(
        batches, [load.tok_s for load in served.loads], "o", markersize=10,
        markerfacecolor="none", markeredgecolor="C3", label="serving table",
    )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.minorticks_off()
    axis.set_xlabel("batch size")
    axis.set_ylabel("tokens a second, all sets")
    axis.set_ylim(bottom=0)
    axis.set_title("Throughput by batch size, temperature 0", fontsize=9)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def acceptance(subject: Subject) -> Any | None:
    """One line a set: share of rounds that accept at least d draft tokens."""
    greedy = find(subject.replayed or subject.decoded, batch_size=1, temperature=0.0)
    trees = served_trees(greedy)
    budgets = {r["budget"] for r in trees}
    if not budgets:
        return None
    budget = TAU_BUDGET if TAU_BUDGET in budgets else max(budgets)
    figure, (axis,) = figure_axes(5.2, 3.2)
    named = [r for r in trees if r["slice"] in SETS] or trees
    for record in find(named, budget=budget):
        shares = record["acceptance_by_depth"]
        axis.plot(range(1, len(shares) + 1), shares, "o-", markersize=3, label=record["slice"])
    axis.set_xlabel("depth d")
    axis.set_ylabel("rounds that accept at least d")
    axis.set_ylim(0, 1)
    axis.set_title(f"Acceptance by depth, trees of {budget} nodes", fontsize=9)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def training(curve: Sequence[Mapping[str, Any]]) -> Any | None:
    """The held-out tau estimate over target tokens trained on, or over steps."""
    rows = [row for row in curve if row.get("tau_estimate") is not None]
    if len(rows) < 2:
        return None
    by_tokens = all("tokens" in row for row in rows)
    places = [row["tokens"] / 1e6 if by_tokens else row["step"] for row in rows]
    figure, (axis,) = figure_axes(5.2, 3.0)
    axis.plot(places, [row["tau_estimate"] for row in rows], "o-", markersize=3.5)
    axis.set_xlabel("target tokens (millions)" if by_tokens else "optimizer step")
    axis.set_ylabel("held-out tau estimate")
    axis.set_title("Training", fontsize=9)
    axis.grid(alpha=0.25)
    return figure
