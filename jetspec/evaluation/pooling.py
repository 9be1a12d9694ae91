"""Views over many records: which belong together, and figures pooled over their prompts."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jetspec.evaluation.statistics import (
    Estimate,
    independent_ratio_interval,
    paired_ratio_interval,
    ratio_interval,
)

Record = Mapping[str, Any]


def select(records: Iterable[Record], **fields: Any) -> list[Record]:
    """The records whose fields all have the given values."""
    return [r for r in records if all(r.get(name) == value for name, value in fields.items())]


def as_served(records: Iterable[Record]) -> list[Record]:
    """Without slot scores where the same head was measured with path scores too."""
    found = list(records)
    paths = any(record.get("scores") == "path" for record in found)
    return [r for r in found if not (paths and r.get("scores") == "slot")]


def prompt_rows(records: Iterable[Record]) -> dict[str, Mapping[str, Any]]:
    """Per-prompt rows by prompt id; a prompt measured in two cells (its slice and `all`) is one."""
    return {row["prompt_id"]: row for record in records for row in record.get("per_prompt") or ()}


def pooled_tau(records: Iterable[Record], *, samples: int, seed: int) -> Estimate | None:
    """tau over every prompt of the records."""
    rows = list(prompt_rows(records).values())
    return ratio_interval(
        [r["tokens"] for r in rows], [r["rounds"] for r in rows], samples=samples, seed=seed
    )


def paired_tau_ratio(
    ours: Iterable[Record], theirs: Iterable[Record], *, samples: int, seed: int
) -> tuple[Estimate | None, int]:
    """Ratio of two taus over the prompts both measured, and how many those are."""
    mine, other = prompt_rows(ours), prompt_rows(theirs)
    shared = sorted(mine.keys() & other.keys())
    columns = [
        [rows[i][name] for i in shared] for rows in (mine, other) for name in ("tokens", "rounds")
    ]
    return paired_ratio_interval(*columns, samples=samples, seed=seed), len(shared)


def speedup(
    ours: Sequence[Record], base: Sequence[Record], *, samples: int, seed: int, clock: str
) -> Estimate | None:
    """Ratio of throughputs, paired batch by batch where both decoded the same batches.

    Where one decoded fewer (`evaluation.method_batches`), each side counts with all of its own.

    Args:
        ours, base: records of one method each, in the same order of groups.
        clock: `decode` (prefill left out) or `total`.
    """
    alike = all(len(a["batches"]) == len(b["batches"]) for a, b in zip(ours, base, strict=True))
    interval = paired_ratio_interval if alike else independent_ratio_interval
    names = (f"{clock}_tokens", f"{clock}_seconds")
    columns = [
        [batch[name] for record in side for batch in record["batches"]]
        for side in (ours, base)
        for name in names
    ]
    return interval(*columns, samples=samples, seed=seed)


def throughput(records: Iterable[Record], clock: str = "decode") -> float | None:
    """Tokens a second over all batches of the records."""
    batches = [batch for record in records for batch in record["batches"]]
    seconds = sum(batch[f"{clock}_seconds"] for batch in batches)
    return sum(batch[f"{clock}_tokens"] for batch in batches) / seconds if seconds else None
