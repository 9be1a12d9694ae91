"""Regeneration on a pool of Ray actors.

A task is one shard; only its number crosses to a worker. A worker that dies is replaced and its
shard tried again. A shard that killed its worker `max_attempts` times is searched: its requests
are answered in halves, the answers thrown away, until those that kill a worker by themselves are
known. They go to the dead-letter file and the shard is computed without them.
"""

import contextlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from flows.cluster import connect, worker_count, worker_resources
from jetspec import storage
from jetspec.config import RunConfig
from jetspec.errors import JetspecError
from jetspec.generation.base import Backend
from jetspec.generation.plan import KIND, Plan, prepare, read_prompts, requests_of
from jetspec.generation.progress import Listener, RegenerationProgress, progress_bar
from jetspec.generation.regenerate import finish, missing_shards, open_for, regenerate_shard
from jetspec.prompts import Prompt
from jetspec.stages import StageResult

_POLL_S = 0.5  # how often progress is asked for


def regenerate_with_ray(config: RunConfig) -> StageResult:
    """Have the target answer every training prompt on a pool of workers.

    Raises:
        JetspecError: a wrong setting, an unreachable cluster or target, a corrupt shard, an output
            that cannot be written, or workers that keep dying.
    """
    plan = prepare(config)
    reused = storage.is_complete(plan.uri)
    if reused:
        manifest = storage.read_manifest(plan.uri, kind=KIND)
    else:
        if missing := missing_shards(plan):
            with (
                connect(config.ray),
                _Pool(plan, missing).running() as pool,
                progress_bar() as show,
            ):
                pool.work(show)
        manifest = finish(plan)
    facts = {name: value for name, value in manifest.items() if name != "files"}
    return StageResult(KIND, plan.uri, plan.key, reused, facts)


class RegenerationWorker:
    """One backend. The second thread tells the progress while the first computes."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._tokens = 0

    def open(self, plan: Plan) -> None:
        self._plan: Plan = plan
        self._prompts: list[Prompt] = read_prompts(plan)
        self._backend: Backend = open_for(plan)
        self._backend.on_tokens = self._count

    def regenerate(self, shard: int, excluded: dict[int, str]) -> None:
        torch.set_num_threads(self._threads)  # here, for it is kept by thread
        regenerate_shard(self._backend, self._plan, self._prompts, shard, excluded)

    def probe(self, shard: int, places: Sequence[int]) -> None:
        """Answer some requests of a shard for nothing but to see whether the worker survives."""
        requests = requests_of(self._plan, self._prompts, shard)
        self._backend.generate([requests[place][1] for place in places])

    def tokens(self) -> int:
        """Tokens written since the last call."""
        written, self._tokens = self._tokens, 0
        return written

    def _count(self, written: int) -> None:
        self._tokens += written


_ACTOR: Any = ray.remote(RegenerationWorker)


@dataclass(frozen=True)
class _Task:
    """A shard to compute, or (`places` given) some requests of it to try."""

    shard: int
    places: tuple[int, ...] = ()


@dataclass(eq=False)
class _Worker:
    actor: Any
    task: _Task | None = None  # None: it is opening its backend
    told: Any = None  # its answer to `tokens`, on the way


@dataclass
class _Suspect:
    """A shard whose workers die, and which of its requests are at fault."""

    deaths: int = 0
    probes: int = 0
    searched: bool = False
    deaths_at: Counter[int] = field(default_factory=Counter)
    excluded: dict[int, str] = field(default_factory=dict)


class _Pool:
    """Workers, the tasks that wait for one, and what is known about those that kill theirs."""

    def __init__(self, plan: Plan, shards: Sequence[int]) -> None:
        self._plan = plan
        self._attempts = plan.config.regeneration.max_attempts
        self._queue = deque(_Task(shard) for shard in shards)
        self._total = sum(plan.asked_in(shard) for shard in shards)
        self._busy: dict[Any, _Worker] = {}  # by the reference of what each is doing
        self._idle: list[_Worker] = []
        self._suspects: defaultdict[int, _Suspect] = defaultdict(_Suspect)
        self._replaced = self._failed_starts = 0
        self._done = self._tokens = 0

    @contextlib.contextmanager
    def running(self) -> Iterator["_Pool"]:
        """The pool with its workers started; they are gone afterwards."""
        settings = self._plan.config.regeneration
        gpu = settings.backend != "endpoint" and self._plan.config.target.device != "cpu"
        workers = min(worker_count(settings.workers, gpu=gpu), len(self._queue))
        self._resources, self._threads = worker_resources(workers, gpu=gpu)
        try:
            for _ in range(workers):
                self._hire()
            yield self
        finally:
            for worker in [*self._busy.values(), *self._idle]:
                ray.kill(worker.actor)

    def work(self, on_progress: Listener) -> None:
        """Until no task is left."""
        started = time.monotonic()
        while self._busy:
            ready, _ = ray.wait(list(self._busy), num_returns=1, timeout=_POLL_S)
            for reference in ready:
                self._settle(reference, self._busy.pop(reference))
            while self._queue and self._idle:
                self._assign(self._idle.pop(), self._queue.popleft())
            self._count_tokens()
            note = f"{self._replaced} workers replaced" if self._replaced else ""
            elapsed = time.monotonic() - started
            on_progress(RegenerationProgress(self._done, self._total, self._tokens, elapsed, note))

    def _hire(self) -> None:
        options = {"max_restarts": 0, "max_concurrency": 2, **self._resources}
        actor = _ACTOR.options(**options).remote(self._threads)
        self._busy[actor.open.remote(self._plan)] = _Worker(actor)

    def _assign(self, worker: _Worker, task: _Task) -> None:
        worker.task = task
        if task.places:
            reference = worker.actor.probe.remote(task.shard, task.places)
        else:
            excluded = self._suspects[task.shard].excluded
            reference = worker.actor.regenerate.remote(task.shard, excluded)
        self._busy[reference] = worker

    def _settle(self, reference: Any, worker: _Worker) -> None:
        """A worker is ready, has finished its task, has failed, or is dead."""
        task = worker.task
        try:
            ray.get(reference)
        except RayTaskError as error:
            ray.kill(worker.actor)
            raise _told_in_one_line(error, task) from error
        except RayError as error:
            ray.kill(worker.actor)
            self._replaced += 1
            self._learn_from_death(task, error)
            self._hire()
            return
        if task is None:
            self._failed_starts = 0
        elif task.places:
            self._probed(task.shard)
        else:
            self._done += self._plan.asked_in(task.shard)
        self._idle.append(worker)

    def _learn_from_death(self, task: _Task | None, error: RayError) -> None:
        """Try again, look closer, or give one request up; never without end."""
        reason = _last_line(error)
        if task is None:
            self._failed_starts += 1
            if self._failed_starts >= self._attempts:
                raise JetspecError(
                    "regeneration",
                    f"{self._failed_starts} workers in a row died before their first shard",
                    f"{reason}; the machine may be out of memory",
                )
            return
        suspect = self._suspects[task.shard]
        if not task.places:
            suspect.deaths += 1
            if suspect.deaths % self._attempts:
                self._queue.append(task)
            elif suspect.searched:
                raise JetspecError(
                    "regeneration",
                    f"shard {task.shard} killed {suspect.deaths} workers, none of its prompts one",
                    f"{reason}; try a smaller regeneration.batch_size",
                )
            else:
                self._probe(task.shard, range(self._plan.asked_in(task.shard)))
        elif len(task.places) > 1:
            self._probe(task.shard, task.places)
            suspect.probes -= 1
        else:
            (place,) = task.places
            suspect.deaths_at[place] += 1
            if suspect.deaths_at[place] < self._attempts:
                self._queue.append(task)
            else:
                suspect.excluded[place] = f"killed its worker {self._attempts} times ({reason})"
                self._probed(task.shard)

    def _probe(self, shard: int, places: Sequence[int]) -> None:
        """Try both halves of some requests by themselves."""
        middle = len(places) // 2
        halves = [_Task(shard, tuple(half)) for half in (places[:middle], places[middle:]) if half]
        self._suspects[shard].probes += len(halves)
        self._queue.extend(halves)

    def _probed(self, shard: int) -> None:
        """One probe is over; after the last the shard is computed without those at fault."""
        suspect = self._suspects[shard]
        suspect.probes -= 1
        if not suspect.probes:
            suspect.searched = True
            self._queue.append(_Task(shard))

    def _count_tokens(self) -> None:
        """Add what workers have written since they were last asked, without waiting for them."""
        for worker in self._busy.values():
            if worker.told is not None:
                if not ray.wait([worker.told], timeout=0)[0]:
                    continue
                with contextlib.suppress(RayError):  # its death is noticed by its task
                    self._tokens += ray.get(worker.told)
            worker.told = worker.actor.tokens.remote()


def _told_in_one_line(error: RayTaskError, task: _Task | None) -> JetspecError:
    if isinstance(error.cause, JetspecError):
        return error.cause
    where = "opening the backend" if task is None else f"shard {task.shard}"
    return JetspecError("regeneration", where, f"failed ({_last_line(error)})")


def _last_line(error: Exception) -> str:
    """What is said last, which is the cause, after a remote traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[-1][:300]
