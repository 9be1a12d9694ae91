"""Distillation losses over a vocabulary that never exists in full for the whole batch.

Slots are taken `chunk_tokens` at a time; a chunk's gradient is formed while its logits exist, and
only [slots, d] gradients are kept. The teacher's distribution is recomputed from its last hidden
state, once for all the slots of a chunk that share it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.heads.edges import EdgeProducer, Places
from jetspec.training.blocks import Chunk
from jetspec.training.config import LossConfig

Project = Callable[[Tensor], Tensor]

TOP_K_GROUP = 64
"""Neighbours of the vocabulary whose maximum stands for them; `kernels.distillation.GROUP`."""


class Candidates(NamedTuple):
    """What path scores train on: each slot's top K, the true token always among them.

    Attributes:
        tokens: long [M, K].
        log_q: fp32 [M, K], under the slot (T = 1), without gradient.
        log_p: fp32 [M, K], under the teacher (T = 1).
        inserted: bool [M], whether the true token was put in the last one's place.
    """

    tokens: Tensor
    log_q: Tensor
    log_p: Tensor
    inserted: Tensor


class Distillation(NamedTuple):
    """Sums over the M slots; divide by the sum of weights.

    Attributes:
        loss: scalar with gradient.
        hits: fp32 [M], 1 where the head's best token is the teacher's.
        candidates: for path scores, or None.
    """

    loss: Tensor
    hits: Tensor
    candidates: Candidates | None


def distil(
    hidden: Tensor,
    teacher_hidden: Tensor,
    slots: Tensor,
    teachers: Tensor,
    shared: Tensor,
    chunks: Sequence[Chunk],
    labels: Tensor,
    weights: Tensor,
    project: Project,
    config: LossConfig,
    *,
    with_candidates: bool = False,
) -> Distillation:
    """Weighted sum over slots of the configured loss (arXiv 2606.18394, eq. 14, numerator).

    Args:
        hidden: [S, d], the head's output for every slot of the batch.
        teacher_hidden: [P, d], the target's last hidden states.
        slots: long [M], rows of `hidden` that carry a loss.
        teachers: long [U], rows of `teacher_hidden` that teach some slot.
        shared: long [M], ascending: which of them teaches each slot.
        chunks: see `Batch`.
        labels: long [M], the target's own tokens.
        weights: fp32 [M].
        project: the target's output projection, hidden -> logits; its gradient reaches hidden.
        with_candidates: also return what path scores train on.
    """
    result = _ChunkedDistillation.apply(
        hidden, teacher_hidden, slots, teachers, shared, chunks, labels, weights,
        project, config, with_candidates,
    )  # fmt: skip
    loss, hits, *found = result
    return Distillation(loss, hits, Candidates(*found) if with_candidates else None)


class _ChunkedDistillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        teacher_hidden: Tensor,
        slots: Tensor,
        teachers: Tensor,
        shared_all: Tensor,
        chunks: Sequence[Chunk],
        labels: Tensor,
        weights: Tensor,
        project: Project,
        config: LossConfig,
        with_candidates: bool,
    ) -> tuple[Tensor, ...]:
        gradient = torch.zeros_like(hidden)
        loss = hidden.new_zeros((), dtype=torch.float32)
        hits, found = [], []
        measure = slot_losses_on(hidden.device)
        for begin, end, first, last in chunks:
            here = slice(begin, end)
            shared = shared_all[here] - first
            # `project` chooses its own dtype; sums over the vocabulary are fp32.
            with torch.autocast(hidden.device.type, enabled=False):
                with torch.enable_grad():
                    chunk = hidden[slots[here]].detach().requires_grad_()
                    logits = project(chunk)  # [m, V]
                student = logits.detach()
                taught = project(teacher_hidden[teachers[first:last]])  # [u, V]
                label, weight = labels[here], weights[here]
                measured = measure(
                    student, taught, shared, label, weight, config.terms, config.temperature
                )
                loss += measured.loss
                hits.append(measured.hits)
                if with_candidates:
                    found.append(_candidates(student, taught, shared, label, measured, config))
                if ctx.needs_input_grad[0]:
                    (d_chunk,) = torch.autograd.grad(logits, chunk, measured.gradient)
                    gradient[slots[here]] = d_chunk
            del logits, student, taught, measured
        ctx.save_for_backward(gradient)
        empty = hidden.new_zeros(0, dtype=torch.float32)
        outputs = [loss, torch.cat([empty, *hits])]
        if with_candidates:
            outputs += _concatenate(found, config.edge_candidates, hidden.device)
        ctx.mark_non_differentiable(*outputs[1:])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * d_loss, *([None] * 10)


class SlotLosses(NamedTuple):
    """Of a chunk of m slots taught by u positions.

    Attributes:
        loss: scalar, weighted sum.
        gradient: [m, V], of that sum with respect to the student's logits.
        hits: fp32 [m], 1 where the best tokens agree.
        student_lse: [m]; teacher_lse: [u]; log-sum-exp of the logits at T = 1.
        group_maxima: [m, G], largest logit of every `TOP_K_GROUP` neighbours of the vocabulary, or
            None.
    """

    loss: Tensor
    gradient: Tensor
    hits: Tensor
    student_lse: Tensor
    teacher_lse: Tensor
    group_maxima: Tensor | None = None


def slot_losses(
    student: Tensor,
    taught: Tensor,
    shared: Tensor,
    labels: Tensor,
    weights: Tensor,
    terms: Sequence[tuple[str, float]],
    temperature: float,
) -> SlotLosses:
    """Loss and gradient in closed form, with as few passes over the vocabulary as will do.

    Args:
        student: fp32 [m, V]; taught: fp32 [u, V]; both logits.
        shared: long [m], the row of `taught` that teaches each slot.
        labels: long [m]; weights: fp32 [m].
        terms: (kind, share) of what is added up; see `LossConfig.kind`.
    """
    student_best, taught_best = student.argmax(-1), taught.argmax(-1)
    hits = (student_best == taught_best[shared]).float()
    q, student_lse = _softmax(student, student_best)
    p, teacher_lse = _softmax(taught, taught_best)
    loss = student.new_zeros(())
    gradient: Tensor | None = None
    soft = []
    for kind, share in terms:
        if kind != "hard_labels":
            soft.append((kind, share))
            continue
        rows = student_lse - student.gather(1, labels[:, None])[:, 0]
        d_rows = q.scatter_add(1, labels[:, None], -torch.ones_like(rows)[:, None])
        loss = loss + (rows * (share * weights)).sum()
        gradient = d_rows * (share * weights)[:, None]
    if soft:
        lse_q, lse_p = student_lse, teacher_lse
        if temperature != 1:
            student, taught = student / temperature, taught / temperature
            q, lse_q = _softmax(student, student_best)
            p, lse_p = _softmax(taught, taught_best)
        p = p[shared]
        for kind, share in soft:
            if kind == "total_variation":
                # TV = sum |q - p| / 2; d/dz_q = q (s - sum q s) / T, s = sign(q - p) / 2
                gap = q - p
                rows = gap.abs().sum(-1) / 2
                sign = gap.sign() / 2
                d_rows = q * (sign - (q * sign).sum(-1, keepdim=True))
            else:
                gap = (lse_q - lse_p[shared])[:, None] - student + taught[shared]  # log p - log q
                if kind == "forward_kl":
                    # KL(p || q) = sum p (log p - log q); d/dz_q = (q - p) / T
                    rows = (p * gap).sum(-1)
                    d_rows = q - p
                else:
                    # KL(q || p) = sum q (log q - log p); d/dz_q = q (log q - log p - KL) / T
                    rows = -(q * gap).sum(-1)
                    d_rows = q * (-gap - rows[:, None])
            loss = loss + (rows * (share * weights)).sum() * temperature**2
            d_rows = d_rows * (share * weights * temperature)[:, None]
            gradient = d_rows if gradient is None else gradient + d_rows
    assert gradient is not None
    return SlotLosses(loss, gradient, hits, student_lse, teacher_lse)


def _softmax(logits: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
    """softmax [n, V] and log-sum-exp [n]: the latter read off the likeliest token, `best`."""
    probabilities = logits.softmax(-1)
    largest = probabilities.gather(1, best[:, None])[:, 0]
    return probabilities, logits.gather(1, best[:, None])[:, 0] - largest.log()


def slot_losses_on(device: torch.device) -> Callable[..., SlotLosses]:
    """`slot_losses`; on a GPU its kernel, which takes logits of any type and keeps that type.

    In torch, a dozen passes over [m, V] cost several times what the projections do.
    """
    if device.type != "cuda":
        return slot_losses
    from kernels import distillation

    def fused(*args: Any) -> SlotLosses:
        return SlotLosses(*distillation.slot_losses(*args))

    return fused


def _candidates(
    student: Tensor,
    taught: Tensor,
    shared: Tensor,
    labels: Tensor,
    measured: SlotLosses,
    config: LossConfig,
) -> Candidates:
    count = min(config.edge_candidates, student.shape[-1])
    best, tokens = top_k(student, count, maxima=measured.group_maxima)  # [m, K]
    missing = ~(tokens == labels[:, None]).any(-1)
    tokens[:, -1] = torch.where(missing, labels, tokens[:, -1])
    best[:, -1] = torch.where(missing, student.gather(1, labels[:, None])[:, 0], best[:, -1])
    log_p = taught[shared[:, None], tokens].float() - measured.teacher_lse[shared, None]
    return Candidates(tokens, best.float() - measured.student_lse[:, None], log_p, missing)


def top_k(
    values: Tensor, count: int, group: int = TOP_K_GROUP, maxima: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(values, indices) [m, K] of the largest entries of [m, V], largest first.

    The K largest lie in the K groups with the largest maxima, so only those are sorted: a
    fraction of `topk` over a whole vocabulary.

    Args:
        maxima: [m, ceil(V / group)], of every group of neighbours, where they are known.
    """
    groups = values.shape[-1] // group
    if groups <= count:
        return values.topk(count, dim=-1)
    whole = values[:, : groups * group].unflatten(-1, (groups, group))
    maxima = whole.amax(-1) if maxima is None else maxima[:, :groups]
    chosen = maxima.topk(count, dim=-1).indices  # [m, K]
    inside = whole.gather(1, chosen[..., None].expand(-1, -1, group)).flatten(1)
    offsets = torch.arange(group, device=values.device)
    places = (chosen[..., None] * group + offsets).flatten(1)
    rest = torch.arange(groups * group, values.shape[-1], device=values.device)
    inside = torch.cat([inside, values[:, groups * group :]], dim=1)
    places = torch.cat([places, rest.expand(len(values), -1)], dim=1)
    best, order = inside.topk(count, dim=-1)
    return best, places.gather(1, order)


def _concatenate(found: list[Candidates], count: int, device: torch.device) -> list[Tensor]:
    if found:
        return [torch.cat(field) for field in zip(*found, strict=True)]
    none = torch.zeros(0, count, device=device)
    return [none.long(), none, none.clone(), none[:, 0].bool()]


def edge_loss(
    edges: EdgeProducer,
    candidates: Candidates,
    hidden: Tensor,
    places: Places,
    weights: Tensor,
    embed: Project,
    vocab_size: int,
    config: LossConfig,
) -> Tensor:
    """Weighted sum of the path scores' loss, teacher-forced: the parent is the true token.

    The configured kinds over each slot's candidates, between the teacher and slot log-probability
    + S, both renormalised there; reverse KL is taken forward. Slot scores and hidden states are
    constants here: path scores never bend the head they correct.

    A slot whose true token had to be inserted does not teach. No draft reaches that token, and
    among the candidates it only ever stood where it was right: never as a token to be turned down,
    so that its scores would grow far beyond its share.

    Args:
        hidden: [M, d], detached slot hidden states.
        places: where the M slots lie, their true tokens and those before them.
        weights: fp32 [M].
        embed: the target's embedding, of `vocab_size` tokens.
    """
    tokens, log_q, log_p, inserted = candidates
    weights = weights.masked_fill(inserted, 0.0)
    total = hidden.new_zeros((), dtype=torch.float32)
    if not len(tokens):  # every parameter has a gradient nevertheless
        total = total + sum(0 * parameter.float().sum() for parameter in edges.parameters())
    scored = edges.teacher_forced(tokens, log_q, hidden, places, embed, vocab_size)
    for begin in range(0, len(tokens), 8 * config.chunk_tokens):
        here = slice(begin, begin + 8 * config.chunk_tokens)
        scores = F.log_softmax(log_q[here] + scored(here).float(), dim=-1)  # [m, K], sums to one
        true = tokens[here] == places.labels[here, None]
        rows = _edge_rows(scores, F.log_softmax(log_p[here], dim=-1), true, config)
        total = total + (rows * weights[here]).sum()
    return total


def _edge_rows(log_q: Tensor, log_p: Tensor, true: Tensor, config: LossConfig) -> Tensor:
    """Losses [m] of log q against log p, both [m, K]; true: bool [m, K], the true token's place."""
    rows = log_q.new_zeros(len(log_q))
    for kind, share in config.terms:
        if kind == "hard_labels":
            row = -(true.float() * log_q).sum(-1)
        elif kind == "total_variation":
            row = (log_q.exp() - log_p.exp()).abs().sum(-1) / 2
        else:
            row = (log_p.exp() * (log_p - log_q)).sum(-1)
        rows = rows + share * row
    return rows
