"""The gate of a gated MLP: SiLU(gate) * up from one fused product."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import enter, unfused


@triton.jit
def _silu_mul(
    x_ptr, out_ptr, rows, width, PARTS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    ok = col < width
    store_type = out_ptr.dtype.element_ty
    x_ptr += row * 2 * width
    gate = tl.load(x_ptr + col, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + width + col, mask=ok, other=0.0).to(tl.float32)
    stride = tl.full((), 2, tl.int64) * width * rows
    for _ in tl.static_range(1, PARTS):
        x_ptr += stride
        gate += tl.load(x_ptr + col, mask=ok, other=0.0)
        up += tl.load(x_ptr + width + col, mask=ok, other=0.0)
    gate = gate.to(store_type).to(tl.float32)
    up = up.to(store_type).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(store_type).to(tl.float32)
    tl.store(out_ptr + row * width + col, (gate * up).to(store_type), mask=ok)


def silu_mul(gate_up: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """SiLU(gate) * up, [T, I] in `dtype` (None: the input's).

    Args:
        gate_up: [T, 2 I], gate first; or fp32 [S, T, 2 I] partial sums, added in order.
    """
    parts = gate_up.shape[0] if gate_up.dim() == 3 else 1
    rows, both = gate_up.shape[-2:]
    width = both // 2
    out = torch.empty(rows, width, dtype=dtype or gate_up.dtype, device=gate_up.device)
    chunk = 1024
    _silu_mul[(rows, triton.cdiv(width, chunk))](
        gate_up, out, rows, width, PARTS=parts, CHUNK=chunk, num_warps=4, **unfused()
    )
    return out
