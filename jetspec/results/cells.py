"""The cells of one target and head: which record stands for each, and its row in the summary."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jetspec.evaluation.cells import ALL_SLICES, BASELINES
from jetspec.evaluation.replayed import DECODER as REPLAY
from jetspec.evaluation.statistics import ratio_interval
from jetspec.results.inputs import Inputs, Record

# The papers' order; sets they do not have come behind, in alphabetical order.
SETS = ("gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt_bench")
_METHODS = ("hf_eager", "plain", "lookup", "draft_model", "chain", "tree")
_CELL = ("method", "builder", "scores", "budget", "batch_size", "slice", "temperature")
Key = tuple[Any, ...]


@dataclass(frozen=True)
class Subject:
    """One head on one target, and everything measured of the two.

    Attributes:
        depth: levels that its drafts were asked for; None is as deep as the head was trained.
        decoded: the good record of every decoded cell, that with the most prompts where several
            runs measured it; failed: cells that no run could measure.
        replayed: of replayed cells.
        runs: all good decoded records, several of one cell included.
    """

    target: str
    head: str
    depth: int | None
    decoded: list[Record]
    replayed: list[Record]
    failed: list[Record]
    runs: list[Record]

    @property
    def sets(self) -> list[str]:
        names = {r["slice"] for r in [*self.decoded, *self.replayed]}
        return sorted(names, key=_set_order)

    def one_run(self, temperature: float = 0.0) -> list[Record]:
        """Of every batch size the cells of one run, that which measured most there: clocks of
        different runs are not set against each other."""
        chosen: list[Record] = []
        own = [r for r in self.runs if r["temperature"] == temperature]
        for batch in sorted({r["batch_size"] for r in own}):
            runs: dict[str, list[Record]] = {}
            for r in own:
                if r["batch_size"] == batch:
                    runs.setdefault(str(r.get("evaluation_key")), []).append(r)
            # A run without plain cells has nothing to be compared with.
            ranked = [m for m in runs.values() if any(r["method"] == "plain" for r in m)]
            if ranked:
                chosen += max(ranked, key=lambda m: sum(r["prompts"] for r in m))
        return chosen


def subjects(inputs: Inputs, names: Mapping[str, str]) -> list[Subject]:
    """Every (target, head, depth) that was measured, the one with the most cells first.

    Args:
        names: how to call a target or a head, by what its records call it.
    """
    heads = {head["hash"]: head for head in inputs.heads}
    groups: dict[tuple[str, str, int | None], list[Record]] = {}
    for record in inputs.records:
        fingerprint = str(record.get("target_fingerprint"))
        head = record.get("head_hash")
        target = record.get("target_name") or heads.get(head, {}).get("target") or fingerprint[:12]
        depth = record.get("settings", {}).get("depth")
        key = names.get(target, target), _head_name(record, names), depth
        groups.setdefault(key, []).append(record)
    made = [_subject(*key, records) for key, records in groups.items()]
    return sorted(made, key=lambda s: (-len(s.decoded) - len(s.replayed), s.target, s.head))


def _head_name(record: Record, names: Mapping[str, str]) -> str:
    uri = str(record.get("head_uri") or "none").rstrip("/").rsplit("/", 1)[-1]
    return names.get(str(record.get("head_hash"))[:12], names.get(uri, uri))


def _subject(target: str, head: str, depth: int | None, records: Sequence[Record]) -> Subject:
    good = [r for r in records if r["status"] == "ok"]
    runs = [r for r in good if r.get("decoder") != REPLAY]
    decoded = _largest(runs)
    known = {cell_key(r) for r in decoded}
    broken = [r for r in _largest(r for r in records if r["status"] != "ok")]
    return Subject(
        target=target,
        head=head,
        depth=depth,
        decoded=sorted(decoded, key=order),
        replayed=sorted(_largest(r for r in good if r.get("decoder") == REPLAY), key=order),
        failed=[r for r in broken if cell_key(r) not in known],
        runs=runs,
    )


def _largest(records: Iterable[Record]) -> list[Record]:
    best: dict[Key, Record] = {}
    for record in records:
        key = cell_key(record)
        if key not in best or record["prompts"] > best[key]["prompts"]:
            best[key] = record
    return list(best.values())


def cell_key(record: Mapping[str, Any]) -> Key:
    return tuple(record.get(name) for name in _CELL)


def order(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Sorts cells as tables have them."""
    method = record["method"]
    return (
        record["temperature"],
        record["batch_size"],
        _set_order(record["slice"]),
        _METHODS.index(method) if method in _METHODS else len(_METHODS),
        record["builder"] or "",
        record.get("scores") != "slot",
        record["budget"],
    )


def _set_order(name: str) -> tuple[int, str]:
    known = SETS.index(name) if name in SETS else len(SETS)
    return (len(SETS) + 1 if name == ALL_SLICES else known, name)


def summary_cells(subject: Subject) -> list[dict[str, Any]]:
    """One row a cell. A decoded cell that was replayed too carries that tau as `tau_replayed`; one
    that was only replayed has no speeds and says `decoder: replay`."""
    replayed = {cell_key(r): r for r in subject.replayed}
    rows = [_row(subject, r, replayed.pop(cell_key(r), None)) for r in subject.decoded]
    rows += [_row(subject, r, r) for r in replayed.values()]
    return rows


def _row(subject: Subject, record: Record, replayed: Record | None) -> dict[str, Any]:
    speedups = {base: record["speedup"][f"vs_{base}"] for base in BASELINES}
    check = record.get("output_check")
    return {
        "target": subject.target,
        "head": subject.head,
        "depth": subject.depth,
        "set": record["slice"],
        "method": record["method"],
        "builder": record["builder"],
        "scores": record.get("scores"),
        "budget": record["budget"],
        "batch": record["batch_size"],
        "temperature": record["temperature"],
        "tau": record["tau"],
        "tau_ci": record["tau_ci"],
        "tok_s": record["tok_s_decode"],
        "tok_s_ci": throughput_interval(record),
        "tok_s_end_to_end": record["tok_s_total"],
        "speedup_graphed": speedups["plain"]["value"],
        "speedup_graphed_ci": speedups["plain"]["ci"],
        "speedup_eager": speedups["hf_eager"]["value"],
        "speedup_eager_ci": speedups["hf_eager"]["ci"],
        "output_check": check
        and {name: check[name] for name in ("passed", "compared", "differing", "near_ties")},
        "prompts": record["prompts"],
        "decoder": record.get("decoder"),
        "tau_replayed": replayed["tau"] if replayed else None,
        "tau_not_looping": record.get("tau_not_looping"),
        "looping": record.get("looping"),
        "generated_tokens": record.get("generated_tokens"),
        "key": record["key"],
        "evaluation_key": record.get("evaluation_key"),
    }


def throughput_interval(record: Record) -> list[float] | None:
    """95 % interval of decode tokens a second, over batches of prompts."""
    batches = record["batches"]
    settings = record["settings"]
    estimate = ratio_interval(
        [b["decode_tokens"] for b in batches],
        [b["decode_seconds"] for b in batches],
        samples=settings["bootstrap_samples"],
        seed=settings["seed"],
    )
    return estimate.rounded(3)[1] if estimate else None
