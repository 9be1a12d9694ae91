"""Launch shapes of tree attention, and products of a draft head, beside the present ones.

A cell is checked before it is timed: against the reference, and against itself over repeats (what
the last program of a tile merges must not depend on which one it was).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.benchmarks.attention import BARS_US, HEADS, KV_HEADS, PAGE, Problem
from kernels.benchmarks.timing import relative_error, time_us
from kernels.fp8_gemm import fp8_gemm
from kernels.small_gemm import GemmPlan, parts_for, small_gemm
from kernels.tree_attention import Plan, plan_for, splits_for

GROUP = HEADS // KV_HEADS
REPEATS = 20
Rule = Callable[[Plan, tuple[int, int], int, int], tuple[Plan, tuple[int, int]]]


def present(
    plan: Plan, splits: tuple[int, int], rows: int, programs: int
) -> tuple[Plan, tuple[int, int]]:
    """A launch's plan and cuts as they are. Every rule has these arguments.

    Args:
        rows: query rows a KV head. programs: KV heads x sequences.
    """
    return plan, splits


def joined(
    plan: Plan, splits: tuple[int, int], rows: int, programs: int
) -> tuple[Plan, tuple[int, int]]:
    plan, splits = fixed(plan, splits, rows, programs)
    return replace(plan, joined=True), splits


def fixed(
    plan: Plan, splits: tuple[int, int], rows: int, programs: int
) -> tuple[Plan, tuple[int, int]]:
    """Splits at multiples of a size that doubles with the context, merged by a second launch."""
    plan = replace(plan, joined=False, even=False)
    return plan, splits_for(plan.tiles(rows)[0] * programs)


def even(
    plan: Plan, splits: tuple[int, int], rows: int, programs: int
) -> tuple[Plan, tuple[int, int]]:
    """As many equal splits as run at once."""
    return replace(plan, joined=True, even=True), splits_for(plan.tiles(rows)[0] * programs, True)


def across(
    plan: Plan, splits: tuple[int, int], rows: int, programs: int
) -> tuple[Plan, tuple[int, int]]:
    if rows <= 16:
        plan = Plan(0, plan.tile, 4, 3, across=16)
    elif rows > 64 and 0 < rows % 64 <= 16:
        # Two buffers instead of three leave room for two programs a multiprocessor.
        plan = replace(plan, stages=2, across=16, descriptors=True)
    return even(plan, splits, rows, programs)


RULES: dict[str, Rule] = {
    "present": present,
    "fixed": fixed,
    "joined": joined,
    "even": even,
    "across": across,
}


@dataclass(frozen=True)
class Launch:
    """One cell: a problem and how it is launched."""

    batch: int
    nodes: int
    name: str
    plan: Plan
    splits: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.batch} x {self.nodes}: {self.name}"

    @property
    def contexts(self) -> tuple[int, ...]:
        return (1024, 8192, 32768) if (self.batch, self.nodes) in ((1, 1), (1, 128)) else (1024,)


def launches() -> list[Launch]:
    found = []
    for batch, nodes in ((1, 128), (1, 129), (1, 1), (16, 1), (16, 16), (16, 17), (16, 33)):
        rows, programs = nodes * GROUP, KV_HEADS * batch
        plan = plan_for(nodes, GROUP, programs, PAGE)
        usual = plan, splits_for(plan.tiles(rows)[0] * programs, plan.even)
        own = {name: rule(*usual, rows, programs) for name, rule in RULES.items()}
        if (batch, nodes) == (1, 1):
            narrow = Plan(0, PAGE, 4, 4, across=16, joined=True)
            own |= {
                "joined, (256, 48)": (replace(plan, joined=True), (256, 48)),
                "narrow": (narrow, usual[1]),
                "narrow, 16 even": (replace(narrow, even=True), (128, 16)),
            }
        elif (batch, nodes) in ((1, 128), (1, 129)):
            own["4 even"] = replace(plan, joined=True, even=True), (64, 4)
        elif nodes in (17, 33):
            own["2 even"] = replace(plan, joined=True, even=True), (64, 2)
        seen = []
        for name, launch in own.items():
            if launch not in seen:
                seen.append(launch)
                found.append(Launch(batch, nodes, name, *launch))
    return found


def check(launch: Launch) -> dict[str, object]:
    """Compile a cell; whether it is right, and has the same bits 20 times."""
    problem = Problem(launch.batch, launch.nodes, 1000)
    problem.cache.prefix.sub_(torch.arange(launch.batch, device="cuda", dtype=torch.int32) * 37)
    shape = (launch.plan, *launch.splits)
    error = problem.error(*shape)
    call = problem.calls(*shape)[0]
    first = call().clone()
    changed = sum(not torch.equal(call(), first) for _ in range(REPEATS))
    return {
        "launch": str(launch),
        "error": error,
        "repeats_that_differ": changed,
        "passed": error < 1e-2 and not changed,
    }


def attention_rows(skip: frozenset[str] = frozenset()) -> Iterator[dict[str, object]]:
    """Microseconds a layer of every launch. skip: those that failed a check."""
    for launch in launches():
        if str(launch) in skip:
            continue
        for context in launch.contexts:
            problem = Problem(launch.batch, launch.nodes, context)
            yield {
                "batch": launch.batch,
                "nodes": launch.nodes,
                "context": context,
                "launch": launch.name,
                "us": time_us(problem.calls(launch.plan, *launch.splits), repeats=15),
                "bar_us": BARS_US.get((launch.batch, launch.nodes, context)),
            }


_HEAD_SHAPES = [
    (6144, 4096, 5), (4096, 4096, 5), (24576, 4096, 5), (4096, 12288, 5), (4096, 20480, 1),
    (10240, 4096, 1), (151936, 4096, 1),
]  # fmt: skip
"""(N, K, how many) of a head of five layers, its fusion, its context and the output projection."""
FP8_PLANS = {
    "present": None,
    "step 256": GemmPlan(16, 128, 256, 4, 4),
    "8 stages": GemmPlan(16, 128, 128, 4, 8),
    "8 warps": GemmPlan(16, 128, 128, 8, 4),
    "64 outputs": GemmPlan(16, 64, 256, 4, 4),
}


def _head_products(rows: int) -> dict[str, list[Callable[[], Tensor]]]:
    """Every way to run a head's products over so many rows."""
    calls: dict[str, list[Callable[[], Tensor]]] = defaultdict(list)
    for n, k, count in _HEAD_SHAPES:
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        parts = 1 if n > 100_000 else parts_for(n, k)
        for _ in range(count):
            w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
            eight = w.to(torch.float8_e4m3fn)
            exponents = torch.zeros(n, device="cuda", dtype=torch.int8)
            calls["cuBLAS, bf16"].append(partial(F.linear, x, w))
            if rows > 16:  # what eight bits of both sides would bring on the card's own product
                scales = [torch.ones(size, device="cuda") for size in ((rows, 1), (1, n))]
                named: dict[str, Any] = dict(zip(("scale_a", "scale_b"), scales, strict=True))
                product = partial(torch._scaled_mm, out_dtype=torch.bfloat16, **named)
                calls["cuBLASLt, fp8 activations"].append(
                    partial(product, x.to(torch.float8_e4m3fn), eight.t())
                )
                continue
            calls["ours, bf16"].append(partial(small_gemm, x, w, parts=parts))
            for name, plan in FP8_PLANS.items():
                calls[f"ours, fp8, {name}"].append(
                    partial(fp8_gemm, x, eight, exponents, parts=parts, plan=plan)
                )
    return calls


def head_rows() -> Iterator[dict[str, object]]:
    """Milliseconds of all products of a head's pass and of the output projection."""
    for rows in (16, 256):
        for name, own in _head_products(rows).items():
            record: dict[str, object] = {"rows": rows, "products": name}
            try:
                for call in own:
                    call()  # nothing may be loaded while a graph is captured
                record["ms"] = time_us(own, repeats=9) * len(own) / 1e3
            except Exception as error:
                record["failed"] = str(error).splitlines()[0][:200]
            yield record


def check_product(name: str) -> dict[str, object]:
    """Compile an eight-bit product's launch shape and compare it with cuBLAS over bf16."""
    worst = 0.0
    for n, k in ((6144, 4096), (24576, 4096)):  # K cut and not
        x = torch.randn(16, k, device="cuda", dtype=torch.bfloat16)
        eight = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
        exponents = torch.randint(-9, 9, (n,), device="cuda", dtype=torch.int8)
        out = fp8_gemm(x, eight, exponents, plan=FP8_PLANS[name])
        whole = out if out.dim() == 2 else out.sum(0)
        expected = F.linear(x, eight.to(x.dtype)) * torch.exp2(exponents.float())
        worst = max(worst, relative_error(whole, expected))
    return {"launch": f"fp8: {name}", "error": worst, "passed": worst < 1e-2}
