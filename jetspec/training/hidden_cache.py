"""Where a training step finds the teacher's hidden states: computed now, or computed once."""

import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from jetspec.errors import JetspecError
from jetspec.targets.target import Target
from jetspec.training.blocks import Batch, causal_mask
from jetspec.training.corpus import Corpus

_GROUP_TOKENS = {"cpu": 256, "cuda": 16384}
_LONG_PASS = 2e13  # FLOP, some 40 ms of an H200: longer than its launches take

States = Callable[..., tuple[Tensor, Tensor]]


class HiddenStates(Protocol):
    """Gives a batch's (taps [R, T, n·d], last hidden states [R, T, d]) of the frozen teacher."""

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]: ...


class OnlineTeacher:
    """Runs the teacher on every batch. One pass gives taps and last hidden states."""

    def __init__(self, target: Target, taps: tuple[int, ...]) -> None:
        self.target = target
        self.taps = taps

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self._states(batch.input_ids, batch.positions, batch.documents)

    def _states(
        self, input_ids: Tensor, positions: Tensor, documents: Tensor
    ) -> tuple[Tensor, Tensor]:
        mask = causal_mask(documents)
        output = self.target.forward(input_ids, position_ids=positions, mask=mask, taps=self.taps)
        assert output.taps is not None
        return output.taps, output.hidden


class RecordedTeacher(OnlineTeacher):
    """`OnlineTeacher` whose pass over batches of one shape is recorded once and played back.

    A small target's thousand launches take the host longer than the GPU. A pass that cannot be
    recorded is run as it is.

    Args:
        shape: (R, T); batches of other shapes are run as they are.
    """

    def __init__(self, target: Target, taps: tuple[int, ...], shape: tuple[int, int]) -> None:
        super().__init__(target, taps)
        self._shape = shape
        self._play: States | None = None

    @staticmethod
    def pays(target: Target, tokens: int) -> bool:
        """Whether a pass over so many tokens is short for a GPU."""
        weights = sum(p.numel() for p in target.model.base_model.parameters())
        return target.device.type == "cuda" and 2 * weights * tokens < _LONG_PASS

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if batch.input_ids.shape != self._shape:
            return super().__call__(batch)
        inputs = batch.input_ids, batch.positions, batch.documents
        if self._play is None:
            try:
                self._play = cuda_graph(self._states, inputs)
            except RuntimeError as error:
                print(f"teacher: its pass is not recorded: {error}", file=sys.stderr, flush=True)
                self._play = self._states
        return self._play(*inputs)


def cuda_graph(function: States, inputs: tuple[Tensor, ...]) -> States:
    """`function` over inputs of these shapes as one CUDA graph.

    Raises:
        RuntimeError: it does what a graph cannot hold.
    """
    held = tuple(tensor.clone() for tensor in inputs)
    function(*held)  # libraries allocate what they keep
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # that not every wait is found
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")  # a recording that breaks off leaves traces
    try:
        function(*held)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    graph = torch.cuda.CUDAGraph()
    # Other threads may go on with CUDA meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = function(*held)

    def play(*given: Tensor) -> tuple[Tensor, Tensor]:
        for to, tensor in zip(held, given, strict=True):
            to.copy_(tensor)
        graph.replay()
        taps, hidden = outputs
        return taps.clone(), hidden.clone()  # the next pass writes over the graph's own

    return play


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
