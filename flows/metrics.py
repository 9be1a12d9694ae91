"""Settings and records as MLflow stores them: dotted names, text, and finite numbers."""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jetspec.config import RunConfig
from jetspec.evaluation.pooling import pooled_tau, select, speedup
from jetspec.evaluation.statistics import Estimate
from jetspec.promotion import compared_cells

_PARAM_LIMIT = 500  # characters; longer values are cut here and stand whole in run.json

CELL_FIELDS = ("method", "builder", "budget", "batch_size", "slice", "temperature")


def cell_metrics(record: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a cell record, flat: intervals as `_lo` and `_hi`, withheld ones absent."""
    low, high = _interval(record.get("tau_ci"))
    flat: dict[str, Any] = {"tau": record.get("tau"), "tau_lo": low, "tau_hi": high}
    names = ("tau_not_looping", "rounds", "tokens", "tok_s_decode", "tok_s_total")
    flat |= {name: record.get(name) for name in (*names, "peak_memory_bytes")}
    for baseline, figure in (record.get("speedup") or {}).items():
        if not isinstance(figure, Mapping):
            continue
        low, high = _interval(figure.get("ci"))
        flat |= {f"speedup_{baseline}": figure.get("value")}
        flat |= {f"speedup_{baseline}_lo": low, f"speedup_{baseline}_hi": high}
    for part, share in (record.get("time_share") or {}).items():
        flat[f"share_{part}"] = share
    check = record.get("output_check") or {}
    if "passed" in check:
        flat["output_check_passed"] = float(bool(check["passed"]))
    return {key: number for key, value in flat.items() if (number := finite(value)) is not None}


def head_metrics(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Figures of every cell that uses the head, keyed `<figure>/<cell>`: what is compared."""
    kept = ("tau", "tau_lo", "tau_hi", "tok_s_decode", "output_check_passed")
    return {
        metric_key(f"{name}/{record['key']}"): value
        for record in records
        if record.get("method") in ("chain", "tree")
        for name, value in cell_metrics(record).items()
        if name in kept or name.startswith("speedup_")
    }


def headline_metrics(records: Sequence[Mapping[str, Any]], config: RunConfig) -> dict[str, float]:
    """What a head is known by, over all prompts of the cells that promotion compares.

    tau with its interval, tau by slice (`tau/<slice>`), and the speed-up over plain decoding
    unless it was withheld anywhere; empty when the matrix has no such cell.
    """
    cells = compared_cells(records, config.promotion)
    draws = {"samples": config.promotion.bootstrap_samples, "seed": config.promotion.seed}
    figures = _estimate("tau", pooled_tau(cells, **draws))
    figures |= {metric_key(f"tau/{r['slice']}"): r["tau"] for r in cells if r["tau"] is not None}
    plain = {cell_group(r): r for r in select(records, method="plain", status="ok")}
    trusted = all((r.get("speedup") or {}).get("vs_plain", {}).get("value") for r in cells)
    if cells and trusted and all(cell_group(r) in plain for r in cells):
        base = [plain[cell_group(r)] for r in cells]
        figures |= _estimate("speedup_vs_plain", speedup(cells, base, clock="decode", **draws))
    return figures


def cell_group(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return record["slice"], record["batch_size"], record["temperature"]


def _estimate(name: str, estimate: Estimate | None) -> dict[str, float]:
    if estimate is None:
        return {}
    low, high = estimate.ci or (None, None)
    figures = {name: estimate.value, f"{name}_lo": low, f"{name}_hi": high}
    return {key: value for key, value in figures.items() if value is not None}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted keys and text; lists stay whole as JSON, long text is cut."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
            continue
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        if len(text) > _PARAM_LIMIT:
            digest = hashlib.sha256(text.encode()).hexdigest()[:12]
            text = f"{text[: _PARAM_LIMIT - 40]}... (sha256 {digest})"
        flat[metric_key(name)] = text
    return flat


def metric_key(key: str) -> str:
    """`key` with the characters that MLflow refuses replaced."""
    return re.sub(r"[^\w./ :-]", "_", key)[:250]


def _interval(pair: Any) -> tuple[Any, Any]:
    return (pair[0], pair[1]) if pair and len(pair) == 2 else (None, None)


def finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
