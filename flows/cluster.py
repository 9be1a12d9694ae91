"""The only place that starts or joins a Ray cluster."""

import contextlib
import os
import socket
from collections.abc import Iterator

# Read by Ray while it is imported.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray

from jetspec.config import RayConfig
from jetspec.errors import JetspecError

_KNOCK_S = 5.0


@contextlib.contextmanager
def connect(config: RayConfig) -> Iterator[None]:
    """Ray for the time of a stage.

    A connection that is already there is used as it is and left alone; one that is made here is
    shut down at the end, whatever happens.

    Raises:
        JetspecError: the cluster cannot be reached or started.
    """
    if ray.is_initialized():
        yield
        return
    local = config.address == "local"
    if local:  # nothing but this machine talks to it, and nobody takes it away
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    elif config.cpus is not None:
        raise JetspecError("ray.cpus", config.cpus, "only a local cluster takes it; leave it out")
    else:
        _knock(config.address)
    try:
        ray.init(
            address=config.address,
            num_cpus=config.cpus,
            configure_logging=False,
            log_to_driver=False,
        )
    except (ConnectionError, ValueError, RuntimeError, TimeoutError, ImportError) as error:
        reason = " ".join(str(error).split())[:200]
        mend = "start one with `ray start --head`, or use local"
        raise JetspecError("ray.address", config.address, f"{reason}; {mend}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Find an unreachable head node in seconds; Ray itself tries for minutes.

    Raises:
        JetspecError: nobody listens at the address.
    """
    host, colon, port = address.rsplit("://", 1)[-1].rpartition(":")
    if not colon or not port.isdigit():  # `auto` and the like are Ray's to resolve
        return
    try:
        socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()
    except (OSError, OverflowError) as error:
        raise JetspecError(
            "ray.address", address, f"cannot be reached ({error}); start the cluster or use local"
        ) from error


def worker_count(asked: int | None, *, gpu: bool) -> int:
    """Actors for a pool: as asked, else one a GPU, or one on a cluster without GPUs.

    Args:
        gpu: every actor needs a GPU of its own when the cluster has any.

    Raises:
        JetspecError: more than the cluster can run.
    """
    resources = ray.cluster_resources()
    gpus = int(resources.get("GPU", 0)) if gpu else 0
    if asked is not None and gpus and asked > gpus:
        raise JetspecError("workers", asked, f"the cluster has {gpus} GPUs; ask for as many")
    return asked or gpus or 1


def worker_resources(workers: int, *, gpu: bool) -> tuple[dict[str, float], int]:
    """What Ray reserves for one of `workers` equal actors, and the threads it should compute with.

    An actor reserves at most one CPU, so that a pool always fits; its threads are its even share.
    """
    resources = ray.cluster_resources()
    cpus = resources.get("CPU", 1.0)
    gpus = 1.0 if gpu and resources.get("GPU", 0) else 0.0
    share = min(1.0, cpus / workers)
    return {"num_cpus": share, "num_gpus": gpus}, max(1, int(cpus // workers))
