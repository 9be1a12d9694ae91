"""Residual addition and RMSNorm in one pass, also the reduction of a split matrix product."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import enter, unfused


@triton.jit
def _add_rms_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, new_residual_ptr, rows, width, eps,
    PARTS: tl.constexpr, RESIDUAL: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, WIDTH)
    ok = col < width
    store_type = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * width + col, mask=ok, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_ptr + (part * rows + row) * width + col, mask=ok, other=0.0)
    x = x.to(store_type).to(tl.float32)
    if RESIDUAL:
        x += tl.load(residual_ptr + row * width + col, mask=ok, other=0.0).to(tl.float32)
        x = x.to(store_type).to(tl.float32)
    tl.store(new_residual_ptr + row * width + col, x.to(store_type), mask=ok)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    normed = (x * scale).to(store_type).to(tl.float32)
    weight = tl.load(weight_ptr + col, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + col, (normed * weight).to(store_type), mask=ok)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual) * weight, x + residual), both [T, d] in the weight's type.

    Args:
        x: [T, d], or [S, T, d] partial sums of a split matrix product, added in order in fp32.
        residual: [T, d], or None.
    """
    parts = x.shape[0] if x.dim() == 3 else 1
    rows, width = x.shape[-2:]
    out = torch.empty(rows, width, dtype=weight.dtype, device=x.device)
    new_residual = torch.empty_like(out)
    _add_rms_norm[(rows,)](
        x, out if residual is None else residual, weight, out, new_residual, rows, width, eps,
        PARTS=parts, RESIDUAL=residual is not None, WIDTH=triton.next_power_of_2(width),
        num_warps=8 if width >= 2048 else 4, **unfused(),
    )  # fmt: skip
    return out, new_residual
