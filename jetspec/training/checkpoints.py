"""Checkpoints of a training run: the head as it is saved, the optimizers, and where the run stood.

`step-000200/` is whole if and only if its manifest exists; the manifest is written last.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from jetspec.errors import JetspecError
from jetspec.heads.base import DraftHead
from jetspec.heads.registry import load_head, save_head
from jetspec.storage import (
    MANIFEST,
    atomic_write,
    filesystem,
    is_complete,
    join,
    read_json,
    read_manifest,
    write_json,
    write_manifest,
)
from jetspec.training.world import World

KEPT = 2
_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: `step` steps are done; `state` is what the loop asked to be kept."""

    uri: str
    step: int
    state: dict[str, Any]


def full_head(module: nn.Module, like: DraftHead) -> DraftHead:
    """A copy of a (perhaps sharded) head with all its weights; every process must call it.

    Args:
        module: the training module whose `head` it is.
    """
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(module, options=options)
    head = like.empty_copy()
    prefix = "head."
    own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    head.load_state_dict(own)
    return head


def save_checkpoint(
    directory: str,
    step: int,
    module: nn.Module,
    head: DraftHead,
    optimizers: Sequence[torch.optim.Optimizer],
    state: dict[str, Any],
    *,
    world: World,
    config_hash: str,
    target_fingerprint: str,
) -> None:
    """Write a checkpoint and prune older ones; every process calls it, rank 0 writes."""
    moments = get_optimizer_state_dict(module, list(optimizers), options=_FULL)
    whole = full_head(module, head)
    if world.rank == 0:
        uri = step_directory(directory, step)
        save_head(whole, uri, target_fingerprint=target_fingerprint)
        with atomic_write(join(uri, "optimizer.pt")) as file:
            torch.save(moments, file)
        close_checkpoint(directory, step, state, config_hash)


def close_checkpoint(directory: str, step: int, state: dict[str, Any], config_hash: str) -> None:
    """Make a checkpoint whole whose other files are written, and prune older ones."""
    uri = step_directory(directory, step)
    write_json(join(uri, "state.json"), state)
    write_manifest(uri, kind="checkpoint", config_hash=config_hash, step=step)
    prune(directory)


def step_directory(directory: str, step: int) -> str:
    return join(directory, f"step-{step:06d}")


def latest_checkpoint(directory: str, config_hash: str) -> Checkpoint | None:
    """The newest whole checkpoint of this run; damaged ones are passed over.

    Raises:
        JetspecError: the directory belongs to a run with other settings.
    """
    for step in sorted(_steps(directory), reverse=True):
        uri = step_directory(directory, step)
        try:
            manifest = read_manifest(uri, kind="checkpoint")
            state = read_json(join(uri, "state.json"))
        except JetspecError:
            continue
        if manifest["config_hash"] != config_hash:
            raise JetspecError("checkpoint", uri, "is another run's; give an empty directory")
        return Checkpoint(uri, step, state)
    return None


def load_checkpoint(
    checkpoint: Checkpoint, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Put a checkpoint's weights and moments into a run; every process reads for itself."""
    options = StateDictOptions(full_state_dict=True)
    state = {f"head.{k}": v for k, v in load_head(checkpoint.uri).state_dict().items()}
    set_model_state_dict(module, state, options=options)
    moments = read_tensors(join(checkpoint.uri, "optimizer.pt"))
    set_optimizer_state_dict(module, list(optimizers), moments, options=options)


def read_tensors(uri: str) -> Any:
    """What `torch.save` wrote, on the CPU."""
    fs, path = filesystem(uri)
    with fs.open(path, "rb") as file:
        return torch.load(io.BytesIO(file.read()), map_location="cpu", weights_only=True)


def prune(directory: str, keep: int = KEPT) -> None:
    """Delete all but the newest `keep` whole checkpoints, and broken ones older than those."""
    fs, path = filesystem(directory)
    steps = sorted(_steps(directory), reverse=True)
    whole = [s for s in steps if is_complete(step_directory(directory, s))]
    if not whole:
        return
    kept = set(whole[:keep]) | {s for s in steps if s > whole[0]}
    for step in set(steps) - kept:
        place = f"{path}/step-{step:06d}"
        # Without its manifest first, a half-deleted checkpoint cannot look whole.
        if fs.exists(f"{place}/{MANIFEST}"):
            fs.rm(f"{place}/{MANIFEST}")
        fs.rm(place, recursive=True)


def _steps(directory: str) -> list[int]:
    fs, path = filesystem(directory)
    fs.invalidate_cache()
    if not fs.exists(path):
        return []
    names = [entry.rstrip("/").rsplit("/", 1)[-1] for entry in fs.ls(path, detail=False)]
    return [int(n.removeprefix("step-")) for n in names if n.removeprefix("step-").isdigit()]
