"""The best tokens of a vocabulary whose rows lie on several ranks: a few keys cross, no logits.

Every rank ranks its own rows (`topk_logsumexp`), packs what it found into one small message, and
merges the messages of all. Equal logits go to the lower token id, as on one rank.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import dependent, enter
from kernels.topk import pack, unpack

_NONE = tl.constexpr(-0x7FFFFFFFFFFFFFFF)


@triton.jit
def _pack_best(
    values_ptr, tokens_ptr, lse_ptr, out_ptr, first,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, SUM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    row = tl.program_id(0)
    place = tl.arange(0, PADDED)
    ok = place < WIDTH
    value = tl.load(values_ptr + row * WIDTH + place, mask=ok, other=0.0)
    token = tl.load(tokens_ptr + row * WIDTH + place, mask=ok, other=0).to(tl.int32) + first
    out = out_ptr + row * (WIDTH + 1)
    tl.store(out + place, pack(value, token), mask=ok)
    if SUM:
        bits = tl.load(lse_ptr + row).to(tl.int32, bitcast=True)
        tl.store(out + WIDTH, bits.to(tl.int64))


@triton.jit
def _merge_packed(
    packed_ptr, values_ptr, tokens_ptr, lse_ptr, rows,
    RANKS: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, KEPT: tl.constexpr,
    RANKS_PADDED: tl.constexpr, SUM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    row = tl.program_id(0)
    at = tl.arange(0, KEYS)
    own = ((at // WIDTH) * rows + row) * (WIDTH + 1) + at % WIDTH
    keys = tl.load(packed_ptr + own, mask=at < RANKS * WIDTH, other=_NONE)
    if WIDTH == 1:
        value, token = unpack(tl.max(keys, 0))
        tl.store(values_ptr + row, value)
        tl.store(tokens_ptr + row, token.to(tl.int64))
    else:
        value, token = unpack(tl.topk(keys, KEPT))
        place = tl.arange(0, KEPT)
        tl.store(values_ptr + row * WIDTH + place, value, mask=place < WIDTH)
        tl.store(tokens_ptr + row * WIDTH + place, token.to(tl.int64), mask=place < WIDTH)
    if SUM:
        rank = tl.arange(0, RANKS_PADDED)
        there = rank < RANKS
        sums_at = packed_ptr + (rank * rows + row) * (WIDTH + 1) + WIDTH
        bits = tl.load(sums_at, mask=there, other=0).to(tl.int32)
        lse = tl.where(there, bits.to(tl.float32, bitcast=True), float("-inf"))
        top = tl.max(lse, 0)
        base = tl.where(top == float("-inf"), 0.0, top)
        tl.store(lse_ptr + row, base + tl.log(tl.sum(tl.exp(lse - base), 0)))


def pack_best(
    values: Tensor, tokens: Tensor, lse: Tensor, first: int, *, sums: bool = True
) -> Tensor:
    """One rank's message: int64 [R, W + 1], keys that order as its candidates do, then the sum.

    Args:
        values, tokens, lse: from `topk_logsumexp` over this rank's rows of the vocabulary.
        first: token id of the first of those rows.
        sums: whether `lse` means anything.
    """
    rows, width = values.shape
    out = torch.empty(rows, width + 1, dtype=torch.int64, device=values.device)
    _pack_best[(rows,)](
        values, tokens, lse, out, first, WIDTH=width, PADDED=triton.next_power_of_2(width),
        SUM=sums, num_warps=1, **dependent(),
    )  # fmt: skip
    return out


def merge_packed(packed: Tensor, *, sums: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """As `topk_logsumexp` over the whole vocabulary, from every rank's message.

    Args:
        packed: int64 [ranks, R, W + 1].

    Returns:
        values fp32 [R, W], tokens int64 [R, W], lse fp32 [R].
    """
    ranks, rows, width = packed.shape[0], packed.shape[1], packed.shape[2] - 1
    device = packed.device
    values = torch.empty(rows, width, dtype=torch.float32, device=device)
    tokens = torch.empty(rows, width, dtype=torch.int64, device=device)
    lse = torch.empty(rows, dtype=torch.float32, device=device)
    _merge_packed[(rows,)](
        packed, values, tokens, lse, rows, RANKS=ranks, WIDTH=width,
        KEYS=triton.next_power_of_2(ranks * width), KEPT=triton.next_power_of_2(width),
        RANKS_PADDED=triton.next_power_of_2(ranks), SUM=sums, num_warps=1, **dependent(),
    )  # fmt: skip
    return values, tokens, lse
