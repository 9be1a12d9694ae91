"""Tables and figures of a matrix."""

import io

import pytest
from rich.console import Console

from jetspec.evaluation.figures import _by_slice, write_figures
from jetspec.evaluation.report import (
    cells_table,
    markdown_table,
    overview_table,
    pool_slices,
)
from tests.measured import failed, group, runner

CURVE = [{"step": i, "loss": 5 / (1 + i / 10), "tau_estimate": None} for i in range(40)]


def records():
    found = []
    for batch_size in (1, 2):
        for i, name in enumerate(("math", "code", "chat_zh")):
            found += group(
                {
                    ("lookup", 10): runner(tau=1.1),
                    ("chain", 7): runner(tau=1.5 + 0.1 * i, round_seconds=0.11),
                    ("tree", 16): runner(tau=1.8 + 0.2 * i, round_seconds=0.12),
                    ("tree", 64): runner(tau=2.3 + 0.2 * i, round_seconds=0.13 * batch_size),
                },
                slice_=name,
                batch_size=batch_size,
                count=4,
            )
    return found


def shown(table, width=120):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


def test_table_has_one_row_a_cell_with_interval_speedups_and_check():
    found = group({("tree", 16): runner(tau=2.0)})
    text = shown(cells_table(found))
    line = next(line for line in text.splitlines() if "tree 16" in line)
    assert "1.92 1.92-1.92" in line and "equal 6" in line
    assert sum("equal 6" in line for line in text.splitlines()) == 3
    assert "math" in text and "batch 1" in text


def test_a_failed_cell_is_shown_with_its_reason():
    text = shown(cells_table([failed("tree", 256, "needs 20 GiB")]))
    row = next(line for line in text.splitlines() if "tree 256" in line)
    assert "no memory" in row
    assert "tree 256 on math at batch 1: needs 20 GiB" in text


def test_tables_fit_eighty_columns():
    for table in (cells_table(records()), overview_table(records(), samples=100)):
        text = shown(table, width=80)
        assert "…" not in text and "equal" in text


def test_a_withheld_speedup_is_a_dash_beside_the_difference():
    wrong = group({("tree", 16): runner(tau=2.0, answer=lambda r, n: [9, 4] * (n // 2))})
    line = next(x for x in shown(cells_table(wrong)).splitlines() if "tree 16" in x)
    assert "DIFFERS 6/6" in line and " - " in line


def test_markdown_holds_the_same_cells_and_explains_tau():
    text = markdown_table(records())
    assert text.count("\n| ") == len(records())
    assert "bonus included" in text and "| tree 64 |" in text


def test_pool_weighs_rounds_not_slices():
    found = group({("tree", 16): runner(tau=4.0)}, slice_="math", count=8)
    found += group({("tree", 16): runner(tau=2.0)}, slice_="code", count=2)
    pooled = next(r for r in pool_slices(found, samples=200, seed=0) if r["method"] == "tree")
    assert pooled["tau"] == pytest.approx((8 * 23 + 2 * 23) / (8 * 6 + 2 * 12))
    assert pooled["speedup"]["vs_plain"]["value"] > 2
    assert pooled["output_check"]["compared"] == 10


def test_pool_withholds_what_a_slice_withholds():
    found = group({("tree", 16): runner(tau=4.0)}, slice_="math")
    found += group(
        {("tree", 16): runner(tau=2.0, answer=lambda r, n: [9, 4] * (n // 2))}, slice_="code"
    )
    pooled = next(r for r in pool_slices(found, samples=200, seed=0) if r["method"] == "tree")
    assert pooled["speedup"]["vs_plain"]["value"] is None
    assert not pooled["output_check"]["passed"]
    assert "DIFFERS" in shown(overview_table(found, samples=100))


def test_every_figure_is_written_as_png(tmp_path):
    paths = write_figures(records(), tmp_path, CURVE)
    assert sorted(p.name for p in paths) == [
        "acceptance_by_depth.png",
        "loss.png",
        "matrix_speedup.png",
        "matrix_tau.png",
        "tau_by_budget.png",
    ]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)


def test_figures_without_figures_to_draw_are_left_out(tmp_path):
    assert write_figures([failed("tree", 16, "no memory")], tmp_path) == []
    assert write_figures([], tmp_path) == []


def test_failed_cells_do_not_stop_the_figures(tmp_path):
    assert len(write_figures([*records(), failed("tree", 256, "no memory")], tmp_path)) == 4


def test_a_mixed_cell_is_drawn_slice_by_slice():
    mixed = [{"slice": "all", "tau": 2.0, "by_slice": {"b": {"tau": 3.0}, "a": {"tau": 1.0}}}]
    assert [(r["slice"], r["tau"]) for r in _by_slice(mixed)] == [("a", 1.0), ("b", 3.0)]
    beside = [*mixed, {"slice": "a", "tau": 1.5}]
    assert [(r["slice"], r["tau"]) for r in _by_slice(beside)] == [("b", 3.0), ("a", 1.5)]
    assert _by_slice([{"slice": "all", "by_slice": {}}]) == [{"slice": "all", "by_slice": {}}]
