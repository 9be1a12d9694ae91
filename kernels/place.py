"""Where the rows of a pass stand, and rows picked from several tensors."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import dependent, enter


@triton.jit
def _place(
    prefix_ptr, active_ptr, depths_ptr, sizes_ptr, table_ptr, positions_ptr, cache_rows_ptr,
    counts_ptr, nodes, max_pages,
    DEPTHS: tl.constexpr, SIZES: tl.constexpr, PAGE: tl.constexpr, NODES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    seq = tl.program_id(0)
    node = tl.arange(0, NODES)
    ok = node < nodes
    prefix = tl.load(prefix_ptr + seq)
    count = tl.load(sizes_ptr + seq).to(tl.int32) if SIZES else nodes
    count = tl.where(tl.load(active_ptr + seq) != 0, count, 0)
    live = node < count
    at = seq * nodes + node
    depth = tl.load(depths_ptr + at, mask=ok, other=0).to(tl.int32) if DEPTHS else node
    row = prefix + node
    page = tl.load(table_ptr + seq * max_pages + row // PAGE, mask=live, other=0).to(tl.int64)
    tl.store(positions_ptr + at, tl.where(live, prefix + depth, 0), mask=ok)
    tl.store(cache_rows_ptr + at, tl.where(live, page * PAGE + row % PAGE, -1), mask=ok)
    tl.store(counts_ptr + seq, count)


def place_rows(
    prefix: Tensor,
    active: Tensor,
    table: Tensor,
    page_size: int,
    nodes: int,
    depths: Tensor | None = None,
    sizes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(positions int32 [B N], cache rows long [B N], counts int32 [B]) of rows behind a prefix.

    Row v of sequence b lies at prefix[b] + v of its pages; a row beyond the sequence's count, and
    every row of an idle sequence, gets cache row -1 and position 0.

    Args:
        prefix, active: int32 [B]; table: int32 [B, max_pages].
        depths: long [B, N], a row's place in the sequence behind the prefix; None is its number.
        sizes: long [B], rows in use; None is all N.
    """
    batch, max_pages = table.shape
    device = prefix.device
    positions = torch.empty(batch * nodes, dtype=torch.int32, device=device)
    cache_rows = torch.empty(batch * nodes, dtype=torch.int64, device=device)
    counts = torch.empty(batch, dtype=torch.int32, device=device)
    padded = triton.next_power_of_2(nodes)
    _place[(batch,)](
        prefix, active, prefix if depths is None else depths, prefix if sizes is None else sizes,
        table, positions, cache_rows, counts, nodes, max_pages,
        DEPTHS=depths is not None, SIZES=sizes is not None, PAGE=page_size, NODES=padded,
        num_warps=1 if padded <= 128 else 4, **dependent(),
    )  # fmt: skip
    return positions, cache_rows, counts


@triton.jit
def _gather(
    source_ptr, index_ptr, out_ptr, width, out_stride, CHUNK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    ok = column < width
    source = tl.load(index_ptr + row).to(tl.int64)
    values = tl.load(source_ptr + source * width + column, mask=ok, other=0.0)
    tl.store(out_ptr + row * out_stride + column, values, mask=ok)


def gather_rows(sources: Sequence[Tensor], index: Tensor) -> Tensor:
    """Row index[r] of every source, side by side: [R, n x d].

    Args:
        sources: n tensors [T, d], contiguous.
        index: long [R].
    """
    width, rows = sources[0].shape[1], len(index)
    out = torch.empty(
        rows, len(sources) * width, dtype=sources[0].dtype, device=sources[0].device
    )  # fmt: skip
    chunk = min(1024, triton.next_power_of_2(width))
    for number, source in enumerate(sources):
        _gather[(rows, triton.cdiv(width, chunk))](
            source, index, out[:, number * width :], width, out.stride(0), CHUNK=chunk,
            num_warps=4, **dependent(),
        )  # fmt: skip
    return out
