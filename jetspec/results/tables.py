"""Tables of the page, in the papers' layout: methods down, sets across."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jetspec.evaluation.budgets import Choice
from jetspec.evaluation.cells import ALL_SLICES, cell_label
from jetspec.results.cells import SETS, Subject, order
from jetspec.results.claims import Claim
from jetspec.results.compare import find
from jetspec.results.cost import Cost
from jetspec.results.goals import Goal
from jetspec.results.inputs import Record
from jetspec.results.serving import Serving, label

_AR = ("plain", "hf_eager")


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """A Markdown table; the first `left` columns are text, the others figures."""
    marks = ["---"] * left + ["--:"] * (len(columns) - left)
    lines = [columns, marks, *rows]
    return ["| " + " | ".join(_escaped(cell) for cell in line) + " |" for line in lines]


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def speed_and_tau(subject: Subject, temperature: float, batch_size: int = 1) -> list[str]:
    """`speed-up / tau` of every method and set, tau with half its interval; AR rows show tok/s."""
    cells = find(subject.decoded, temperature=temperature, batch_size=batch_size)
    return _by_set(cells, _speed_and_tau)


def tau_tables(subject: Subject) -> list[str]:
    """Replayed tau of every method and set: the papers' sets, then others by themselves."""
    named = [r for r in subject.replayed if r["slice"] in SETS]
    others = [r for r in subject.replayed if r["slice"] not in SETS]
    both = [_by_set(records, _tau) for records in (named, others) if records]
    return [line for table in both for line in (*table, "")][:-1]


def _by_set(cells: Sequence[Record], show: Any) -> list[str]:
    if not cells:
        return []
    sets = [s for s in dict.fromkeys(r["slice"] for r in sorted(cells, key=order))]
    rows: dict[tuple[str, str], dict[str, str]] = {}
    ordered = sorted(cells, key=lambda r: (*order(r)[:2], *order(r)[3:]))
    fast = any(r.get("decoder") == "engine" for r in cells)
    for record in ordered:
        aside = fast and record.get("decoder") == "reference"
        row = rows.setdefault(_method(record, aside), dict.fromkeys(sets, "-"))
        row[record["slice"]] = show(record)
    lines = [[*name, *row.values()] for name, row in rows.items()]
    return markdown(["method", "budget", *sets], lines, left=1)


def _method(record: Record, aside: bool) -> tuple[str, str]:
    """(name, budget) as the papers' tables have them; aside: another decoder than AR's."""
    if record["method"] in _AR:
        return autoregressive(record), "-"
    name = " ".join(cell_label({**record, "budget": ""}).split())
    return name + (" *" if aside else ""), str(record["budget"])


def autoregressive(record: Mapping[str, Any]) -> str:
    """What a baseline is called: it says what decoded it."""
    if record["method"] == "hf_eager":
        return "AR, Hugging Face eager"
    return "AR, our engine, graphed" if record.get("decoder") == "engine" else "AR, reference loop"


def _speed_and_tau(record: Record) -> str:
    if record["method"] in _AR:
        return f"{record['tok_s_decode']:.0f} tok/s"
    figure = record["speedup"]["vs_plain"]["value"]
    speed = "-" if figure is None else f"{figure:.2f}"
    return f"{speed} / {_tau(record)}"


def _tau(record: Record) -> str:
    if record["tau"] is None:
        return "-"
    ci = record["tau_ci"]
    return f"{record['tau']:.2f}" + (f" ±{(ci[1] - ci[0]) / 2:.2f}" if ci else "")


def loads_table(served: Serving) -> list[str]:
    """Tokens a second by batch size, all sets pooled; the table's choice in bold."""
    batches = [load.batch_size for load in served.loads]
    chosen = {load.batch_size: load.choice for load in served.loads}
    every = {choice for here in served.speeds.values() for choice in here}
    choices = sorted(every, key=lambda c: (c[0] != "plain", c[0], c[1] or "", c[3] or "", c[2]))
    rows = []
    for choice in choices:
        cells = []
        for batch in batches:
            speed = served.speeds[batch].get(choice)
            text = "-" if speed is None else f"{speed:.0f}"
            cells.append(f"**{text}**" if chosen[batch] == choice else text)
        rows.append([_choice(choice), *cells])
    return markdown(["tok/s", *(f"batch {batch}" for batch in batches)], rows)


def _choice(choice: Choice) -> str:
    return "AR" if choice[0] == "plain" else label(choice)


def choices_table(served: Serving) -> list[str]:
    """What the table decodes with, against the best fixed choice at each load."""
    rows = [
        [
            str(load.batch_size),
            _choice(load.choice),
            f"{load.tok_s:.0f}",
            f"{load.tok_s / load.plain_tok_s:.2f}x",
            f"{_choice(load.best)} ({load.best_tok_s:.0f})",
            f"{load.loss:.1%}",
        ]
        for load in served.loads
    ]
    columns = ["batch", "choice", "tok/s", "over AR", "best fixed (tok/s)", "slower by"]
    return markdown(columns, rows, left=2)


def scores_table(served: Serving) -> list[str]:
    """The load range as a whole: the table, then every fixed choice, best first."""
    ranked = sorted(served.fixed_scores.items(), key=lambda pair: -pair[1])
    rows = [["serving table", f"{served.table_score:.2f}x"]]
    rows += [[_choice(c), f"{score:.2f}x"] for c, score in ranked]
    return markdown(["always", "mean speed-up over AR"], rows)


def goals_table(goals: Sequence[Goal]) -> list[str]:
    rows = [[goal.name, goal.wanted, goal.measured, goal.outcome] for goal in goals]
    return markdown(["goal", "wanted", "measured", "outcome"], rows, left=4)


def claims_list(claims: Sequence[Claim]) -> list[str]:
    return [f"- **{c.verdict.capitalize()}**: {c.text}. {c.evidence}." for c in claims]


def cost_lines(cost: Cost) -> list[str]:
    """Hours, rates and the break-even, or that the manifests were not given."""
    lines = []
    if made := cost.regeneration:
        lines.append(
            f"- Regeneration: {_number(made.get('tokens'))} tokens in "
            f"{_number(made.get('worker_seconds'))} {_seconds(made)} "
            f"({_number(made.get('tokens_per_second'))} tokens a second)."
        )
    if trained := cost.training:
        rates = [
            f"{_number(trained[name])} {unit}"
            for name, unit in (("tokens_per_second", "target tokens a second"),)
            if trained.get(name)
        ]
        if trained.get("mfu"):
            rates.append(f"MFU {trained['mfu']:.1%}")
        lines.append(
            f"- Training: {_number(trained.get('steps'))} steps of a head with "
            f"{_number(trained.get('parameters'))} parameters in "
            f"{_number(trained.get('worker_seconds'))} {_seconds(trained)}"
            + (f" ({', '.join(rates)})." if rates else ".")
        )
        if trained.get("earlier_steps"):
            lines.append(
                f"- Before it, the head that it started from: {_number(trained['earlier_steps'])} "
                f"steps in {_number(trained['earlier_worker_seconds'])} {_seconds(trained)}."
            )
    if cost.hours is None:
        why = "not every manifest of the samples, the training and what it started from is known"
        return [*lines, f"- No break-even: {why}."]
    lines += [f"- Together {cost.hours:.3f} hours of those workers.", ""]
    rows = [
        [
            str(load["batch"]),
            f"{load['plain_tok_s']:.0f}",
            f"{load['tok_s']:.0f}",
            "never" if load["tokens"] is None else _number(load["tokens"]),
            "-" if load["tokens"] is None else f"{load['hours_of_serving']:.2f}",
        ]
        for load in cost.loads
    ]
    columns = ["batch", "AR tok/s", "tok/s", "tokens to break even", "hours of serving"]
    if not rows:
        return [*lines, "Trained on one kind of machine and measured on another: no break-even."]
    return [*lines, *markdown(columns, rows)]


def _seconds(facts: Record) -> str:
    return "GPU-seconds" if facts.get("gpu_hours") else "worker-seconds"


def _number(value: Any) -> str:
    """`12,345`, `1.2 M`, or a dash."""
    if value is None:
        return "-"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.2f} M"
    return f"{value:,.0f}"


def failures(subject: Subject) -> list[str]:
    return [
        f"- {cell_label(r)} on {r['slice']}, batch {r['batch_size']}, temperature "
        f"{r['temperature']:g}: {r['reason']}"
        for r in subject.failed
    ]


def withheld(subject: Subject) -> list[str]:
    """Speed-ups that a failed output check took away."""
    wrong = [r for r in subject.decoded if r["output_check"] and not r["output_check"]["passed"]]
    return [
        f"- {cell_label(r)} on {r['slice']}, batch {r['batch_size']}, temperature "
        f"{r['temperature']:g}: {r['output_check']['differing']} of "
        f"{r['output_check']['compared']} outputs differ, "
        f"{r['output_check']['near_ties']} of them at a near tie; no speed-up is reported"
        for r in wrong
    ]


def missing(subject: Subject, wanted: Mapping[str, Sequence[Any]]) -> list[str]:
    """What of the wanted grid has no decoded cell, in words."""
    lines = []
    own = [r for r in subject.decoded]
    for title, name, values in (
        ("sets", "slice", wanted["sets"]),
        ("batch sizes", "batch_size", wanted["batch_sizes"]),
        ("temperatures", "temperature", wanted["temperatures"]),
        ("methods", "method", wanted["methods"]),
    ):
        lacking = [str(value) for value in values if not find(own, **{name: value})]
        if lacking:
            lines.append(f"- {title} without a decoded cell: {', '.join(lacking)}")
    for scores in ("slot", "path"):
        trees = find(own, method="tree", scores=scores)
        lacking = [f"{budget}" for budget in wanted["budgets"] if not find(trees, budget=budget)]
        if lacking:
            shown = ", ".join(lacking)
            lines.append(f"- {scores}-scored trees without a decoded cell: {shown} nodes")
    pairs = [
        f"{name} at batch {batch}, temperature {temperature:g}"
        for temperature in wanted["temperatures"]
        for batch in wanted["batch_sizes"]
        for name in wanted["sets"]
        if find(own, slice=name)
        and find(own, batch_size=batch)
        and find(own, temperature=temperature)
        and not find(own, slice=name, batch_size=batch, temperature=temperature)
        and not find(own, slice=ALL_SLICES, batch_size=batch, temperature=temperature)
    ]
    if pairs:
        lines.append(f"- {'; '.join(pairs)}")
    return lines
