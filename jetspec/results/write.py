"""From records to `docs/results`: the page, its plots, the summary, and the records beside it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jetspec import __version__
from jetspec.promotion import PromotionConfig
from jetspec.results.cells import Subject, subjects, summary_cells
from jetspec.results.claims import ablation_sentences, claims, unanswered
from jetspec.results.cost import cost
from jetspec.results.goals import goals
from jetspec.results.inputs import Record, read_inputs
from jetspec.results.page import Contents, commands, page, place
from jetspec.results.plots import write_plots
from jetspec.results.serving import serving
from jetspec.storage import atomic_write, join, write_json

PAGE, SUMMARY, RECORDS = "README.md", "summary.json", "records.jsonl"
# What a record says of its prompts and batches that figures need.
_PROMPT = ("prompt_id", "slice", "batch", "rounds", "tokens", "looping")


def write_results(
    out: str,
    paths: Sequence[str],
    *,
    names: Mapping[str, str] | None = None,
    command: str = "python -m jetspec results",
) -> dict[str, Any]:
    """Write the page of results into the local directory `out`; returns what was written.

    The records that it writes are enough to write it again.

    Args:
        paths: see `inputs.read_inputs`.
        names: how to call targets and heads, by what their records call them.
        command: what was typed, for the page.

    Raises:
        JetspecError: there are no records.
    """
    inputs = read_inputs(paths)
    # Figures come from what is kept, so that the kept records give the same page.
    inputs.records = [slim(record) for record in inputs.records]
    found = subjects(inputs, names or {})
    main = found[0]
    served = serving(main.one_run(), PromotionConfig().hysteresis)
    spent = cost(main, inputs, served)
    curve = spent.training["curve"] if spent.training else []
    contents = Contents(
        subject=main,
        others=found[1:],
        goals=goals(main, served),
        claims=claims(main, found[1:]),
        served=served,
        cost=spent,
        findings=inputs.findings,
        plots=write_plots(main, served, curve, Path(out)),
        command=command,
    )
    cells = [cell for subject in found for cell in summary_cells(subject)]
    with atomic_write(join(out, RECORDS), "w") as file:
        findings = [{k: v for k, v in f.items() if k != "per_prompt"} for f in inputs.findings]
        lines = [*inputs.records, *inputs.heads, *inputs.samples, *findings]
        for kept in lines:
            file.write(json.dumps(kept, ensure_ascii=False, sort_keys=True) + "\n")
    write_json(join(out, SUMMARY), _summary(contents, found, cells))
    with atomic_write(join(out, PAGE), "w") as file:
        file.write(page(contents))
    return {
        "out": out,
        "cells": len(cells),
        "goals_met": sum(goal.met is True for goal in contents.goals),
        "plots": sorted(contents.plots),
    }


def _summary(
    contents: Contents, found: Sequence[Subject], cells: Sequence[Record]
) -> dict[str, Any]:
    records = [r for s in found for r in [*s.decoded, *s.replayed]]
    first = contents.subject
    return {
        "cells": list(cells),
        "goals": [goal.as_json() for goal in contents.goals],
        "claims": [claim.as_json() for claim in contents.claims],
        "ablations": ablation_sentences(contents.findings),
        "unanswered": unanswered(contents.findings, first.sets, contents.claims),
        "serving": contents.served and contents.served.as_json(),
        "cost": contents.cost.as_json(),
        "commands": commands(contents),
        "hardware": sorted({place(r) for r in records}),
        "versions": _distinct(r["environment"]["versions"] for r in records),
        "settings": {str(r.get("evaluation_key"))[:16]: r["settings"] for r in records},
        "seeds": sorted({r["settings"]["seed"] for r in records}),
        "target_fingerprints": sorted({str(r.get("target_fingerprint")) for r in records}),
        "head_hashes": sorted({str(r.get("head_hash")) for r in records}),
        "prompts_hashes": sorted({str(r.get("prompts_hash")) for r in records}),
        "code_version": __version__,
    }


def _distinct(values: Any) -> list[Any]:
    return [json.loads(text) for text in sorted({json.dumps(v, sort_keys=True) for v in values})]


def slim(record: Record) -> Record:
    """A record without what no figure needs: texts, and columns of its rows."""
    kept = {name: value for name, value in record.items() if name != "outputs"}
    kept["per_prompt"] = [
        {name: row[name] for name in _PROMPT if name in row} for row in record["per_prompt"]
    ]
    kept["batches"] = [
        {name: round(value, 6) for name, value in row.items()} for row in record["batches"]
    ]
    return kept
