"""A diagnosis as a person reads it: a few short tables, and two figures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table

from jetspec.diagnostics.gap import LARGE, SMALL
from jetspec.diagnostics.paths import ALL
from jetspec.evaluation.figures import figure_axes, save_figure

Facts = Mapping[str, Any]


def diagnosis_view(facts: Facts) -> Group:
    """The whole page for the terminal, within 80 columns."""
    parts: list[Any] = [glance_table(facts), "", depth_table(facts), "", prediction_table(facts)]
    if "path_scores" in facts:
        parts += ["", path_table(facts), "", versus_table(facts)]
    return Group(*parts, *settings_lines(facts))


def glance_table(facts: Facts) -> Table:
    """Every figure with one line that says what it means."""
    table = _table(_title(facts))
    for name, right in (("figure", False), ("value", True), ("what it means", False)):
        table.add_column(name, justify="right" if right else "left", no_wrap=right)
    for name, value, meaning in glance_rows(facts):
        table.add_row(name, value, meaning)
    if facts["greedy"] < 0.995:
        table.caption = (
            f"{1 - facts['greedy']:.1%} of the text is not the target's likeliest token: these "
            "answers were sampled, and tau is that of sampling with their seed."
        )
        table.caption_justify = "left"
    return table


def glance_rows(facts: Facts) -> list[tuple[str, str, str]]:
    """(figure, value, meaning) of what a head is judged by first."""
    tree = facts["reference"]["tree"]
    at_tree = next(row for row in facts["predictions"] if row["tree"] == tree)
    chain = next(row for row in facts["predictions"] if row["builder"] == "chain")
    gap, next_ = facts["gap"], facts["next_depth"]
    spine, sibling = next_["spine"], next_["sibling"]
    curves, loops = facts["calibration"], facts.get("looping")
    rows = [
        (f"tau, {tree}", _tau(at_tree), "tokens a round commits, from the log"),
        ("  by replay", _number(at_tree["replayed"]), "the same with the head run again"),
        (f"tau, {chain['tree']}", _tau(chain), "the likeliest path alone"),
        ("tau, oracle", _tau(facts["oracle"]), f"always right among {facts['width']} candidates"),
        ("rank-1 gap", _number(gap["median"]), "nats surer than the target, best branch"),
        (f"  under {SMALL:g} nats", _share(gap["below_5"]), "branches the target agrees with"),
        (f"  {LARGE:g} or more", _share(gap["at_least_80"]), "branches that contradict themselves"),
        (
            "right on the spine",
            _share(spine["right"]),
            f"rank 1 right, below rank 1 ({spine['asked']})",
        ),
        (
            "right after a sibling",
            _share(sibling["right"]),
            f"rank 1 right, below another ({sibling['asked']})",
        ),
        ("entropy", f"{facts['entropy']:.2f}", f"nats; the target's {facts['target_entropy']:.2f}"),
        ("calibration, step", _number(curves["step"]["ece"], 3), "probability against acceptance"),
        ("calibration, path", _number(curves["path"]["ece"], 3), "the same of whole tree paths"),
    ]
    if "path_scores" in facts:
        bare = facts["path_scores"]["next_depth"]
        for name, kind in (("right on the spine", "spine"), ("right after a sibling", "sibling")):
            place = next(n for n, row in enumerate(rows) if row[0] == name)
            meaning = f"the same without the head's edges ({bare[kind]['asked']})"
            rows.insert(place + 1, ("  slot scores", _share(bare[kind]["right"]), meaning))
    if loops:
        meaning = f"{loops['looping']} of {loops['answers']} answers repeat; left out"
        rows.append(("looping answers", _share(loops["share"]), meaning))
    return rows


def depth_table(facts: Facts) -> Table:
    """Acceptance by depth, and the rank of the right token."""
    table = _table(f"By depth, at the rounds of {facts['reference']['tree']}")
    names = list(facts["by_depth"][0]["ranks"]) if facts["by_depth"] else []
    for name in ("depth", "accepted", "asked", *names, "entropy", "target's"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in facts["by_depth"]:
        ranks = [_share(share) for share in row["ranks"].values()]
        entropies = [_number(row[name]) for name in ("entropy", "target_entropy")]
        fields = (str(row["depth"]), _share(row["accepted"]), str(row["asked"]))
        table.add_row(*fields, *ranks, *entropies)
    table.caption = (
        "accepted: rounds that accept so deep. asked: rounds whose text above is among the "
        "candidates; then the rank of the right token under the right parent (none: no "
        "candidate). Entropies of the head and of the target in nats."
    )
    table.caption_justify = "left"
    return table


def prediction_table(facts: Facts) -> Table:
    """tau of every tree, and which are worth measuring."""
    table = _table("Predicted tau, from the log alone")
    for name in ("tree", "tau 95 %", "replayed", "head expects"):
        table.add_column(name, justify="left" if name == "tree" else "right", no_wrap=True)
    table.add_column("worth measuring")
    for row in facts["predictions"]:
        beaten = row["beaten_by"]
        verdict = f"no: {beaten}" if beaten else "yes"
        style = "dim" if beaten else ""
        expected = f"{row['expected']:.2f}"
        cells = (row["tree"], _tau(row), _number(row["replayed"]), expected, verdict)
        table.add_row(*cells, style=style)
    table.caption = (
        "head expects: tau if its probabilities were the target's. Not worth measuring: another "
        "of no larger budget commits as much on these answers. survival and static trees use the "
        "settings below."
    )
    table.caption_justify = "left"
    return table


def path_table(facts: Facts) -> Table:
    """tau with slot scores and with path scores, chain and best-first trees, by slice."""
    table = _table("What path scores add: the same drafts with and without the head's edges")
    table.add_column("slice")
    for name in ("tree", "slot 95 %", "path 95 %", "path / slot 95 %"):
        table.add_column(name, justify="left" if name == "tree" else "right", no_wrap=True)
    before = None
    for row in facts["path_scores"]["scores"]:
        if row["builder"] == "algorithm1":
            continue
        name = "" if row["slice"] == before else f"{row['slice']} ({row['prompts']})"
        before = row["slice"]
        kind = "chain" if row["builder"] == "chain" else "tree"
        values = [_estimate(row[side]) for side in ("slot", "path", "ratio")]
        table.add_row(name, f"{kind} {row['budget']}", *values)
    table.caption = (
        "In brackets the prompts. Ratios are paired by prompt; an interval that holds 1 decides "
        "nothing."
    )
    table.caption_justify = "left"
    return table


def versus_table(facts: Facts) -> Table:
    """The best-first tree over the chain and over Algorithm 1, each kind of scores for itself."""
    table = _table("Best-first trees over others, all prompts, paired")
    names = {"chain": "chain", "algorithm1": "Algorithm 1"}
    table.add_column("tree", no_wrap=True)
    for kind in ("slot", "path"):
        for over in names.values():
            table.add_column(f"/ {over}, {kind}", justify="right")
    rows = [row for row in facts["path_scores"]["versus"] if row["slice"] == ALL]
    for budget in dict.fromkeys(row["budget"] for row in rows):
        own = {row["over"]: row for row in rows if row["budget"] == budget}
        values = [_estimate(own[over][kind]) for kind in ("slot", "path") for over in names]
        table.add_row(f"tree {budget}", *values)
    return table


def settings_lines(facts: Facts) -> list[str]:
    """What was fitted, as settings of a run file."""
    if not facts["settings"]:
        return []
    lines = ["", "Fitted on these answers, for `evaluation` in a run file:"]
    for name, values in facts["settings"].items():
        lines.append(f"  {name}: [{', '.join(f'{value:g}' for value in values)}]")
    return lines


def write_figures(facts: Facts, directory: str | Path) -> list[Path]:
    """The calibration curves and the ranks by depth as PNG files; returns the files."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {"calibration.png": calibration_figure(facts), "ranks.png": ranks_figure(facts)}
    return [
        save_figure(figure, folder / name) for name, figure in drawn.items() if figure is not None
    ]


def calibration_figure(facts: Facts) -> Any:
    """Acceptance against draft probability; on the diagonal a head means what it says."""
    titles = {"step": "best candidate of a step", "path": "whole path of a node"}
    figure, axes = figure_axes(8.4, 4.0, columns=2, share_y=True)
    for (kind, title), axis in zip(titles.items(), axes, strict=True):
        curve = facts["calibration"][kind]
        bins = curve["bins"]
        axis.plot([0, 1], [0, 1], color="#999999", linewidth=1, linestyle="--")
        largest = max((row["count"] for row in bins), default=1)
        axis.plot(
            [row["probability"] for row in bins],
            [row["accepted"] for row in bins],
            color="C0",
            linewidth=1.4,
        )
        axis.scatter(
            [row["probability"] for row in bins],
            [row["accepted"] for row in bins],
            s=[12 + 120 * row["count"] / largest for row in bins],
            color="C0",
        )
        ece = curve["ece"]
        axis.set_title(f"{title}" + (f" (ECE {ece:.3f})" if ece is not None else ""), fontsize=10)
        axis.set_xlabel("draft probability")
        axis.set_xlim(0, 1)
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("share accepted (dot size: how often)")
    return figure


def ranks_figure(facts: Facts) -> Any | None:
    """Where the right token stands among a slot's candidates, by depth."""
    rows: Sequence[Facts] = facts["by_depth"]
    if not rows:
        return None
    figure, (axis,) = figure_axes(7.2, 4.2)
    depths = [row["depth"] for row in rows]
    floor = [0.0] * len(rows)
    names = list(rows[0]["ranks"])
    for number, name in enumerate(names):
        shares = [row["ranks"][name] for row in rows]
        missing = name == "none"
        label = "no candidate" if missing else f"rank {name}"
        colour = "#d8d8d8" if missing else _shade(number / max(1, len(names) - 1))
        axis.bar(depths, shares, bottom=floor, width=0.85, color=colour, label=label)
        floor = [below + share for below, share in zip(floor, shares, strict=True)]
    accepted = [row["accepted"] for row in rows]
    label = f"accepted by {facts['reference']['tree']}"
    axis.plot(depths, accepted, "o-", color="black", markersize=4, linewidth=1.4, label=label)
    axis.set_xlabel("depth")
    axis.set_ylabel("share of rounds")
    axis.set_ylim(0, 1)
    axis.set_xticks(depths)
    axis.set_title("Rank of the right token, given that the text above was drafted", fontsize=10)
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    return figure


def _title(facts: Facts) -> str:
    kind = "held-out answers" if facts.get("held_out", True) else "answers"
    return (
        f"{facts['answers']} {kind} of {facts['prompts']} prompts, {facts['anchors']} anchors; "
        f"{facts['scoring']} scores, depth {facts['depth']}"
    )


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )


def _tau(row: Facts) -> str:
    if row["tau"] is None:
        return "-"
    ci = row["ci"]
    return f"{row['tau']:.2f}" + (f" {ci[0]:.2f}-{ci[1]:.2f}" if ci else "")


def _estimate(found: Facts) -> str:
    return _tau({"tau": found["value"], "ci": found["ci"]})


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _shade(place: float) -> Any:
    import matplotlib

    return matplotlib.colormaps["viridis"](0.1 + 0.8 * place)
