"""Parallel heads on disk: what format A holds, and how it is written.

A is a JetSpec / z-lab DFlash directory: `config.json` and `model.safetensors`, weights without a
prefix, no embedding and no output projection. Path scores lie beside it in `edges.safetensors` and
`rescorer.safetensors`, so that readers of A which do not know them are undisturbed. A convolution
in the block is part of the trunk, and a reader without it must refuse the head: such a head names
an architecture of ours.

`readers.py` reads A and the formats B and C; `exports.py` writes these two.
"""

from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from jetspec.heads.files import CONFIG, EDGES, RESCORER, WEIGHTS, DType, write_tensors
from jetspec.storage import join, write_json

if TYPE_CHECKING:
    from jetspec.heads.parallel import ParallelHead

Format = Literal["jetspec", "speculators", "dspark"]
# Weights of the target that some trainers save along; ours come from the target itself.
FOREIGN = ("embed_tokens.", "lm_head.", "verifier_lm_head.", "verifier_norm.", "t2d", "d2t")
TABLES = "markov_head."  # format C's spelling of path scores, made from `edges.safetensors`


def save_native(head: "ParallelHead", directory: str, record: dict[str, Any], dtype: DType) -> None:
    """Write `head` in format A; see `DraftHead.save`."""
    write_head(directory, native_config(head, dtype, record), trunk_state(head), dtype)
    write_beside(head, directory, dtype)


def native_config(head: "ParallelHead", dtype: DType, record: dict[str, Any]) -> dict[str, Any]:
    """`config.json` of format A. Both spellings of the in-block mask are written: JetSpec reads
    `causal_head`, vLLM and Automodel read `causal`."""
    causal = head.config.mask == "causal"
    config = {
        **layer_config(head, dtype),
        "architectures": ["JetSpecConvDraftModel" if head.config.conv_rank else "DFlashDraftModel"],
        "block_size": head.config.block_size,
        "num_target_layers": head.num_target_layers,
        "dflash_config": {
            "mask_token_id": head.mask_token_id,
            "target_layer_ids": list(head.taps),
            "causal_head": causal,
            "causal": causal,
        },
        "jetspec_training": record,
    }
    return config | own_config(head)


def own_config(head: "ParallelHead") -> dict[str, Any]:
    """What no published format has a word for, under keys of ours; `own_fields` reads it."""
    config, own = head.config, {}
    if head.edges is not None:
        edges = {"type": config.producer, "rank": config.edge_rank, "gate": config.edge_gate}
        if config.producer != "markov":
            edges |= {"layers": config.edge_layers, "width": config.edge_width}
        if config.edge_rows != "projected":
            edges["rows"] = config.edge_rows
        if config.edge_normaliser != "candidates":
            edges["normaliser"] = config.edge_normaliser
        own["jetspec_edges"] = edges
    if head.rescores:
        own["jetspec_rescore"] = {
            "type": config.rescore,
            "layers": config.rescore_layers,
            "nodes": config.rescore_nodes,
        }
    if config.conv_rank:
        own["jetspec_conv"] = {"rank": config.conv_rank}
    return own


def own_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of `HeadConfig` from a config file's keys of ours."""
    fields: dict[str, Any] = {}
    edges, rescore, conv = (raw.get(f"jetspec_{key}") for key in ("edges", "rescore", "conv"))
    if edges is not None:
        fields |= {"edge_rank": edges.get("rank"), "edge_gate": edges.get("gate")}
        if (kind := edges.get("type", "markov")) != "markov":
            fields |= {"edges": kind, "edge_layers": edges.get("layers")}
            fields |= {"edge_width": edges.get("width")}
        for key in edges.keys() & {"rows", "normaliser"}:
            fields[f"edge_{key}"] = edges[key]
    if rescore is not None:
        fields |= {f"rescore_{key}": rescore.get(key) for key in ("layers", "nodes")}
        fields["rescore"] = rescore.get("type")
    if conv is not None:
        fields["conv_rank"] = conv.get("rank")
    return fields


def layer_config(head: "ParallelHead", dtype: DType) -> dict[str, Any]:
    """The decoder layers as a Qwen3 config, RoPE in the old and in the new spelling."""
    config = head.config
    rope = dict(config.rope_parameters or {})
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": {"fp32": "float32", "bf16": "bfloat16"}[dtype],
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": head.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["full_attention"] * config.num_layers,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", **rope},
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
        "rope_theta": rope["rope_theta"],
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": head.vocab_size,
    }


def trunk_state(head: "ParallelHead") -> dict[str, Tensor]:
    """The weights of `model.safetensors`: everything but the path scores."""
    state = head.state_dict()
    return {k: v for k, v in state.items() if not k.startswith(("edges.", "rescorer."))}


def parts_beside(head: "ParallelHead") -> list[tuple[str, nn.Module]]:
    """(file name, module) of the path scores."""
    parts = ((EDGES, head.edges), (RESCORER, head.rescorer))
    return [(name, part) for name, part in parts if part is not None]


def write_head(
    directory: str, config: dict[str, Any], state: dict[str, Tensor], dtype: DType
) -> None:
    write_tensors(join(directory, WEIGHTS), state, dtype)
    write_json(join(directory, CONFIG), config)


def write_beside(head: "ParallelHead", directory: str, dtype: DType) -> None:
    for name, part in parts_beside(head):
        write_tensors(join(directory, name), part.state_dict(), dtype)
