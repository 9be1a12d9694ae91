"""Attention whose bits depend on a row's own (position, key, value) sequence and nothing else.

A row at position P sees positions 0..P. They are cut in two by P alone:

- all but the last TAIL: tiles and splits at fixed absolute positions, over the cache's columns.
  No node of a tree lies deeper than TAIL - 1, so these rows are committed, each in the column of
  its position, whether P is a node, a chain's row, a prompt's or the one token of plain decoding.
- the last TAIL, in the order of their positions: gathered row by row, from the committed columns
  and then along the row's own ancestors. A token has the same place there before and after it is
  committed. One program a (row, KV head), in the kernel that merges the splits behind it.

A tree costs no masked tiles, its ancestor bits are not needed, and no row reads another branch.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_plans import Plan, plan_for
from kernels.kv_tiles import LOG2_E, fold, next_tiles, tile_sources
from kernels.launch import dot, enter, unfused
from kernels.merge_splits import MERGE, Workspace, fold_splits

TAIL = 32
"""Positions a row gathers, itself included; part of the reduction order."""


@dataclass(frozen=True)
class Cuts:
    """Where the committed rows are cut: fixed positions, a part of the reduction order.

    Attributes:
        size: rows of the first splits; a multiple of the tile.
        octave: after 2 x octave splits the size doubles, and again after every octave more.
    """

    size: int = 256
    octave: int = 8

    def used(self, rows: int) -> int:
        """Splits that cover `rows` rows."""
        size, before = self.size, 0
        while size * 2 * self.octave < rows:
            size, before = size * 2, before + self.octave
        return before + -(-rows // size)


@triton.jit
def _cut(split, SIZE: tl.constexpr, OCTAVE: tl.constexpr):
    """(first row of a split, first row behind it)."""
    over = tl.maximum(split - OCTAVE, 0)
    size = SIZE << (over // OCTAVE)
    low = tl.where(split < OCTAVE, split, OCTAVE + over % OCTAVE) * size
    return low, low + size


@triton.jit
def _cuts_used(rows, SIZE: tl.constexpr, OCTAVE: tl.constexpr):
    size = tl.full((), SIZE, tl.int32)
    before = tl.full((), 0, tl.int32)
    while size * 2 * OCTAVE < rows:
        size = size * 2
        before += OCTAVE
    return before + tl.cdiv(tl.maximum(rows, 0), size)


@triton.jit
def _attend_committed(
    q_ptr, k_ptr, v_ptr, pages_ptr, counts_ptr, positions_ptr, out_ptr, top_ptr, sum_ptr,
    scale, max_pages, nodes, batch,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    TAIL: tl.constexpr, SIZE: tl.constexpr, OCTAVE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, DESCRIPTORS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    tiles_of_rows = tl.cdiv(nodes * GROUP, ROWS)
    row_tile = tl.program_id(0) % tiles_of_rows
    head = tl.program_id(0) // tiles_of_rows
    split = tl.program_id(1)
    seq = tl.program_id(2)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    node = rows // GROUP
    live = node < tl.load(counts_ptr + seq)
    position = tl.load(positions_ptr + seq * nodes + node, mask=live, other=0)
    seen = tl.where(live, tl.maximum(position - (TAIL - 1), 0), 0)  # columns before the row's tail
    most = tl.max(seen, 0)
    least = tl.min(tl.where(live, seen, most), 0)
    low, high = _cut(split, SIZE, OCTAVE)
    high = tl.minimum(high, most)
    if low < high:
        dims = tl.arange(0, HEAD_DIM)
        cols = tl.arange(0, TILE)
        flat = ((seq * nodes + node) * KV_HEADS + head) * GROUP + rows % GROUP
        q = tl.load(q_ptr + flat[:, None] * HEAD_DIM + dims, mask=live[:, None], other=0.0)
        acc = tl.zeros((ROWS, HEAD_DIM), tl.float32)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        pages_ptr += seq * max_pages
        last = (high - 1) // PAGE
        page = tl.load(pages_ptr + tl.minimum(low // PAGE, last))
        unmasked = tl.minimum(high, least // TILE * TILE)
        for start in tl.range(low, unmasked, TILE):
            k, v, page = next_tiles(
                k_ptr, v_ptr, pages_ptr, page, head, start, last, KV_HEADS, HEAD_DIM, PAGE, TILE,
                DESCRIPTORS,
            )  # fmt: skip
            acc, top, total = fold(q, k, v, acc, top, total, live[:, None], scale, False)
        for start in tl.range(tl.maximum(low, unmasked), high, TILE, num_stages=2):
            k, v, page = next_tiles(
                k_ptr, v_ptr, pages_ptr, page, head, start, last, KV_HEADS, HEAD_DIM, PAGE, TILE,
                DESCRIPTORS,
            )  # fmt: skip
            allowed = (start + cols)[None, :] < seen[:, None]
            acc, top, total = fold(q, k, v, acc, top, total, allowed, scale, True)
        flat += split * batch * nodes * KV_HEADS * GROUP
        tl.store(top_ptr + flat, top, mask=live)
        tl.store(sum_ptr + flat, total, mask=live)
        out_at = out_ptr + flat[:, None].to(tl.int64) * HEAD_DIM + dims
        tl.store(out_at, acc, mask=live[:, None])


# Sizes are never specialised on: plain rows and trees run the same machine code.
@triton.jit(do_not_specialize=["max_pages", "nodes", "batch", "trees"])
def _finish(
    q_ptr, k_ptr, v_ptr, pages_ptr, prefix_ptr, counts_ptr, positions_ptr, ancestors_ptr,
    part_ptr, top_ptr, sum_ptr, out_ptr, scale, max_pages, nodes, batch, trees,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr, TAIL: tl.constexpr, SIZE: tl.constexpr, OCTAVE: tl.constexpr,
    MERGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    head = tl.program_id(0)
    node = tl.program_id(1)
    seq = tl.program_id(2)
    alive = node < tl.load(counts_ptr + seq)
    dims = tl.arange(0, HEAD_DIM)
    heads = tl.arange(0, ROWS)
    mine = heads < GROUP
    flat = ((seq * nodes + node) * KV_HEADS + head) * GROUP + heads
    at = flat.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
    position = tl.load(positions_ptr + seq * nodes + node)
    prefix = tl.load(prefix_ptr + seq)
    q = tl.load(q_ptr + at, mask=mine[:, None], other=0.0)

    back = TAIL - 1 - tl.arange(0, TAIL)  # steps back from the row, so that positions ascend
    column = position - back
    there = (column >= 0) & alive
    behind = there & (column >= prefix) & (trees != 0)
    ancestor = tl.load(ancestors_ptr + (seq * nodes + node) * TAIL + back, mask=behind, other=0)
    column = tl.where(behind, prefix + ancestor, column)
    page = tl.load(pages_ptr + seq * max_pages + column // PAGE, mask=there, other=0)
    line = (page.to(tl.int64) * KV_HEADS + head) * PAGE + column % PAGE
    source = line[:, None] * HEAD_DIM + dims[None, :]
    k = tl.load(k_ptr + source, mask=there[:, None], other=0.0)
    v = tl.load(v_ptr + source, mask=there[:, None], other=0.0)
    scores = dot(q, tl.trans(k)) * scale
    scores = tl.where(there[None, :], scores, float("-inf"))
    top = tl.max(scores, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(scores - base[:, None])
    total = tl.sum(weight, 1)
    acc = dot(weight.to(v.dtype), v)

    used = _cuts_used(position - (TAIL - 1), SIZE, OCTAVE)
    used = tl.where(alive, used, 0)
    rows_in_all = batch * nodes * KV_HEADS * GROUP
    for first in tl.range(0, used, MERGE):
        new_top = top
        for index in tl.static_range(MERGE):
            split = first + index
            filled = (split < used) & mine
            tops = tl.load(top_ptr + split * rows_in_all + flat, mask=filled, other=float("-inf"))
            new_top = tl.maximum(new_top, tops)
        acc, total = fold_splits(
            acc, top, total, new_top, part_ptr, top_ptr, sum_ptr, flat, mine, first, used,
            rows_in_all, HEAD_DIM, MERGE, "",
        )  # fmt: skip
        top = new_top
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mine[:, None])


def exact_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    prefix_lengths: Tensor,
    node_counts: Tensor,
    positions: Tensor,
    ancestors: Tensor | None,
    *,
    max_context: int,
    scale: float | None = None,
    plan: Plan | None = None,
    cuts: Cuts = Cuts(),
    out: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v, [B, N, heads, head_dim], the bits independent of batch and tree.

    Args:
        q, keys, values, page_table, prefix_lengths, node_counts, max_context, scale: as in
            `tree_attention.tree_attention`.
        positions: int32 [B N], each row's place in its sequence; at most TAIL - 1 behind a prefix
            where there are ancestors.
        ancestors: int32 [B, N, TAIL] from `tree_build.list_ancestors`. None is causal: row v lies
            at prefix + v and sees all before it.

    Raises:
        ValueError: shapes that the kernels have no path for.
    """
    batch, nodes, heads, head_dim = q.shape
    _, kv_heads, page_size, _ = keys.shape
    group = heads // kv_heads
    plan = plan or plan_for(nodes, group, kv_heads * batch, page_size, q.element_size())
    key_source, value_source = tile_sources(keys, values, heads, cuts.size, plan)
    splits = cuts.used(max_context)
    space = Workspace.allocate(splits, batch * nodes * heads, head_dim, q.device)
    out = torch.empty_like(q) if out is None else out
    scale = (head_dim**-0.5 if scale is None else scale) * LOG2_E
    order = {"TAIL": TAIL, "SIZE": cuts.size, "OCTAVE": cuts.octave}
    _attend_committed[(triton.cdiv(nodes * group, plan.rows) * kv_heads, splits, batch)](
        q, key_source, value_source, page_table, node_counts, positions,
        space.out, space.top, space.total, scale, page_table.shape[1], nodes, batch,
        KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, PAGE=page_size, **order,
        ROWS=plan.rows, TILE=plan.tile, DESCRIPTORS=plan.descriptors,
        num_warps=plan.warps, num_stages=plan.stages, **unfused(),
    )  # fmt: skip
    _finish[(kv_heads, nodes, batch)](
        q, keys, values, page_table, prefix_lengths, node_counts, positions,
        positions if ancestors is None else ancestors, space.out, space.top, space.total, out,
        scale, page_table.shape[1], nodes, batch, int(ancestors is not None),
        KV_HEADS=kv_heads, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim, PAGE=page_size, **order, MERGE=MERGE, num_warps=4, **unfused(),
    )  # fmt: skip
    return out
