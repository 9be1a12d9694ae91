"""The optimizers of a training run, and what each of them moves."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from jetspec.heads.base import DraftHead
from jetspec.training.config import TrainingConfig

RATIO = "lr_ratio"
"""Key of a parameter group: its learning rate over the schedule's."""


def make_optimizers(
    config: TrainingConfig, head: DraftHead, module: nn.Module, *, sharded: bool, fused: bool
) -> list[torch.optim.Optimizer]:
    """AdamW over everything that is trained, or Muon over the backbone's matrices and AdamW over
    the rest.

    Muon (Jordan et al. 2024) orthogonalises a matrix's momentum. Its step is scaled to the
    root-mean-square of AdamW's (arXiv 2502.16982, eq. 4), so that one learning rate serves both.
    Path scores stay with AdamW: their factors start at zero, and a full-rank first step would not
    be small beside them.

    Every group's `RATIO` is there for `set_learning_rate`.

    Args:
        module: whose parameters are trained; its `head` is `head`.
        sharded: whether `fully_shard` has spread the rows of every parameter over workers.
        fused: run AdamW in fused kernels.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    path = {id(p) for p in head.path_parameters()}
    ratio = (config.path_learning_rate or config.learning_rate) / config.learning_rate
    own = [p for p in trained if id(p) in path]
    rest = [p for p in trained if id(p) not in path]
    matrices = [p for p in rest if p.ndim > 1]
    turned: list[nn.Parameter] = []
    if config.optimizer == "muon":
        turned = [p for p in matrices if p.ndim == 2]
        matrices = [p for p in matrices if p.ndim != 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, RATIO: 1.0},
        {"params": [p for p in rest if p.ndim <= 1], RATIO: 1.0, "weight_decay": 0},
        {"params": [p for p in own if p.ndim > 1], RATIO: ratio},
        {"params": [p for p in own if p.ndim <= 1], RATIO: ratio, "weight_decay": 0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizers: list[torch.optim.Optimizer] = []
    if groups:
        optimizers.append(
            torch.optim.AdamW(
                groups,
                lr=config.learning_rate,
                betas=config.betas,
                weight_decay=config.weight_decay,
                fused=fused,
            )
        )
    if turned:
        muon = torch.optim.Muon
        if sharded:
            from jetspec.training.muon import ShardedMuon  # rests on private parts of torch

            muon = ShardedMuon
        optimizers.append(
            muon(
                [{"params": turned, RATIO: 1.0}],
                lr=config.learning_rate,
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return optimizers


def learning_rate(config: TrainingConfig, step: int, total: int) -> float:
    """Linear warm-up over `warmup_fraction`, then a cosine down to `final_lr_fraction`."""
    warmup = math.ceil(config.warmup_fraction * total)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    share = 0.5 * (1 + math.cos(math.pi * progress))
    floor = config.final_lr_fraction
    return config.learning_rate * (floor + (1 - floor) * share)


def set_learning_rate(optimizers: Sequence[torch.optim.Optimizer], rate: float) -> None:
    """Give every group its share of the schedule's rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group[RATIO]


Parts = tuple[list[nn.Parameter], list[nn.Parameter]]


def clipped_apart(head: DraftHead, module: nn.Module) -> Parts:
    """(the rest, path scores) of what is trained of `module`, whose `head` is `head`.

    The large gradients of fresh path scores must not shrink the backbone's steps.
    """
    path = {id(p) for p in head.path_parameters()}
    parts: Parts = ([], [])
    for parameter in module.parameters():
        if parameter.requires_grad:
            parts[id(parameter) in path].append(parameter)
    return parts


def clip_gradients(parts: Parts, largest: float) -> Tensor:
    """Bring the norm of the gradients of each of `parts` down to `largest`.

    Returns:
        the norm of them all before.
    """
    # A part without gradients has a norm on no device.
    found = [[p for p in part if p.grad is not None] for part in parts]
    norms = [nn.utils.clip_grad_norm_(part, largest) for part in found if part]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return torch.linalg.vector_norm(torch.stack(whole))
