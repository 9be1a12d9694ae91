"""The processes that train, or decode one target, together."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 gave it another name.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class World:
    """This process's place among its peers.

    Attributes:
        rank: from 0; rank 0 writes checkpoints.
        size: processes in all; local_size: those on this machine.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes; the same on every one."""
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def gather(self, values: Tensor) -> Tensor:
        """[size, ...]: every process's values in the order of ranks; the same on every one."""
        out = values.new_empty(self.size, *values.shape)
        _gather(out.view(-1), values.contiguous().view(-1))
        return out


@contextmanager
def join_world() -> Iterator[World]:
    """The world that `torchrun` started, or one process alone."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        yield World()
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield World(dist.get_rank(), size, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    finally:
        dist.destroy_process_group()
