"""What an ablation found: tables in the papers' layout, and a verdict for every claim.

Everything here is a pure function of the variants' records.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jetspec.ablation.claims import (
    Outcome,
    Outcomes,
    compare,
    draws_of,
    judge,
    matching,
    named,
    plain,
    pooled,
    rows_by_seed,
    tau,
)
from jetspec.ablation.config import AblationConfig, Side, Table, side_label
from jetspec.evaluation.cells import ALL_SLICES
from jetspec.evaluation.pooling import Record
from jetspec.evaluation.report import pool_slices


def table_rows(table: Table, outcomes: Outcomes, config: AblationConfig) -> list[dict[str, Any]]:
    """One row a side: tau with its interval and the speed-up, by slice and over all of them.

    Of several seeds tau is pooled, and `by_seed` has each seed's own over all slices.
    """
    rows = []
    for label, side in table.rows.items():
        full = config.fill(side)
        every = rows_by_seed(full, outcomes, config)
        slices = sorted({str(row["slice"]) for own in every.values() for row in own.values()})
        members = [
            outcomes[member]
            for member in config.members(full.variant).values()
            if member in outcomes
        ]
        rows.append(
            {
                "row": label,
                "variant": full.variant,
                "cell": side_label(full),
                "cells": {
                    name or ALL_SLICES: _cell(full, name, members, outcomes, config)
                    for name in (*slices, None)
                },
                "by_seed": {
                    str(seed): plain(tau(own, draws_of(config)))[0]
                    for seed, own in every.items()
                    if seed is not None
                },
                "failure": next((one.failure for one in members if one.failure), None),
            }
        )
    return rows


def ratio_rows(table: Table, outcomes: Outcomes, config: AblationConfig) -> list[dict[str, Any]]:
    """One row a pair of sides: the paired ratio of their taus, by slice and over all of them."""
    rows = []
    for label, pair in table.ratios.items():
        sides = [config.fill(side) for side in (pair.better, pair.than)]
        seen = [rows_by_seed(side, outcomes, config) for side in sides]
        slices = sorted(
            {str(row["slice"]) for seeds in seen for own in seeds.values() for row in own.values()}
        )
        cells = {
            name or ALL_SLICES: compare(pair, outcomes, config, name) for name in (*slices, None)
        }
        better, than = map(named, sides)
        rows.append({"row": label, "better": better, "than": than, "cells": cells})
    return rows


def _cell(
    side: Side,
    slice: str | None,
    members: Sequence[Outcome],
    outcomes: Outcomes,
    config: AblationConfig,
) -> dict[str, Any]:
    draws = draws_of(config)
    rows = pooled([r for r in rows_by_seed(side, outcomes, config, slice).values() if r])
    value, ci = plain(tau(rows, draws))
    speedup: Mapping[str, Any] = {"value": None, "ci": None}
    if len(members) == 1:  # a speed is one machine's at one time: it is not pooled over seeds
        speedup = _speedup(matching(members[0], side), slice, members[0].records, draws)
    return {
        "tau": value,
        "tau_ci": ci,
        "speedup": speedup["value"],
        "speedup_ci": speedup["ci"],
        "prompts": len(rows),
    }


def _speedup(
    records: Sequence[Record],
    slice: str | None,
    everything: Sequence[Record],
    draws: Mapping[str, int],
) -> Mapping[str, Any]:
    nothing = {"value": None, "ci": None}
    if all(r["speedup"]["vs_plain"]["value"] is None for r in records):
        return nothing
    own = [r for r in records if r["slice"] == (slice or ALL_SLICES)]
    smallest = min((r["batch_size"] for r in records), default=0)
    figures = [r["speedup"]["vs_plain"] for r in own if r["batch_size"] == smallest]
    if slice is None and not figures and records:
        alike = [
            r
            for r in everything
            if r["temperature"] == records[0]["temperature"]
            and r.get("scores") in (None, records[0].get("scores"))
        ]
        pools = pool_slices(alike, **draws)
        cell = ("method", "builder", "budget", "batch_size")
        wanted = (*(records[0][name] for name in cell[:3]), smallest)
        figures = [
            p["speedup"]["vs_plain"] for p in pools if tuple(p[name] for name in cell) == wanted
        ]
    return figures[0] if figures else nothing


def findings(config: AblationConfig, outcomes: Outcomes) -> dict[str, Any]:
    """All tables and verdicts as plain JSON values, with the per-prompt rows they rest on."""
    tables = []
    for table in config.tables:
        tables.append(
            {
                "title": table.title,
                "source": table.source,
                "rows": table_rows(table, outcomes, config),
                "ratios": ratio_rows(table, outcomes, config),
                "claims": [judge(claim, outcomes, config) for claim in table.claims],
            }
        )
    looked_at = {named(side): side for side in map(config.fill, config.sides())}
    return {
        "variants": {
            name: {**outcome.facts, "failure": outcome.failure}
            for name, outcome in outcomes.items()
        },
        "tables": tables,
        "per_prompt": {
            name: [
                {
                    "prompt_id": prompt,
                    **{k: row[k] for k in ("slice", "tokens", "rounds")},
                    **({} if seed is None else {"seed": seed}),
                }
                for seed, rows in rows_by_seed(side, outcomes, config).items()
                for prompt, row in rows.items()
            ]
            for name, side in looked_at.items()
        },
    }


def markdown(config: AblationConfig, found: Mapping[str, Any], environment: Any) -> str:
    """The report: claims first, then the tables, then how everything was made."""
    run = config.base_run()
    lines = [f"# Ablations: {run.name}", "", _setup(config, environment), "", "## Claims", ""]
    claims = [claim for table in found["tables"] for claim in table["claims"]]
    lines += [f"- {text}" for text in sentences(claims)] or ["None was asked."]
    for table in found["tables"]:
        lines += ["", f"## {table['title']}", ""]
        if table["source"]:
            lines += [f"Source: {table['source']}", ""]
        lines += _table_lines(table["rows"])
        lines += _ratio_lines(table["ratios"])
    lines += ["", LEGEND, "", "## Variants", "", *_variant_lines(config, found["variants"]), ""]
    return "\n".join(lines)


LEGEND = (
    "Cells: speed-up over plain decoding / tau, or tau alone, with 95 % intervals of tau from a "
    "bootstrap over prompts; a dash is a speed-up that was withheld or not measured for that "
    "slice. Claims and ratios compare taus on the prompts that both sides decoded, paired, answers "
    "that end in a loop left out; where heads of one kind meet at one cell, a round costs the same "
    "and speed-ups compare as taus do. Intervals tell what other prompts would do, not what "
    "another training seed would: a variant of several seeds is compared seed by seed, and a claim "
    "holds where it holds for each of them; its taus and ratios are pooled over seeds, prompt by "
    "prompt."
)


def sentences(claims: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every claim that was measured as a sentence, then one that names the others."""
    told = [sentence(claim) for claim in claims if claim["ratio"] is not None]
    others = dict.fromkeys(claim["claim"] for claim in claims if claim["ratio"] is None)
    return told + ([f"**Not measured here**: {'; '.join(others)}."] if others else [])


def sentence(claim: Mapping[str, Any]) -> str:
    """One claim as a sentence a person reads."""
    text = f"**{str(claim['verdict']).capitalize()}**: {claim['claim']}"
    where = f" on {claim['slice']}" if claim["slice"] else ""
    if claim["ratio"] is not None:
        ci = claim["ci"]
        interval = f" [{ci[0]:.3f}, {ci[1]:.3f}]" if ci else ""
        text += (
            f" (tau of {claim['better']} over {claim['than']}{where}: {claim['ratio']:.3f}"
            f"{interval}, {claim['prompts']} prompts{_by_seed(claim['by_seed'])})"
        )
    if claim["reason"]:
        text += f"; {claim['reason']}"
    return f"{text}; the paper: {claim['paper']}." if claim["paper"] else f"{text}."


def _by_seed(parts: Sequence[Mapping[str, Any]]) -> str:
    """The ratios of several pairs of seeds; nothing where there is one."""
    if len(parts) < 2 or any(part["ci"] is None for part in parts):
        return ""
    shown = (f"{p['ratio']:.3f} [{p['ci'][0]:.3f}, {p['ci'][1]:.3f}]" for p in parts)
    return f"; seed by seed {', '.join(shown)}"


def _setup(config: AblationConfig, environment: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in environment["versions"].items())
    place = ", ".join(environment["gpus"]) or f"{environment['cpus']} CPU cores"
    run = config.base_run()
    training, limit = run.training, run.evaluation.max_new_tokens
    steps = f", at most {training.max_steps} steps" if training.max_steps else ""
    measured = {
        "decode": f"all decode the same evaluation prompts, up to {limit} tokens each",
        "replay": "tau is of rounds replayed along the target's own greedy answers to the same "
        f"evaluation prompts, up to {limit} tokens each",
    }
    return (
        f"Target `{run.target.source}`. Unless its line below says otherwise, a variant trains on "
        f"the same prompts, in {training.epochs} epochs{steps}, a step being "
        f"{training.batch_size} rows of at most {training.sequence_length} tokens; "
        f"{measured[config.measure]}. Measured on {place}; {versions}."
    )


def _table_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
    slices = _slices(rows)
    seeds = any(row["by_seed"] for row in rows)
    extra = [" seeds |", "---|"] if seeds else ["", ""]
    lines = [
        f"| method | cell | {' | '.join(slices)} |{extra[0]}",
        f"|---|---|{'--:|' * len(slices)}{extra[1]}",
    ]
    speeds = any(cell["speedup"] is not None for row in rows for cell in row["cells"].values())
    for row in rows:
        cells = [_figures(row["cells"].get(name), speeds) for name in slices]
        label = row["row"] + (" (not made)" if row["failure"] else "")
        each = ", ".join("-" if v is None else f"{v:.2f}" for v in row["by_seed"].values())
        last = f" {each or '-'} |" if seeds else ""
        lines.append(f"| {label} | {row['cell']} | {' | '.join(cells)} |{last}")
    return lines


def _ratio_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
    slices = _slices(rows)
    lines = ["", f"| ratio of taus | {' | '.join(slices)} |", f"|---|{'--:|' * len(slices)}"]
    for row in rows:
        cells = [_ratio(row["cells"].get(name)) for name in slices]
        lines.append(f"| {row['row']} | {' | '.join(cells)} |")
    return lines


def _slices(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for row in rows for name in row["cells"])
    return sorted(names, key=lambda name: (name == ALL_SLICES, name))


def _ratio(cell: Mapping[str, Any] | None) -> str:
    if cell is None or cell["ratio"] is None:
        return "-"
    ci = cell["ci"]
    return f"{cell['ratio']:.3f}" + (f" [{ci[0]:.3f}, {ci[1]:.3f}]" if ci else "")


def _figures(cell: Mapping[str, Any] | None, speeds: bool) -> str:
    if cell is None or cell["tau"] is None:
        return "-"
    speedup = "-" if cell["speedup"] is None else f"{cell['speedup']:.2f}"
    ci = cell["tau_ci"]
    tau_ = f"{cell['tau']:.2f}" + (f" [{ci[0]:.2f}, {ci[1]:.2f}]" if ci else "")
    return f"{speedup} / {tau_}" if speeds else tau_


def _variant_lines(config: AblationConfig, variants: Mapping[str, Any]) -> list[str]:
    lines = [
        "| variant | differs in | steps | parameters | held-out tau | head |",
        "|---|---|--:|--:|--:|---|",
    ]
    for name, facts in variants.items():
        variant, start = config.variant_of(name), config.start_of(name)
        changes = [f"{key} = {value}" for key, value in variant.set.items()]
        changes += [f"starts from {start}"] if start else []
        changes += ["corpus text"] if variant.text == "corpus" else []
        if facts["failure"]:
            figures = ["-", "-", "-", f"not made: {facts['failure']}"]
        else:
            estimate = facts.get("tau_estimate")
            figures = [
                str(facts.get("steps", "-")),
                str(facts.get("parameters", "-")),
                "-" if estimate is None else f"{estimate:.3f}",
                f"`{str(facts['head_uri']).rsplit('/', 1)[-1]}`",
            ]
        text = " | ".join(cell.replace("|", "\\|") for cell in figures)
        lines.append(f"| {name} | {'; '.join(changes) or 'nothing'} | {text} |")
    return lines
