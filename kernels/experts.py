"""Mixtures of experts: who goes where, and the products of each expert's rows, in fixed shapes.

A token takes C of E experts. Pair number token * C + choice names a (token, choice). An expert's
pairs are listed first; then every (expert, outputs) is one program that walks its list, so that a
weight is read once for all rows of a tile, an expert without rows costs nothing, and no host needs
to know how many there are. As in `small_gemm` a result has one order of sums whatever the number of
rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import dependent, dot, enter

_PAIRS = 1024  # looked through at one time


@triton.jit
def _route(
    logits_ptr, like_ptr, ids_ptr, weights_ptr, tokens, experts,
    PARTS: tl.constexpr, CHOICES: tl.constexpr, NORMALISE: tl.constexpr, EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    token = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    real = expert < experts
    store_type = like_ptr.dtype.element_ty
    at = logits_ptr + token * experts + expert
    logits = tl.load(at, mask=real, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        logits += tl.load(at + part * tokens * experts, mask=real, other=0.0)
    logits = tl.where(real, logits.to(store_type).to(tl.float32), float("-inf"))
    probability = tl.exp(logits - tl.max(logits, 0))
    probability = probability / tl.sum(probability, 0)
    probability = tl.where(real, probability, -1.0)
    left = probability
    total = tl.full((), 1.0, tl.float32)
    if NORMALISE:
        total = tl.full((), 0.0, tl.float32)
        for _ in tl.static_range(CHOICES):
            best = tl.max(left, 0)
            total += best
            first = tl.min(tl.where(left == best, expert, EXPERTS), 0)
            left = tl.where(expert == first, -1.0, left)
    left = probability
    for index in tl.static_range(CHOICES):
        best = tl.max(left, 0)
        first = tl.min(tl.where(left == best, expert, EXPERTS), 0)
        left = tl.where(expert == first, -1.0, left)
        tl.store(ids_ptr + token * CHOICES + index, first)
        rounded = (best / total).to(store_type).to(tl.float32)
        tl.store(weights_ptr + token * CHOICES + index, rounded)


def route(
    logits: Tensor, choices: int, *, normalise: bool, like: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(experts int32 [T, C], best first, equal ones by lower number; their weights fp32 [T, C]).

    Args:
        logits: [T, E], or fp32 [S, T, E] partial sums, added in order.
        normalise: whether the chosen probabilities are scaled to sum to one.
        like: logits and weights are rounded to its type; None is the logits'.
    """
    tokens, experts = logits.shape[-2:]
    ids = torch.empty(tokens, choices, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, choices, dtype=torch.float32, device=logits.device)
    _route[(tokens,)](
        logits, logits if like is None else like, ids, weights, tokens, experts,
        PARTS=len(logits) if logits.dim() == 3 else 1, CHOICES=choices, NORMALISE=normalise,
        EXPERTS=triton.next_power_of_2(experts), num_warps=1, **dependent(),
    )  # fmt: skip
    return ids, weights


@triton.jit
def _list_pairs(
    ids_ptr, pairs_ptr, counts_ptr, pairs, capacity, PAIRS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    enter(PDL)
    expert = tl.program_id(0)
    count = tl.full((), 0, tl.int32)
    for first in tl.range(0, pairs, PAIRS):
        pair = first + tl.arange(0, PAIRS)
        mine = tl.load(ids_ptr + pair, mask=pair < pairs, other=-1) == expert
        place = count + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(pairs_ptr + expert.to(tl.int64) * capacity + place, pair, mask=mine)
        count += tl.sum(mine.to(tl.int32), 0)
    tl.store(counts_ptr + expert, count)


def list_pairs(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(pairs int32 [E, T], each expert's in ascending order, the rest undefined; counts int32 [E]).

    Args:
        ids: int32 [T, C], no expert twice in a row.
    """
    tokens = len(ids)
    pairs = torch.empty(experts, tokens, dtype=torch.int32, device=ids.device)
    counts = torch.empty(experts, dtype=torch.int32, device=ids.device)
    chunk = min(_PAIRS, triton.next_power_of_2(ids.numel()))
    _list_pairs[(experts,)](
        ids, pairs, counts, ids.numel(), tokens, PAIRS=chunk, num_warps=4, **dependent()
    )
    return pairs, counts


@triton.jit
def _expert_product(
    x_ptr, w_ptr, pairs_ptr, counts_ptr, weights_ptr, out_ptr, tokens, choices, n, k,
    SECOND: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    expert = tl.program_id(1)
    step = tl.arange(0, STEP)
    enter(PDL)
    count = tl.load(counts_ptr + expert)
    pairs_ptr += expert.to(tl.int64) * tokens
    # Outputs and slots beyond the end read real ones and are never stored: cheaper than masks.
    row = expert.to(tl.int64) * n + tl.where(output < n, output, 0)
    for first in tl.range(0, count, TOKENS):
        slot = first + tl.arange(0, TOKENS)
        pair = tl.load(pairs_ptr + slot % count)
        source = pair if SECOND else pair // choices
        w_at = w_ptr + row[:, None] * k + step[None, :]
        x_at = x_ptr + source.to(tl.int64)[None, :] * k + step[:, None]
        acc = tl.zeros((OUTPUTS, TOKENS), tl.float32)
        for _ in tl.range(0, k, STEP):
            acc = dot(tl.load(w_at), tl.load(x_at), acc)
            w_at += STEP
            x_at += STEP
        target = pair
        if SECOND:
            acc = acc.to(x_ptr.dtype.element_ty).to(tl.float32)
            acc = acc * tl.load(weights_ptr + pair)[None, :]
            target = pair % choices * tokens + pair // choices
        out = out_ptr + target.to(tl.int64)[None, :] * n + output[:, None]
        live = (slot < count)[None, :] & (output < n)[:, None]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=live)


def _launch(
    x: Tensor, w: Tensor, pairs: Tensor, counts: Tensor, weights: Tensor, out: Tensor, second: bool
) -> None:
    experts, n, k = w.shape
    tokens, choices = weights.shape
    rows = tokens * choices // experts  # of an expert, on average
    held = 16 if rows <= 16 else 32 if rows <= 48 else 64 if rows <= 96 else 128
    step = 128 * 2 // x.element_size() if held <= 32 else 64 * 2 // x.element_size()
    while k % step:
        step //= 2
    if step < 16:
        raise ValueError(f"K {k} is no multiple of 16")
    outputs = 64 if held == 128 else 128
    _expert_product[(triton.cdiv(n, outputs), experts)](
        x, w, pairs, counts, weights, out, tokens, choices, n, k,
        SECOND=second, TOKENS=held, OUTPUTS=outputs, STEP=step, num_warps=4, num_stages=4,
        **dependent(),
    )  # fmt: skip


def first_product(x: Tensor, w: Tensor, pairs: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
    """Every token through its experts' first weights: [T C, N] in x's type, by pair.

    Args:
        x: [T, K]; w: [E, N, K]; pairs, counts: from `list_pairs`; weights: fp32 [T, C].
    """
    out = torch.empty(weights.numel(), w.shape[1], dtype=x.dtype, device=x.device)
    _launch(x, w, pairs, counts, weights, out, second=False)
    return out


def second_product(x: Tensor, w: Tensor, pairs: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
    """What each choice adds to its token, weighted: fp32 [C, T, N], summed by who reads it.

    Args:
        x: [T C, K], by pair; the rest as in `first_product`.
    """
    tokens, choices = weights.shape
    out = torch.empty(choices, tokens, w.shape[1], dtype=torch.float32, device=x.device)
    _launch(x, w, pairs, counts, weights, out, second=True)
    return out
