"""Logits to the W best tokens and the log-sum-exp of each row.

Log-probabilities of the whole vocabulary are never written: log q of a candidate is its logit
minus the row's log-sum-exp. Equal logits go to the lower token id. The first pass reads every
chunk of the vocabulary once; only the W chunks with the best maxima can hold one of the W best, and
the second pass picks from those alone. The W-th best maximum bounds the W best from below, and
few logits reach it: the second pass lays them out without ordering them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import dependent, enter

CHUNK = 2048
"""Vocabulary entries a program reduces; part of the log-sum-exp's reduction order."""
_NONE = tl.constexpr(-0x7FFFFFFFFFFFFFFF)


@triton.jit
def pack(value, index):
    """int64 keys that order by value, then by LOWER index."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def unpack(key):
    """(value fp32, index int32) of a packed key."""
    ordered = (key >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    index = 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)
    return bits.to(tl.float32, bitcast=True), index


@triton.jit
def _chunk_keys(logits_ptr, row, chunk, vocab, stride, CHUNK: tl.constexpr):
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    at = logits_ptr + row.to(tl.int64) * stride + token
    logits = tl.load(at, mask=token < vocab, other=float("-inf")).to(tl.float32)
    return logits, tl.where(token < vocab, pack(logits, token), _NONE)


@triton.jit
def _chunk_max(
    logits_ptr, best_ptr, sum_ptr, vocab, stride, chunks,
    SUM: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    chunk = tl.program_id(1)
    row = tl.program_id(0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    at = logits_ptr + row.to(tl.int64) * stride + token
    logits = tl.load(at, mask=token < vocab, other=float("-inf")).to(tl.float32)
    top = tl.max(logits, 0)
    first = tl.min(tl.where((logits == top) & (token < vocab), token, 0x7FFFFFFF), 0)
    tl.store(best_ptr + row * chunks + chunk, pack(top, first))
    if SUM:
        base = tl.where(top == float("-inf"), 0.0, top)
        tl.store(sum_ptr + row * chunks + chunk, tl.sum(tl.exp(logits - base), 0))


@triton.jit
def _chunk_best(
    logits_ptr, best_ptr, keys_ptr, vocab, stride, chunks,
    WIDTH: tl.constexpr, KEPT: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    chunk = tl.program_id(1)
    row = tl.program_id(0)
    others = tl.arange(0, CHUNKS)
    bests = tl.load(best_ptr + row * chunks + others, mask=others < chunks, other=_NONE)
    mine = tl.load(best_ptr + row * chunks + chunk)
    place = tl.sum((bests > mine).to(tl.int32), 0)
    # A chunk with `WIDTH` better chunks before it holds none of the row's best.
    if place < WIDTH:
        _, keys = _chunk_keys(logits_ptr, row, chunk, vocab, stride, CHUNK)
        floor = tl.full((), _NONE, tl.int64)
        if CHUNKS >= KEPT:
            floor = tl.min(tl.topk(bests, KEPT), 0)
        reach = (keys >= floor) & (keys != _NONE)
        order = tl.cumsum(reach.to(tl.int32), 0)
        count = tl.max(order, 0)
        out = keys_ptr + (row * WIDTH + place) * KEPT
        slots = tl.arange(0, KEPT)
        if count <= KEPT:
            tl.store(out + slots, tl.full((KEPT,), _NONE, tl.int64), mask=slots >= count)
            tl.store(out + order - 1, keys, mask=reach)
        else:
            tl.store(out + slots, tl.topk(keys, KEPT))


@triton.jit
def _merge_best(
    keys_ptr, best_ptr, sum_ptr, values_ptr, tokens_ptr, lse_ptr, chunks,
    WIDTH: tl.constexpr, KEPT: tl.constexpr, KEYS: tl.constexpr, CHUNKS: tl.constexpr,
    SUM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    bests = tl.load(best_ptr + row * chunks + chunk, mask=chunk < chunks, other=_NONE)
    best = tl.max(bests, 0)
    top, token = unpack(best)
    if SUM:
        sums = tl.load(sum_ptr + row * chunks + chunk, mask=chunk < chunks, other=0.0)
        tops, _ = unpack(bests)
        tops = tl.where(chunk < chunks, tops, float("-inf"))
        base = tl.where(top == float("-inf"), 0.0, top)
        tl.store(lse_ptr + row, top + tl.log(tl.sum(sums * tl.exp(tops - base), 0)))
    if WIDTH == 1:
        tl.store(values_ptr + row, top)
        tl.store(tokens_ptr + row, token)
    else:
        at = tl.arange(0, KEYS)
        held = tl.minimum(chunks, WIDTH) * KEPT
        keys = tl.load(keys_ptr + row * WIDTH * KEPT + at, mask=at < held, other=_NONE)
        value, token = unpack(tl.topk(keys, KEPT))
        rank = tl.arange(0, KEPT)
        tl.store(values_ptr + row * WIDTH + rank, value, mask=rank < WIDTH)
        tl.store(tokens_ptr + row * WIDTH + rank, token.to(tl.int64), mask=rank < WIDTH)


def topk_logsumexp(
    logits: Tensor, width: int, chunk: int = CHUNK, sums: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """The `width` best logits of each row, best first, their ids, and the row's log-sum-exp.

    Args:
        logits: [R, V], any float type, unit stride along V; width <= V.
        chunk: vocabulary entries a program reduces, a power of two; a smaller vocabulary takes a
            smaller one.
        sums: False leaves the log-sum-exp out; its entries then hold anything.

    Returns:
        values fp32 [R, width], tokens int64 [R, width], lse fp32 [R].
    """
    rows, vocab = logits.shape
    if not 1 <= width <= min(vocab, chunk) or logits.stride(1) != 1:
        raise ValueError(f"width {width} of a vocabulary of {vocab}: not supported")
    chunk = min(chunk, triton.next_power_of_2(vocab))
    chunks = triton.cdiv(vocab, chunk)
    device = logits.device
    best = torch.empty(rows, chunks, dtype=torch.int64, device=device)
    total = torch.empty(rows, chunks, dtype=torch.float32, device=device)
    values = torch.empty(rows, width, dtype=torch.float32, device=device)
    tokens = torch.empty(rows, width, dtype=torch.int64, device=device)
    lse = torch.empty(rows, dtype=torch.float32, device=device)
    _chunk_max[(rows, chunks)](
        logits, best, total, vocab, logits.stride(0), chunks, SUM=sums, CHUNK=chunk, num_warps=4,
        **dependent(),
    )  # fmt: skip
    keys = best
    padded, kept = triton.next_power_of_2(chunks), triton.next_power_of_2(width)
    if width > 1:
        keys = torch.empty(rows, width, kept, dtype=torch.int64, device=device)
        _chunk_best[(rows, chunks)](
            logits, best, keys, vocab, logits.stride(0), chunks,
            WIDTH=width, KEPT=kept, CHUNK=chunk, CHUNKS=padded, num_warps=4, **dependent(),
        )  # fmt: skip
    _merge_best[(rows,)](
        keys, best, total, values, tokens, lse, chunks,
        WIDTH=width, KEPT=kept, KEYS=triton.next_power_of_2(width * kept), CHUNKS=padded, SUM=sums,
        num_warps=4,
        **dependent(),
    )  # fmt: skip
    return values, tokens, lse
