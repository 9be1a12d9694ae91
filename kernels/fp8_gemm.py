"""x @ w^T with weights in eight bits: e4m3 values times one power of two an output channel.

Half the bytes of bf16 are streamed; a value becomes the activations' type in registers, exactly,
and a power of two changes no digit of the sum. So the result is that of the same product with the
weights written out in bf16, and like `small_gemm`'s it has one order whatever the number of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import dependent, dot, enter
from kernels.small_gemm import GemmPlan, fitting, gemm_plan, parts_for


@triton.jit
def _fp8_product(
    x_ptr, w_ptr, exponents_ptr, out_ptr, m, n, k, part_k,
    TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.program_id(2)
    step = tl.arange(0, STEP)
    first = part * part_k
    enter(PDL)
    # Rows beyond the end read a real one and are never stored: cheaper than masks.
    row = tl.where(output < n, output, 0)
    # 2^e as the bits of a float: no approximation.
    scale = ((tl.load(exponents_ptr + row).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    w_at = w_ptr + row.to(tl.int64)[:, None] * k + first + step[None, :]
    x_at = x_ptr + (token % m).to(tl.int64)[None, :] * k + first + step[:, None]
    acc = tl.zeros((OUTPUTS, TOKENS), tl.float32)
    for _ in tl.range(0, part_k, STEP):
        x = tl.load(x_at)
        acc = dot(tl.load(w_at).to(x.dtype), x, acc)
        w_at += STEP
        x_at += STEP
    acc = acc * scale[:, None]
    out = out_ptr + (part.to(tl.int64) * m + token[None, :]) * n + output[:, None]
    tl.store(
        out, acc.to(out_ptr.dtype.element_ty), mask=(token < m)[None, :] & (output < n)[:, None]
    )


def fp8_gemm(
    x: Tensor, values: Tensor, exponents: Tensor, *, parts: int | None = None,
    plan: GemmPlan | None = None,
) -> Tensor:  # fmt: skip
    """x [M, K] @ w^T: [M, N] in x's type, or fp32 [S, M, N] when K is cut.

    Args:
        values: e4m3 [N, K]; exponents: int8 [N]; w[n] = values[n] * 2^exponents[n].
        parts, plan: as in `small_gemm.small_gemm`; descriptors are not used.
    """
    m, k = x.shape
    n = len(values)
    parts = parts_for(n, k) if parts is None else parts
    plan = fitting(plan or gemm_plan(m, n, x.element_size()), k, parts)
    shape = (m, n) if parts == 1 else (parts, m, n)
    dtype = x.dtype if parts == 1 else torch.float32
    out = torch.empty(shape, dtype=dtype, device=x.device)
    grid = (triton.cdiv(m, plan.tokens), triton.cdiv(n, plan.outputs), parts)
    _fp8_product[grid](
        x, values, exponents, out, m, n, k, k // parts,
        TOKENS=plan.tokens, OUTPUTS=plan.outputs, STEP=plan.step,
        num_warps=plan.warps, num_stages=plan.stages, **dependent(),
    )  # fmt: skip
    return out
