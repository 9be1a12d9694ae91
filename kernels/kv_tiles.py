"""A tile of a paged cache's keys and values, and how it is folded into a row's running output."""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.attention_plans import Plan
from kernels.launch import dot

LOG2_E = 1.4426950408889634
"""Scores are scaled by it: the kernels raise 2, not e, to them."""


def tile_sources(
    keys: Tensor, values: Tensor, heads: int, split: int, plan: Plan
) -> tuple[Tensor | TensorDescriptor, Tensor | TensorDescriptor]:
    """What `next_tiles` reads keys and values from.

    Args:
        keys, values: [pages, kv_heads, page_size, head_dim].
        heads: of the queries.
        split: KV rows of the shortest split.

    Raises:
        ValueError: shapes that the kernels have no path for.
    """
    _, kv_heads, page_size, head_dim = keys.shape
    if head_dim not in (16, 32, 64, 128) or heads % kv_heads:
        raise ValueError(f"head_dim {head_dim}, heads {heads}/{kv_heads}: not supported")
    if page_size % plan.tile or split % plan.tile or plan.tile & (plan.tile - 1):
        raise ValueError(f"tile {plan.tile} must divide page {page_size} and split {split}")
    if not plan.descriptors:
        return keys, values
    block = [plan.tile, head_dim]
    key_source, value_source = (
        TensorDescriptor.from_tensor(cached.view(-1, head_dim), block) for cached in (keys, values)
    )
    return key_source, value_source


@triton.jit
def _tile(source, line, TILE: tl.constexpr, HEAD_DIM: tl.constexpr, DESCRIPTORS: tl.constexpr):
    """[T, H]: the rows of one head from `line` on, of a cache seen as [rows, head_dim]."""
    if DESCRIPTORS:
        tile = source.load([line, 0])
    else:
        at = source + line.to(tl.int64) * HEAD_DIM
        offsets = tl.arange(0, TILE)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
        tile = tl.load(at + offsets)
    return tile


@triton.jit
def next_tiles(
    k_ptr, v_ptr, pages_ptr, page, head, start, last,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """(k [T, H], v [T, H]) of the sequence's rows from `start` on, and the page of the next step.

    The page is read one step ahead: tiles then wait for no other load.

    Args:
        page: in which `start` lies.
        last: place of the last page that may be read, in the sequence's own table.
    """
    line = (page * KV_HEADS + head) * PAGE + start % PAGE
    page = tl.load(pages_ptr + tl.minimum((start + TILE) // PAGE, last))
    k = _tile(k_ptr, line, TILE, HEAD_DIM, DESCRIPTORS)
    v = _tile(v_ptr, line, TILE, HEAD_DIM, DESCRIPTORS)
    return k, v, page


@triton.jit
def fold(q, k, v, acc, top, total, allowed, scale, MASKED: tl.constexpr):
    """Fold one tile into the running output. q [R, H], k [T, H], v [T, H], allowed bool [R, T]."""
    scores = dot(q, tl.trans(k)) * scale
    if MASKED:
        scores = tl.where(allowed, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen nothing yet has top -inf: subtracting 0 keeps NaN out of exp2(-inf).
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(scores - base[:, None])
    keep = tl.exp2(top - base)
    acc = acc * keep[:, None]
    acc = dot(weight.to(v.dtype), v, acc)
    return acc, new_top, total * keep + tl.sum(weight, 1)


@triton.jit
def fold_across(q, k, v, acc, top, total, allowed, scale, MASKED: tl.constexpr):
    """As `fold`, the rows across: q [H, R], k and v [T, H], acc [H, R], allowed bool [T, R]."""
    scores = dot(k, q) * scale
    if MASKED:
        scores = tl.where(allowed, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 0))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(scores - base[None, :])
    keep = tl.exp2(top - base)
    acc = acc * keep[None, :]
    acc = dot(tl.trans(v), weight.to(v.dtype), acc)
    return acc, new_top, total * keep + tl.sum(weight, 0)
