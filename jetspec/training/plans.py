"""What a step trains on, and making it while the steps before are taken."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeVar

import numpy as np
import torch

from jetspec.training.blocks import Batch
from jetspec.training.config import TrainingConfig
from jetspec.training.corpus import BatchMaker, Corpus, Schedule
from jetspec.training.world import World

_AHEAD = 2  # steps: one is made while the last is taken, one is there in case that takes longer

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """One step.

    Attributes:
        batches: this worker's micro batches, on the host; equally many on every worker.
        weight: sum of the loss weights over all workers.
        tokens, slots: over all workers, slots being those that carry a loss.
    """

    batches: list[Batch]
    weight: float
    tokens: int
    slots: int


class Planner:
    """The plan of any step: a pure function of (samples, config, step) and of the worker.

    Args:
        pinned: whether batches lie where a GPU copies from by itself.
    """

    def __init__(
        self,
        corpus: Corpus,
        schedule: Schedule,
        maker: BatchMaker,
        config: TrainingConfig,
        world: World,
        *,
        pinned: bool,
    ) -> None:
        self._corpus, self._schedule, self._maker = corpus, schedule, maker
        self._config, self._world, self._pinned = config, world, pinned

    def __call__(self, step: int) -> Plan:
        maker, world = self._maker, self._world
        rows = sorted(self._schedule.rows(step), key=self._length, reverse=True)
        drawn = [maker.draw(step, row) for row in rows]
        size = min(self._config.micro_batch_size, math.ceil(len(rows) / world.size))
        micro = [slice(begin, begin + size) for begin in range(0, len(rows), size)]
        rounds = math.ceil(len(micro) / world.size)  # every rank synchronises equally often
        mine = micro[world.rank :: world.size]
        mine += [slice(0, 0)] * (rounds - len(mine))
        batches = [maker.make(rows[part], drawn[part]) for part in mine]
        return Plan(
            batches=[batch.pinned() for batch in batches] if self._pinned else batches,
            weight=sum(map(maker.weight, rows, drawn)),
            tokens=sum(map(self._length, rows)),
            slots=sum(map(maker.slots, rows, drawn)),
        )

    def _length(self, row: tuple[int, ...]) -> int:
        return int(self._corpus.lengths[np.asarray(row)].sum())


@contextmanager
def made_ahead(
    make: Callable[[int], T], steps: Iterable[int], device: torch.device
) -> Iterator[Iterator[T]]:
    """`make(step)` of every step, in order; for a GPU by a thread that is `_AHEAD` steps ahead.

    What `make` raises is raised where its step is asked for.
    """
    if device.type != "cuda":
        yield map(make, steps)
        return
    # Pinned memory belongs to the thread's current device.
    pool = ThreadPoolExecutor(1, initializer=partial(torch.cuda.set_device, device))
    try:
        yield _made_by(pool, make, steps)
    finally:
        pool.shutdown(cancel_futures=True)


def _made_by(
    pool: ThreadPoolExecutor, make: Callable[[int], T], steps: Iterable[int]
) -> Iterator[T]:
    left = iter(steps)
    pending: deque[Future[T]] = deque(pool.submit(make, step) for step in islice(left, _AHEAD))
    while pending:
        made = pending.popleft().result()
        pending.extend(pool.submit(make, step) for step in islice(left, 1))
        yield made
