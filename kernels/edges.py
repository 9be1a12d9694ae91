"""Path scores of low rank at a draft's candidates, and the likeliest chain among them.

S_t(a, b) = <A[a] * g(h_t), C[b]> with a factor for every token of the vocabulary in two tables: a
slot's K candidates under their K parents are one small product. It is added to the slot's
log-probabilities and brought back to the mass of its candidates, in one program a slot.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import dependent, dot, enter

Gate = Literal["none", "sigmoid", "linear"]
_RANKS = 64  # of the factors a step


@triton.jit
def _log_sum_exp(x, AXIS: tl.constexpr):
    top = tl.max(x, AXIS, keep_dims=True)
    base = tl.where(top == float("-inf"), 0.0, top)
    return base + tl.log(tl.sum(tl.exp(x - base), AXIS, keep_dims=True))


@triton.jit
def _edge_scores(
    tokens_ptr, best_ptr, lse_ptr, anchors_ptr, parents_ptr, children_ptr, gates_ptr, out_ptr,
    slots, width, rank, rows,
    GATE: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    slot = tl.program_id(0)
    tree = tl.program_id(1)
    row = tree * slots + slot
    place = tl.arange(0, WIDTH)
    real = place < width
    child = tl.load(tokens_ptr + row * width + place, mask=real, other=0)
    parent = tl.load(tokens_ptr + (row - 1) * width + place, mask=real & (slot > 0), other=0)
    parent = tl.where(slot > 0, parent, tl.load(anchors_ptr + tree))
    acc = tl.zeros((WIDTH, WIDTH), tl.float32)
    for first in tl.range(0, rank, STEP):
        at = first + tl.arange(0, STEP)
        ok = at < rank
        a = tl.load(parents_ptr + parent[:, None] * rank + at[None, :], mask=ok[None, :], other=0.0)
        c = tl.load(children_ptr + child[:, None] * rank + at[None, :], mask=ok[None, :], other=0.0)
        if GATE != "none":
            gate = tl.zeros((STEP,), tl.float32)
            for part in tl.static_range(PARTS):
                gate += tl.load(gates_ptr + (part * rows + row) * rank + at, mask=ok, other=0.0).to(
                    tl.float32
                )
            gate = gate.to(a.dtype).to(tl.float32)
            if GATE == "sigmoid":
                gate = 2.0 / (1.0 + tl.exp(-gate))
            a = (a.to(tl.float32) * gate.to(a.dtype).to(tl.float32)[None, :]).to(a.dtype)
        acc = dot(a, tl.trans(c), acc)
    log_q = tl.load(best_ptr + row * width + place, mask=real, other=float("-inf"))
    log_q = tl.where(real, log_q - tl.load(lse_ptr + row), float("-inf"))[None, :]
    raw = log_q + acc
    scores = tl.minimum(raw - _log_sum_exp(raw, 1) + _log_sum_exp(log_q, 1), 0.0)
    out = out_ptr + (row * width + place[:, None]) * width + place[None, :]
    tl.store(out, scores, mask=real[:, None] & real[None, :])


def edge_scores(
    tokens: Tensor, best: Tensor, lse: Tensor, anchors: Tensor, parents: Tensor, children: Tensor,
    gates: Tensor | None = None, *, gate: Gate = "none",
) -> Tensor:  # fmt: skip
    """log q(child | parent) over neighbouring slots' candidates: fp32 [B, D, K, K].

    At slot 0 every parent row is the anchor's. Scores are at most 0.

    Args:
        tokens: long [B, D, K]; best: fp32 [B, D, K], their logits; lse: fp32 [B, D].
        anchors: long [B].
        parents, children: [V, r], every token's factors.
        gates: [B D, r], what a slot multiplies the parents' factors by; or fp32 [S, B D, r]
            partial sums, added in order.
        gate: `sigmoid` takes 2 sigmoid(gates), `linear` takes them as they are.
    """
    batch, slots, width = tokens.shape
    if (gate != "none") != (gates is not None):
        raise ValueError(f"gate {gate!r} does not go with gates {gates is not None}")
    out = torch.empty(batch, slots, width, width, dtype=torch.float32, device=tokens.device)
    rank = parents.shape[1]
    _edge_scores[(slots, batch)](
        tokens, best, lse, anchors, parents, children, parents if gates is None else gates, out,
        slots, width, rank, batch * slots,
        GATE=gate, PARTS=gates.shape[0] if gates is not None and gates.dim() == 3 else 1,
        WIDTH=max(16, triton.next_power_of_2(width)),
        STEP=min(_RANKS, max(16, triton.next_power_of_2(rank))), num_warps=4, **dependent(),
    )  # fmt: skip
    return out


@triton.jit
def _best_chain(
    tokens_ptr, edges_ptr, out_ptr, slots, width, WIDTH: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    enter(PDL)
    tree = tl.program_id(0)
    place = tl.arange(0, WIDTH)
    real = place < width
    rank = tl.full((), 0, tl.int32)
    for slot in tl.range(0, slots):
        row = tree * slots + slot
        at = edges_ptr + (row * width + rank) * width + place
        score = tl.load(at, mask=real, other=float("-inf"))
        best = tl.max(score, 0)
        rank = tl.min(tl.where((score == best) & real, place, WIDTH - 1), 0)
        tl.store(out_ptr + row, tl.load(tokens_ptr + row * width + rank))


def best_chain(tokens: Tensor, edges: Tensor) -> Tensor:
    """The likeliest child of the likeliest child ...: long [B, D]; equal ones by lower rank.

    Args:
        tokens: long [B, D, K]; edges: fp32 [B, D, K, K], contiguous.
    """
    batch, slots, width = tokens.shape
    out = torch.empty(batch, slots, dtype=torch.int64, device=tokens.device)
    _best_chain[(batch,)](
        tokens, edges, out, slots, width, WIDTH=triton.next_power_of_2(width), num_warps=1,
        **dependent(),
    )  # fmt: skip
    return out
