"""Programmatic dependent launch: a kernel's programs are placed while the kernel before still runs.

Every kernel of a round calls `enter` before it reads or writes memory. It lets the next kernel's
programs be placed at once and then waits until the kernel before it has finished. What a kernel
does before `enter` (reading weights ahead) overlaps with its predecessors.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES = 64
_PREFETCH = "cp.async.bulk.prefetch.L2.global [$1], {}; mov.u32 $0, 0;"

_state = {"overlap": True}


@triton.jit
def enter(PDL: tl.constexpr):
    """The start of a kernel that may have been placed early."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def read_ahead(w_ptr, rows, row_bytes, program, programs, ASM: tl.constexpr, LANES: tl.constexpr):
    """The start of every weight row to the L2 cache, the rows shared out among the programs."""
    for first in tl.range(program * LANES, rows, programs * LANES):
        row = tl.minimum(first + tl.arange(0, LANES), rows - 1).to(tl.int64)
        at = w_ptr.to(tl.int64) + row * row_bytes
        tl.inline_asm_elementwise(ASM, "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


@dataclass(frozen=True)
class Ahead:
    """A weight whose product comes next: a kernel that leaves memory idle fetches its beginning.

    Attributes:
        weight: [N, K].
        bytes: of every row, a multiple of 16.
    """

    weight: Tensor
    bytes: int


def ahead_arguments(ahead: Ahead | None, like: Tensor) -> tuple[Tensor, int, int]:
    """(weight, rows, bytes a row) for a kernel that reads ahead; stand-ins when there is none."""
    if ahead is None:
        return like, 0, 0
    weight = ahead.weight
    return weight, weight.shape[0], weight.stride(0) * weight.element_size()


def ahead_options(ahead: Ahead | None) -> dict[str, str]:
    """The launch keyword that goes with `ahead_arguments`; empty where nothing reads ahead."""
    on = ahead is not None and ahead.bytes > 0 and dependent()["PDL"]
    return {"AHEAD": _PREFETCH.format(ahead.bytes) if on and ahead else ""}


@functools.cache
def _hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


def dependent() -> dict[str, bool]:
    """Launch keywords: whether the kernel may be placed early."""
    if _state["overlap"] and _hopper():
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@contextmanager
def overlap(allowed: bool) -> Iterator[None]:
    """Launches inside may, or may not, be placed early; for measuring what that brings."""
    before = _state["overlap"]
    _state["overlap"] = allowed
    try:
        yield
    finally:
        _state["overlap"] = before
