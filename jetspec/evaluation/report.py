"""Records as a reader meets them: tables for the terminal and for Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from jetspec.evaluation.cells import ALL_SLICES, BASELINES, Cell, cell_label
from jetspec.evaluation.pooling import Record, pooled_tau, speedup, throughput

_COLUMNS = ("slice", "batch", "method", "tau 95 %", "tok/s", "x plain", "x HF eager", "output")
_RIGHT = {"batch", "tau 95 %", "tok/s", "x plain", "x HF eager"}


def cells_table(records: Sequence[Record], title: str = "Evaluation matrix") -> Table:
    """One row a cell; a failed cell shows its reason."""
    return _rich(title, records)


def overview_table(
    records: Sequence[Record], title: str = "All slices", *, samples: int = 2000, seed: int = 0
) -> Table:
    """One row a method and batch size, pooled over slices: a matrix at a glance."""
    return _rich(title, pool_slices(records, samples=samples, seed=seed))


def markdown_table(records: Sequence[Record]) -> str:
    """The cells as a Markdown table, with what its columns mean."""
    several = len({record["temperature"] for record in records}) > 1
    mixed = _mixed(records)
    lines = [
        "| " + " | ".join(_COLUMNS) + " |",
        "|" + "|".join("--:" if name in _RIGHT else "---" for name in _COLUMNS) + "|",
    ]
    for record in records:
        cells = [cell.replace("|", "\\|") for cell in _row(record, several, mixed)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *_legend(mixed), ""])


LEGEND = (
    "tau: tokens committed per round, bonus included, prefill not counted. tok/s and speed-ups: "
    "after the prefill, drafting inside the clock. Intervals: 95 %, bootstrap over prompts (over "
    "batches of prompts for speed-ups above batch 1), paired. output: equal to plain decoding's."
)
ELSEWHERE = "*: decoded by the reference loop, not by the engine: compare its tau, not its speed."


def pool_slices(records: Sequence[Record], *, samples: int, seed: int) -> list[dict[str, Any]]:
    """Records of one method, batch size and temperature pooled into one over their slices.

    Only slices that a method finished count, and speed-ups pair it with the baselines on those
    slices alone. A speed-up that is withheld in one slice is withheld in the pool.
    """
    separate = [r for r in records if r["slice"] != ALL_SLICES] or list(records)
    pools: dict[tuple[Any, ...], list[Record]] = {}
    for record in separate:
        names = ("method", "builder", "budget", "batch_size", "temperature")
        scores = record.get("scores")
        pools.setdefault((*(record[name] for name in names), scores), []).append(record)
    pooled = []
    for (method, builder, budget, batch_size, temperature, scores), members in pools.items():
        cell = Cell(method, builder, budget, batch_size, ALL_SLICES, temperature, scores)
        good = [record for record in members if record["status"] == "ok"]
        missing = len(members) - len(good)
        tau = pooled_tau(good, samples=samples, seed=seed)
        value, ci = tau.rounded() if tau else (None, None)
        pooled.append(
            {
                **cell.as_json(),
                "status": "ok" if good else members[0]["status"],
                "decoder": members[0].get("decoder"),
                "reason": f"{missing} of {len(members)} slices failed" if missing else None,
                "tau": value,
                "tau_ci": ci,
                "tok_s_decode": throughput(good),
                "tok_s_total": throughput(good, "total"),
                "speedup": {
                    f"vs_{base}": _pooled_speedup(good, separate, base, samples, seed)
                    for base in BASELINES
                },
                "output_check": _pooled_check(good),
            }
        )
    return pooled


def _pooled_speedup(
    good: Sequence[Record], records: Iterable[Record], base: str, samples: int, seed: int
) -> dict[str, Any]:
    bases = {
        (r["slice"], r["batch_size"], r["temperature"]): r for r in records if r["method"] == base
    }
    withheld = [r["speedup"][f"vs_{base}"]["value"] is None for r in good]
    if not good or any(withheld):
        return {"value": None, "ci": None, "reason": f"withheld in {sum(withheld)} slices"}
    pairs = [bases[(r["slice"], r["batch_size"], r["temperature"])] for r in good]
    estimate = speedup(good, pairs, samples=samples, seed=seed, clock="decode")
    value, ci = estimate.rounded(4) if estimate else (None, None)
    return {"value": value, "ci": ci, "reason": None}


def _pooled_check(records: Sequence[Record]) -> dict[str, Any] | None:
    checks = [record["output_check"] for record in records]
    if not checks or None in checks:
        return None
    sums = {n: sum(check[n] for check in checks) for n in ("compared", "differing", "near_ties")}
    return {"passed": all(check["passed"] for check in checks), **sums}


def _rich(title: str, records: Sequence[Record]) -> Table:
    """Fits 80 columns: a group is a heading row, reasons stand below the table."""
    several = len({record["temperature"] for record in records}) > 1
    mixed = _mixed(records)
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption="\n".join([*_notes(records), *_legend(mixed)]),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name in _COLUMNS[2:]:
        table.add_column(name, justify="right" if name in _RIGHT else "left", no_wrap=True)
    group = None
    for record in records:
        if group != (group := (record["slice"], record["batch_size"])):
            if table.row_count:
                table.add_row()
            table.add_row(f"[bold]{escape(group[0])}[/bold]", f"[bold]batch {group[1]}[/bold]")
        cells = _row(record, several, mixed)[2:]
        short = [cell.replace(", ", "-").replace(" [", " ").rstrip("]") for cell in cells[:-1]]
        table.add_row(*map(escape, short), _styled(_outcome(record)))
    return table


def _notes(records: Iterable[Record]) -> list[str]:
    """Why cells have no figures, one line a cell."""
    return [
        f"{cell_label(dict(r))} on {r['slice']} at batch {r['batch_size']}: {r['reason']}"
        for r in records
        if r["reason"]
    ]


def _styled(outcome: str) -> str:
    bad = outcome.startswith(("failed", "no memory", "DIFFERS"))
    style = "bold red" if bad else "green" if outcome.startswith("equal") else "dim"
    return f"[{style}]{escape(outcome)}[/{style}]"


def _mixed(records: Iterable[Record]) -> bool:
    """Whether the engine decoded some of the cells, so that those it did not need a mark."""
    return any(record.get("decoder") == "engine" for record in records)


def _legend(mixed: bool) -> list[str]:
    return [LEGEND, ELSEWHERE] if mixed else [LEGEND]


def _row(record: Record, show_temperature: bool, mixed: bool) -> tuple[str, ...]:
    label = cell_label(dict(record))
    if mixed and record.get("decoder") == "reference":
        label += " *"
    if show_temperature:
        label += f" T={record['temperature']:g}"
    speedups = record["speedup"]
    return (
        record["slice"],
        str(record["batch_size"]),
        label,
        _interval(record["tau"], record["tau_ci"]),
        "-" if record["tok_s_decode"] is None else f"{record['tok_s_decode']:.1f}",
        *(_speedup(speedups[f"vs_{base}"]) for base in BASELINES),
        _outcome(record) + (f"; {record['reason']}" if record["reason"] else ""),
    )


def _speedup(figure: Mapping[str, Any]) -> str:
    return _interval(figure["value"], figure["ci"])


def _interval(value: float | None, ci: Sequence[float] | None) -> str:
    if value is None:
        return "-"
    if ci is None:
        return f"{value:.2f}"
    return f"{value:.2f} [{ci[0]:.2f}, {ci[1]:.2f}]"


def _outcome(record: Record) -> str:
    if record["status"] != "ok":
        return "no memory" if record["status"] == "out_of_memory" else "failed"
    check = record["output_check"]
    if check is None:
        return "not compared"
    if not check["passed"]:
        return f"DIFFERS {check['differing']}/{check['compared']}"
    ties = check["near_ties"]
    return f"equal {check['compared']}" + (f" ({ties} near ties)" if ties else "")
