"""The serving table: at which batch size which node budget is fastest, from measured cells."""

from collections.abc import Sequence
from typing import Any

from jetspec.evaluation.cells import cell_label
from jetspec.evaluation.pooling import Record, throughput
from jetspec.evaluation.record import comparable

# vLLM reads ranges of batch sizes; the last measured choice is carried on to here.
MAX_BATCH_SIZE = 512
# Method, builder, budget and, where they were measured apart, scores.
Choice = tuple[str, str | None, int, str | None]
CONTENDERS = ("plain", "chain", "tree")


def serving_table(
    records: Sequence[Record], hysteresis: float, *, temperature: float = 0.0
) -> list[dict[str, Any]]:
    """One row a measured batch size: the fastest of plain decoding (budget 0), chains and trees.

    Walking up the batch sizes, the choice of the smaller batch is kept unless another is faster by
    more than `hysteresis`, a fraction: budgets must not flicker between neighbouring loads. A
    cell counts only when its output check passed, when what decoded it also decoded plainly, and
    when the method was measured on every slice that plain decoding was measured on.

    Returns:
        rows {batch_size, method, builder, budget, tok_s, speedup_vs_plain}, by batch size; none
        for a batch size whose plain cells are missing.
    """
    rows: list[dict[str, Any]] = []
    held: Choice = ("plain", None, 0, None)
    good = [
        r
        for r in records
        if r["status"] == "ok" and r["temperature"] == temperature and _checked(r)
    ]
    for batch_size in sorted({r["batch_size"] for r in good}):
        speeds = speeds_by_choice([r for r in good if r["batch_size"] == batch_size])
        plain = speeds.get(("plain", None, 0, None))
        if plain is None:
            continue
        best = max(speeds, key=lambda choice: speeds[choice])
        if held not in speeds or speeds[best] > speeds[held] * (1 + hysteresis):
            held = best
        method, builder, budget, scores = held
        rows.append(
            {
                "batch_size": batch_size,
                "method": method,
                "builder": builder,
                "budget": budget,
                **({"scores": scores} if scores else {}),
                "tok_s": round(speeds[held], 3),
                "speedup_vs_plain": round(speeds[held] / plain, 4),
            }
        )
    return rows


def serving_document(records: Sequence[Record], hysteresis: float) -> dict[str, Any]:
    """The artefact of a registered version: the table, and the same for stock vLLM."""
    return {
        "hysteresis": hysteresis,
        "rows": serving_table(records, hysteresis),
        "vllm": {"num_speculative_tokens_per_batch_size": vllm_table(records, hysteresis)},
    }


def budget_for(table: Sequence[dict[str, Any]], batch_size: int) -> dict[str, Any]:
    """The row that serves `batch_size`: the next measured one up, or the last beyond them all.

    The best budget falls as the batch grows, so the larger neighbour is the careful choice.
    """
    if not table:
        return {"batch_size": batch_size, "method": "plain", "builder": None, "budget": 0}
    return next((row for row in table if batch_size <= row["batch_size"]), table[-1])


def vllm_table(
    records: Sequence[Record],
    hysteresis: float,
    *,
    temperature: float = 0.0,
    max_batch_size: int = MAX_BATCH_SIZE,
) -> list[list[int]]:
    """vLLM's `num_speculative_tokens_per_batch_size`: [[first batch, last batch, tokens], ...].

    vLLM drafts chains, so trees do not contend; 0 switches drafting off. The ranges start at 1,
    leave no gap, and reach `max_batch_size`.
    """
    chains = [r for r in records if r["method"] in ("plain", "chain")]
    ranges: list[list[int]] = []
    for row in serving_table(chains, hysteresis, temperature=temperature):
        first = ranges[-1][1] + 1 if ranges else 1
        if ranges and ranges[-1][2] == row["budget"]:
            ranges[-1][1] = row["batch_size"]
        else:
            ranges.append([first, row["batch_size"], row["budget"]])
    if ranges:
        ranges[-1][1] = max(ranges[-1][1], max_batch_size)
    return ranges


def describe(table: Sequence[dict[str, Any]]) -> str:
    """One line, e.g. `batch 1: tree 64 (1.8x), batch 8: plain (1.0x)`."""
    return ", ".join(
        f"batch {row['batch_size']}: {cell_label(row)} ({row['speedup_vs_plain']:.2f}x)"
        for row in table
    )


def _checked(record: Record) -> bool:
    check = record.get("output_check")
    return check is not None and bool(check["passed"])


def _choice(record: Record) -> Choice:
    return record["method"], record["builder"], record["budget"], record.get("scores")


def speeds_by_choice(records: Sequence[Record]) -> dict[Choice, float]:
    """Pooled tokens a second of every method that covers plain decoding's slices."""
    plain = [r for r in records if r["method"] == "plain"]
    needed = {r["slice"] for r in plain}
    records = [r for r in records if all(comparable(r, base) for base in plain)]
    speeds = {}
    for choice in {_choice(r) for r in records}:
        own = [r for r in records if _choice(r) == choice]
        speed = throughput(own)
        if choice[0] in CONTENDERS and speed and {r["slice"] for r in own} == needed:
            speeds[choice] = speed
    return speeds
