"""Figures of a matrix and of a training run, as PNG files."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jetspec.evaluation.cells import ALL_SLICES, cell_label
from jetspec.evaluation.pooling import Record

_DPI = 150
_FIGURES = {"tau": "tau (tokens per round)", "speedup": "speed-up over plain decoding"}


def write_figures(
    records: Sequence[Record],
    directory: str | Path,
    curve: Sequence[Mapping[str, Any]] | None = None,
) -> list[Path]:
    """Every figure that the records and the training curve allow; returns the files written.

    Args:
        curve: rows {step, loss, ...} of a training run.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    good = [record for record in records if record["status"] == "ok"]
    drawn = {
        "matrix_tau.png": heat_map(records, "tau"),
        "matrix_speedup.png": heat_map(records, "speedup"),
        "tau_by_budget.png": tau_by_budget(good),
        "acceptance_by_depth.png": acceptance_by_depth(good),
        "loss.png": loss_curve(curve or ()),
    }
    paths = []
    for name, figure in drawn.items():
        if figure is None:
            continue
        paths.append(save_figure(figure, folder / name))
    return paths


def heat_map(records: Sequence[Record], value: str) -> Any | None:
    """Methods down, slices across, one panel a batch size; greedy cells.

    Args:
        value: `tau` or `speedup`. A cell that failed or whose speed-up is withheld is grey.
    """
    import numpy as np

    cells = [r for r in _greedy(records) if r["method"] != "hf_eager"]
    if value == "tau":
        cells = _by_slice(cells)
    if not cells:
        return None
    methods = list(dict.fromkeys(cell_label(dict(r)) for r in cells))
    slices = list(dict.fromkeys(r["slice"] for r in cells))
    batches = sorted({r["batch_size"] for r in cells})
    grids = {b: np.full((len(methods), len(slices)), np.nan) for b in batches}
    for r in cells:
        at = methods.index(cell_label(dict(r))), slices.index(r["slice"])
        figure = r["tau"] if value == "tau" else r["speedup"]["vs_plain"]["value"]
        grids[r["batch_size"]][at] = np.nan if figure is None else figure
    everything = np.concatenate([grid.ravel() for grid in grids.values()])
    if np.isnan(everything).all():
        return None
    low, high = float(np.nanmin(everything)), float(np.nanmax(everything))
    high = high if high > low else low + 1
    width = 1.6 + len(batches) * (0.72 * len(slices) + 0.5) + 0.9
    figure_, axes = figure_axes(
        width, 1.5 + 0.38 * len(methods), columns=len(batches), share_y=True
    )
    for batch, axis in zip(batches, axes, strict=True):
        image = axis.imshow(grids[batch], cmap=_colours(), vmin=low, vmax=high, aspect="auto")
        axis.set_title(f"batch {batch}")
        axis.set_xticks(range(len(slices)), slices, rotation=40, ha="right")
        axis.set_yticks(range(len(methods)), methods)
        axis.tick_params(length=0)
        for (row, column), number in np.ndenumerate(grids[batch]):
            missing = np.isnan(number)
            dark = not missing and (number - low) / (high - low) < 0.55
            axis.text(
                column,
                row,
                "n/a" if missing else f"{number:.2f}",
                ha="center",
                va="center",
                fontsize=8,
                color="white" if dark else "black",
            )
    figure_.colorbar(image, ax=list(axes), label=_FIGURES[value], pad=0.02)
    return figure_


def tau_by_budget(records: Sequence[Record]) -> Any | None:
    """tau of trees against their budget, one line a slice, with 95 % intervals; chains as dots."""
    cells = _by_slice(_smallest_batch(_greedy(records)))
    drawn = [r for r in cells if r["method"] in ("chain", "tree") and r["tau"] is not None]
    if not drawn:
        return None
    figure, (axis,) = figure_axes(7.2, 4.2)
    slices = list(dict.fromkeys(r["slice"] for r in drawn))
    builders = list(dict.fromkeys(r["builder"] for r in drawn if r["method"] == "tree"))
    for i, name in enumerate(slices):
        # Lines of several slices would hide each other's intervals at one x.
        nudge = 1.0 + 0.025 * (i - (len(slices) - 1) / 2)
        for builder in [*builders, "chain"]:
            own = sorted(
                (r for r in drawn if r["slice"] == name and r["builder"] == builder),
                key=lambda r: r["budget"],
            )
            if not own:
                continue
            spans = [r["tau_ci"] or (r["tau"], r["tau"]) for r in own]
            axis.errorbar(
                [r["budget"] * nudge for r in own],
                [r["tau"] for r in own],
                yerr=[
                    [max(0.0, r["tau"] - s[0]) for r, s in zip(own, spans, strict=True)],
                    [max(0.0, s[1] - r["tau"]) for r, s in zip(own, spans, strict=True)],
                ],
                color=f"C{i % 10}",
                fmt="D" if builder == "chain" else "o-" if builder == builders[0] else "s--",
                markerfacecolor="white" if builder == "chain" else None,
                markersize=5,
                capsize=2,
                linewidth=1.4,
                label=name if builder == (builders or ["chain"])[0] else None,
            )
    _logarithmic(axis, sorted({r["budget"] for r in drawn}))
    axis.set_xlabel("budget (draft nodes per round)")
    axis.set_ylabel(_FIGURES["tau"])
    names = {
        "best_first": "best-first trees",
        "algorithm1": "Algorithm 1's trees",
        "static": "static trees",
    }
    shapes = [
        f"{line}: {names[builder]}"
        for line, builder in zip(("lines", "dashed"), builders, strict=False)
    ]
    if any(r["method"] == "chain" for r in drawn):
        shapes.append("diamonds: chains")
    axis.set_title(f"tau by budget with 95 % intervals ({'; '.join(shapes)})", fontsize=10)
    axis.legend(title="slice", loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    axis.grid(alpha=0.25)
    return figure


def acceptance_by_depth(records: Sequence[Record]) -> Any | None:
    """Share of rounds that accept at least d draft tokens, one line a method, over all slices."""
    cells = [r for r in _smallest_batch(_greedy(records)) if r["budget"] and r["rounds"]]
    cells = [r for r in cells if r["slice"] != ALL_SLICES] or cells
    if not any(r["acceptance_by_depth"] for r in cells):
        return None
    figure, (axis,) = figure_axes(7.2, 4.2)
    deepest = max(len(r["acceptance_by_depth"]) for r in cells)
    for label in dict.fromkeys(cell_label(dict(r)) for r in cells):
        own = [r for r in cells if cell_label(dict(r)) == label]
        rounds = sum(r["rounds"] for r in own)
        shares = [
            sum(r["rounds"] * (r["acceptance_by_depth"][d:] or [0.0])[0] for r in own) / rounds
            for d in range(deepest)
        ]
        axis.plot(range(1, deepest + 1), shares, "o-", markersize=4, linewidth=1.4, label=label)
    axis.set_xlabel("depth d (draft tokens)")
    axis.set_ylabel("share of rounds accepting at least d")
    axis.set_title("Acceptance by depth, all slices", fontsize=10)
    axis.set_ylim(0, 1)
    step = max(1, deepest // 16)
    axis.set_xticks(range(1, deepest + 1, step))
    axis.legend(title="method", loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    axis.grid(alpha=0.25)
    return figure


def loss_curve(curve: Iterable[Mapping[str, Any]]) -> Any | None:
    """Training loss by step, and the held-out tau estimate where it was made."""
    rows = list(curve)
    losses = [(r["step"], r["loss"]) for r in rows if r.get("loss") is not None]
    if not losses:
        return None
    figure, (axis,) = figure_axes(7.2, 4.2)
    axis.plot(*zip(*losses, strict=True), color="C0", linewidth=1.4, label="loss")
    axis.set_xlabel("optimizer step")
    axis.set_ylabel("distillation loss (nats)", color="C0")
    axis.set_title("Distillation", fontsize=10)
    axis.grid(alpha=0.25)
    taus = [(r["step"], r["tau_estimate"]) for r in rows if r.get("tau_estimate") is not None]
    if taus:
        right = axis.twinx()
        right.plot(*zip(*taus, strict=True), "o--", color="C1", markersize=4)
        right.set_ylabel("tau estimate, held-out (tokens per round)", color="C1")
    return figure


def _greedy(records: Iterable[Record]) -> list[Record]:
    """The cells of the lowest temperature."""
    kept = list(records)
    lowest = min((r["temperature"] for r in kept), default=0)
    return [r for r in kept if r["temperature"] == lowest]


def _by_slice(records: Iterable[Record]) -> list[Record]:
    """Cells over all slices taken apart, where no cell of the slice itself stands beside them."""
    kept = list(records)
    own = {r["slice"] for r in kept}
    parts: list[Record] = []
    for r in kept:
        found = r.get("by_slice") or {} if r["slice"] == ALL_SLICES else {}
        new: list[Record] = [
            {**r, "slice": name, **found[name]} for name in sorted(found) if name not in own
        ]
        parts += new or ([r] if r["slice"] != ALL_SLICES or not found else [])
    return parts


def _smallest_batch(records: Sequence[Record]) -> list[Record]:
    smallest = min((r["batch_size"] for r in records), default=0)
    return [r for r in records if r["batch_size"] == smallest]


def save_figure(figure: Any, path: Path) -> Path:
    """Write a figure as PNG; returns the path."""
    figure.savefig(path, dpi=_DPI)
    return path


def figure_axes(
    width: float, height: float, *, columns: int = 1, share_y: bool = False
) -> tuple[Any, Sequence[Any]]:
    """A figure of `width` x `height` inches with a row of axes, drawn without a window system."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False, sharey=share_y)[0]
    return figure, axes


def _colours() -> Any:
    import matplotlib

    return matplotlib.colormaps["viridis"].with_extremes(bad="#d8d8d8")


def _logarithmic(axis: Any, ticks: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
