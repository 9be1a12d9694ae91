"""Launch shapes tried for attention and the small-M product, to choose the plans by measurement."""

import multiprocessing
from collections.abc import Callable, Iterator

from kernels import tree_attention
from kernels.benchmarks.attention import BARS_US, Problem
from kernels.benchmarks.gemm import WEIGHTS, Product
from kernels.benchmarks.timing import time_us
from kernels.small_gemm import GemmPlan
from kernels.tree_attention import Plan

WIDE = [
    Plan(64, 64, 4, 2), Plan(64, 64, 4, 3), Plan(64, 64, 4, 3, True),
    Plan(128, 64, 8, 3, True), Plan(128, 128, 8, 2, True), Plan(64, 128, 4, 2, True),
]  # fmt: skip
NARROW = [
    Plan(64, 64, 4, 3), Plan(64, 64, 4, 4), Plan(64, 64, 4, 6), Plan(64, 64, 4, 4, True),
    Plan(64, 128, 4, 2), Plan(64, 128, 4, 3, True),
]  # fmt: skip
SPLITS = [(256, 12), (256, 24), (512, 24)]
GEMM = {
    1: [GemmPlan(16, 128, 128, 4, 4), GemmPlan(16, 128, 128, 4, 4, True)],
    64: [
        GemmPlan(64, 64, 64, 4, 5),
        GemmPlan(64, 128, 64, 4, 4),
        GemmPlan(64, 128, 64, 4, 5, True),
    ],
    128: [
        GemmPlan(128, 64, 64, 4, 4),
        GemmPlan(128, 64, 64, 4, 4, True),
        GemmPlan(128, 128, 64, 8, 4, True),
        GemmPlan(128, 256, 64, 8, 3, True),
    ],
}


def _compile_attention(job: tuple[int, Plan]) -> None:
    nodes, plan = job
    problem = Problem(1, nodes, 256, page=128)
    problem.calls(plan)[0]()


def _compile_gemm(job: tuple[int, GemmPlan]) -> None:
    m, plan = job
    product = Product("o")
    product.error(m, plan)


def _attempt(job: tuple[str, object]) -> None:
    kind, argument = job
    try:
        (_compile_attention if kind == "attention" else _compile_gemm)(argument)  # type: ignore
    except Exception as error:
        print("does not launch:", argument, str(error).splitlines()[:1])


def compile_all(tables: list[str], workers: int = 14) -> None:
    """Fill Triton's cache from several processes: most of a sweep's time is compilation."""
    jobs: list[tuple[str, object]] = []
    if "sweep_attention" in tables:
        jobs += [("attention", (128, plan)) for plan in WIDE]
        jobs += [("attention", (1, plan)) for plan in NARROW]
    if "sweep_gemm" in tables:
        jobs += [("gemm", (m, plan)) for m, plans in GEMM.items() for plan in plans]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        pool.map(_attempt, jobs, chunksize=1)


def attention_rows() -> Iterator[dict[str, object]]:
    for nodes, plans in ((128, WIDE), (1, NARROW)):
        for context in (1024, 8192, 32768):
            problem = Problem(1, nodes, context, page=128)
            for plan in plans:
                for split, most in SPLITS:
                    record: dict[str, object] = {
                        "nodes": nodes,
                        "context": context,
                        "plan": str(plan),
                    }
                    record |= {"split": split, "max_splits": most}
                    try:
                        record["us"] = time_us(problem.calls(plan, split, most), repeats=9)
                        if split == 256 and most == 24:
                            record["error"] = problem.error(plan=plan)
                    except Exception as error:
                        record["failed"] = str(error).splitlines()[0][:100]
                    yield record


def gemm_rows() -> Iterator[dict[str, object]]:
    for name in WEIGHTS:
        product = Product(name)
        for m, plans in GEMM.items():
            for plan in plans:
                record: dict[str, object] = {"weight": name, "m": m, "plan": str(plan)}
                try:
                    record["us"] = product.us(m, plan)
                except Exception as error:
                    record["failed"] = str(error).splitlines()[0][:100]
                yield record
        del product


def part_rows() -> Iterator[dict[str, object]]:
    """Attention's two kernels apart, under a tree's mask and a causal one."""
    kernels = {"attend_us": "_merge", "merge_us": "_attend"}
    for nodes, plan in ((1, NARROW[0]), (128, WIDE[1])):
        problem = Problem(1, nodes, 1024, page=128)
        for mask, bits in (("tree", problem.bits), ("causal", None)):
            problem.bits = bits  # type: ignore[assignment]
            record: dict[str, object] = {"nodes": nodes, "mask": mask}
            for name, other in kernels.items():
                kept = getattr(tree_attention, other)
                setattr(tree_attention, other, _Nothing())
                try:
                    record[name] = time_us(problem.calls(plan))
                finally:
                    setattr(tree_attention, other, kept)
            yield record


class _Nothing:
    """A kernel that is not launched."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **named: None


def choose(rows: list[dict[str, object]]) -> tuple[Plan, Plan, int, int]:
    """(plan for many rows, plan for few, split, max_splits) that share tile and splits."""
    times: dict[tuple[object, ...], float] = {}
    for row in rows:
        bar = BARS_US.get((1, int(row["nodes"]), int(row["context"])), 8.0)  # type: ignore
        key = (row["nodes"], row["plan"], row["split"], row["max_splits"])
        times[key] = times.get(key, 0.0) + float(row.get("us", 1e9)) / bar  # type: ignore
    options = [
        (times[128, str(wide), *splits] + times[1, str(narrow), *splits], index)
        for index, (wide, narrow, splits) in enumerate(_pairs())
    ]
    wide, narrow, splits = _pairs()[min(options)[1]]
    return wide, narrow, *splits


def _pairs() -> list[tuple[Plan, Plan, tuple[int, int]]]:
    return [
        (wide, narrow, splits)
        for wide in WIDE
        for narrow in NARROW
        for splits in SPLITS
        if wide.tile == narrow.tile
    ]
