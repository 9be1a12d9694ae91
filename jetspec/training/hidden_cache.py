"""Where a training step finds the teacher's hidden states: computed now, or computed once."""

import os
import tempfile
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from jetspec.errors import JetspecError
from jetspec.targets.target import Target
from jetspec.training.blocks import Batch
from jetspec.training.corpus import Corpus

_GROUP_TOKENS = {"cpu": 256, "cuda": 16384}


class HiddenStates(Protocol):
    """Gives a batch's (taps [R, T, n·d], last hidden states [R, T, d]) of the frozen teacher."""

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]: ...


class OnlineTeacher:
    """Runs the teacher on every batch. One pass gives taps and last hidden states."""

    def __init__(self, target: Target, taps: tuple[int, ...]) -> None:
        self.target = target
        self.taps = taps

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        output = self.target.forward(
            batch.input_ids,
            position_ids=batch.positions,
            mask=batch.causal_mask(),
            taps=self.taps,
        )
        assert output.taps is not None
        return output.taps, output.hidden


def cache_bytes(corpus: Corpus, target: Target, taps: tuple[int, ...]) -> int:
    """What a cache of all samples takes: (taps + 1) hidden states a token in the target's dtype."""
    itemsize = torch.empty((), dtype=target.dtype).element_size()
    return len(corpus.tokens) * (len(taps) + 1) * target.hidden_size * itemsize


class HiddenCache:
    """Runs the teacher once a sample and keeps what it gave in a temporary file.

    Samples are computed in groups of similar length that do not depend on the order of training,
    so a resumed run gets the same values as an unbroken one. The file is deleted from the moment
    it is opened: it is gone when the process is, however it ends.

    Args:
        copies: caches that share this machine, one a worker; their sum is held against the limit.

    Raises:
        JetspecError: the estimated size is beyond `limit_gb` or the disk's free space.
    """

    def __init__(
        self,
        corpus: Corpus,
        target: Target,
        taps: tuple[int, ...],
        *,
        limit_gb: float,
        copies: int = 1,
        directory: str | None = None,
    ) -> None:
        self.corpus = corpus
        self.taps = taps
        self._teacher = OnlineTeacher(target, taps)
        self._device = target.device
        size = cache_bytes(corpus, target, taps) * copies
        if size > limit_gb * 1e9:
            raise JetspecError(
                "training.hidden_states",
                "cache",
                f"would take {size / 1e9:.3g} GB, more than training.cache_limit_gb "
                f"{limit_gb:g}; raise the limit or use online",
            )
        place = directory or tempfile.gettempdir()
        disk = os.statvfs(place)
        if size > disk.f_bavail * disk.f_frsize:
            raise JetspecError(
                "training.hidden_states",
                "cache",
                f"would take {size / 1e9:.3g} GB, more than {place} has free; use online",
            )
        width = (len(taps) + 1) * target.hidden_size
        self._store = _temporary_tensor(len(corpus.tokens), width, target.dtype, place)
        self._filled = np.zeros(len(corpus.ids), dtype=bool)
        self._group, self._members = _groups(corpus.lengths, _GROUP_TOKENS[self._device.type])

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        used = batch.documents >= 0
        samples = batch.samples.cpu()
        self.fill(np.unique(self._sample_of(samples[used.cpu()].numpy())))
        rows = self._store[samples].to(self._device, non_blocking=True)
        rows = rows * used[..., None].to(self._device)
        width = rows.shape[-1] // (len(self.taps) + 1)
        return rows[..., :-width], rows[..., -width:]

    def fill(self, samples: np.ndarray) -> None:
        """Make sure that these samples are in the cache."""
        for group in np.unique(self._group[samples[~self._filled[samples]]]):
            members = self._members[group]
            batch = _plain_batch(self.corpus, members).to(self._device)
            states = torch.cat(self._teacher(batch), dim=-1)
            used = batch.documents >= 0
            self._store[batch.samples[used].cpu()] = states[used].cpu()
            self._filled[members] = True

    def _sample_of(self, flat: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.corpus.offsets, flat, side="right") - 1


def sample_states(
    corpus: Corpus, indices: np.ndarray, states: HiddenStates, device: torch.device
) -> tuple[Batch, Tensor]:
    """(batch, taps [R, T, n·d]) of whole samples, one a row, for evaluation."""
    batch = _plain_batch(corpus, indices).to(device)
    return batch, states(batch)[0]


def _groups(lengths: np.ndarray, budget: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Samples of similar length together: (group of each sample, samples of each group)."""
    group = np.zeros(len(lengths), dtype=np.int64)
    members: list[list[int]] = []
    for index in np.argsort(-lengths, kind="stable"):
        if not members or (len(members[-1]) + 1) * lengths[members[-1][0]] > budget:
            members.append([])
        members[-1].append(int(index))
        group[index] = len(members) - 1
    return group, [np.asarray(one) for one in members]


def _plain_batch(corpus: Corpus, indices: np.ndarray) -> Batch:
    """Whole samples, one a row, without blocks."""
    lengths = corpus.lengths[indices]
    columns = np.arange(int(lengths.max()))
    used = columns < lengths[:, None]
    flat = np.where(used, corpus.offsets[indices][:, None] + columns, 0)
    empty = torch.zeros(len(indices), 0, dtype=torch.long)
    return Batch(
        input_ids=torch.from_numpy(np.where(used, corpus.tokens[flat], 0).astype(np.int64)),
        positions=torch.from_numpy(np.broadcast_to(columns, flat.shape).copy()),
        documents=torch.from_numpy(np.where(used, 0, -1)),
        samples=torch.from_numpy(flat),
        anchors=empty,
        starts=empty,
        labels=empty[..., None],
        weights=empty[..., None].float(),
        slots=empty.flatten(),
        teachers=empty.flatten(),
        shared=empty.flatten(),
        chunks=(),
    )


def _temporary_tensor(rows: int, width: int, dtype: torch.dtype, directory: str) -> Tensor:
    handle, path = tempfile.mkstemp(prefix="jetspec-hidden-", dir=directory)
    os.close(handle)
    try:
        flat = torch.from_file(path, shared=True, size=rows * width, dtype=dtype)
    finally:
        os.unlink(path)
    return flat.view(rows, width)
