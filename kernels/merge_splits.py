"""Merging the splits of an attention: unnormalised outputs with their maxima and sums, in order."""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import enter

MERGE = 8
"""Splits merged at once; a constant of the reduction order, not a tuning knob."""
MERGED_ROWS = 4
"""Heads of a node that one program of the merge takes, where they divide so."""
LAST_ROWS = 16
"""Rows that the last program of a tile merges at a time."""


@dataclass(frozen=True)
class Workspace:
    """Partial results of the splits: out [S, rows, head_dim] fp32, top and total [S, rows]."""

    out: Tensor
    top: Tensor
    total: Tensor

    @classmethod
    def allocate(cls, splits: int, rows: int, head_dim: int, device: torch.device) -> "Workspace":
        """rows: batch x nodes x query heads."""
        return cls(
            torch.empty(splits, rows, head_dim, dtype=torch.float32, device=device),
            torch.empty(splits, rows, dtype=torch.float32, device=device),
            torch.empty(splits, rows, dtype=torch.float32, device=device),
        )


@functools.cache
def _zeros(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.int32, device=device)


def counters(count: int, device: torch.device) -> Tensor:
    """int32: where programs of one launch meet; every launch leaves them at 0.

    Launches that share them must follow each other on one stream.
    """
    return _zeros(triton.next_power_of_2(max(count, 1024)), device)


@triton.jit
def split_size(
    prefix, count, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """KV rows a split for a prefix and `count` rows behind it.

    SPLIT, doubled until MAX_SPLITS cover the prefix; EVEN: the fewest times SPLIT that let
    MAX_SPLITS cover everything.
    """
    if EVEN:
        size = tl.maximum(tl.cdiv(tl.cdiv(prefix + count, MAX_SPLITS), SPLIT), 1) * SPLIT
    else:
        size = SPLIT
        while size * MAX_SPLITS < prefix:
            size = size * 2
    return size


@triton.jit
def fold_splits(
    acc, top, total, new_top, part_ptr, top_ptr, sum_ptr, row, live, first, used, rows_in_all,
    HEAD_DIM: tl.constexpr, MERGE: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """(acc, total): splits first..first + MERGE - 1, of `used`, folded into the running output.

    Args:
        acc: [R, HEAD_DIM], with its maximum `top` and sum `total`, both [R].
        new_top: [R], the maximum of `top` and of those splits' own.
        row: [R], of the partial results, of which each split has `rows_in_all`.
        CACHE: cache modifier of the loads.
    """
    dims = tl.arange(0, HEAD_DIM)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    keep = tl.exp2(top - base)
    acc = acc * keep[:, None]
    total = total * keep
    for index in tl.static_range(MERGE):
        split = first + index
        there = (split < used) & live
        at = split * rows_in_all + row
        tops = tl.load(top_ptr + at, mask=there, other=float("-inf"), cache_modifier=CACHE)
        sums = tl.load(sum_ptr + at, mask=there, other=0.0, cache_modifier=CACHE)
        part = tl.load(
            part_ptr + at[:, None].to(tl.int64) * HEAD_DIM + dims[None, :],
            mask=there[:, None], other=0.0, cache_modifier=CACHE,
        )  # fmt: skip
        weight = tl.exp2(tops - base)
        acc += part * weight[:, None]
        total += sums * weight
    return acc, total


@triton.jit
def merged_rows(
    part_ptr, top_ptr, sum_ptr, row, live, used, rows_in_all,
    HEAD_DIM: tl.constexpr, MERGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """fp32 [ROWS, HEAD_DIM]: the rows' attention from their first `used` splits; 0 if not live."""
    acc = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    for first in tl.range(0, used, MERGE):
        new_top = top
        for index in tl.static_range(MERGE):
            split = first + index
            at = split * rows_in_all + row
            there = (split < used) & live
            # Another program of this launch may have written it: not from the near cache.
            tops = tl.load(top_ptr + at, mask=there, other=float("-inf"), cache_modifier=".cg")
            new_top = tl.maximum(new_top, tops)
        acc, total = fold_splits(
            acc, top, total, new_top, part_ptr, top_ptr, sum_ptr, row, live, first, used,
            rows_in_all, HEAD_DIM, MERGE, ".cg",
        )  # fmt: skip
        top = new_top
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def _merge(
    part_ptr, top_ptr, sum_ptr, prefix_ptr, counts_ptr, out_ptr, nodes, batch,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
    EVEN: tl.constexpr, MERGE: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    first_row = tl.program_id(0) * ROWS  # heads of one node
    row = first_row + tl.arange(0, ROWS)
    node = first_row // HEADS % nodes
    seq = first_row // HEADS // nodes
    prefix = tl.load(prefix_ptr + seq)
    count = tl.load(counts_ptr + seq)
    used = tl.cdiv(prefix + count, split_size(prefix, count, SPLIT, MAX_SPLITS, EVEN))
    used = tl.where(node < count, used, 0)  # a padding row gets zeros
    out = merged_rows(
        part_ptr, top_ptr, sum_ptr, row, row >= 0, used, batch * nodes * HEADS,
        HEAD_DIM, MERGE, ROWS,
    )  # fmt: skip
    out_at = out_ptr + row.to(tl.int64)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty))


@triton.jit
def last_to_arrive(counter_ptr, arrivals):
    """Whether this program is the last of `arrivals` at the counter, which then is 0 again.

    What the others stored before they came is visible to it.
    """
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    last = arrived == arrivals - 1
    if last:
        tl.store(counter_ptr, 0)
    return last
