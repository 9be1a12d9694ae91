"""Products of a slot's parent factor with the child factors of its candidates, for training.

The candidates' rows are read from the table of all tokens where they are needed. In torch they are
gathered first, half a gigabyte a step, and the table's gradient sorts a million rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rows(
    tokens_ptr, table_ptr, slot, count, rank, COUNT: tl.constexpr, RANK: tl.constexpr
):  # fmt: skip
    """(tokens [COUNT], which exist, their rows' offsets and mask [COUNT, RANK])."""
    k, r = tl.arange(0, COUNT), tl.arange(0, RANK)
    token = tl.load(tokens_ptr + slot * count + k, mask=k < count, other=0)
    at = token[:, None].to(tl.int64) * rank + r[None, :]
    return k, r, at, (k < count)[:, None] & (r < rank)[None, :]


@triton.jit
def _forward(
    parents_ptr, table_ptr, tokens_ptr, out_ptr, count, rank,
    COUNT: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    k, r, at, there = _rows(tokens_ptr, table_ptr, slot, count, rank, COUNT, RANK)
    parent = tl.load(parents_ptr + slot * rank + r, mask=r < rank, other=0.0).to(tl.float32)
    rows = tl.load(table_ptr + at, mask=there, other=0.0).to(tl.float32)
    product = tl.sum(rows * parent[None, :], 1)
    tl.store(out_ptr + slot * count + k, product.to(out_ptr.dtype.element_ty), mask=k < count)


@triton.jit
def _backward(
    parents_ptr, table_ptr, tokens_ptr, gradient_ptr, d_parents_ptr, d_table_ptr, count, rank,
    COUNT: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    k, r, at, there = _rows(tokens_ptr, table_ptr, slot, count, rank, COUNT, RANK)
    parent = tl.load(parents_ptr + slot * rank + r, mask=r < rank, other=0.0).to(tl.float32)
    given = tl.load(gradient_ptr + slot * count + k, mask=k < count, other=0.0).to(tl.float32)
    rows = tl.load(table_ptr + at, mask=there, other=0.0).to(tl.float32)
    d_parent = tl.sum(rows * given[:, None], 0)
    tl.store(
        d_parents_ptr + slot * rank + r, d_parent.to(d_parents_ptr.dtype.element_ty), mask=r < rank
    )
    tl.atomic_add(d_table_ptr + at, given[:, None] * parent[None, :], mask=there, sem="relaxed")


class _EdgeProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parents: Tensor, table: Tensor, tokens: Tensor) -> Tensor:
        slots, count = tokens.shape
        out = parents.new_empty(slots, count)
        if slots:
            _forward[(slots,)](
                parents, table, tokens, out, count, parents.shape[1],
                COUNT=triton.next_power_of_2(count), RANK=triton.next_power_of_2(parents.shape[1]),
            )  # fmt: skip
        ctx.save_for_backward(parents, table, tokens)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        parents, table, tokens = ctx.saved_tensors
        slots, count = tokens.shape
        d_parents = torch.empty_like(parents)
        d_table = torch.zeros_like(table, dtype=torch.float32)
        if slots:
            _backward[(slots,)](
                parents, table, tokens, gradient.contiguous(), d_parents, d_table,
                count, parents.shape[1],
                COUNT=triton.next_power_of_2(count), RANK=triton.next_power_of_2(parents.shape[1]),
            )  # fmt: skip
        return d_parents, d_table.to(table.dtype), None


def edge_products(parents: Tensor, table: Tensor, tokens: Tensor) -> Tensor:
    """<parents[m], table[tokens[m, k]]>, with gradients for both factors.

    Sums are fp32. The table's gradient is summed in no fixed order.

    Args:
        parents: [M, r]; table: [V, r] of the same type; both contiguous.
        tokens: long [M, K].

    Returns:
        [M, K], in the factors' type.
    """
    return _EdgeProducts.apply(parents.contiguous(), table.contiguous(), tokens.contiguous())
