"""Training samples in flat arrays, and the order in which steps visit them.

Everything here is a pure function of (samples, config, step): a resumed run and a run on more
workers see the same batches.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
import torch

from jetspec.errors import JetspecError
from jetspec.samples import SampleColumns
from jetspec.training.blocks import Batch, plan_chunks
from jetspec.training.config import TrainingConfig

TrainingSamples = SampleColumns | Sequence[Any]
"""Columns, or samples with `id`, `prompt_id`, `input_ids` and `loss_mask`."""

_TOGETHER = 4096  # samples looked at together: arrays of a few megabytes
_WINDOW = 1024  # samples packed into rows together: enough to fill rows, few enough to stay mixed


@dataclass(frozen=True)
class Corpus:
    """N samples, cut to a row's length.

    Attributes:
        tokens: int32 [total]; run_ends: int32 [total], for a generated token the index in its
            sample where its unbroken run of generated tokens ends, -1 for a prompt's token.
        offsets: int64 [N + 1], where each sample begins.
        ids: the samples' ids; prompt_ids: their prompts'.
        cut: samples longer than a row.
    """

    tokens: np.ndarray
    run_ends: np.ndarray
    offsets: np.ndarray
    ids: tuple[str, ...]
    prompt_ids: tuple[str, ...]
    cut: int

    @classmethod
    def from_samples(cls, samples: TrainingSamples, sequence_length: int) -> "Corpus":
        """Samples as a corpus; the tokens of columns that nothing is cut from are shared.

        Raises:
            JetspecError: a sample whose mask and tokens differ in length.
        """
        columns = samples if isinstance(samples, SampleColumns) else SampleColumns.of(samples)
        tokens, mask, offsets = columns.tokens, columns.mask, columns.offsets
        long = np.diff(offsets) > sequence_length
        if long.any():
            begins = offsets[:-1]
            ends = np.minimum(offsets[1:], begins + sequence_length)
            kept = [slice(*pair) for pair in zip(begins.tolist(), ends.tolist(), strict=True)]
            tokens = np.concatenate([tokens[part] for part in kept])
            mask = np.concatenate([mask[part] for part in kept])
            offsets = np.cumsum(np.concatenate([np.zeros(1, np.int64), ends - begins]))
        return cls(
            tokens=tokens,
            run_ends=_run_ends(mask, offsets),
            offsets=offsets,
            ids=columns.ids,
            prompt_ids=columns.prompt_ids,
            cut=int(long.sum()),
        )

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 [N]."""
        return np.diff(self.offsets)

    def anchors(self, index: int) -> np.ndarray:
        """Where a block may start: generated tokens followed by another of the same answer."""
        ends = self.run_ends[self.offsets[index] : self.offsets[index + 1]]
        places = np.arange(len(ends))
        return np.flatnonzero((ends > places) & (places >= 1))

    def _with_anchors(self) -> np.ndarray:
        """Indices of the samples that have an anchor."""
        found = []
        for begin in range(0, len(self.ids), _TOGETHER):
            offsets = self.offsets[begin : begin + _TOGETHER + 1]
            places = np.arange(offsets[0], offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))
            ends = self.run_ends[offsets[0] : offsets[-1]]
            anchors = np.append(0, np.cumsum((ends > places) & (places >= 1)))
            found.append(np.flatnonzero(np.diff(anchors[offsets - offsets[0]])) + begin)
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def split(self, heldout_fraction: float) -> tuple[np.ndarray, np.ndarray]:
        """Indices of (training, held-out) samples, by prompt, stable when samples are added.

        Samples without any block to train on are in neither.

        Raises:
            JetspecError: fewer than two prompts with an answer.
        """
        usable = self._with_anchors().tolist()
        prompts = sorted(
            {self.prompt_ids[i] for i in usable}, key=lambda p: sha256(p.encode()).hexdigest()
        )
        if len(prompts) < 2:
            raise JetspecError(
                "samples",
                f"{len(prompts)} prompts with an answer",
                "training needs at least two; regenerate more",
            )
        count = min(max(1, round(heldout_fraction * len(prompts))), len(prompts) - 1)
        held = set(prompts[:count])
        heldout = [i for i in usable if self.prompt_ids[i] in held]
        training = [i for i in usable if self.prompt_ids[i] not in held]
        return np.asarray(training), np.asarray(heldout)


def _run_ends(mask: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """`Corpus.run_ends` of N samples' masks [total], one behind the other."""
    first = np.ones(len(mask), dtype=bool)  # of a run of equal flags within one sample
    first[1:] = mask[1:] != mask[:-1]
    first[offsets[:-1][np.diff(offsets) > 0]] = True
    begins = np.flatnonzero(first)
    ends = np.append(begins[1:], len(mask))[: len(begins)]
    samples = np.searchsorted(offsets, begins, side="right") - 1
    last = np.where(mask[begins] == 1, ends - 1 - offsets[samples], -1)
    return np.repeat(last.astype(np.int32), ends - begins)


class Schedule:
    """Which rows each step trains on.

    Every epoch visits the training samples in a new seeded order; with a row capacity, samples
    are packed into rows first. A step takes `batch_size` rows; an epoch's last rows, too few for
    a step, are left to the next epoch's order.

    Args:
        lengths: tokens of every sample; training: indices of the samples to visit.
        capacity: tokens a row may hold, or None for one sample a row.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        training: np.ndarray,
        config: TrainingConfig,
        capacity: int | None,
    ) -> None:
        self.batch_size = config.batch_size
        self._lengths, self._training, self._capacity = lengths, training, capacity
        self._seed = config.seed
        self._ends: list[int] = []  # the step after each epoch's last
        self._held: tuple[int, list[tuple[int, ...]]] = (-1, [])
        most = config.max_steps
        while len(self._ends) < config.epochs and (most is None or self._last < most):
            rows = self._epoch(len(self._ends))
            self._ends.append(self._last + max(1, len(rows) // self.batch_size))
        self.total_steps = self._last if most is None else min(self._last, most)

    def epoch(self, step: int) -> float:
        """Epochs done before `step` (from 0)."""
        index = bisect_right(self._ends, step)
        if index == len(self._ends):
            return float(index)
        first = self._first(index)
        return index + (step - first) / (self._ends[index] - first)

    def rows(self, step: int) -> list[tuple[int, ...]]:
        """The samples of every row of `step`."""
        index = bisect_right(self._ends, step)
        start = (step - self._first(index)) * self.batch_size
        return self._epoch(index)[start : start + self.batch_size]

    @property
    def _last(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _first(self, epoch: int) -> int:
        return self._ends[epoch - 1] if epoch else 0

    def _epoch(self, index: int) -> list[tuple[int, ...]]:
        """The rows of an epoch; the latest is kept, since packing one takes a while."""
        if self._held[0] != index:
            order = np.random.default_rng([self._seed, index])
            self._held = index, _rows(self._lengths, self._training, order, self._capacity)
        return self._held[1]


def _rows(
    lengths: np.ndarray, training: np.ndarray, order: np.random.Generator, capacity: int | None
) -> list[tuple[int, ...]]:
    samples = order.permutation(training)
    if capacity is None:
        return [(int(index),) for index in samples]
    rows: list[tuple[int, ...]] = []
    for begin in range(0, len(samples), _WINDOW):
        window = samples[begin : begin + _WINDOW]
        rows += _pack(window[np.argsort(-lengths[window], kind="stable")], lengths, capacity)
    return [rows[i] for i in order.permutation(len(rows))]


def _pack(samples: np.ndarray, lengths: np.ndarray, capacity: int) -> list[tuple[int, ...]]:
    """First fit of samples (longest first) into rows of `capacity` tokens."""
    rows: list[list[int]] = []
    room = np.zeros(len(samples), dtype=np.int64)
    for index in samples:
        fits = np.flatnonzero(room[: len(rows)] >= lengths[index])
        if len(fits):
            row = int(fits[0])
        else:
            row = len(rows)
            rows.append([])
            room[row] = capacity
        rows[row].append(int(index))
        room[row] -= lengths[index]
    return [tuple(row) for row in rows]


class BatchMaker:
    """Draws the anchors of a step and lays rows out as tensors.

    Args:
        fixed_shape: pad every batch to `micro_batch_size` rows of `sequence_length` tokens and
            `anchors` blocks, so that a compiled kernel sees one shape.
    """

    def __init__(
        self, corpus: Corpus, config: TrainingConfig, block_size: int, *, fixed_shape: bool
    ) -> None:
        self.corpus = corpus
        self.config = config
        self.depth = block_size - 1
        self.fixed_shape = fixed_shape
        steps = np.arange(self.depth)
        gamma = config.loss.gamma
        self.depth_weights = np.exp(-steps / gamma) if gamma else np.ones(self.depth)

    def draw(self, step: int, row: tuple[int, ...]) -> np.ndarray:
        """int64 [a, 2]: (document of the row, anchor in that document) of a row's blocks."""
        places = [self.corpus.anchors(index) for index in row]
        pairs = np.concatenate([np.stack([np.full(len(p), d), p], 1) for d, p in enumerate(places)])
        if len(pairs) > self.config.anchors:
            order = np.random.default_rng([self.config.seed, step, row[0]])
            chosen = order.choice(len(pairs), self.config.anchors, replace=False)
            pairs = pairs[np.sort(chosen)]
        return pairs

    def weight(self, row: tuple[int, ...], pairs: np.ndarray) -> float:
        """Sum of the loss weights of a row's blocks."""
        return float(self._slot_weights(row, pairs).sum())

    def slots(self, row: tuple[int, ...], pairs: np.ndarray) -> int:
        """Slots of a row that carry a loss."""
        return int((self._slot_weights(row, pairs) > 0).sum())

    def make(self, rows: list[tuple[int, ...]], drawn: list[np.ndarray]) -> Batch:
        """The batch of `rows` (possibly none) with their drawn blocks."""
        corpus, depth = self.corpus, self.depth
        lengths = [sum(int(corpus.lengths[i]) for i in row) for row in rows]
        if self.fixed_shape:
            count, width = self.config.micro_batch_size, self.config.sequence_length
            blocks = self.config.anchors
        else:
            count, width = max(1, len(rows)), max([1, *lengths])
            blocks = max([1, *(len(pairs) for pairs in drawn)])
        ids = np.zeros((count, width), np.int64)
        positions = np.zeros((count, width), np.int64)
        documents = np.full((count, width), -1, np.int64)
        samples = np.zeros((count, width), np.int64)
        anchors = np.zeros((count, blocks), np.int64)
        starts = np.zeros((count, blocks), np.int64)
        labels = np.zeros((count, blocks, depth), np.int64)
        weights = np.zeros((count, blocks, depth), np.float32)
        for r, (row, pairs) in enumerate(zip(rows, drawn, strict=True)):
            begins = np.cumsum([0, *(corpus.lengths[i] for i in row)])
            for d, index in enumerate(row):
                here = slice(begins[d], begins[d + 1])
                flat = np.arange(corpus.offsets[index], corpus.offsets[index + 1])
                ids[r, here] = corpus.tokens[flat]
                positions[r, here] = np.arange(len(flat))
                documents[r, here] = d
                samples[r, here] = flat
            a = len(pairs)
            starts[r, :a] = begins[pairs[:, 0]]
            anchors[r, :a] = starts[r, :a] + pairs[:, 1]
            weights[r, :a] = self._slot_weights(row, pairs)
            ahead = anchors[r, :a, None] + np.arange(1, depth + 1)
            labels[r, :a] = ids[r, np.minimum(ahead, width - 1)]
        teachers = np.arange(count)[:, None, None] * width + anchors[:, :, None] + np.arange(depth)
        flat_slots = np.flatnonzero(np.pad(weights, ((0, 0), (0, 0), (1, 0))))
        flat_teachers = teachers[weights > 0]
        order = np.argsort(flat_teachers, kind="stable")
        ascending = flat_teachers[order]
        new = np.diff(ascending, prepend=-1) > 0
        shared = np.cumsum(new) - 1
        return Batch(
            input_ids=torch.from_numpy(ids),
            positions=torch.from_numpy(positions),
            documents=torch.from_numpy(documents),
            samples=torch.from_numpy(samples),
            anchors=torch.from_numpy(anchors),
            starts=torch.from_numpy(starts),
            labels=torch.from_numpy(labels),
            weights=torch.from_numpy(weights),
            slots=torch.from_numpy(flat_slots[order]),
            teachers=torch.from_numpy(ascending[new]),
            shared=torch.from_numpy(shared),
            chunks=plan_chunks(shared, self.config.loss.chunk_tokens),
        )

    def _slot_weights(self, row: tuple[int, ...], pairs: np.ndarray) -> np.ndarray:
        """[a, D]: the depth's weight where the slot's token belongs to the same answer, else 0."""
        flat = self.corpus.offsets[np.asarray(row)][pairs[:, 0]] + pairs[:, 1]
        left = self.corpus.run_ends[flat] - pairs[:, 1]
        return self.depth_weights * (np.arange(1, self.depth + 1) <= left[:, None])
