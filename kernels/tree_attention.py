"""Attention of a draft tree's rows over a paged KV cache (paper eq. 8), without a dense bias.

Every sequence has a committed prefix of n rows in its pages, and the rows of this round (root and
draft nodes, or one token, or a chunk of a prompt) behind it at n, n + 1, .... Node v sees the
prefix, its ancestors and itself: prefix tiles carry no mask, the tiles from the prefix's last one
on test one packed bit per (node, row of this round).

The query heads that share a KV head are stacked: row r of a KV head is node r // group, head
r % group. Keys are cut at fixed positions into splits that run side by side; each leaves an
unnormalised output with its maximum and sum, and a second kernel merges them in a fixed order.
A tile's columns are always the same positions, but a node's ancestors stand in other columns than
the same tokens do once committed, and many rows are cut less often than few: bits that depend on
neither are `exact_attention`'s.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_plans import Plan, plan_for, splits_for, splits_needed
from kernels.kv_tiles import LOG2_E, fold, fold_across, next_tiles, tile_sources
from kernels.launch import dependent, enter
from kernels.merge_splits import (
    LAST_ROWS,
    MERGE,
    MERGED_ROWS,
    Workspace,
    _merge,
    counters,
    last_to_arrive,
    merged_rows,
    split_size,
)


@triton.jit
def _tile_words(bits, first, WORDS: tl.constexpr, node_ok, chunk: tl.constexpr):
    """uint32 [R]: the 32 ancestor bits of each row for tree rows first + 32*chunk and on."""
    word = (first >> 5) + chunk
    low = tl.load(bits + word, mask=node_ok & (word >= 0) & (word < WORDS), other=0)
    high = tl.load(bits + word + 1, mask=node_ok & (word + 1 >= 0) & (word + 1 < WORDS), other=0)
    low = low.to(tl.uint32, bitcast=True).to(tl.uint64)
    high = high.to(tl.uint32, bitcast=True).to(tl.uint64)
    shift = (first & 31).to(tl.uint64)
    return (((high << 32) | low) >> shift).to(tl.uint32)


@triton.jit
def _seen(
    bits_ptr, start, prefix, node, live, cols, WORDS: tl.constexpr, CAUSAL: tl.constexpr,
    TILE: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """bool [R, T], or [T, R] across: which KV rows of the tile at `start` each row may see."""
    row_axis: tl.constexpr = 0 if ACROSS else 1
    place = tl.expand_dims(cols, 1 - row_axis)
    if CAUSAL:
        allowed = start + place <= prefix + tl.expand_dims(node, row_axis)
    else:
        bits = bits_ptr + node * WORDS
        words = tl.zeros_like(place + tl.expand_dims(node, row_axis)).to(tl.uint32)
        for chunk in tl.static_range((TILE + 31) // 32):
            part = _tile_words(bits, start - prefix, WORDS, live, chunk)
            words = tl.where(place // 32 == chunk, tl.expand_dims(part, row_axis), words)
        bit = (words >> (place & 31).to(tl.uint32)) & 1
        allowed = (start + place < prefix) | (bit != 0)
    return allowed


@triton.jit
def _walk(
    q_ptr, k_ptr, v_ptr, pages_ptr, bits_ptr, part_ptr, top_ptr, sum_ptr, out_ptr,
    first_row, head, seq, part, whole, prefix, count, low, high, scale, nodes,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    WORDS: tl.constexpr, CAUSAL: tl.constexpr, ROWS: tl.constexpr, ACROSS: tl.constexpr,
    TILE: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """KV rows low..high for ROWS query rows from `first_row` on and ACROSS more behind them.

    Args:
        part: where this split's partial results begin, in rows.
        whole: this split is the only one: its results are the output.
    """
    dims = tl.arange(0, HEAD_DIM)
    cols = tl.arange(0, TILE)
    bits_ptr += seq * nodes * WORDS
    if ROWS:
        rows = first_row + tl.arange(0, ROWS)
        node = rows // GROUP
        live = node < count
        # [B, N, KV_HEADS, GROUP, HEAD_DIM]: query heads of one KV head are neighbours.
        flat = ((seq * nodes + node) * KV_HEADS + head) * GROUP + rows % GROUP
        q = tl.load(q_ptr + flat[:, None] * HEAD_DIM + dims, mask=live[:, None], other=0.0)
        acc = tl.zeros((ROWS, HEAD_DIM), tl.float32)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
    if ACROSS:
        # A few rows as the matrix instruction's narrow operand: its wide one is the KV tile.
        rows_x = first_row + ROWS + tl.arange(0, ACROSS)
        node_x = rows_x // GROUP
        live_x = node_x < count
        flat_x = ((seq * nodes + node_x) * KV_HEADS + head) * GROUP + rows_x % GROUP
        q_x = tl.load(
            q_ptr + flat_x[None, :] * HEAD_DIM + dims[:, None], mask=live_x[None, :], other=0.0
        )
        acc_x = tl.zeros((HEAD_DIM, ACROSS), tl.float32)
        top_x = tl.full((ACROSS,), float("-inf"), tl.float32)
        total_x = tl.zeros((ACROSS,), tl.float32)

    if CAUSAL:
        high = tl.minimum(high, prefix + (first_row + ROWS + ACROSS - 1) // GROUP + 1)
    last = tl.maximum(high - 1, 0) // PAGE
    page = tl.load(pages_ptr + tl.minimum(low // PAGE, last))
    unmasked = tl.minimum(high, prefix // TILE * TILE)
    for start in tl.range(low, unmasked, TILE):
        k, v, page = next_tiles(
            k_ptr, v_ptr, pages_ptr, page, head, start, last, KV_HEADS, HEAD_DIM, PAGE, TILE,
            DESCRIPTORS,
        )  # fmt: skip
        if ROWS:
            acc, top, total = fold(q, k, v, acc, top, total, live[:, None], scale, False)
        if ACROSS:
            acc_x, top_x, total_x = fold_across(
                q_x, k, v, acc_x, top_x, total_x, live_x[None, :], scale, False
            )

    for start in tl.range(tl.maximum(low, unmasked), high, TILE, num_stages=2):
        k, v, page = next_tiles(
            k_ptr, v_ptr, pages_ptr, page, head, start, last, KV_HEADS, HEAD_DIM, PAGE, TILE,
            DESCRIPTORS,
        )  # fmt: skip
        if ROWS:
            allowed = _seen(bits_ptr, start, prefix, node, live, cols, WORDS, CAUSAL, TILE, False)
            acc, top, total = fold(q, k, v, acc, top, total, allowed, scale, True)
        if ACROSS:
            allowed_x = _seen(
                bits_ptr, start, prefix, node_x, live_x, cols, WORDS, CAUSAL, TILE, True
            )
            acc_x, top_x, total_x = fold_across(
                q_x, k, v, acc_x, top_x, total_x, allowed_x, scale, True
            )

    if ROWS:
        if whole:
            divisor = tl.where(total > 0, total, 1.0)
            out = tl.where(live[:, None], acc / divisor[:, None], 0.0)
            tl.store(
                out_ptr + flat[:, None] * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty),
                mask=(node < nodes)[:, None],
            )  # fmt: skip
        else:
            flat += part
            tl.store(top_ptr + flat, top, mask=live)
            tl.store(sum_ptr + flat, total, mask=live)
            tl.store(part_ptr + flat[:, None] * HEAD_DIM + dims, acc, mask=live[:, None])
    if ACROSS:
        if whole:
            divisor = tl.where(total_x > 0, total_x, 1.0)
            out_x = tl.where(live_x[None, :], acc_x / divisor[None, :], 0.0)
            tl.store(
                out_ptr + flat_x[None, :] * HEAD_DIM + dims[:, None],
                out_x.to(out_ptr.dtype.element_ty), mask=(node_x < nodes)[None, :],
            )  # fmt: skip
        else:
            flat_x += part
            tl.store(top_ptr + flat_x, top_x, mask=live_x)
            tl.store(sum_ptr + flat_x, total_x, mask=live_x)
            at = part_ptr + flat_x[None, :] * HEAD_DIM + dims[:, None]
            tl.store(at, acc_x, mask=live_x[None, :])


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, pages_ptr, prefix_ptr, counts_ptr, bits_ptr, part_ptr, top_ptr, sum_ptr,
    counters_ptr, out_ptr, scale, max_pages, nodes, batch,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr,
    WORDS: tl.constexpr, CAUSAL: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
    ROWS: tl.constexpr, ACROSS: tl.constexpr, TILE: tl.constexpr, DESCRIPTORS: tl.constexpr,
    JOINED: tl.constexpr, EVEN: tl.constexpr, MERGE: tl.constexpr, LAST_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    tiles_of_rows = tl.num_programs(0) // KV_HEADS
    row_tile = tl.program_id(0) % tiles_of_rows
    head = tl.program_id(0) // tiles_of_rows
    split = tl.program_id(1)
    seq = tl.program_id(2)

    prefix = tl.load(prefix_ptr + seq)
    count = tl.load(counts_ptr + seq)
    size = split_size(prefix, count, SPLIT, MAX_SPLITS, EVEN)
    low = split * size
    high = tl.minimum(low + size, prefix + count)
    # All tiles have ROWS rows; those that are left over go across, beside the last.
    first_row = row_tile * (ROWS if ROWS else ACROSS)
    part = split * batch * nodes * KV_HEADS * GROUP
    used = tl.cdiv(prefix + count, size)
    whole = used == 1 if JOINED else False
    merging = split < 0
    if (low < high) & (first_row < count * GROUP):
        pages_ptr += seq * max_pages
        if ROWS and ACROSS:
            if row_tile == tiles_of_rows - 1:
                _walk(
                    q_ptr, k_ptr, v_ptr, pages_ptr, bits_ptr, part_ptr, top_ptr, sum_ptr,
                    out_ptr, first_row, head, seq, part, whole, prefix, count, low, high, scale,
                    nodes, KV_HEADS, GROUP, HEAD_DIM, PAGE, WORDS, CAUSAL, ROWS, ACROSS, TILE,
                    DESCRIPTORS,
                )  # fmt: skip
            else:
                _walk(
                    q_ptr, k_ptr, v_ptr, pages_ptr, bits_ptr, part_ptr, top_ptr, sum_ptr,
                    out_ptr, first_row, head, seq, part, whole, prefix, count, low, high, scale,
                    nodes, KV_HEADS, GROUP, HEAD_DIM, PAGE, WORDS, CAUSAL, ROWS, 0, TILE,
                    DESCRIPTORS,
                )  # fmt: skip
        else:
            _walk(
                q_ptr, k_ptr, v_ptr, pages_ptr, bits_ptr, part_ptr, top_ptr, sum_ptr,
                out_ptr, first_row, head, seq, part, whole, prefix, count, low, high, scale, nodes,
                KV_HEADS, GROUP, HEAD_DIM, PAGE, WORDS, CAUSAL, ROWS, ACROSS, TILE, DESCRIPTORS,
            )  # fmt: skip
        if JOINED:
            counter = counters_ptr + seq * tl.num_programs(0) + tl.program_id(0)
            if used > 1:
                merging = last_to_arrive(counter, used)
    elif JOINED:
        merging = split == 0  # nobody comes: rows of padding are zeros
    if JOINED and merging:
        beside = ACROSS if ROWS == 0 or row_tile == tiles_of_rows - 1 else 0
        stop = tl.minimum(first_row + ROWS + beside, nodes * GROUP)
        dims = tl.arange(0, HEAD_DIM)
        for first in tl.range(first_row, stop, LAST_ROWS, num_stages=1):
            rows = first + tl.arange(0, LAST_ROWS)
            node = rows // GROUP
            flat = ((seq * nodes + node) * KV_HEADS + head) * GROUP + rows % GROUP
            out = merged_rows(
                part_ptr, top_ptr, sum_ptr, flat, node < count, used,
                batch * nodes * KV_HEADS * GROUP, HEAD_DIM, MERGE, LAST_ROWS,
            )  # fmt: skip
            out_at = out_ptr + flat.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
            tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=(rows < stop)[:, None])


def tree_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    prefix_lengths: Tensor,
    node_counts: Tensor,
    ancestor_bits: Tensor | None,
    *,
    max_context: int,
    scale: float | None = None,
    plan: Plan | None = None,
    split: int | None = None,
    max_splits: int | None = None,
    workspace: Workspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T * scale) v under the tree's mask, [B, N, heads, head_dim].

    Args:
        q: [B, N, heads, head_dim], contiguous; rows from node_counts[b] on are padding.
        keys, values: [pages, kv_heads, page_size, head_dim] of one layer, finite everywhere (a
            masked value is multiplied by 0). This round's rows are already written.
        page_table: int32 [B, max_pages].
        prefix_lengths: int32 [B], committed rows n; this round's row v lies at n + v.
        node_counts: int32 [B], rows of this round, at most N.
        ancestor_bits: int32 [B, N, words] from `tree_build.pack_ancestors`: bit u % 32 of word
            u // 32 says that row v may see row u. None is causal: row v sees rows 0..v.
        max_context: no prefix plus rows is longer; sizes the grid and the workspace.
        scale: 1 / sqrt(head_dim) when None.
        split, max_splits: other cuts than `splits_for` gives. With `max_splits` large they lie at
            multiples of `split` whatever the length.

    Raises:
        ValueError: shapes that the kernel has no path for.
    """
    batch, nodes, heads, head_dim = q.shape
    _, kv_heads, page_size, _ = keys.shape
    group = heads // kv_heads
    plan = plan or plan_for(nodes, group, kv_heads * batch, page_size, q.element_size())
    row_tiles, across = plan.tiles(nodes * group)
    usual = splits_for(row_tiles * kv_heads * batch, plan.even)
    split, max_splits = split or usual[0], max_splits or usual[1]
    key_source, value_source = tile_sources(keys, values, heads, split, plan)
    splits = splits_needed(nodes, max_context, split, max_splits, plan.even)
    if workspace is None:
        workspace = Workspace.allocate(splits, batch * nodes * heads, head_dim, q.device)
    if out is None:
        out = torch.empty_like(q)
    scale = head_dim**-0.5 if scale is None else scale
    words = 1 if ancestor_bits is None else ancestor_bits.shape[-1]
    _attend[(row_tiles * kv_heads, splits, batch)](
        q, key_source, value_source, page_table, prefix_lengths, node_counts,
        prefix_lengths if ancestor_bits is None else ancestor_bits,
        workspace.out, workspace.top, workspace.total,
        counters(row_tiles * kv_heads * batch, q.device) if plan.joined else prefix_lengths, out,
        scale * LOG2_E, page_table.shape[1], nodes, batch,
        KV_HEADS=kv_heads, GROUP=group, HEAD_DIM=head_dim, PAGE=page_size, WORDS=words,
        CAUSAL=ancestor_bits is None, SPLIT=split, MAX_SPLITS=max_splits,
        ROWS=plan.rows, ACROSS=across, TILE=plan.tile, DESCRIPTORS=plan.descriptors,
        JOINED=plan.joined, EVEN=plan.even, MERGE=MERGE, LAST_ROWS=LAST_ROWS,
        num_warps=plan.warps, num_stages=plan.stages, **dependent(),
    )  # fmt: skip
    if plan.joined:
        return out
    merged = math.gcd(MERGED_ROWS, heads)
    _merge[(batch * nodes * heads // merged,)](
        workspace.out, workspace.top, workspace.total, prefix_lengths, node_counts, out,
        nodes, batch, HEADS=heads, HEAD_DIM=head_dim, SPLIT=split, MAX_SPLITS=max_splits,
        EVEN=plan.even, MERGE=MERGE, ROWS=merged, num_warps=merged, **dependent(),
    )  # fmt: skip
    return out
