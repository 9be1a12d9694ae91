"""The evaluation matrix over Ray actors: one a GPU, or one with all cores of a CPU machine.

A group of cells is one call, since its cells take turns on the same prompts. When a worker dies,
the group's cells are started one by one on a fresh worker, so that the one that brings it down is
found and becomes a row with its reason.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError, WorkerCrashedError

from jetspec.config import RunConfig
from jetspec.errors import JetspecError
from jetspec.evaluation.bench import open_engines
from jetspec.evaluation.cells import Cell, Group
from jetspec.evaluation.matrix import (
    OnProgress,
    Plan,
    finish,
    finished,
    load_models,
    make_plan,
    measure_group,
    pending,
    write_record,
)
from jetspec.evaluation.record import failed_record
from jetspec.stages import StageResult
from jetspec.storage import read_json

if TYPE_CHECKING:
    from jetspec.evaluation.engines import Engines

_DEATHS = (RayActorError, OutOfMemoryError, WorkerCrashedError)


class EvaluationWorker:
    """Holds the target and the head, and measures what it is given."""

    def __init__(self, config: RunConfig, head_uri: str | None, threads: int | None) -> None:
        if threads:
            torch.set_num_threads(threads)
        self._config = config
        self._head_uri = head_uri
        self._models: tuple[Any, Any | None] | None = None
        self._engines: Engines | None = None

    def measure(self, plan: Plan, cells: Sequence[Cell]) -> None:
        """Measure cells of one group; their records go to the plan's directory."""
        # Loading here and not in the constructor: its errors then reach the driver as they are.
        if self._models is None:
            self._models = load_models(self._config, self._head_uri)
            self._engines = open_engines(*self._models, self._config.evaluation)
        measure_group(plan, cells, *self._models, self._config, self._engines)


@dataclass(frozen=True)
class _Job:
    """Cells of one group still to be measured: in turns, or `alone` one after the other."""

    cells: tuple[Cell, ...]
    alone: bool = False

    @property
    def next(self) -> tuple[Cell, ...]:
        return self.cells[:1] if self.alone else self.cells

    @property
    def rest(self) -> tuple[Cell, ...]:
        return self.cells[len(self.next) :]


def evaluate_with_ray(
    config: RunConfig,
    head_uri: str | None,
    on_progress: OnProgress | None = None,
    *,
    retry_failed: bool = False,
    other_target: bool = False,
) -> StageResult:
    """Measure the matrix on the connected Ray cluster; as `jetspec.evaluation.matrix.evaluate`.

    Raises:
        JetspecError: a wrong setting, an unfit head, or an output that cannot be written.
    """
    plan = make_plan(config, head_uri, other_target=other_target)
    if reused := finished(plan, retry_failed=retry_failed):
        return reused
    if todo := pending(plan):
        run_cells(plan, todo, config, head_uri, on_progress)
    return finish(plan, config)


def run_cells(
    plan: Plan,
    todo: Mapping[Group, Sequence[Cell]],
    config: RunConfig,
    head_uri: str | None,
    on_progress: OnProgress | None = None,
    worker: type[EvaluationWorker] = EvaluationWorker,
) -> None:
    """Every cell of `todo` gets a record, whatever becomes of the workers."""
    workers, resources, threads = placement(config.evaluation.workers, ray.cluster_resources())
    actor_class: Any = ray.remote(worker).options(max_restarts=0, **resources)
    queue = deque(_Job(tuple(cells)) for cells in todo.values())
    done = len(plan.cells) - sum(len(job.cells) for job in queue)
    deaths: dict[Cell, int] = {}
    running: dict[Any, tuple[Any, _Job]] = {}
    idle: list[Any] = []

    def report(cells: Sequence[Cell]) -> None:
        nonlocal done
        for cell in cells:
            done += 1
            if on_progress:
                on_progress(done, len(plan.cells), read_json(plan.cell_uri(cell)))

    try:
        while queue or running:
            while queue and len(running) < workers:
                job = queue.popleft()
                actor = idle.pop() if idle else actor_class.remote(config, head_uri, threads)
                running[actor.measure.remote(plan, job.next)] = (actor, job)
            (call,), _ = ray.wait(list(running), num_returns=1)
            actor, job = running.pop(call)
            try:
                ray.get(call)
            except RayTaskError as error:
                raise error.cause if isinstance(error.cause, JetspecError) else error from None
            except _DEATHS as error:
                job = _after_death(job, plan, deaths, config.evaluation.max_attempts, error, report)
            else:
                idle.append(actor)
                report(job.next)
                job = _Job(job.rest, alone=True)
            if job.cells:
                queue.appendleft(job)
    finally:
        for actor in [*idle, *(actor for actor, _ in running.values())]:
            ray.kill(actor)


def placement(
    wanted: int | None, cluster: Mapping[str, float]
) -> tuple[int, dict[str, float], int | None]:
    """How many workers, what each asks of Ray, and its torch threads (None: torch's own choice).

    Two workers never share a core or a GPU: they would measure each other.

    Raises:
        JetspecError: more workers than GPUs, or than cores where there is no GPU.
    """
    gpus, cores = int(cluster.get("GPU", 0)), int(cluster.get("CPU", 1))
    most = gpus or cores
    if wanted is not None and wanted > most:
        kind = "GPUs" if gpus else "cores"
        raise JetspecError("evaluation.workers", wanted, f"the cluster has {most} {kind}")
    if gpus:
        return wanted or gpus, {"num_gpus": 1, "num_cpus": min(1.0, cores / gpus)}, None
    workers = wanted or 1
    threads = max(1, cores // workers)
    return workers, {"num_cpus": threads}, threads


def _after_death(
    job: _Job,
    plan: Plan,
    deaths: dict[Cell, int],
    max_attempts: int,
    error: Exception,
    report: Any,
) -> _Job:
    """What is left of a job whose worker died."""
    if not job.alone and len(job.cells) > 1:
        return _Job(job.cells, alone=True)
    cell = job.next[0]
    deaths[cell] = deaths.get(cell, 0) + 1
    if deaths[cell] < max_attempts:
        return job
    starved = isinstance(error, OutOfMemoryError)
    reason = f"its worker died {deaths[cell]} times, perhaps for want of memory"
    status = "out_of_memory" if starved else "failed"
    write_record(plan, cell, failed_record(cell, status, reason, **plan.facts))
    report([cell])
    return _Job(job.rest, alone=True)
