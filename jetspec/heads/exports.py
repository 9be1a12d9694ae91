"""Formats B (speculators) and C (DSpark): to and from.

B counts tapped layers from the embedding, so its ids are ours plus one. C writes the path scores
as Markov tables over the vocabulary, W1[parent] · W2[child].
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from jetspec.errors import JetspecError
from jetspec.heads.edges import MarkovEdges
from jetspec.heads.files import CONFIG, DType
from jetspec.heads.formats import (
    TABLES,
    HeadShape,
    dspark_shape,
    layer_config,
    native_config,
    own_config,
    own_fields,
    read_native,
    trunk_state,
    write_beside,
    write_head,
)
from jetspec.heads.parallel import ParallelHead
from jetspec.heads.registry import DraftHead
from jetspec.storage import join
from jetspec.targets.target import Target

Format = Literal["jetspec", "speculators", "dspark"]


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
    from jetspec.heads.doctor import require_fit

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


def format_of(raw: dict[str, Any], directory: str) -> Format:
    """Which format a config file is in.

    Raises:
        JetspecError: none of the three.
    """
    if "speculators_model_type" in raw:
        if raw["speculators_model_type"] != "dflash":
            kind = raw["speculators_model_type"]
            raise JetspecError("head.speculators_model_type", kind, "only dflash heads are read")
        return "speculators"
    if raw.get("architectures") == ["Qwen3DSparkModel"]:
        return "dspark"
    if "dflash_config" in raw:
        return "jetspec"
    raise JetspecError("head", join(directory, CONFIG), "no dflash_config; not a parallel head")


def _read_speculators(raw: dict[str, Any], directory: str) -> HeadShape:
    layers = raw.get("transformer_layer_config") or {}
    vocabulary = raw.get("draft_vocab_size")
    if vocabulary is not None and vocabulary != layers.get("vocab_size"):
        raise JetspecError(
            "head.draft_vocab_size",
            vocabulary,
            f"differs from vocab_size {layers.get('vocab_size')}; cut vocabularies are not read",
        )
    taps = raw.get("aux_hidden_state_layer_ids")
    return HeadShape(
        layers,
        directory,
        mask="bidirectional" if raw.get("sliding_window_non_causal") else "causal",
        block_size=raw.get("block_size"),
        taps=None if taps is None else [layer - 1 for layer in taps],
        mask_token_id=raw.get("mask_token_id"),
        num_target_layers=raw.get("num_target_layers"),
        own=own_fields(raw),
    )


def _read_dspark(raw: dict[str, Any], directory: str) -> HeadShape:
    if raw.get("markov_rank") and raw.get("jetspec_edges") is None:
        raise JetspecError(
            "head.markov_rank",
            raw["markov_rank"],
            "Markov tables of another trainer are not read; give a head without them",
        )
    for key, wanted in (("sample_from_anchor", False), ("enable_confidence_head", False)):
        # Both default to true in C.
        if raw.get(key, True) != wanted:
            raise JetspecError(f"head.{key}", raw.get(key, True), "only false is supported")
    return dspark_shape(raw, directory, own_fields(raw))


READERS: dict[Format, Callable[[dict[str, Any], str], HeadShape]] = {
    "jetspec": read_native,
    "speculators": _read_speculators,
    "dspark": _read_dspark,
}
