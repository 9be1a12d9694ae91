"""From the fused QKV product to attention's inputs: bias, q/k-norm, RoPE and the cache write."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _qkv_to_cache(
    x_ptr, bias_ptr, q_norm_ptr, k_norm_ptr, table_ptr, positions_ptr, cache_rows_ptr,
    q_ptr, k_ptr, v_ptr, rows, eps,
    PARTS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)  # query heads, then key heads, then value heads
    row = tl.program_id(1)
    store_type = q_ptr.dtype.element_ty
    dims = tl.arange(0, HALF)
    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * 2 * HALF
    column = head * 2 * HALF + dims
    at = row.to(tl.int64) * width + column
    low = tl.load(x_ptr + at).to(tl.float32)
    high = tl.load(x_ptr + at + HALF).to(tl.float32)
    for _ in tl.static_range(1, PARTS):
        at += tl.full((), width, tl.int64) * rows
        low += tl.load(x_ptr + at)
        high += tl.load(x_ptr + at + HALF)
    if BIAS:
        low += tl.load(bias_ptr + column).to(tl.float32)
        high += tl.load(bias_ptr + column + HALF).to(tl.float32)
    low = low.to(store_type).to(tl.float32)
    high = high.to(store_type).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if NORM:
            scale = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / (2 * HALF) + eps)
            norm_ptr = q_norm_ptr if head < HEADS else k_norm_ptr
            weight_low = tl.load(norm_ptr + dims).to(tl.float32)
            weight_high = tl.load(norm_ptr + dims + HALF).to(tl.float32)
            low = (low * scale).to(store_type).to(tl.float32) * weight_low
            high = (high * scale).to(store_type).to(tl.float32) * weight_high
            low = low.to(store_type).to(tl.float32)
            high = high.to(store_type).to(tl.float32)
        position = tl.load(positions_ptr + row).to(tl.int64)
        cos = tl.load(table_ptr + position * 2 * HALF + dims)
        sin = tl.load(table_ptr + position * 2 * HALF + HALF + dims)
        turned = low * cos - high * sin
        high = high * cos + low * sin
        low = turned
    if head < HEADS:
        out = q_ptr + (row.to(tl.int64) * HEADS + head) * 2 * HALF + dims
        tl.store(out, low.to(store_type))
        tl.store(out + HALF, high.to(store_type))
    else:
        cache_row = tl.load(cache_rows_ptr + row).to(tl.int64)
        if cache_row >= 0:
            is_key = head < HEADS + KV_HEADS
            kv_head = head - HEADS - tl.where(is_key, 0, KV_HEADS)
            line = (cache_row // PAGE * KV_HEADS + kv_head) * PAGE + cache_row % PAGE
            cache_ptr = k_ptr if is_key else v_ptr
            out = cache_ptr + line * 2 * HALF + dims
            tl.store(out, low.to(store_type))
            tl.store(out + HALF, high.to(store_type))


def qkv_to_cache(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    rope_table: Tensor,
    positions: Tensor,
    cache_rows: Tensor,
    *,
    heads: int,
    bias: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    out: Tensor | None = None,
) -> Tensor:
    """Queries [T, heads, head_dim]; keys and values go to the cache.

    Args:
        qkv: [T, (heads + 2 kv_heads) head_dim]; or fp32 [S, T, ...] partial sums, added in order.
        keys, values: [pages, kv_heads, page_size, head_dim] of one layer, written in place.
        rope_table: fp32 [max_position, head_dim]: cosines, then sines.
        positions: int [T]. cache_rows: int [T], page * page_size + offset; negative is not written.
        bias: of the fused product (Qwen2). q_norm, k_norm: [head_dim] (Qwen3), both or neither.
    """
    parts = qkv.shape[0] if qkv.dim() == 3 else 1
    _, kv_heads, page_size, head_dim = keys.shape
    rows = qkv.shape[-2]
    if out is None:
        out = torch.empty(rows, heads, head_dim, dtype=keys.dtype, device=qkv.device)
    _qkv_to_cache[(heads + 2 * kv_heads, rows)](
        qkv, out if bias is None else bias, out if q_norm is None else q_norm,
        out if k_norm is None else k_norm, rope_table, positions, cache_rows,
        out, keys, values, rows, eps,
        PARTS=parts, BIAS=bias is not None, NORM=q_norm is not None,
        HEADS=heads, KV_HEADS=kv_heads, HALF=head_dim // 2, PAGE=page_size, num_warps=1,
    )  # fmt: skip
    return out
