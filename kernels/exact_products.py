"""`small_gemm`'s bits at cuBLAS's speed, where cuBLAS has them.

On Hopper both sum an output along K in one chain of matrix instructions whatever their tiles, so
long as cuBLAS does not cut K itself. Nobody promises that. So every shape is tried before it is
used: cuBLAS must give `small_gemm`'s bits for random rows and the real weight, or `small_gemm`
runs. Where `small_gemm` cuts K in parts, cuBLAS multiplies the parts as a batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.small_gemm import parts_for, small_gemm

FEW_ROWS = 32
"""Up to so many rows `small_gemm` is the faster one (docs/kernels.md)."""
PADDED_ROWS = 512
"""More rows are padded to a multiple, so that few shapes are tried for prompts of any length."""
ALIGNMENT = 256
"""Bytes: cuBLAS tells addresses apart up to it, and what torch allocates on a card has it."""

_Shape = tuple[torch.device, int, int, int, int, torch.dtype]
_agreed: dict[_Shape, bool] = {}


def exact_product(x: Tensor, w: Tensor, *, parts: int | None = None) -> Tensor:
    """`small_gemm(x, w, parts=parts)`, bit for bit.

    A shape that is first met while a CUDA graph is captured is not tried: `small_gemm` runs.

    Args:
        x: [M, K]. w: [N, K]. parts: as there.
    """
    parts = parts_for(*w.shape) if parts is None else parts
    rows = len(x)
    padded = rows if rows <= PADDED_ROWS else -(-rows // PADDED_ROWS) * PADDED_ROWS
    if not (_many(x) and _aligned(x, w) and agrees(w, padded, parts)):
        return small_gemm(x, w, parts=parts)
    if padded == rows:
        return _library(x, w, parts)
    return _library(F.pad(x, (0, 0, 0, padded - rows)), w, parts)[..., :rows, :].contiguous()


def _many(x: Tensor) -> bool:
    """Whether cuBLAS would be faster."""
    return x.is_cuda and x.dtype == torch.bfloat16 and len(x) > FEW_ROWS


def _aligned(*operands: Tensor) -> bool:
    """Whether cuBLAS, whose choice of kernel follows addresses too, sees them as in a trial."""
    return all(operand.data_ptr() % ALIGNMENT == 0 for operand in operands)


def agrees(w: Tensor, rows: int, parts: int) -> bool:
    """Whether cuBLAS has `small_gemm`'s bits for so many rows; found out the first time."""
    shape = (w.device, rows, *w.shape, parts, w.dtype)
    if shape not in _agreed:
        if _capturing(w.device):
            return False
        draw = torch.Generator(w.device).manual_seed(0)
        x = torch.randn(rows, w.shape[1], generator=draw, device=w.device).to(w.dtype)
        ours, theirs = small_gemm(x, w, parts=parts), _library(x, w, parts)
        bits = torch.int16 if ours.element_size() == 2 else torch.int32
        _agreed[shape] = torch.equal(ours.view(bits), theirs.view(bits))
    return _agreed[shape]


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _library(x: Tensor, w: Tensor, parts: int) -> Tensor:
    """[M, N] in x's type, or fp32 [S, M, N] partial sums."""
    with _uncut():
        if parts == 1:
            return F.linear(x, w)
        inner = x.shape[1] // parts
        left = x.view(len(x), parts, inner).transpose(0, 1)
        right = w.view(len(w), parts, inner).permute(1, 2, 0)
        return torch.bmm(left, right, out_dtype=torch.float32)


@contextmanager
def _uncut() -> Iterator[None]:
    """Inside, cuBLASLt multiplies and does not cut K."""
    settings = torch.backends.cuda.matmul
    library = torch.backends.cuda.preferred_blas_library()
    reduced = (
        settings.allow_bf16_reduced_precision_reduction,
        settings.allow_bf16_reduced_precision_reduction_split_k,
    )
    torch.backends.cuda.preferred_blas_library("cublaslt")
    settings.allow_bf16_reduced_precision_reduction = (False, False)
    try:
        yield
    finally:
        settings.allow_bf16_reduced_precision_reduction = reduced
        torch.backends.cuda.preferred_blas_library(library)
