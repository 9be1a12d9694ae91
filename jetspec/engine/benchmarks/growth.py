"""`python -m jetspec.engine.benchmarks.growth RECORD PNG`: a round's time and memory, plotted.

RECORD is one run's, of the tables `rows` or `variants` (the round as it is) and `growth`.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jetspec.engine.benchmarks.models import CONTEXT

TABLES = ("rows", "variants", "growth")


class Point(NamedTuple):
    """A measured round.

    Attributes:
        kind: `ar`, `chain` or `tree`.
        budget: nodes beside the root; 0 in plain decoding.
        gb: most memory held, or None where it was not recorded.
    """

    kind: str
    batch: int
    budget: int
    context: int
    ms: float
    gb: float | None


def points(record: Mapping[str, Any]) -> list[Point]:
    """The rounds of a record, as they are: no variants, no failures; once each."""
    found: dict[tuple[Any, ...], Point] = {}
    for table in TABLES:
        for row in record.get(table, ()):
            if "row" not in row or "ms" not in row or row.get("variant", "present") != "present":
                continue
            kind, batch, *budget = row["row"].split("_")
            at = kind, int(batch[1:]), int(budget[0]) if budget else 0, row.get("context", CONTEXT)
            found.setdefault(at, Point(*at, row["ms"], row.get("peak_gb")))
    return sorted(found.values())


def _line(axes: Any, chosen: Iterable[Point], over: Callable[[Point], int], label: str) -> None:
    line = sorted((over(p), p.ms) for p in chosen)
    if len(line) > 1:
        axes.plot(*zip(*line, strict=True), marker="o", label=label)


def plot(record: Mapping[str, Any], path: Path) -> None:
    """Four panels: time over context, rows and batch; memory over the rows that are cached."""
    from matplotlib.figure import Figure

    every = points(record)
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    panels = figure.subplots(1, 4)
    alone = [p for p in every if p.batch == 1]
    for kind, budget, label in (("ar", 0, "plain"), ("tree", 128, "tree, budget 128")):
        chosen = [p for p in alone if (p.kind, p.budget) == (kind, budget)]
        _line(panels[0], chosen, lambda p: p.context, label)
    short = [p for p in every if p.context == CONTEXT]
    _line(
        panels[1],
        [p for p in short if p.batch == 1 and p.kind != "chain"],
        lambda p: p.budget + 1,
        "batch 1",
    )
    for kind, budget, label in (("ar", 0, "plain"), ("tree", 16, "tree, budget 16")):
        chosen = [p for p in short if (p.kind, p.budget) == (kind, budget)]
        _line(panels[2], chosen, lambda p: p.batch, label)
        held = [p for p in every if (p.kind == "ar") == (kind == "ar") and p.gb is not None]
        memory = [p._replace(ms=p.gb) for p in held if p.gb is not None]
        _line(
            panels[3], memory, lambda p: p.batch * p.context, "plain" if kind == "ar" else "trees"
        )
    titles = ("context, rows", "rows of a round (budget + root)", "batch", "batch x context, rows")
    for axes, title in zip(panels, titles, strict=True):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g} K" if x >= 1024 else f"{x:g}")
        axes.set_xlabel(title)
        axes.set_ylabel("GB held" if axes is panels[3] else "ms a round")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jetspec.engine.benchmarks.growth", description=__doc__
    )
    parser.add_argument("record", type=Path)
    parser.add_argument("png", type=Path)
    args = parser.parse_args(arguments)
    try:
        record = json.loads(args.record.read_text())
    except (OSError, ValueError) as error:
        print(f"RECORD: {args.record}: {error}", file=sys.stderr)
        return 2
    if not points(record):
        print(f"RECORD: {args.record}: no rounds in it; measure rows and growth", file=sys.stderr)
        return 2
    plot(record, args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
