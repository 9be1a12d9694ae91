"""Heads for other readers: formats B (speculators) and C (DSpark), and A as it is.

B counts tapped layers from the embedding, so its ids are ours plus one. C writes the path scores
as Markov tables over the vocabulary, W1[parent] · W2[child].
"""

from typing import Any

import torch
from torch import Tensor

from jetspec.errors import JetspecError
from jetspec.heads.base import DraftHead
from jetspec.heads.doctor import require_fit
from jetspec.heads.edges import MarkovEdges
from jetspec.heads.files import DType
from jetspec.heads.formats import (
    TABLES,
    Format,
    layer_config,
    native_config,
    own_config,
    trunk_state,
    write_beside,
    write_head,
)
from jetspec.heads.parallel import ParallelHead
from jetspec.targets.target import Target


def export_head(
    head: DraftHead,
    directory: str,
    target: Target,
    *,
    format: Format = "jetspec",
    dtype: DType = "bf16",
    training: dict[str, Any] | None = None,
) -> None:
    """Write `head` for another reader.

    Path scores go along in files that only we read; C also gets Markov scores as tables, when they
    have no gate.

    Args:
        training: the head's own training record; what it does not say of its target is taken from
            `target`.

    Raises:
        JetspecError: the format is unknown, or `head` does not fit `target` or the formats.
    """
    if not isinstance(head, ParallelHead):
        raise JetspecError("head.kind", head.config.kind, "only parallel heads have export formats")
    require_fit(head, target, directory)
    if head.config.conv_rank and format != "jetspec":
        mend = "other readers would leave the convolution out; export as jetspec"
        raise JetspecError("head.conv_rank", head.config.conv_rank, mend)
    record = {"target_fingerprint": target.fingerprint, **(training or {})}
    state = trunk_state(head)
    if format == "jetspec":
        config = native_config(head, dtype, record)
    elif format == "speculators":
        config = speculators_config(head, target, dtype)
    elif format == "dspark":
        config = dspark_config(head, dtype)
        state |= _markov_tables(head, target)
    else:
        raise JetspecError("format", format, "use jetspec, speculators or dspark")
    config |= own_config(head) | {"jetspec_training": record}
    write_head(directory, config, state, dtype)
    write_beside(head, directory, dtype)


def speculators_config(head: ParallelHead, target: Target, dtype: DType) -> dict[str, Any]:
    """`config.json` of format B. vLLM derives the mask: causal = not sliding_window_non_causal."""
    layers = layer_config(head, dtype)
    return {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in head.taps],
        "mask_token_id": head.mask_token_id,
        "block_size": head.config.block_size,
        "draft_vocab_size": head.vocab_size,
        "dtype": layers["dtype"],
        "num_target_layers": head.num_target_layers,
        "sliding_window_non_causal": head.config.mask == "bidirectional",
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": head.depth}],
            "verifier": {
                "name_or_path": target.name,
                "architectures": target.model.config.architectures or [type(target.model).__name__],
            },
        },
    }


def dspark_config(head: ParallelHead, dtype: DType) -> dict[str, Any]:
    """`config.json` of format C. Slot 0 is the anchor and predicts nothing."""
    return {
        **layer_config(head, dtype),
        "architectures": ["Qwen3DSparkModel"],
        "block_size": head.config.block_size,
        "causal": head.config.mask == "causal",
        "enable_confidence_head": False,
        "markov_head_type": "vanilla",
        "markov_rank": head.config.edge_rank if _ungated(head) else 0,
        "mask_token_id": head.mask_token_id,
        "num_target_layers": head.num_target_layers,
        "sample_from_anchor": False,
        "target_layer_ids": list(head.taps),
    }


def _ungated(head: ParallelHead) -> MarkovEdges | None:
    """Path scores that two tables can hold."""
    edges = head.edges
    return edges if isinstance(edges, MarkovEdges) and edges.gate_proj is None else None


@torch.no_grad()
def _markov_tables(head: ParallelHead, target: Target) -> dict[str, Tensor]:
    edges = _ungated(head)
    if edges is None:
        return {}
    device = head.fc.weight.device

    def embed(tokens: Tensor) -> Tensor:
        return target.embed(tokens.to(target.device)).to(device)

    sides = {"w1": edges.parent_proj, "w2": edges.child_proj}
    tables = {name: side.table(embed, head.vocab_size) for name, side in sides.items()}
    return {f"{TABLES}markov_{name}.weight": table for name, table in tables.items()}
