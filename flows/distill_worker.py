"""What every Ray Train worker runs. In a module of its own, since workers import it by name."""

from typing import Any

import ray.train
import ray.train.torch
import torch

from jetspec.config import parse_config
from jetspec.training.stage import distil_head
from jetspec.training.world import World


def train_loop_per_worker(settings: dict[str, Any]) -> None:
    """Distil the head of `settings["run"]`.

    Nothing is reported to Ray itself, which lets a worker report once in two seconds and makes it
    wait until then; checkpoints are the stage's own, on its storage.

    Args:
        settings: `run` (the RunConfig as plain values), `samples_uri`, `warm_start`, `threads`,
            and `progress`, the queue that the driver listens to.
    """
    context = ray.train.get_context()
    if torch.cuda.is_available():
        torch.cuda.set_device(ray.train.torch.get_device())
    else:
        torch.set_num_threads(settings["threads"])
    world = World(
        rank=context.get_world_rank(),
        size=context.get_world_size(),
        local_size=context.get_local_world_size(),
    )

    def report(step: int, metrics: dict[str, float]) -> None:
        if world.rank == 0:
            settings["progress"].put_nowait((step, metrics))

    distil_head(
        parse_config(settings["run"]),
        settings["samples_uri"],
        warm_start=settings["warm_start"],
        world=world,
        report=report,
    )
