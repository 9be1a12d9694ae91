"""Distillation on Ray Train: 1..N workers, replaced when they die, resumed where they stood."""

import contextlib
import sys
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pyarrow.fs

from flows.cluster import (
    connect,
    worker_count,
    worker_resources,
)  # before ray: it sets its switches

# isort: split
from ray.train import FailureConfig, ScalingConfig, WorkerGroupError
from ray.train import RunConfig as RayRunConfig
from ray.train.torch import TorchTrainer
from ray.util.queue import Queue

from flows.distill_worker import train_loop_per_worker
from jetspec.config import RunConfig
from jetspec.errors import JetspecError
from jetspec.stages import StageResult
from jetspec.storage import absolute, filesystem, is_local, join
from jetspec.training.loop import Report
from jetspec.training.stage import head_stage

MAX_REPLACEMENTS = 3


def print_metrics(step: int, metrics: dict[str, float]) -> None:
    """One line of progress."""
    names = ("loss", "accuracy_1", "tau_estimate", "tokens_per_second")
    shown = "  ".join(f"{name} {metrics[name]:.4g}" for name in names if name in metrics)
    print(f"distil step {step}  {shown}", file=sys.stderr, flush=True)


def distill_with_ray(
    config: RunConfig,
    samples_uri: str,
    warm_start: str | None = None,
    report: Report = print_metrics,
) -> StageResult:
    """The run's head, trained on the cluster, or reused when it is there.

    A worker that dies takes its group with it; a new group resumes from the stage's last
    checkpoint, which lies on the run's storage. So does a rerun after the driver itself died.

    Args:
        warm_start: a head directory, or None for fresh weights.
        report: called here, in the driver, with rank 0's metrics.

    Raises:
        JetspecError: what the workers found wrong, too few resources, or too many dead groups.
    """
    config = config.model_copy(update={"storage": absolute(config.storage)})
    samples_uri = absolute(samples_uri)
    warm_start = None if warm_start is None else absolute(warm_start)
    stage, done = head_stage(config, samples_uri, warm_start)
    if done:
        return stage
    with connect(config.ray), _listening(report) as progress:
        scaling, threads = _scaling(config)
        settings = {
            "run": config.model_dump(mode="json"),
            "samples_uri": samples_uri,
            "warm_start": warm_start,
            "threads": threads,
            "progress": progress,
        }
        _fit(config, stage.key, settings, scaling)
    finished, done = head_stage(config, samples_uri, warm_start)
    if not done:
        raise JetspecError("training", stage.uri, "ended without a head; see Ray's worker log")
    return StageResult("head", finished.uri, finished.key, reused=False, facts=finished.facts)


def _fit(config: RunConfig, key: str, settings: dict[str, Any], scaling: ScalingConfig) -> None:
    """Run worker groups until one finishes.

    Raises:
        JetspecError: a mistake the workers told, or too many dead groups.
    """
    for attempt in range(1, MAX_REPLACEMENTS + 2):
        trainer = TorchTrainer(
            train_loop_per_worker,
            train_loop_config=settings,
            scaling_config=scaling,
            run_config=_run_config(config, key),
        )
        try:
            trainer.fit()
            return
        except WorkerGroupError as error:
            mistake = _user_mistake(error)
            if mistake is not None:
                raise mistake from error
            reason = str(next(iter(error.worker_failures.values()), error)).strip().splitlines()[-1]
            if attempt > MAX_REPLACEMENTS:
                raise JetspecError(
                    "training",
                    f"workers failed {attempt} times, last: {reason}",
                    "see Ray's worker log; a rerun resumes from the last checkpoint",
                ) from error
            print(f"distil: workers lost ({reason}); replaced", file=sys.stderr, flush=True)


def _scaling(config: RunConfig) -> tuple[ScalingConfig, int]:
    """Workers, what Ray reserves for each, and each one's CPU threads.

    Raises:
        JetspecError: more workers than the cluster can hold, which Ray would await for ever.
    """
    gpu = not config.target.device.startswith("cpu")
    workers = worker_count(config.training.workers, gpu=gpu)
    resources, threads = worker_resources(workers, gpu=gpu)
    each = {"CPU": resources["num_cpus"]}
    if resources["num_gpus"]:
        each["GPU"] = resources["num_gpus"]
    scaling = ScalingConfig(num_workers=workers, use_gpu="GPU" in each, resources_per_worker=each)
    return scaling, threads


def _run_config(config: RunConfig, key: str) -> RayRunConfig:
    """A Ray run of its own for every group: a name used twice would resume Ray's own state."""
    name = f"distil-{key[:12]}-{uuid.uuid4().hex[:8]}"
    place = join(config.storage, "ray")
    failures = FailureConfig(max_failures=0)  # groups are replaced above, where mistakes are known
    if is_local(place):
        return RayRunConfig(name=name, storage_path=place, failure_config=failures)
    fs, path = filesystem(place)
    remote = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fs))
    return RayRunConfig(
        name=name, storage_path=path, storage_filesystem=remote, failure_config=failures
    )


@contextlib.contextmanager
def _listening(report: Report) -> Iterator[Queue]:
    """A queue whose (step, metrics) entries are reported here while the workers run."""
    queue = Queue(actor_options={"num_cpus": 0})

    def listen() -> None:
        while (entry := queue.get()) is not None:
            report(*entry)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield queue
    finally:
        queue.put(None)
        listener.join(timeout=10)
        queue.shutdown()


def _user_mistake(error: WorkerGroupError) -> JetspecError | None:
    """The mistake a worker told in one line, whatever Ray wrapped it in."""
    for failure in error.worker_failures.values():
        seen: BaseException | None = failure
        while seen is not None:
            if isinstance(seen, JetspecError):
                return seen
            seen = getattr(seen, "_base_exc", None) or seen.__cause__
    return None
