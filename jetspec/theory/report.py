"""Theory as a person reads it: costs, predicted beside measured, and the best budget by load."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

Facts = Mapping[str, Any]


def theory_view(facts: Facts) -> Group:
    """The whole page for the terminal, within 80 columns."""
    tables = [cost_table(facts["costs"])]
    if facts["comparison"]:
        tables.append(comparison_table(facts["comparison"]))
    if facts["best"]:
        tables.append(best_table(facts["best"], facts["serving"]))
    parts: list[Any] = []
    for table in tables:
        # Beside the table and not in it: a narrow table would squeeze its note.
        note, table.caption = Text(str(table.caption), style="dim italic"), None
        parts += [table, note, ""]
    return Group(*parts[:-1])


def cost_table(costs: Facts) -> Table:
    """c(N, L): one row a size, one column a batch size."""
    facts = costs["facts"]
    batches = sorted({row["batch"] for row in costs["forwards"]})
    table = _table(f"Cost of N tokens at context {facts['context']}, over that of one")
    table.add_column("N", justify="right")
    for batch in batches:
        table.add_column(f"batch {batch}", justify="right")
    by_place = {(row["tokens"], row["batch"]): row for row in costs["forwards"]}
    for size in sorted({row["tokens"] for row in costs["forwards"]}):
        cells = [f"{by_place[size, batch]['relative']:.2f}" for batch in batches]
        table.add_row(str(size), *cells)
    ones = [f"{1000 * by_place[1, batch]['seconds']:.2f} ms" for batch in batches]
    table.add_row("1 token", *ones, style="dim")
    if costs["drafts"]:
        drafts = {row["batch"]: row["seconds"] for row in costs["drafts"]}
        table.add_row("a draft", *(f"{1000 * drafts[b]:.2f} ms" for b in batches), style="dim")
    table.caption = (
        f"{facts['target']}, {facts['dtype']} on {facts['device']}, median of "
        f"{facts['repeats']} runs. A round pays when tau exceeds cost of N = budget + 1 and draft."
    )
    return table


def comparison_table(rows: Sequence[Facts]) -> Table:
    """Predicted speed-ups beside measured ones."""
    table = _table("Speed-up over plain decoding, predicted and measured")
    names = ("slice", "batch", "method", "tau", "needed", "eq. 3", "own price", "measured 95 %")
    for name in names:
        side = "left" if name in ("slice", "method") else "right"
        table.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for row in rows:
        measured = "withheld" if row["measured"] is None else f"{row['measured']:.2f}"
        if row["ci"]:
            measured += f" {row['ci'][0]:.2f}-{row['ci'][1]:.2f}"
        figures = (row[name] for name in ("tau", "needed", "printed", "dear"))
        cells = (row["slice"], str(row["batch"]), row["label"], *(f"{x:.2f}" for x in figures))
        table.add_row(*cells, measured)
    table.caption = (
        "needed: the tau that breaks even. eq. 3: as printed, a verification as dear as a plain "
        "step. own price: with this machine's cost of verifying. What measured lacks of it is the "
        "loop around the models, and at larger batches the wait for the slowest sequence."
    )
    return table


def best_table(rows: Sequence[Facts], serving: Sequence[Facts]) -> Table:
    """The best budget by batch size, predicted, beside the measured serving table."""
    known = {row["batch_size"]: row for row in serving}
    table = _table("Best budget by load")
    for name in ("batch", "predicted", "tau", "x plain", "margin", "measured"):
        side = "left" if name in ("predicted", "measured") else "right"
        table.add_column(name, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for row in rows:
        found = known.get(row["batch"])
        measured = "-"
        if found is not None:
            label = "plain" if found["method"] == "plain" else f"budget {found['budget']}"
            measured = f"{label}, {found['speedup_vs_plain']:.2f}x"
        figures = (f"{row[name]:.2f}" for name in ("tau", "speedup", "margin"))
        table.add_row(str(row["batch"]), row["label"], *figures, measured)
    table.caption = "margin: speed over the next best choice; near 1 the choice hardly matters."
    return table


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
