"""The optimizers of a training run, and what each of them moves."""

from typing import Any

import torch
from torch import nn

from jetspec.errors import JetspecError
from jetspec.heads.registry import DraftHead
from jetspec.training.config import TrainingConfig


def make_optimizers(
    config: TrainingConfig, head: DraftHead, module: nn.Module, *, sharded: bool, fused: bool
) -> list[torch.optim.Optimizer]:
    """AdamW over everything that is trained, or Muon over the backbone's matrices and AdamW over
    the rest.

    Muon (Jordan et al. 2024) orthogonalises a matrix's momentum. Its step is scaled to the
    root-mean-square of AdamW's (arXiv 2502.16982, eq. 4), so that one learning rate serves both.
    Path scores stay with AdamW: their factors start at zero, and a full-rank first step would not
    be small beside them.

    Args:
        module: whose parameters are trained; its `head` is `head`.
        sharded: whether a parameter's rows are spread over workers.
        fused: run AdamW in fused kernels.

    Raises:
        JetspecError: Muon over matrices that are sharded.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim > 1]
    vectors = [p for p in trained if p.ndim <= 1]
    turned: list[nn.Parameter] = []
    if config.optimizer == "muon":
        if sharded:
            raise JetspecError(
                "training.optimizer", "muon", "needs whole matrices; set training.strategy to ddp"
            )
        path = {id(p) for p in head.path_parameters()}
        turned = [p for p in matrices if p.ndim == 2 and id(p) not in path]
        moved = {id(p) for p in turned}
        matrices = [p for p in matrices if id(p) not in moved]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0}]
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
        optimizers.append(
            torch.optim.Muon(
                turned,
                lr=config.learning_rate,
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return optimizers
