"""What an ablation found: tables in the papers' layout, and a verdict for every claim.

Everything here is a pure function of the variants' records.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jetspec.ablation.config import AblationConfig, Claim, Side, Table, side_label
from jetspec.evaluation.cells import ALL_SLICES
from jetspec.evaluation.pooling import Record, prompt_rows
from jetspec.evaluation.report import pool_slices
from jetspec.evaluation.statistics import Estimate, paired_ratio_interval, ratio_interval

VERDICTS = ("holds", "does not hold", "not decided here")


@dataclass(frozen=True)
class Outcome:
    """What became of one variant.

    Attributes:
        records: its evaluation's cells; none where it failed, and `failure` says why.
        facts: URIs and small figures of its stages.
    """

    records: Sequence[Record]
    facts: Mapping[str, Any]
    failure: str | None = None


Outcomes = Mapping[str, Outcome]


def matching(outcome: Outcome, side: Side) -> list[Record]:
    """The good cells of a variant at a filled side, at its lowest temperature."""
    good = [r for r in outcome.records if r["status"] == "ok"]
    lowest = min((r["temperature"] for r in good), default=0)
    wanted = (side.method, side.builder, side.budget)
    return [
        r
        for r in good
        if r["temperature"] == lowest and (r["method"], r["builder"], r["budget"]) == wanted
    ]


def compare(
    ours: Sequence[Record], theirs: Sequence[Record], slice: str | None, draws: Mapping[str, int]
) -> tuple[Estimate | None, int]:
    """(ratio of taus over the prompts that both sides measured, how many those are)."""
    mine, other = (_rows(records, slice) for records in (ours, theirs))
    shared = sorted(mine.keys() & other.keys())
    columns = [[rows[i][n] for i in shared] for rows in (mine, other) for n in ("tokens", "rounds")]
    return paired_ratio_interval(*columns, **draws), len(shared)


def judge(claim: Claim, outcomes: Outcomes, config: AblationConfig) -> dict[str, Any]:
    """The verdict on one claim, with the figures it rests on.

    `holds` needs the whole interval above the factor, `does not hold` the whole interval below;
    anything else, a missing side included, is not decided here.
    """
    sides = [config.fill(side) for side in (claim.better, claim.than)]
    ours, theirs = (matching(outcomes[side.variant], side) for side in sides)
    estimate, prompts = compare(ours, theirs, claim.slice, _draws(config))
    reason = None
    if estimate is None or estimate.ci is None:
        verdict = "not decided here"
        missing = [_named(s) for s, found in zip(sides, (ours, theirs), strict=True) if not found]
        reason = f"not measured: {', '.join(missing)}" if missing else "too few prompts"
    elif estimate.ci[0] > claim.factor:
        verdict = "holds"
    elif estimate.ci[1] < claim.factor:
        verdict = "does not hold"
    else:
        verdict, reason = "not decided here", f"the interval contains {claim.factor:g}"
    value, ci = estimate.rounded(4) if estimate else (None, None)
    return {
        "claim": claim.text,
        "verdict": verdict,
        "reason": reason,
        "ratio": value,
        "ci": ci,
        "factor": claim.factor,
        "prompts": prompts,
        "slice": claim.slice,
        "better": _named(sides[0]),
        "than": _named(sides[1]),
        "paper": claim.paper,
    }


def table_rows(table: Table, outcomes: Outcomes, config: AblationConfig) -> list[dict[str, Any]]:
    """One row a side: tau with its interval and the speed-up, by slice and over all of them."""
    rows = []
    for label, side in table.rows.items():
        full = config.fill(side)
        records = matching(outcomes[full.variant], full)
        slices = sorted({str(row["slice"]) for row in prompt_rows(records).values()})
        cells = {name: _cell(records, name, config) for name in slices}
        cells[ALL_SLICES] = _cell(records, None, config, outcomes[full.variant].records)
        rows.append(
            {
                "row": label,
                "variant": full.variant,
                "cell": side_label(full),
                "cells": cells,
                "failure": outcomes[full.variant].failure,
            }
        )
    return rows


def _cell(
    records: Sequence[Record],
    slice: str | None,
    config: AblationConfig,
    everything: Sequence[Record] = (),
) -> dict[str, Any]:
    rows = list(_rows(records, slice).values())
    draws = _draws(config)
    tau = ratio_interval([r["tokens"] for r in rows], [r["rounds"] for r in rows], **draws)
    value, ci = tau.rounded(4) if tau else (None, None)
    own = [r for r in records if r["slice"] == (slice or ALL_SLICES)]
    smallest = min((r["batch_size"] for r in records), default=0)
    figures = [r["speedup"]["vs_plain"] for r in own if r["batch_size"] == smallest]
    if slice is None and not figures and records:
        alike = [r for r in everything if r["temperature"] == records[0]["temperature"]]
        pools = pool_slices(alike, **draws)
        cell = ("method", "builder", "budget", "batch_size")
        wanted = (*(records[0][name] for name in cell[:3]), smallest)
        figures = [
            p["speedup"]["vs_plain"] for p in pools if tuple(p[name] for name in cell) == wanted
        ]
    speedup = figures[0] if figures else {"value": None, "ci": None}
    return {
        "tau": value,
        "tau_ci": ci,
        "speedup": speedup["value"],
        "speedup_ci": speedup["ci"],
        "prompts": len(rows),
    }


def findings(config: AblationConfig, outcomes: Outcomes) -> dict[str, Any]:
    """All tables and verdicts as plain JSON values, with the per-prompt rows they rest on."""
    tables = []
    for table in config.tables:
        verdicts = [judge(claim, outcomes, config) for claim in table.claims]
        rows = table_rows(table, outcomes, config)
        tables.append(
            {"title": table.title, "source": table.source, "rows": rows, "claims": verdicts}
        )
    looked_at = {_named(side): side for side in map(config.fill, config.sides())}
    return {
        "variants": {
            name: {**outcome.facts, "failure": outcome.failure}
            for name, outcome in outcomes.items()
        },
        "tables": tables,
        "per_prompt": {
            name: [
                {k: row[k] for k in ("prompt_id", "slice", "tokens", "rounds")}
                for row in prompt_rows(matching(outcomes[side.variant], side)).values()
            ]
            for name, side in looked_at.items()
        },
    }


def markdown(config: AblationConfig, found: Mapping[str, Any], environment: Any) -> str:
    """The report: claims first, then the tables, then how everything was made."""
    run = config.base_run()
    lines = [f"# Ablations: {run.name}", "", *_setup(run, environment), "", "## Claims", ""]
    claims = [claim for table in found["tables"] for claim in table["claims"]]
    lines += [f"- {sentence(claim)}" for claim in claims] or ["None was asked."]
    for table in found["tables"]:
        lines += ["", f"## {table['title']}", ""]
        if table["source"]:
            lines += [f"Source: {table['source']}", ""]
        lines += _table_lines(table["rows"])
    lines += ["", LEGEND, "", "## Variants", "", *_variant_lines(config, found["variants"]), ""]
    return "\n".join(lines)


LEGEND = (
    "Cells: speed-up over plain decoding / tau, with 95 % intervals of tau from a bootstrap over "
    "prompts; a dash is a speed-up that was withheld or not measured for that slice. Claims "
    "compare taus on the prompts that both sides decoded, paired; where heads of one kind meet at "
    "one cell, a round costs the same and speed-ups compare as taus do. Intervals tell what other "
    "prompts would do, not what another training seed would."
)


def sentence(claim: Mapping[str, Any]) -> str:
    """One claim as a sentence a person reads."""
    text = f"**{str(claim['verdict']).capitalize()}**: {claim['claim']}"
    where = f" on {claim['slice']}" if claim["slice"] else ""
    if claim["ratio"] is not None:
        ci = claim["ci"]
        interval = f" [{ci[0]:.3f}, {ci[1]:.3f}]" if ci else ""
        text += (
            f" (tau of {claim['better']} over {claim['than']}{where}: {claim['ratio']:.3f}"
            f"{interval}, {claim['prompts']} prompts)"
        )
    if claim["reason"]:
        text += f"; {claim['reason']}"
    return f"{text}; the paper: {claim['paper']}." if claim["paper"] else f"{text}."


def _setup(run: Any, environment: Mapping[str, Any]) -> list[str]:
    versions = ", ".join(f"{k} {v}" for k, v in environment["versions"].items())
    place = ", ".join(environment["gpus"]) or f"{environment['cpus']} CPU cores"
    training, evaluation = run.training, run.evaluation
    steps = f", at most {training.max_steps} steps" if training.max_steps else ""
    return [
        f"Target `{run.target.source}`. Unless its line below says otherwise, a variant trains on "
        f"the same prompts, in {training.epochs} epochs{steps}; all decode the same evaluation "
        f"prompts, up to {evaluation.max_new_tokens} tokens each. Measured on {place}; {versions}.",
    ]


def _table_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    slices = list(dict.fromkeys(name for row in rows for name in row["cells"]))
    slices.sort(key=lambda name: (name == ALL_SLICES, name))
    lines = [
        f"| method | cell | {' | '.join(slices)} |",
        f"|---|---|{'--:|' * len(slices)}",
    ]
    for row in rows:
        cells = [_figures(row["cells"].get(name)) for name in slices]
        label = row["row"] + (" (failed)" if row["failure"] else "")
        lines.append(f"| {label} | {row['cell']} | {' | '.join(cells)} |")
    return lines


def _figures(cell: Mapping[str, Any] | None) -> str:
    if cell is None or cell["tau"] is None:
        return "-"
    speedup = "-" if cell["speedup"] is None else f"{cell['speedup']:.2f}"
    ci = cell["tau_ci"]
    return f"{speedup} / {cell['tau']:.2f}" + (f" [{ci[0]:.2f}, {ci[1]:.2f}]" if ci else "")


def _variant_lines(config: AblationConfig, variants: Mapping[str, Any]) -> list[str]:
    lines = [
        "| variant | differs in | steps | parameters | held-out tau | head |",
        "|---|---|--:|--:|--:|---|",
    ]
    for name, facts in variants.items():
        variant = config.variants[name]
        changes = [f"{key} = {value}" for key, value in variant.set.items()]
        changes += [f"starts from {variant.start}"] if variant.start else []
        changes += ["corpus text"] if variant.text == "corpus" else []
        if facts["failure"]:
            figures = ["-", "-", "-", f"failed: {facts['failure']}"]
        else:
            tau = facts.get("tau_estimate")
            figures = [
                str(facts.get("steps", "-")),
                str(facts.get("parameters", "-")),
                "-" if tau is None else f"{tau:.3f}",
                f"`{str(facts['head_uri']).rsplit('/', 1)[-1]}`",
            ]
        text = " | ".join(cell.replace("|", "\\|") for cell in figures)
        lines.append(f"| {name} | {'; '.join(changes) or 'nothing'} | {text} |")
    return lines


def _rows(records: Sequence[Record], slice: str | None) -> dict[str, Mapping[str, Any]]:
    rows = prompt_rows(records)
    return {k: row for k, row in rows.items() if slice is None or row["slice"] == slice}


def _draws(config: AblationConfig) -> dict[str, int]:
    settings = config.base_run().evaluation
    return {"samples": settings.bootstrap_samples, "seed": settings.seed}


def _named(side: Side) -> str:
    return f"{side.variant} ({side_label(side)})"
