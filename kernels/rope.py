"""From the fused QKV product to attention's inputs: bias, q/k-norm, RoPE and the cache write."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import dependent, enter, unfused

MOST_HEADS = 8
"""Heads a program turns; all of them are queries, keys or values."""


@triton.jit
def _norm_and_turn(
    low, high, norm_ptr, table_ptr, position, dims, eps, store_type: tl.constexpr,
    NORM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """RMS norm of each head, then the rotation; low and high are the halves [heads, HALF]."""
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + eps)
        weight_low = tl.load(norm_ptr + dims).to(tl.float32)
        weight_high = tl.load(norm_ptr + dims + HALF).to(tl.float32)
        low = (low * scale[:, None]).to(store_type).to(tl.float32) * weight_low[None, :]
        high = (high * scale[:, None]).to(store_type).to(tl.float32) * weight_high[None, :]
        low = low.to(store_type).to(tl.float32)
        high = high.to(store_type).to(tl.float32)
    cos = tl.load(table_ptr + position * 2 * HALF + dims)[None, :]
    sin = tl.load(table_ptr + position * 2 * HALF + HALF + dims)[None, :]
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _to_cache(cache_ptr, low, high, cache_row, kv_heads, dims, KV_HEADS: tl.constexpr,
              HALF: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip
    if cache_row >= 0:
        line = (cache_row // PAGE * KV_HEADS + kv_heads) * PAGE + cache_row % PAGE
        out = cache_ptr + line[:, None] * 2 * HALF + dims[None, :]
        tl.store(out, low.to(cache_ptr.dtype.element_ty))
        tl.store(out + HALF, high.to(cache_ptr.dtype.element_ty))


@triton.jit
def _qkv_to_cache(
    x_ptr, bias_ptr, q_norm_ptr, k_norm_ptr, table_ptr, positions_ptr, cache_rows_ptr,
    q_ptr, k_ptr, v_ptr, rows, eps,
    PARTS: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    first = tl.program_id(1) * GROUP  # query heads, then key heads, then value heads
    row = tl.program_id(0)
    store_type = q_ptr.dtype.element_ty
    dims = tl.arange(0, HALF)
    heads = first + tl.arange(0, GROUP)
    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * 2 * HALF
    column = heads[:, None] * 2 * HALF + dims[None, :]
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
    if first < HEADS + KV_HEADS:
        position = tl.load(positions_ptr + row).to(tl.int64)
        norm_ptr = q_norm_ptr if first < HEADS else k_norm_ptr
        low, high = _norm_and_turn(
            low, high, norm_ptr, table_ptr, position, dims, eps, store_type, NORM, HALF
        )
    if first < HEADS:
        out = q_ptr + (row.to(tl.int64) * HEADS + heads)[:, None] * 2 * HALF + dims[None, :]
        tl.store(out, low.to(store_type))
        tl.store(out + HALF, high.to(store_type))
    else:
        cache_row = tl.load(cache_rows_ptr + row).to(tl.int64)
        is_key = first < HEADS + KV_HEADS
        cache_ptr = k_ptr if is_key else v_ptr
        kv_heads = heads - HEADS - tl.where(is_key, 0, KV_HEADS)
        _to_cache(cache_ptr, low, high, cache_row, kv_heads, dims, KV_HEADS, HALF, PAGE)


@triton.jit
def _context_to_caches(
    x_ptr, k_norm_ptr, table_ptr, positions_ptr, cache_rows_ptr, kv_ptr, plane, eps,
    NORM: tl.constexpr, LAYERS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    PAGE: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    first = tl.program_id(1) * GROUP  # key heads, then value heads
    row = tl.program_id(0)
    layer = tl.program_id(2)
    store_type = kv_ptr.dtype.element_ty
    dims = tl.arange(0, HALF)
    heads = first + tl.arange(0, GROUP)
    at = ((row.to(tl.int64) * LAYERS + layer) * 2 * KV_HEADS + heads)[:, None] * 2 * HALF
    low = tl.load(x_ptr + at + dims[None, :]).to(tl.float32)
    high = tl.load(x_ptr + at + dims[None, :] + HALF).to(tl.float32)
    is_key = first < KV_HEADS
    if is_key:
        position = tl.load(positions_ptr + row).to(tl.int64)
        low, high = _norm_and_turn(
            low, high, k_norm_ptr + layer * 2 * HALF, table_ptr, position, dims, eps, store_type,
            NORM, HALF,
        )  # fmt: skip
    cache_row = tl.load(cache_rows_ptr + row).to(tl.int64)
    kv_ptr += (2 * layer + tl.where(is_key, 0, 1)).to(tl.int64) * plane
    kv_heads = heads - tl.where(is_key, 0, KV_HEADS)
    _to_cache(kv_ptr, low, high, cache_row, kv_heads, dims, KV_HEADS, HALF, PAGE)


def _group(*counts: int) -> int:
    """Heads a program: a power of two that divides every count."""
    return math.gcd(MOST_HEADS, *counts)


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
    group = _group(heads, kv_heads)
    if out is None:
        out = torch.empty(rows, heads, head_dim, dtype=keys.dtype, device=qkv.device)
    _qkv_to_cache[(rows, (heads + 2 * kv_heads) // group)](
        qkv, out if bias is None else bias, out if q_norm is None else q_norm,
        out if k_norm is None else k_norm, rope_table, positions, cache_rows,
        out, keys, values, rows, eps,
        PARTS=parts, BIAS=bias is not None, NORM=q_norm is not None,
        HEADS=heads, KV_HEADS=kv_heads, HALF=head_dim // 2, PAGE=page_size, GROUP=group,
        num_warps=4 if group * head_dim >= 512 else 1, **unfused(),
    )  # fmt: skip
    return out


def context_to_caches(
    both: Tensor,
    kv: Tensor,
    rope_table: Tensor,
    positions: Tensor,
    cache_rows: Tensor,
    *,
    k_norms: Tensor | None,
    eps: float = 1e-6,
) -> None:
    """Keys and values of a draft head's new context to the caches of all its layers, one launch.

    Args:
        both: [T, layers x 2 kv_heads x head_dim]: of each layer its keys, then its values.
        kv: [layers, 2, pages, kv_heads, page_size, head_dim], written in place.
        positions, cache_rows, rope_table: as in `qkv_to_cache`.
        k_norms: [layers, head_dim], or None.
    """
    layers, _, pages, kv_heads, page_size, head_dim = kv.shape
    group = _group(kv_heads)
    _context_to_caches[(len(both), 2 * kv_heads // group, layers)](
        both, kv if k_norms is None else k_norms, rope_table, positions, cache_rows, kv,
        pages * kv_heads * page_size * head_dim, eps,
        NORM=k_norms is not None, LAYERS=layers, KV_HEADS=kv_heads, HALF=head_dim // 2,
        PAGE=page_size, GROUP=group, num_warps=4 if group * head_dim >= 512 else 1, **dependent(),
    )  # fmt: skip
