"""Prompts into pages: the pass before a sequence's first round.

Nothing here waits for the device: what the host knows goes there from pinned memory, behind the
rounds that were enqueued before.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from jetspec.engine.layers import Rows
from jetspec.engine.paged_cache import PagedCache
from jetspec.engine.round import Round
from kernels.place import place_rows

PREFILL_CHUNK = 512  # prompt tokens of one sequence in one pass
_ROW_STEP = 16
"""A pass has a multiple of it, so that prompts of all lengths run the same compiled kernels: Triton
compiles sizes that 16 divides apart from others."""


def read_prompts(
    round: Round, cache: PagedCache, prompts: Sequence[Sequence[int]], lengths: Tensor,
    table: Tensor,
) -> Tensor:  # fmt: skip
    """Keys and values of a group's prompts, and the head's context, chunk by chunk.

    Args:
        lengths: long [G], of the prompts, on the device.
        table: int [G, max_pages], the pages of each prompt's slot.

    Returns:
        [G, d], the hidden state of every prompt's last token.
    """
    device = table.device
    ids = to_device(_padded(prompts, _ROW_STEP), device)
    last: Tensor | None = None
    for first in range(0, ids.shape[1], PREFILL_CHUNK):
        chunk = ids[:, first : first + PREFILL_CHUNK].contiguous()
        nodes = chunk.shape[1]
        counts = (lengths - first).clamp(0, nodes)
        prefix = torch.full_like(counts, first).int()
        placed = place_rows(prefix, counts.int(), table, cache.page_size, nodes, sizes=counts)
        rows = Rows(len(prompts), nodes, *placed[:2], table, prefix, placed[2], None,
                    first + nodes)  # fmt: skip
        hidden, taps = round.model.forward(chunk.flatten(), rows, cache, round.taps)
        if round.head and round.head_cache:
            round.head.extend(torch.cat(taps, -1), *placed[:2], round.head_cache)
        hidden = hidden.view(len(prompts), nodes, -1)
        at = (lengths - 1 - first).clamp(0, nodes - 1)
        ends = hidden[torch.arange(len(prompts), device=device), at]
        here = ((lengths > first) & (lengths <= first + nodes))[:, None]
        last = ends if last is None else torch.where(here, ends, last)
    assert last is not None
    return last


def keep_texts(
    history: Tensor, slots: Tensor, prompts: Sequence[Sequence[int]], lengths: Tensor,
    anchors: Tensor,
) -> None:  # fmt: skip
    """A group's prompts and first tokens into the histories of its slots.

    Args:
        history: int32 [B, rows]; slots, lengths, anchors: long [G], on its device.
    """
    ids = to_device(_padded(prompts), history.device).int()
    history[slots, : ids.shape[1]] = ids
    history[slots, lengths] = anchors.int()


def _padded(prompts: Sequence[Sequence[int]], step: int = 1) -> NDArray[np.int64]:
    """[G, longest, rounded up to a multiple of `step`], zeros behind the tokens."""
    longest = -(-max(map(len, prompts)) // step) * step
    padded = np.zeros((len(prompts), longest), np.int64)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    return padded


def to_device(values: ArrayLike, device: torch.device) -> Tensor:
    """A tensor of the host's values; a GPU fetches it in its turn, and nobody waits."""
    tensor = torch.as_tensor(np.asarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Stopwatch:
    """Adds up what the blocks under it take: the device's time where it is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        if self._on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._spans.append((start, end))
        else:
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started

    def seconds(self) -> float:
        """Of all blocks; the device must be through them."""
        spent = sum(start.elapsed_time(end) for start, end in self._spans)
        return self._seconds + spent / 1e3
