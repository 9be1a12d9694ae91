"""Processes that share out one stage's work without an orchestrator: those that torchrun starts.

They agree through torchrun's key-value store alone. No collective waits for a process that is busy
with a long piece of work, and a machine's GPUs need no link between them.
"""

import os
import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
_PATIENCE = timedelta(days=30)  # torchrun ends every process when one of them fails


class Peers:
    """This process's place among those that share out the work; by default it is alone.

    Every process makes the same calls in the same order.

    Args:
        rank: from 0; rank 0 prepares, closes and reports.
        size: processes in all.
        store: theirs, with `set`, `get`, `add` and `wait`; None for one process alone.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None) -> None:
        self.rank, self.size, self._store = rank, size, store
        self._calls = 0
        self._sums: dict[str, int] = defaultdict(int)

    def same(self, call: Callable[[], T]) -> T:
        """What `call` gives on rank 0, on every rank; where it fails, rank 0 alone says why."""
        if self.size == 1:
            return call()
        key = self._key()
        if self.rank == 0:
            try:
                value = call()
            except BaseException:
                self._store.set(key, b"")
                raise
            self._store.set(key, pickle.dumps(value))
            return value
        self._store.wait([key], _PATIENCE)
        if not (sent := self._store.get(key)):
            raise SystemExit(1)
        found: T = pickle.loads(sent)
        return found

    def taken(self, items: Sequence[T]) -> Iterator[T]:
        """The items that are this process's: whoever is free takes the next one."""
        if self.size == 1:
            yield from items
            return
        key = self._key()
        while (number := self._store.add(key, 1) - 1) < len(items):
            yield items[number]

    def all(self, value: T) -> list[T]:
        """Every process's value, by rank."""
        if self.size == 1:
            return [value]
        key = self._key()
        self._store.set(f"{key}/{self.rank}", pickle.dumps(value))
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        self._store.wait(keys, _PATIENCE)
        return [pickle.loads(self._store.get(key)) for key in keys]

    def add(self, name: str, amount: int) -> int:
        """The sum under a name over all processes so far."""
        if self.size == 1:
            self._sums[name] += amount
            return self._sums[name]
        return int(self._store.add(f"sum/{name}", amount))

    def wait(self) -> None:
        """Return when every process has come here."""
        if self.size == 1:
            return
        key = self._key()
        if self._store.add(key, 1) == self.size:
            self._store.set(f"{key}/all", b"here")
        self._store.wait([f"{key}/all"], _PATIENCE)

    def _key(self) -> str:
        self._calls += 1
        return f"call/{self._calls}"


@contextmanager
def join_peers() -> Iterator[Peers]:
    """The processes that `torchrun` started, each with a GPU of its own where there are any."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        yield Peers()
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store, rank, size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore("jetspec", store)
    peers = Peers(rank, size, store)
    yield peers
    peers.wait()
    # Rank 0 may hold the store: it leaves last.
    if rank:
        store.add("left", 1)
    else:
        while store.add("left", 0) < size - 1:
            time.sleep(0.01)
