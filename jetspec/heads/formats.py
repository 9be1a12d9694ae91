"""Head checkpoints on disk: the native format A, and the way to B and C (heads/exports.py).

A is a JetSpec / z-lab DFlash directory: `config.json` and `model.safetensors`, weights without a
prefix, no embedding and no output projection. Path scores lie beside it in `edges.safetensors` and
`rescorer.safetensors`, so that readers of A which do not know them are undisturbed. A convolution
in the block is part of the trunk, and a reader without it must refuse the head: such a head names
an architecture of ours.
"""

from typing import Any, TypeVar

from pydantic import ValidationError
from torch import Tensor, nn

from jetspec.errors import JetspecError
from jetspec.heads.config import HeadConfig
from jetspec.heads.files import (
    CONFIG,
    EDGES,
    RESCORER,
    WEIGHTS,
    DType,
    load_state,
    read_tensors,
    read_weights,
    write_tensors,
)
from jetspec.heads.parallel import ParallelHead
from jetspec.storage import join, write_json

# Weights of the target that some trainers save along; ours come from the target itself.
FOREIGN = ("embed_tokens.", "lm_head.", "verifier_lm_head.", "verifier_norm.", "t2d", "d2t")
TABLES = "markov_head."  # format C's spelling of path scores, made from `edges.safetensors`
_Parallel = TypeVar("_Parallel", bound=ParallelHead)


def save_native(head: ParallelHead, directory: str, record: dict[str, Any], dtype: DType) -> None:
    """Write `head` in format A; see `DraftHead.save`."""
    write_head(directory, native_config(head, dtype, record), trunk_state(head), dtype)
    write_beside(head, directory, dtype)


def load_parallel(cls: type[_Parallel], raw: dict[str, Any], directory: str) -> _Parallel:
    """A parallel head of any of the three formats; see `DraftHead.load`."""
    from jetspec.heads import exports

    reader = exports.READERS[exports.format_of(raw, directory)]
    return build_head(cls, reader(raw, directory), directory)


def native_config(head: ParallelHead, dtype: DType, record: dict[str, Any]) -> dict[str, Any]:
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


def own_config(head: ParallelHead) -> dict[str, Any]:
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


def layer_config(head: ParallelHead, dtype: DType) -> dict[str, Any]:
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


class HeadShape:
    """What a config file says of a head: everything `ParallelHead` is built from."""

    def __init__(
        self,
        layers: dict[str, Any],
        directory: str,
        *,
        mask: str,
        block_size: Any,
        taps: Any,
        mask_token_id: Any,
        num_target_layers: Any,
        own: dict[str, Any],
    ) -> None:
        """Args: `layers` is the Qwen3 config; `own` is of `own_fields`; the rest is the format's.

        Raises:
            JetspecError: a key is missing, or layers are of a kind this head has not.
        """
        self.directory = directory
        for key, wanted in (("attention_bias", False), ("hidden_act", "silu")):
            if layers.get(key, wanted) != wanted:
                raise self.error(key, layers[key], f"only {wanted} is supported")
        if set(layers.get("layer_types") or ["full_attention"]) != {"full_attention"}:
            raise self.error(
                "layer_types", layers["layer_types"], "only full_attention is supported"
            )
        said = {"block_size": block_size, "target_layer_ids": taps, "mask_token_id": mask_token_id}
        for key, value in said.items():
            if value is None:
                raise self.error(key, "missing", "set it in config.json")
        self.hidden_size = self._need(layers, "hidden_size")
        self.vocab_size = self._need(layers, "vocab_size")
        self.num_target_layers = num_target_layers or max(taps) + 1
        heads = self._need(layers, "num_attention_heads")
        fields = {
            "mask": mask,
            "num_layers": self._need(layers, "num_hidden_layers"),
            "block_size": block_size,
            "num_taps": len(taps),
            "taps": tuple(taps),
            "mask_token_id": mask_token_id,
            "intermediate_size": self._need(layers, "intermediate_size"),
            "num_attention_heads": heads,
            "num_key_value_heads": layers.get("num_key_value_heads") or heads,
            "head_dim": layers.get("head_dim") or self.hidden_size // heads,
            "rms_norm_eps": self._need(layers, "rms_norm_eps"),
            "rope_parameters": self._rope(layers),
            "max_position_embeddings": self._need(layers, "max_position_embeddings"),
        }
        try:
            self.config = HeadConfig.model_validate(fields | own)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"]) or "config"
            raise self.error(key, first["input"], first["msg"]) from error

    def error(self, key: str, value: object, mend: str) -> JetspecError:
        return JetspecError(f"head.{key}", value, f"{mend} ({join(self.directory, CONFIG)})")

    def _need(self, layers: dict[str, Any], key: str) -> Any:
        if layers.get(key) is None:
            raise self.error(key, "missing", "set it in config.json")
        return layers[key]

    def _rope(self, layers: dict[str, Any]) -> dict[str, Any]:
        parameters = dict(layers.get("rope_parameters") or {})
        scaling = dict(layers.get("rope_scaling") or {})
        found = {
            t for t in (parameters.get("rope_theta"), layers.get("rope_theta")) if t is not None
        }
        if len(found) > 1:
            raise self.error("rope_theta", sorted(found), "two values; readers would differ")
        if not found:
            raise self.error("rope_theta", "missing", "set it in config.json")
        if "type" in scaling:
            scaling["rope_type"] = scaling.pop("type")
        return {"rope_type": "default", **scaling, **parameters, "rope_theta": float(found.pop())}


def dspark_shape(raw: dict[str, Any], directory: str, own: dict[str, Any]) -> HeadShape:
    """The shape in a config of format C, with `own` as its fields of ours."""
    return HeadShape(
        raw,
        directory,
        mask="causal" if raw.get("causal") else "bidirectional",
        block_size=raw.get("block_size"),
        taps=raw.get("target_layer_ids"),
        mask_token_id=raw.get("mask_token_id"),
        num_target_layers=raw.get("num_target_layers"),
        own=own,
    )


def read_native(raw: dict[str, Any], directory: str) -> HeadShape:
    own = raw.get("dflash_config") or {}
    return HeadShape(
        raw,
        directory,
        mask=_mask(own, directory),
        # Newer files keep block_size inside dflash_config.
        block_size=raw.get("block_size", own.get("block_size")),
        taps=own.get("target_layer_ids"),
        mask_token_id=own.get("mask_token_id"),
        num_target_layers=raw.get("num_target_layers"),
        own=own_fields(raw),
    )


def _mask(own: dict[str, Any], directory: str) -> str:
    """JetSpec's key, vLLM's key, or neither: z-lab's own heads are bidirectional."""
    said = {bool(own[key]) for key in ("causal_head", "causal") if own.get(key) is not None}
    if len(said) > 1:
        raise JetspecError(
            "head.dflash_config",
            f"causal_head {own['causal_head']}, causal {own['causal']}",
            f"they disagree; set both alike ({join(directory, CONFIG)})",
        )
    return "causal" if said == {True} else "bidirectional"


def build_head(cls: type[_Parallel], shape: HeadShape, directory: str) -> _Parallel:
    """The head of `shape` with the weights of `directory`."""
    head = cls.unset(
        shape.config,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        num_target_layers=shape.num_target_layers,
    )
    trunk = {
        name: tensor
        for name, tensor in read_weights(directory).items()
        if not name.startswith((*FOREIGN, TABLES))
    }
    load_state(head, trunk, set(trunk_state(head)), directory)
    for name, part in parts_beside(head):
        load_state(part, read_tensors(join(directory, name)), set(part.state_dict()), directory)
    return head.eval()


def trunk_state(head: ParallelHead) -> dict[str, Tensor]:
    """The weights of `model.safetensors`: everything but the path scores."""
    state = head.state_dict()
    return {k: v for k, v in state.items() if not k.startswith(("edges.", "rescorer."))}


def parts_beside(head: ParallelHead) -> list[tuple[str, nn.Module]]:
    """(file name, module) of the path scores."""
    parts = ((EDGES, head.edges), (RESCORER, head.rescorer))
    return [(name, part) for name, part in parts if part is not None]


def write_head(
    directory: str, config: dict[str, Any], state: dict[str, Tensor], dtype: DType
) -> None:
    write_tensors(join(directory, WEIGHTS), state, dtype)
    write_json(join(directory, CONFIG), config)


def write_beside(head: ParallelHead, directory: str, dtype: DType) -> None:
    for name, part in parts_beside(head):
        write_tensors(join(directory, name), part.state_dict(), dtype)
