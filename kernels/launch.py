"""Programmatic dependent launch: a kernel's programs are placed while the kernel before still runs.

Every kernel of a round calls `enter` before it reads or writes memory. It lets the next kernel's
programs be placed at once and then waits until the kernel before it has finished. What a kernel
does before `enter` (reading weights ahead) overlaps with its predecessors.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl

_state = {"overlap": True}
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def enter(PDL: tl.constexpr):
    """The start of a kernel that may have been placed early."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def dot(a, b, acc=None):
    """a @ b (+ acc) in fp32. Triton's interpreter multiplies bf16 as integers: it gets fp32."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@functools.cache
def _hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


def dependent() -> dict[str, bool]:
    """Launch keywords: whether the kernel may be placed early."""
    if _state["overlap"] and _hopper():
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def unfused() -> dict[str, bool]:
    """Launch keywords of a kernel whose bits must not depend on how it was compiled.

    A product and the sum behind it may become one instruction that rounds once. Which ones do is
    the compiler's choice, and it differs between two loops of a kernel and between two launches of
    different sizes. Here every operation rounds by itself.
    """
    return {"enable_fp_fusion": False, **dependent()}


@contextmanager
def overlap(allowed: bool) -> Iterator[None]:
    """Launches inside may, or may not, be placed early; for measuring what that brings."""
    before = _state["overlap"]
    _state["overlap"] = allowed
    try:
        yield
    finally:
        _state["overlap"] = before
