"""x @ w^T for few rows of x, every output summed in one order whatever the number of rows.

Weights are the tensor core's A operand and the tokens its B operand, so a few tokens waste little
of an instruction. One element of the result is always the same chain of products along K: the
tile of tokens is free to follow M, the cuts of K follow the weight's shape alone. A narrow weight
is cut along K so that enough programs stream it; the parts are added, in order, by the consumer
(`add_rms_norm`, `qkv_to_cache`, `silu_mul`), which saves the extra launch.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.launch import dependent, dot, enter


@triton.jit
def _product(
    x_ptr, w_ptr, out_ptr, m, n, k, part_k,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr, DESCRIPTORS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.program_id(2)
    step = tl.arange(0, STEP)
    first = part * part_k
    enter(PDL)
    acc = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    if DESCRIPTORS:
        for start in tl.range(first, first + part_k, STEP):
            w = w_ptr.load([tl.program_id(1) * OUTPUTS, start])
            x = x_ptr.load([tl.program_id(0) * TOKENS, start])
            acc = dot(w, tl.trans(x), acc)
    else:
        # Rows beyond the end read a real one and are never stored: cheaper than masks. Tokens are
        # spread, since many copies of one row would wait for the same lines of the L2 cache.
        row = tl.where(output < n, output, 0).to(tl.int64)
        w_at = w_ptr + row[:, None] * k + first + step[None, :]
        x_at = x_ptr + (token % m).to(tl.int64)[None, :] * k + first + step[:, None]
        for _ in tl.range(0, part_k, STEP):
            acc = dot(tl.load(w_at), tl.load(x_at), acc)
            w_at += STEP
            x_at += STEP
    out = out_ptr + (part.to(tl.int64) * m + token[None, :]) * n + output[:, None]
    tl.store(
        out, acc.to(out_ptr.dtype.element_ty), mask=(token < m)[None, :] & (output < n)[:, None]
    )


@dataclass(frozen=True)
class GemmPlan:
    """Launch shape; every choice gives the same bits."""

    tokens: int
    outputs: int
    step: int
    warps: int
    stages: int
    descriptors: bool = False


def parts_for(n: int, k: int) -> int:
    """How often K is cut for an [n, k] weight: until about 128 programs stream it. Never by M."""
    parts = 1
    while parts < 8 and triton.cdiv(n, 128) * parts < 96 and k % (parts * 2 * 128) == 0:
        parts *= 2
    return parts


def gemm_plan(m: int, n: int, item_bytes: int = 2) -> GemmPlan:
    """The measured choice (docs/kernels.md) for m rows and an [n, k] weight."""
    narrow = max(item_bytes // 2, 1)  # steps share the stages' memory
    if m <= 32:
        tokens = 16 if m <= 16 else 32
        return GemmPlan(tokens=tokens, outputs=128, step=128 // narrow, warps=4, stages=4)
    if m <= 64:
        outputs = 64 if n <= 8192 else 128
        return GemmPlan(tokens=64, outputs=outputs, step=64 // narrow, warps=4, stages=4)
    return GemmPlan(tokens=128, outputs=64, step=64 // narrow, warps=4, stages=4)


LEAST_STEP = 16
"""K must be a multiple of it: what one matrix instruction takes."""


def fitting(plan: GemmPlan, k: int, parts: int) -> GemmPlan:
    """The plan with the largest step that divides a part of K.

    Raises:
        ValueError: none does.
    """
    step = plan.step
    while step > LEAST_STEP and k % (parts * step):
        step //= 2
    if k % (parts * step):
        raise ValueError(f"K {k} is no multiple of {parts} parts x {step}")
    return replace(plan, step=step)


def small_gemm(
    x: Tensor,
    w: Tensor,
    *,
    parts: int | None = None,
    plan: GemmPlan | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x [M, K] @ w [N, K]^T: [M, N] in `dtype` (None: x's), or fp32 [S, M, N] when K is cut.

    Args:
        parts: S; None decides by the weight's shape. 1 asks for a finished product.
    """
    m, k = x.shape
    n = w.shape[0]
    parts = parts_for(n, k) if parts is None else parts
    plan = fitting(plan or gemm_plan(m, n, x.element_size()), k, parts)
    if out is None:
        shape = (m, n) if parts == 1 else (parts, m, n)
        out = torch.empty(
            shape, dtype=(dtype or x.dtype) if parts == 1 else torch.float32, device=x.device
        )
    x_source, w_source = x, w
    if plan.descriptors:
        x_source = TensorDescriptor.from_tensor(x, [plan.tokens, plan.step])
        w_source = TensorDescriptor.from_tensor(w, [plan.outputs, plan.step])
    grid = (triton.cdiv(m, plan.tokens), triton.cdiv(n, plan.outputs), parts)
    _product[grid](
        x_source, w_source, out, m, n, k, k // parts,
        TOKENS=plan.tokens, OUTPUTS=plan.outputs, STEP=plan.step,
        DESCRIPTORS=plan.descriptors, num_warps=plan.warps,
        num_stages=plan.stages, **dependent(),
    )  # fmt: skip
    return out
