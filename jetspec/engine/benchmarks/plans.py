"""Launch shapes of the small-M product that are tried in whole rounds."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from kernels import small_gemm
from kernels.small_gemm import GemmPlan

_USUAL = small_gemm.gemm_plan
_BASE = GemmPlan(tokens=16, outputs=128, step=128, warps=4, stages=4)
_HALF = replace(_BASE, outputs=64)
_NARROW = 8192  # outputs: qkv, o and down have fewer, gate_up and lm_head more

# (weights of at most 8,192 outputs, wider ones); the rows of x are put in when launched.
PLANS: list[tuple[GemmPlan, GemmPlan]] = [
    (_BASE, _BASE),
    (replace(_BASE, ahead=0), replace(_BASE, ahead=0)),
    (replace(_BASE, ahead=2048), replace(_BASE, ahead=2048)),
    (replace(_BASE, ahead=4096), replace(_BASE, ahead=4096)),
    (_HALF, _BASE),
    (replace(_HALF, step=256, stages=3), _BASE),
    (replace(_HALF, stages=6), _BASE),
    (_BASE, _HALF),
    (_BASE, replace(_HALF, stages=3)),
    (_BASE, replace(_HALF, step=64, stages=6)),
    (_BASE, replace(_BASE, step=64, stages=6)),
    (_BASE, replace(_BASE, outputs=256, step=64, warps=8, stages=4)),
]


@contextmanager
def planned(narrow: GemmPlan, wide: GemmPlan) -> Iterator[None]:
    """Launches inside take these shapes up to 32 rows."""

    def plan(m: int, n: int, item_bytes: int = 2) -> GemmPlan:
        if m > 32:
            return _USUAL(m, n, item_bytes)
        return replace(narrow if n <= _NARROW else wide, tokens=16 if m <= 16 else 32)

    small_gemm.gemm_plan = plan
    try:
        yield
    finally:
        small_gemm.gemm_plan = _USUAL
