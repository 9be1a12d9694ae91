"""How much of a GPU's arithmetic a training step uses."""

from collections.abc import Mapping

import torch

from jetspec.heads.base import DraftHead
from jetspec.heads.parallel import ParallelHead
from jetspec.targets.target import Target
from jetspec.training.config import TrainingConfig

PEAKS = {"H100": 989.5e12, "H200": 989.5e12, "A100": 312e12}
"""FLOP/s of one GPU by its name, dense bf16 without sparsity (data sheets)."""


def peak_flops(device: torch.device, count: int) -> float | None:
    """FLOP/s of `count` GPUs whose data sheet is known here."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((count * peak for known, peak in PEAKS.items() if known in name), None)


def step_flops(
    head: ParallelHead, target: Target, rows: float, length: float, **of: float
) -> float:
    """Useful FLOP of one step: a multiply-add counts 2, recomputation does not count.

    Weights cost 2 a token forward and 2 each for the gradients of inputs and weights; the frozen
    target has the forward pass alone, the frozen output projection no gradient of its weights.
    Attention costs 4 x width a (query, key) pair forward and twice that backward; causal pairs
    only. Slots are counted with all of their block's rows, the vocabulary where a loss is.

    Args:
        rows, length: of a step, and tokens of each.
        of: `anchors` blocks of a row, `slots` with a loss in the step.
    """
    config, model = head.config, target.config
    assert config.num_attention_heads and config.num_key_value_heads and config.head_dim
    tokens, width, vocab = rows * length, target.hidden_size, target.vocab_size
    layers = target.model.base_model.layers
    weights = sum(p.numel() for p in layers.parameters() if p.ndim == 2)
    head_dim = getattr(model, "head_dim", None) or width // model.num_attention_heads
    query = model.num_attention_heads * head_dim
    teacher = 2 * weights * tokens + 4 * query * len(layers) * tokens * length / 2
    own = sum(p.numel() for p in head.layers.parameters() if p.ndim == 2)
    shared = 2 * config.num_key_value_heads * config.head_dim * width * config.num_layers
    context = 4 * head.fc.weight.numel() * tokens + 6 * shared * tokens
    slots = rows * of["anchors"] * config.block_size
    seen = length / 2 + config.block_size / 2
    drafted = config.num_attention_heads * config.head_dim * config.num_layers
    trained = 6 * own * slots + 12 * drafted * slots * seen
    output = (4 * of["slots"] + 2 * min(of["slots"], tokens)) * width * vocab
    return float(teacher + context + trained + output)


def utilisation(
    head: DraftHead, target: Target, rates: Mapping[str, float], config: TrainingConfig,
    peak: float | None,
) -> float | None:  # fmt: skip
    """MFU: useful FLOP over what the GPUs could have done.

    None where the peak is not known, or a step does other work than `step_flops` counts: another
    kind of head, a frozen backbone, the target's states from a cache.

    Args:
        rates: `steps_per_second`, `tokens_per_second` and `slots_per_second`.
        peak: FLOP/s of all GPUs together.
    """
    if peak is None or not isinstance(head, ParallelHead):
        return None
    if config.freeze_backbone or config.hidden_states != "online":
        return None
    rows = config.batch_size * rates["steps_per_second"]
    length = rates["tokens_per_second"] / rows
    slots = rates["slots_per_second"]
    return step_flops(head, target, rows, length, anchors=config.anchors, slots=slots) / peak
