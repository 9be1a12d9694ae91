"""Remedies beside the present round: launch shapes of attention, drafts in eight bits, clocks."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from jetspec.engine.benchmarks.models import CONTEXT
from jetspec.engine.benchmarks.rows import BARS_MS, engine_for, milliseconds, shape
from jetspec.engine.engine import Engine
from jetspec.heads.config import DraftWeights
from jetspec.heads.eight_bits import drafting_head
from jetspec.heads.parallel import ParallelHead
from jetspec.targets.target import Target
from kernels import tree_attention
from kernels.benchmarks import variants
from kernels.tree_attention import Plan

ROWS = (
    "chain_b1", "chain_b16", "tree_b1_64", "tree_b1_128", "tree_b1_255", "tree_b16_16",
    "tree_b16_32", "ar_b1", "ar_b16",
)  # fmt: skip
ALIGNED_ROWS = ("tree_b1_63", "tree_b1_127", "tree_b16_15", "tree_b16_31")
"""Budgets that fill whole tiles together with the root."""
CLOCK_ROWS = ("tree_b1_255", "chain_b16", "tree_b16_32")
ROUNDS: dict[str, tuple[str, DraftWeights]] = {
    "present": ("present", "own"),
    "fp8 drafts": ("present", "fp8"),
    "fixed": ("fixed", "own"),
    "joined": ("joined", "own"),
    "even": ("even", "own"),
    "across": ("across", "own"),
    "across, fp8 drafts": ("across", "fp8"),
}
"""Variants of a round: the rule of attention's launches, and the drafts' weights."""


@contextmanager
def launched_by(name: str) -> Iterator[None]:
    """Launches inside follow a rule of `kernels.benchmarks.variants`."""
    rule = variants.RULES[name]
    usual = tree_attention.plan_for, tree_attention.splits_for
    held: dict[str, tuple[Plan, tuple[int, int]]] = {}

    def plan(nodes: int, group: int, programs: int, *rest: Any) -> Plan:
        own, rows = usual[0](nodes, group, programs, *rest), nodes * group
        cuts = usual[1](own.tiles(rows)[0] * programs, own.even)
        held["now"] = rule(own, cuts, rows, programs)
        return held["now"][0]

    def splits(programs: int, even: bool = False) -> tuple[int, int]:
        return held["now"][1]

    tree_attention.plan_for = plan  # type: ignore[assignment]
    tree_attention.splits_for = splits
    try:
        yield
    finally:
        tree_attention.plan_for, tree_attention.splits_for = usual


def wanted(row: str) -> list[str]:
    """The variants that change anything in a row."""
    config, batch = shape(row)
    other = "even" if batch == 1 else "fixed"  # what the row's launches do not do at present
    if row in ALIGNED_ROWS:
        return ["present", other]
    if config is None:
        return ["present", "joined", other, "across"]
    eight = batch == 1  # at 16 the head's 256 rows take bf16 weights in any case
    left = (1 + config.budget) * variants.GROUP % 64
    names = ["present", other] + ["across"] * (0 < left <= 16)
    return names + ["fp8 drafts"] * eight + ["across, fp8 drafts"] * (eight and "across" in names)


def rounds(
    target: Target, head: ParallelHead, wrong: frozenset[str] = frozenset()
) -> Iterator[dict[str, object]]:
    """Milliseconds of whole rounds. wrong: rules whose launches failed a check."""
    heads = {"own": head, "fp8": drafting_head(head, target, "fp8")}
    for row in ROWS + ALIGNED_ROWS:
        for name in wanted(row):
            rule, weights = ROUNDS[name]
            record: dict[str, object] = {"row": row, "variant": name, "bar_ms": BARS_MS.get(row)}
            try:
                if rule in wrong:
                    raise RuntimeError("its launches failed a check")
                with launched_by(rule):
                    engine = engine_for(row, target, heads[weights])
                    record["ms"] = milliseconds(engine, repeats=5)
                del engine
            except Exception as error:
                record["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            yield record


def prepare(job: tuple[str, Any]) -> dict[str, object]:
    """Compile, and check, one launch; or compile a row's kernels on fewer layers."""
    kind, what = job
    try:
        if kind == "launch":
            return variants.check(what)
        if kind == "product":
            return variants.check_product(what)
        compile_round(*what)
        torch.cuda.synchronize()
        return {"launch": str(what), "passed": True}
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return {"launch": str(what), "passed": False, "failed": why}
    finally:  # the other processes need the memory
        gc.collect()
        torch.cuda.empty_cache()


def compile_round(row: str, rule: str, weights: DraftWeights) -> None:
    from jetspec.engine.benchmarks.models import random_head, random_target

    target = random_target(layers=5)
    head = drafting_head(random_head(target), target, weights)
    with launched_by(rule):
        engine_for(row, target, head).round.run()


def jobs() -> list[tuple[str, Any]]:
    """What `prepare` must do before anything is timed, the longest first."""
    rows: list[tuple[str, Any]] = [("row", ("chain_b1", "present", "fp8"))]
    for row in ROWS + ALIGNED_ROWS:
        rules = dict.fromkeys(ROUNDS[name][0] for name in wanted(row))
        rows += [("row", (row, rule, "own")) for rule in rules]
    launches = [("launch", launch) for launch in variants.launches()]
    return [*rows, *launches, *(("product", name) for name in variants.FP8_PLANS)]


def sm_mhz() -> float:
    """The multiprocessors' clock: how long a kernel takes that waits for so many cycles."""
    cycles = 1_000_000
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / start.elapsed_time(end) / 1e3


def _replays(engine: Engine, count: int, pause: float) -> tuple[list[float], float]:
    """(milliseconds of each of `count` rounds; the clock right behind the last)."""
    marks = []
    for _ in range(count):
        if pause:
            torch.cuda.synchronize()
            time.sleep(pause)
        engine.state.prefix.fill_(CONTEXT)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        engine.launch()
        end.record()
        marks.append((start, end))
    clock = sm_mhz()
    return [start.elapsed_time(end) for start, end in marks], clock


def _trace(engine: Engine) -> dict[str, object]:
    """One replay by its kernels' own time stamps: when any runs, when none does."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        engine.state.prefix.fill_(CONTEXT)
        torch.cuda.synchronize()
        engine.launch()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type == DeviceType.CUDA and "FillFunctor" not in event.name
    )
    busy, gaps, reached = 0.0, [], spans[0][0]
    for start, end in spans:
        if start > reached:
            gaps.append(start - reached)
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return {
        "kernels": len(spans),
        "span_ms": (reached - spans[0][0]) / 1e3,
        "busy_ms": busy / 1e3,
        "sum_ms": sum(end - start for start, end in spans) / 1e3,
        "gaps_ms": sum(gaps) / 1e3,
        "gaps": len(gaps),
    }


def clocks(target: Target, head: ParallelHead) -> Iterator[dict[str, object]]:
    """Rounds without a pause and with pauses, the clock behind each, and a replay's gaps.

    Slow without pauses only: the clock sinks under load. Slow both ways, and gaps: launches.
    """
    for row in CLOCK_ROWS:
        engine = engine_for(row, target, head)
        engine.launch()
        torch.cuda.synchronize()
        time.sleep(0.3)
        idle = sm_mhz()
        apart, clock_apart = _replays(engine, 12, 0.05)
        steady, clock_steady = _replays(engine, 120, 0.0)
        yield {
            "row": row,
            "mhz_idle": idle,
            "apart_ms": sorted(apart)[len(apart) // 2],
            "mhz_apart": clock_apart,
            "first_ms": sum(steady[1:6]) / 5,
            "last_ms": sum(steady[-20:]) / 20,
            "mhz_steady": clock_steady,
            **_trace(engine),
        }
        del engine
