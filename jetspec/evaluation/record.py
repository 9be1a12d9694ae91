"""From decoded batches to a cell's record: plain JSON, everything a figure needs beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jetspec.evaluation.cells import BASELINES, Cell
from jetspec.evaluation.config import EvaluationConfig
from jetspec.evaluation.methods import PARTS, Decoded
from jetspec.evaluation.output_check import check_outputs
from jetspec.evaluation.pooling import speedup, throughput
from jetspec.evaluation.statistics import Estimate, ratio_interval
from jetspec.generation.loops import is_looping
from jetspec.records import environment

Record = dict[str, Any]


@dataclass(frozen=True)
class Trace:
    """What a cell decoded.

    Attributes:
        batches: the items (prompt id, slice, request, filler) of each batch.
        decoded: for each batch one `Decoded` a repeat; texts are the first repeat's.
        interleaved_with: labels of the cells that took turns with this one.
    """

    cell: Cell
    batches: Sequence[Sequence[Any]]
    decoded: Sequence[Sequence[Decoded]]
    interleaved_with: Sequence[str]


def failed_record(cell: Cell, status: str, reason: str, **facts: Any) -> Record:
    """The row of a cell that could not be measured: every figure None, the reason in words."""
    return {
        **cell.as_json(),
        "status": status,
        "reason": reason,
        "decoder": None,
        "prompts": 0,
        "tau": None,
        "tau_ci": None,
        "tok_s_decode": None,
        "tok_s_total": None,
        "output_check": None,
        "speedup": {f"vs_{base}": withheld(f"the cell {status}") for base in BASELINES},
        "per_prompt": [],
        "batches": [],
        "environment": environment(),
        **facts,
    }


def make_record(
    trace: Trace,
    target: Any,
    config: EvaluationConfig,
    plain_record: Record | None,
    **facts: Any,
) -> Record:
    """The record of a measured cell, all but its speed-ups.

    Args:
        plain_record: the group's `plain` record, whose outputs are the reference; or outputs from
            elsewhere, which the group's own `plain` cell is checked against too.
    """
    cell = trace.cell
    rows = _prompt_rows(trace, target)
    batches = [_batch_row(repeats) for repeats in trace.decoded]
    seconds = sum(batch["decode_seconds"] for batch in batches)
    quiet = [row for row in rows if not row["looping"]]
    tau, tau_ci = tau_of(rows, config)
    tau_quiet, tau_quiet_ci = tau_of(quiet, config)
    record: Record = {
        **cell.as_json(),
        "status": "ok",
        "reason": None,
        "decoder": trace.decoded[0][0].decoder,
        "prompts": len(rows),
        "tau": tau,
        "tau_ci": tau_ci,
        "tau_not_looping": tau_quiet,
        "tau_not_looping_ci": tau_quiet_ci,
        "looping": len(rows) - len(quiet),
        "by_slice": by_slice(rows, config),
        "rounds": sum(row["rounds"] for row in rows),
        "tokens": sum(row["tokens"] for row in rows),
        "generated_tokens": sum(row["tokens"] + 1 for row in rows),
        "seconds": seconds,
        "tok_s_decode": throughput([{"batches": batches}], "decode"),
        "tok_s_total": throughput([{"batches": batches}], "total"),
        "time_share": _time_share(trace.decoded),
        "seconds_per_round": _seconds_per_round(trace.decoded),
        "acceptance_by_depth": acceptance_by_depth(_accepted(trace)),
        "peak_memory_bytes": max(
            (d.peak_bytes for repeats in trace.decoded for d in repeats if d.peak_bytes),
            default=None,
        ),
        "per_prompt": rows,
        "batches": batches,
        "device": str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "settings": config.model_dump(mode="json"),
        "interleaved_with": list(trace.interleaved_with),
        "environment": environment(),
        **facts,
    }
    outputs = {
        item.prompt_id: repeats[0].outputs[i]
        for batch, repeats in zip(trace.batches, trace.decoded, strict=True)
        for i, item in enumerate(batch)
        if not item.filler
    }
    if cell.method == "plain" and plain_record is None:
        record["outputs"] = outputs
    plain = record if cell.method == "plain" and plain_record is None else plain_record
    record["output_check"] = _output_check(trace, target, config, record, outputs, plain)
    return record


def with_speedups(record: Record, baselines: Mapping[str, Record]) -> Record:
    """The record with its speed-ups over the baselines of its group, as far as these exist."""
    if record["status"] != "ok":
        return record
    return {
        **record,
        "speedup": {
            f"vs_{base}": _speedup(record, baselines.get(base), base) for base in BASELINES
        },
    }


def acceptance_by_depth(accepted: Sequence[int]) -> list[float]:
    """Share of rounds that accept at least d draft tokens, for d = 1, 2, ...

    Args:
        accepted: draft tokens accepted by each round.
    """
    if not accepted:
        return []
    at_least = np.bincount(accepted)[::-1].cumsum()[::-1]
    return [round(int(count) / len(accepted), 6) for count in at_least[1:]]


def _accepted(trace: Trace) -> list[int]:
    return [
        count
        for batch, repeats in zip(trace.batches, trace.decoded, strict=True)
        for item, counts in zip(batch, repeats[0].accepted, strict=True)
        if not item.filler
        for count in counts
    ]


def _prompt_rows(trace: Trace, target: Any) -> list[Record]:
    """One row a prompt; `tokens` are those committed in rounds, so tau = tokens / rounds."""
    rows = []
    for number, (batch, repeats) in enumerate(zip(trace.batches, trace.decoded, strict=True)):
        first = repeats[0]
        seconds = _batch_row(repeats)["decode_seconds"] / len(batch)
        for i, item in enumerate(batch):
            if item.filler:
                continue
            text = [t for t in first.outputs[i] if t not in target.eos_token_ids]
            rows.append(
                {
                    "prompt_id": item.prompt_id,
                    "slice": item.slice,
                    "batch": number,
                    "prompt_tokens": len(item.request.input_ids),
                    "rounds": len(first.rounds[i]),
                    "tokens": sum(first.rounds[i]),
                    "seconds": seconds,
                    "looping": is_looping(text),
                }
            )
    return rows


def _batch_row(repeats: Sequence[Decoded]) -> Record:
    """Tokens and seconds of one batch; the clock is the mean over repeats, fillers count."""
    outputs = repeats[0].outputs
    prefill = sum(d.prefill_seconds for d in repeats) / len(repeats)
    decoding = sum(d.decode_seconds for d in repeats) / len(repeats)
    return {
        "decode_tokens": sum(len(output) - 1 for output in outputs),
        "decode_seconds": decoding,
        "total_tokens": sum(len(output) for output in outputs),
        "total_seconds": prefill + decoding,
    }


def tau_of(
    rows: Sequence[Record], config: EvaluationConfig
) -> tuple[float | None, list[float] | None]:
    estimate = ratio_interval(
        [row["tokens"] for row in rows],
        [row["rounds"] for row in rows],
        samples=config.bootstrap_samples,
        seed=config.seed,
    )
    return estimate.rounded() if estimate else (None, None)


def by_slice(rows: Sequence[Record], config: EvaluationConfig) -> dict[str, Record]:
    slices = {}
    for name in dict.fromkeys(row["slice"] for row in rows):
        own = [row for row in rows if row["slice"] == name]
        tau, ci = tau_of(own, config)
        slices[name] = {"prompts": len(own), "tau": tau, "tau_ci": ci}
    return slices


def _time_share(decoded: Sequence[Sequence[Decoded]]) -> dict[str, float]:
    """Shares of the decode clock by part of a round; `other` is what no part claims."""
    calls = [d for repeats in decoded for d in repeats]
    total = sum(d.decode_seconds for d in calls)
    if not total or not calls[0].parts:
        return {}
    shares = {part: sum(d.parts[part] for d in calls) / total for part in PARTS}
    shares["other"] = max(0.0, 1 - sum(shares.values()))
    return {part: round(share, 4) for part, share in shares.items()}


def _seconds_per_round(decoded: Sequence[Sequence[Decoded]]) -> dict[str, float]:
    """Mean seconds of one round of the batch: as many rounds as its longest row took."""
    calls = [d for repeats in decoded for d in repeats]
    steps = sum(max(map(len, d.rounds), default=0) for d in calls)
    if not steps:
        return {}
    parts = {p: sum(d.parts[p] for d in calls) / steps for p in PARTS if calls[0].parts}
    return {**parts, "total": sum(d.decode_seconds for d in calls) / steps}


def _output_check(
    trace: Trace,
    target: Any,
    config: EvaluationConfig,
    record: Record,
    outputs: Mapping[str, list[int]],
    plain: Record | None,
) -> Record | None:
    """The comparison with plain decoding; None where there is nothing to compare with."""
    cell = trace.cell
    sampled_elsewhere = cell.method == "hf_eager" and cell.temperature > 0
    reference = plain and plain.get("outputs")
    if plain is None or reference is None or sampled_elsewhere:
        return None
    requests = {i.prompt_id: i.request for batch in trace.batches for i in batch}
    other = _decoder(record) != _decoder(plain)
    return check_outputs(target, requests, reference, outputs, cell, config, other_kernels=other)


def _speedup(record: Record, base: Record | None, name: str) -> Record:
    """Ratio of throughputs, or None with the reason it is withheld."""
    check = record["output_check"]
    unchecked = record["method"] == "hf_eager" and record["temperature"] > 0
    if base is None:
        return withheld(f"{name} was not measured")
    if base["status"] != "ok":
        return withheld(f"{name} {base['status']}: {base['reason']}")
    if not comparable(record, base):
        return withheld(f"decoded by {_decoder(record)}, {name} by {_decoder(base)}")
    if not unchecked and check is None:
        return withheld("no plain output to compare with")
    if check is not None and not check["passed"]:
        return withheld("the output differs from plain decoding's")
    base_check = base.get("output_check")
    if base_check is not None and not base_check["passed"]:
        return withheld(f"{name}'s own output differs from plain decoding's")
    # A baseline may have decoded fewer batches than the others: those it has must be the same.
    shared = min(len(record["batches"]), len(base["batches"]))
    ours, theirs = (
        [_pairing(row) for row in side["per_prompt"] if row["batch"] < shared]
        for side in (record, base)
    )
    if ours != theirs:
        return withheld(f"{name} was measured on other prompts")
    settings = record["settings"]
    value, ci = _rounded(record, base, "decode", settings)
    total, total_ci = _rounded(record, base, "total", settings)
    return {
        "value": value,
        "ci": ci,
        "end_to_end": total,
        "end_to_end_ci": total_ci,
        "same_run": name in record["interleaved_with"],
        "reason": None if value is not None else "no token was decoded after the first",
    }


def comparable(record: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    """Whether the two differ by their method alone: Hugging Face's `generate` stands for itself,
    but our own methods are compared on one decoder."""
    elsewhere = "hf_eager" in (record["method"], base["method"])
    return elsewhere or _decoder(record) == _decoder(base)


def _decoder(record: Mapping[str, Any]) -> str:
    return record.get("decoder") or "reference"


def _pairing(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["prompt_id"], row["batch"]


def _rounded(
    record: Record, base: Record, clock: str, settings: Mapping[str, Any]
) -> tuple[float | None, list[float] | None]:
    estimate: Estimate | None = speedup(
        [record],
        [base],
        samples=settings["bootstrap_samples"],
        seed=settings["seed"],
        clock=clock,
    )
    return estimate.rounded(4) if estimate else (None, None)


def withheld(reason: str) -> Record:
    return {"value": None, "ci": None, "end_to_end": None, "end_to_end_ci": None, "reason": reason}
