"""Distillation losses of many slots against their teachers, with the gradient in closed form.

A row of logits is read twice and its gradient written once; probabilities are never stored. Every
slot is one program that walks over the vocabulary: its own log-sum-exp first, then the loss and the
gradient together. A loss whose gradient needs its own value (reverse KL, total variation) adds one
walk in between. The teacher's rows are reduced once for all the slots that share them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Vocabulary entries of one step of a walk."""
GROUP = 64
"""Neighbouring entries whose maximum is kept, for finding the best few of a row."""
_WARPS = 8
_LOWEST = tl.constexpr(-1e30)  # finite, so that differences of absent entries are numbers


class FusedLosses(NamedTuple):
    """Of m slots taught by u positions.

    Attributes:
        loss: fp32 scalar, the weighted sum.
        gradient: [m, V], of that sum with respect to the slots' logits, in their type.
        hits: fp32 [m], 1 where the best tokens agree; of equal logits the lower id is best.
        student_lse: fp32 [m]; teacher_lse: fp32 [u]; log-sum-exp of the logits at T = 1.
        group_maxima: [m, ceil(V / GROUP)] of the slots' logits.
    """

    loss: Tensor
    gradient: Tensor
    hits: Tensor
    student_lse: Tensor
    teacher_lse: Tensor
    group_maxima: Tensor


@triton.jit
def _log_sum_exp(
    row_ptr, groups_ptr, vocab, inverse_t,
    SCALED: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(log-sum-exp at T = 1, at T, best token) of one row; maxima of its groups are written."""
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], _LOWEST, tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    scaled = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, vocab, BLOCK):
        token = begin + lane
        z = tl.load(row_ptr + token, mask=token < vocab, other=_LOWEST).to(tl.float32)
        if GROUPS:
            maxima = tl.max(tl.reshape(z, [BLOCK // GROUP, GROUP]), 1)
            group = begin // GROUP + tl.arange(0, BLOCK // GROUP)
            tl.store(
                groups_ptr + group,
                maxima.to(groups_ptr.dtype.element_ty),
                mask=group < (vocab + GROUP - 1) // GROUP,
            )
        raised = tl.maximum(top, z)
        present = token < vocab
        total = total * tl.exp(top - raised) + tl.where(present, tl.exp(z - raised), 0.0)
        if SCALED:
            scaled = scaled * tl.exp((top - raised) * inverse_t)
            scaled += tl.where(present, tl.exp((z - raised) * inverse_t), 0.0)
        place = tl.where(z > top, token, place)
        top = raised
    best = tl.max(top, 0)
    lse = best + tl.log(tl.sum(total * tl.exp(top - best), 0))
    lse_t = lse
    if SCALED:
        lse_t = best * inverse_t + tl.log(tl.sum(scaled * tl.exp((top - best) * inverse_t), 0))
    return lse, lse_t, tl.min(tl.where(top == best, place, 0x7FFFFFFF), 0)


@triton.jit
def _teacher(
    logits_ptr, lse_ptr, lse_t_ptr, best_ptr, vocab, stride, inverse_t,
    SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    lse, lse_t, best = _log_sum_exp(
        logits_ptr + row.to(tl.int64) * stride, best_ptr, vocab, inverse_t,
        SCALED, False, 64, BLOCK,
    )  # fmt: skip
    tl.store(lse_ptr + row, lse)
    tl.store(lse_t_ptr + row, lse_t)
    tl.store(best_ptr + row, best)


@triton.jit
def _probabilities(z_ptr, y_ptr, token, vocab, lse_q, lse_p, inverse_t):
    """q, p and log p - log q of a block; zero where there is no token."""
    present = token < vocab
    z = tl.load(z_ptr + token, mask=present, other=0.0).to(tl.float32) * inverse_t
    y = tl.load(y_ptr + token, mask=present, other=0.0).to(tl.float32) * inverse_t
    log_q, log_p = z - lse_q, y - lse_p
    q = tl.where(present, tl.exp(log_q), 0.0)
    p = tl.where(present, tl.exp(log_p), 0.0)
    return q, p, log_p - log_q


@triton.jit
def _student(
    student_ptr, taught_ptr, shared_ptr, labels_ptr, weights_ptr,
    teacher_lse_ptr, teacher_best_ptr,
    gradient_ptr, loss_ptr, hits_ptr, lse_ptr, groups_ptr,
    vocab, student_stride, taught_stride, groups, temperature,
    forward_kl, reverse_kl, total_variation, hard_labels,
    FORWARD: tl.constexpr, REVERSE: tl.constexpr, VARIATION: tl.constexpr, HARD: tl.constexpr,
    SCALED: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    teacher = tl.load(shared_ptr + row)
    z_ptr = student_ptr + row.to(tl.int64) * student_stride
    y_ptr = taught_ptr + teacher.to(tl.int64) * taught_stride
    inverse_t = 1.0 / temperature
    lse, lse_q, best = _log_sum_exp(
        z_ptr, groups_ptr + row.to(tl.int64) * groups, vocab, inverse_t,
        SCALED, True, GROUP, BLOCK,
    )  # fmt: skip
    tl.store(lse_ptr + row, lse)
    tl.store(hits_ptr + row, (best == tl.load(teacher_best_ptr + teacher)).to(tl.float32))
    lse_p = tl.load(teacher_lse_ptr + teacher)
    weight = tl.load(weights_ptr + row)
    label = tl.load(labels_ptr + row)
    lane = tl.arange(0, BLOCK)

    reverse, turn, distance = 0.0, 0.0, 0.0
    if REVERSE or VARIATION:
        sums = tl.zeros([BLOCK], tl.float32)
        turns = tl.zeros([BLOCK], tl.float32)
        apart = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, vocab, BLOCK):
            q, p, gap = _probabilities(z_ptr, y_ptr, begin + lane, vocab, lse_q, lse_p, inverse_t)
            if REVERSE:
                sums -= q * gap
            if VARIATION:
                sign = tl.where(q > p, 0.5, tl.where(q < p, -0.5, 0.0))
                turns += q * sign
                apart += tl.abs(q - p)
        reverse = tl.sum(sums, 0)
        turn = tl.sum(turns, 0)
        distance = tl.sum(apart, 0) / 2

    # The loss at T is scaled by T^2 and its gradient by T^2 / T; hard labels know no temperature.
    soft = weight * temperature
    forward = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, vocab, BLOCK):
        token = begin + lane
        q, p, gap = _probabilities(z_ptr, y_ptr, token, vocab, lse_q, lse_p, inverse_t)
        gradient = tl.zeros([BLOCK], tl.float32)
        if FORWARD:
            forward += p * gap
            gradient += (q - p) * (forward_kl * soft)
        if REVERSE:
            gradient += q * (-gap - reverse) * (reverse_kl * soft)
        if VARIATION:
            sign = tl.where(q > p, 0.5, tl.where(q < p, -0.5, 0.0))
            gradient += q * (sign - turn) * (total_variation * soft)
        if HARD:
            if SCALED:
                z = tl.load(z_ptr + token, mask=token < vocab, other=_LOWEST).to(tl.float32)
                q = tl.exp(z - lse)
            gradient += (q - (token == label).to(tl.float32)) * (hard_labels * weight)
        at = gradient_ptr + row.to(tl.int64) * vocab + token
        tl.store(at, gradient.to(gradient_ptr.dtype.element_ty), mask=token < vocab)

    loss = 0.0
    if FORWARD:
        loss += forward_kl * tl.sum(forward, 0)
    if REVERSE:
        loss += reverse_kl * reverse
    if VARIATION:
        loss += total_variation * distance
    loss *= soft * temperature
    if HARD:
        loss += hard_labels * weight * (lse - tl.load(z_ptr + label).to(tl.float32))
    tl.store(loss_ptr + row, loss)


def slot_losses(
    student: Tensor,
    taught: Tensor,
    shared: Tensor,
    labels: Tensor,
    weights: Tensor,
    terms: Sequence[tuple[str, float]],
    temperature: float,
) -> FusedLosses:
    """Weighted sum over slots of a mixture of losses (arXiv 2606.18394, eq. 14, numerator).

    Args:
        student: [m, V]; taught: [u, V]; both logits with rows that lie densely.
        shared: long [m], the row of `taught` that teaches each slot.
        labels: long [m], the target's own tokens; weights: fp32 [m].
        terms: (kind, share) of `forward_kl`, `reverse_kl`, `total_variation`, `hard_labels`.
    """
    (slots, vocab), device = student.shape, student.device
    if student.stride(1) != 1 or taught.stride(1) != 1:
        raise ValueError("slot_losses reads rows whose entries are neighbours")
    shares = dict(terms)
    scaled = temperature != 1
    teacher_lse, teacher_lse_t = torch.empty(2, len(taught), device=device)
    teacher_best = torch.empty(len(taught), dtype=torch.int32, device=device)
    loss, hits, lse = torch.empty(3, slots, device=device)
    groups = -(-vocab // GROUP)
    maxima = torch.empty(slots, groups, dtype=student.dtype, device=device)
    gradient = torch.empty(slots, vocab, dtype=student.dtype, device=device)
    if slots:
        _teacher[(len(taught),)](
            taught, teacher_lse, teacher_lse_t, teacher_best, vocab, taught.stride(0),
            1 / temperature, SCALED=scaled, BLOCK=BLOCK, num_warps=_WARPS,
        )  # fmt: skip
        _student[(slots,)](
            student, taught, shared, labels, weights, teacher_lse_t, teacher_best,
            gradient, loss, hits, lse, maxima,
            vocab, student.stride(0), taught.stride(0), groups, float(temperature),
            *(float(shares.get(kind, 0)) for kind in _KINDS),
            FORWARD="forward_kl" in shares, REVERSE="reverse_kl" in shares,
            VARIATION="total_variation" in shares, HARD="hard_labels" in shares,
            SCALED=scaled, GROUP=GROUP, BLOCK=BLOCK, num_warps=_WARPS,
        )  # fmt: skip
    return FusedLosses(loss.sum(), gradient, hits, lse, teacher_lse, maxima)


_KINDS = ("forward_kl", "reverse_kl", "total_variation", "hard_labels")
