"""Acceptance on the GPU, and moving the accepted rows' keys and values to their places."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import dependent, enter


@triton.jit
def _accept(
    tokens_ptr, parents_ptr, sizes_ptr, next_ptr, forced_ptr, active_ptr, path_ptr, lengths_ptr,
    bonus_ptr, nodes, max_path,
    FORCED: tl.constexpr, ACTIVE: tl.constexpr, NODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    seq = tl.program_id(0)
    row = seq * nodes
    index = tl.arange(0, NODES)
    real = index < tl.load(sizes_ptr + seq)
    tokens = tl.load(tokens_ptr + row + index, mask=real, other=0)
    parents = tl.load(parents_ptr + row + index, mask=real, other=-1).to(tl.int32)
    limit = tl.load(forced_ptr + seq).to(tl.int32) if FORCED else max_path
    node = tl.zeros((), tl.int32)
    length = tl.full((), 1, tl.int32)
    alive = length > 0
    tl.store(path_ptr + seq * max_path, 0)
    for step in tl.range(1, max_path):
        fits = parents == node
        if not FORCED:
            fits = fits & (tokens == tl.load(next_ptr + row + node))
        child = tl.min(tl.where(fits, index, NODES), 0)
        alive = alive & (child < NODES) & (step < limit)
        node = tl.where(alive, child, node)
        length += alive.to(tl.int32)
        tl.store(path_ptr + seq * max_path + step, tl.where(alive, node, -1))
    if ACTIVE:
        length = tl.where(tl.load(active_ptr + seq) != 0, length, 0)
    tl.store(lengths_ptr + seq, length)
    tl.store(bonus_ptr + seq, tl.load(next_ptr + row + node))


def accept_greedy(
    tokens: Tensor,
    parents: Tensor,
    sizes: Tensor,
    next_tokens: Tensor,
    max_depth: int,
    forced_lengths: Tensor | None = None,
    active: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk down from the root while a child carries the target's token.

    Args:
        tokens, parents: long [B, N]. sizes: long [B].
        next_tokens: long [B, N], the target's token after every node.
        max_depth: no node lies deeper.
        forced_lengths: int [B]; takes first children until the path has this many nodes, whatever
            their tokens: for timing with weights that accept nothing.
        active: int32 [B]; where 0 the length is 0.

    Returns:
        path long [B, max_depth + 1] from the root down, padded with -1; lengths long [B], root
        included; bonus long [B], the target's token after the path.
    """
    batch, nodes = tokens.shape
    path = torch.empty(batch, max_depth + 1, dtype=torch.int64, device=tokens.device)
    lengths = torch.empty(batch, dtype=torch.int64, device=tokens.device)
    bonus = torch.empty(batch, dtype=torch.int64, device=tokens.device)
    _accept[(batch,)](
        tokens, parents, sizes, next_tokens, sizes if forced_lengths is None else forced_lengths,
        sizes if active is None else active, path, lengths, bonus, nodes, max_depth + 1,
        FORCED=forced_lengths is not None, ACTIVE=active is not None,
        NODES=triton.next_power_of_2(nodes),
        num_warps=1 if nodes <= 256 else 4, **dependent(),
    )  # fmt: skip
    return path, lengths, bonus


@triton.jit
def _compact(
    kv_ptr, pages_ptr, prefix_ptr, path_ptr, lengths_ptr, plane, max_pages, max_path,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, PATH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    head = tl.program_id(0) % KV_HEADS
    which = tl.program_id(0) // KV_HEADS  # layer and keys-or-values
    seq = tl.program_id(1)
    step = tl.arange(0, PATH)
    dims = tl.arange(0, HEAD_DIM)
    moved = (step > 0) & (step < tl.load(lengths_ptr + seq))
    prefix = tl.load(prefix_ptr + seq)
    source = prefix + tl.load(path_ptr + seq * max_path + step, mask=moved, other=0).to(tl.int32)
    target = prefix + step
    pages = pages_ptr + seq * max_pages
    kv_ptr += which.to(tl.int64) * plane
    page = tl.load(pages + source // PAGE, mask=moved, other=0).to(tl.int64)
    at = ((page * KV_HEADS + head) * PAGE + source % PAGE) * HEAD_DIM
    rows = tl.load(kv_ptr + at[:, None] + dims, mask=moved[:, None], other=0.0)
    # A place may be another row's source: everything is read before anything is written.
    tl.debug_barrier()
    page = tl.load(pages + target // PAGE, mask=moved, other=0).to(tl.int64)
    at = ((page * KV_HEADS + head) * PAGE + target % PAGE) * HEAD_DIM
    tl.store(kv_ptr + at[:, None] + dims, rows, mask=moved[:, None])


def compact_kv(
    kv: Tensor, page_table: Tensor, prefix_lengths: Tensor, path: Tensor, lengths: Tensor
) -> None:
    """Move row prefix + path[i] to prefix + i for every accepted node, in all layers, in place.

    Args:
        kv: [layers, 2, pages, kv_heads, page_size, head_dim].
        page_table: int32 [B, max_pages]; prefix_lengths: int32 [B], before this round.
        path, lengths: as `accept_greedy` returns them.
    """
    layers, _, pages, kv_heads, page_size, head_dim = kv.shape
    max_path = path.shape[1]
    _compact[(layers * 2 * kv_heads, path.shape[0])](
        kv, page_table, prefix_lengths, path, lengths,
        pages * kv_heads * page_size * head_dim, page_table.shape[1], max_path,
        KV_HEADS=kv_heads, PAGE=page_size, HEAD_DIM=head_dim,
        PATH=triton.next_power_of_2(max_path), num_warps=4,
        **dependent(),
    )  # fmt: skip


@triton.jit
def _advance(
    tokens_ptr, path_ptr, lengths_ptr, bonus_ptr, table_ptr, prefix_ptr, anchors_ptr, ids_ptr,
    out_ptr, history_ptr, positions_ptr, cache_rows_ptr, picked_ptr, nodes, max_path, max_pages,
    ids_stride, capacity,
    HISTORY: tl.constexpr, PAGE: tl.constexpr, PATH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    seq = tl.program_id(0)
    step = tl.arange(0, PATH)
    ok = step < max_path
    length = tl.load(lengths_ptr + seq).to(tl.int32)
    prefix = tl.load(prefix_ptr + seq)
    bonus = tl.load(bonus_ptr + seq)
    node = tl.load(path_ptr + seq * max_path + step, mask=step < length, other=0)
    more = step + 1 < length
    following = tl.load(path_ptr + seq * max_path + step + 1, mask=more, other=0)
    token = tl.load(tokens_ptr + seq * nodes + following, mask=more, other=0)
    token = tl.where(step == length - 1, bonus, token)
    out = out_ptr + seq * (max_path + 1)
    tl.store(out, length.to(tl.int64))
    tl.store(out + 1 + step, token, mask=ok)
    row = prefix + step
    if HISTORY:  # the anchor stands at the prefix already, what it is followed by behind it
        text = history_ptr + seq.to(tl.int64) * capacity
        tl.store(text + 1 + row, token.to(tl.int32), mask=step < length)
    page = tl.load(table_ptr + seq * max_pages + row // PAGE, mask=step < length, other=0)
    at = seq * max_path + step
    tl.store(positions_ptr + at, row, mask=ok)
    cache_row = page.to(tl.int64) * PAGE + row % PAGE
    tl.store(cache_rows_ptr + at, tl.where(step < length, cache_row, -1), mask=ok)
    tl.store(picked_ptr + at, seq * nodes + node, mask=ok)
    tl.store(prefix_ptr + seq, prefix + length)
    if length > 0:
        tl.store(anchors_ptr + seq, bonus)
        tl.store(ids_ptr + seq * ids_stride, bonus)


def advance(
    tokens: Tensor, path: Tensor, lengths: Tensor, bonus: Tensor, page_table: Tensor,
    page_size: int, prefix: Tensor, anchors: Tensor, ids: Tensor, out: Tensor,
    history: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Count a round: what it committed, where its rows lie, and the next round's start.

    Args:
        tokens: long [B, N]; path, lengths, bonus: as `accept_greedy` returns them.
        prefix: int32 [B], grows by `lengths`; anchors: long [B], become the bonus tokens.
        ids: long [B, S], the next draft's slots; column 0 becomes the anchors.
        out: long [B, P + 1], becomes the length and the committed tokens: the path's below its
            root, then the bonus.
        history: int32 [B, R], each sequence's tokens up to its anchor; takes the committed ones.

    Returns:
        For every step of every path, [B P]: position int32, cache row long (-1 beyond the length)
        and node long, counted over the batch.
    """
    batch, max_path = path.shape
    device = path.device
    positions = torch.empty(batch * max_path, dtype=torch.int32, device=device)
    cache_rows = torch.empty(batch * max_path, dtype=torch.int64, device=device)
    picked = torch.empty(batch * max_path, dtype=torch.int64, device=device)
    # One warp: every lane reads the prefix before any writes it.
    _advance[(batch,)](
        tokens, path, lengths, bonus, page_table, prefix, anchors, ids, out,
        prefix if history is None else history, positions, cache_rows, picked, tokens.shape[1],
        max_path, page_table.shape[1], ids.stride(0), 0 if history is None else history.shape[1],
        HISTORY=history is not None, PAGE=page_size, PATH=triton.next_power_of_2(max_path),
        num_warps=1, **dependent(),
    )  # fmt: skip
    return positions, cache_rows, picked
