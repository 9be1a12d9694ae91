"""The part of a training step that has gradients: one module, so that DDP and FSDP2 can wrap it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from jetspec.heads.base import DraftHead
from jetspec.heads.edges import Places
from jetspec.targets.target import Target
from jetspec.training.blocks import Batch, attention_mask
from jetspec.training.config import LossConfig
from jetspec.training.exact_edges import exact_edge_loss
from jetspec.training.losses import Distillation, distil, edge_loss

if TYPE_CHECKING:
    from jetspec.heads.parallel import ParallelHead


@dataclass(frozen=True)
class Statistics:
    """Sums of one or more batches; they add up over batches and workers.

    Attributes:
        sums: fp32 [2 + 2 D]: weighted loss, weighted edge loss, then per depth the slots whose
            best token is the teacher's, and the slots.
    """

    EDGE: ClassVar[int] = 1
    """Where in `sums` the edge loss stands."""

    sums: Tensor

    @classmethod
    def zero(cls, depth: int, device: torch.device) -> "Statistics":
        return cls(torch.zeros(2 + 2 * depth, device=device))

    @classmethod
    def of(cls, batch: Batch, loss: Tensor, edge: Tensor, hits: Tensor) -> "Statistics":
        """Of one batch.

        Args:
            loss, edge: scalars, weighted sums; edge is zero without path scores.
            hits: fp32 [M], 1 where the head's best token at `batch.slots` is the teacher's.
        """
        places = batch.slots % batch.block_size - 1
        none = hits.new_zeros(batch.block_size - 1)
        counted = [none.index_add(0, places, x) for x in (hits, torch.ones_like(hits))]
        return cls(torch.cat([torch.stack([loss.detach(), edge.detach()]), *counted]))

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(self.sums + other.sums)

    def metrics(self, weight: float) -> dict[str, float]:
        """Means of one step; `weight` is its sum of loss weights over all workers."""
        values = self.sums.tolist()
        hits, counts = values[2:][: len(values) // 2 - 1], values[len(values) // 2 + 1 :]
        means = {"loss": values[0] / weight, "edge_loss": values[1] / weight}
        for depth, (hit, count) in enumerate(zip(hits, counts, strict=True), start=1):
            means[f"accuracy_{depth}"] = hit / count if count else 0.0
        return means


@dataclass
class Window:
    """What has added up since the last report; kept in checkpoints so that curves are exact."""

    sums: Tensor
    weight: float = 0.0
    tokens: int = 0
    slots: int = 0
    # Wall time is this process's own and is not kept.
    started: float = field(default_factory=time.perf_counter)
    timed_tokens: int = 0
    timed_slots: int = 0
    timed_steps: int = 0

    def add(self, sums: Tensor, weight: float, tokens: int, slots: int) -> None:
        self.sums = self.sums + sums
        self.weight += weight
        self.tokens += tokens
        self.slots += slots
        self.timed_tokens += tokens
        self.timed_slots += slots
        self.timed_steps += 1

    def metrics(self) -> dict[str, float]:
        seconds = time.perf_counter() - self.started
        return {
            **Statistics(self.sums).metrics(self.weight),
            "tokens_per_second": self.timed_tokens / seconds,
            "slots_per_second": self.timed_slots / seconds,
            "steps_per_second": self.timed_steps / seconds,
        }

    def state(self) -> dict[str, Any]:
        kept = {"weight": self.weight, "tokens": self.tokens, "slots": self.slots}
        return {"sums": self.sums.tolist(), **kept}


class Distiller(nn.Module):
    """The head under training, from a batch and the teacher's hidden states to a loss.

    Args:
        head: the trained part.
        target: lends its embedding and its output projection, both frozen.
    """

    def __init__(self, head: DraftHead, target: Target, config: LossConfig) -> None:
        super().__init__()
        self.head = head
        self.config = config
        self._target = target

    def forward(self, batch: Batch, taps: Tensor, teacher_hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(loss summed over slots with their weights, sums for `Statistics`).

        Args:
            taps: [R, T, n·d]; teacher_hidden: [R, T, d].
        """
        return self.head.loss(batch, taps, teacher_hidden, self._target, self.config)


def distil_slots(
    batch: Batch,
    hidden: Tensor,
    teacher_hidden: Tensor,
    target: Target,
    config: LossConfig,
    *,
    slots: Tensor | None = None,
    with_candidates: bool = False,
) -> Distillation:
    """The configured loss of every slot that carries one.

    Args:
        hidden: [R, A * block, d], input of the target's output projection.
        teacher_hidden: [R, T, d].
        slots: long [M], where in `hidden` each of `batch.slots` is predicted; None is at itself.
        with_candidates: also return what edge scores train on.
    """
    chosen = batch.chosen()
    return distil(
        hidden.flatten(0, 1),
        teacher_hidden.flatten(0, 1),
        batch.slots if slots is None else slots,
        batch.teachers,
        batch.shared,
        batch.chunks,
        batch.labels.flatten()[chosen],
        batch.weights.flatten()[chosen],
        target.project_rounded if hidden.is_cuda else target.project,
        config,
        with_candidates=with_candidates,
    )


@dataclass
class FirstPass:
    """What the slots of one batch give, and all path scores over them start from.

    Attributes:
        fused: [R, T, d], the context.
        hidden: [R, A * block, d]; without a graph where the backbone is frozen.
        found: loss and hits of the slots; candidates where they were asked for.
    """

    batch: Batch
    fused: Tensor
    hidden: Tensor
    found: Distillation

    @cached_property
    def states(self) -> Tensor:
        """[M, d], detached, of the slots that carry a loss: path scores never bend the head."""
        return self.hidden.detach().flatten(0, 1)[self.batch.slots]

    @cached_property
    def places(self) -> Places:
        batch, chosen = self.batch, self.batch.chosen()
        blocks, depths = batch.slots // batch.block_size, batch.slots % batch.block_size - 1
        parents, labels = (x.flatten()[chosen] for x in (batch.parents(), batch.labels))
        shape = batch.anchors.numel(), batch.block_size - 1
        return Places(blocks, depths, parents, labels, shape)

    @cached_property
    def weights(self) -> Tensor:
        """fp32 [M]."""
        return self.batch.weights.flatten()[self.batch.chosen()]


def first_pass(
    head: "ParallelHead",
    batch: Batch,
    taps: Tensor,
    teacher_hidden: Tensor,
    target: Target,
    config: LossConfig,
    *,
    scored_by: Sequence["ParallelHead"],
) -> FirstPass:
    """The slots of a head that drafts a block in one pass; arguments as in `DraftHead.loss`.

    Args:
        scored_by: heads whose path scores are trained over them.
    """
    fused = head.fuse(taps)
    hidden = head(
        fused,
        batch.positions,
        target.embed(batch.slot_ids(head.mask_token_id)),
        batch.slot_positions(),
        attention_mask(batch, causal=head.config.mask == "causal"),
    )
    over_candidates = any(
        other.edges is not None and other.edges.normaliser == "candidates" for other in scored_by
    )
    found = distil_slots(
        batch, hidden, teacher_hidden, target, config, with_candidates=over_candidates
    )
    return FirstPass(batch, fused, hidden, found)


def path_loss(
    head: "ParallelHead",
    first: FirstPass,
    teacher_hidden: Tensor,
    target: Target,
    config: LossConfig,
) -> Tensor:
    """Weighted sum over slots of what `head`'s path scores lose; zero where it has none."""
    batch, path = first.batch, torch.zeros_like(first.found.loss)
    if head.edges is not None and head.edges.normaliser == "vocabulary":
        path = exact_edge_loss(
            head.edges, first.states, teacher_hidden, batch, first.places, first.weights, target,
            config,
        )  # fmt: skip
    elif head.edges is not None:
        assert first.found.candidates is not None
        path = edge_loss(
            head.edges, first.found.candidates, first.states, first.places, first.weights,
            target.embed, target.vocab_size, config,
        )  # fmt: skip
    if head.rescores:
        second = head.true_hidden(
            first.fused,
            batch.positions,
            target.embed(batch.true_ids()),
            batch.slot_positions(),
            attention_mask(batch, causal=True),
            first.hidden,
        )
        # A row that has read k tokens predicts the next, which is slot k + 1's.
        slots = batch.slots - 1
        path = path + distil_slots(batch, second, teacher_hidden, target, config, slots=slots).loss
    return path


def block_loss(
    head: "ParallelHead",
    batch: Batch,
    taps: Tensor,
    teacher_hidden: Tensor,
    target: Target,
    config: LossConfig,
) -> tuple[Tensor, Tensor]:
    """The loss of a head that drafts a block in one pass; see `DraftHead.loss`."""
    first = first_pass(head, batch, taps, teacher_hidden, target, config, scored_by=[head])
    path = path_loss(head, first, teacher_hidden, target, config)
    slots, hits = first.found.loss, first.found.hits
    loss = slots + config.edge_weight * path if head.scores_paths else slots
    return loss, Statistics.of(batch, slots, path, hits).sums
