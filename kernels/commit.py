"""Acceptance on the GPU, and moving the accepted rows' keys and values to their places."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _accept(
    tokens_ptr, parents_ptr, sizes_ptr, next_ptr, forced_ptr, path_ptr, lengths_ptr, bonus_ptr,
    nodes, max_path,
    FORCED: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
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
    tl.store(lengths_ptr + seq, length)
    tl.store(bonus_ptr + seq, tl.load(next_ptr + row + node))


def accept_greedy(
    tokens: Tensor,
    parents: Tensor,
    sizes: Tensor,
    next_tokens: Tensor,
    max_depth: int,
    forced_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk down from the root while a child carries the target's token.

    Args:
        tokens, parents: long [B, N]. sizes: long [B].
        next_tokens: long [B, N], the target's token after every node.
        max_depth: no node lies deeper.
        forced_lengths: int [B]; takes first children until the path has this many nodes, whatever
            their tokens: for timing with weights that accept nothing.

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
        path, lengths, bonus, nodes, max_depth + 1,
        FORCED=forced_lengths is not None, NODES=triton.next_power_of_2(nodes),
        num_warps=1 if nodes <= 256 else 4,
    )  # fmt: skip
    return path, lengths, bonus


@triton.jit
def _compact(
    kv_ptr, pages_ptr, prefix_ptr, path_ptr, lengths_ptr, plane, max_pages, max_path,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
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
    )  # fmt: skip
