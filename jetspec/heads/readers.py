"""Parallel heads from disk, in any of the three formats: native A, B (speculators), C (DSpark).

B counts tapped layers from the embedding, so its ids are ours plus one.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from jetspec.errors import JetspecError
from jetspec.heads.config import HeadConfig
from jetspec.heads.files import CONFIG, load_state, read_tensors, read_weights
from jetspec.heads.formats import FOREIGN, TABLES, Format, own_fields, parts_beside, trunk_state
from jetspec.storage import join

if TYPE_CHECKING:
    from jetspec.heads.parallel import ParallelHead

_Parallel = TypeVar("_Parallel", bound="ParallelHead")


def load_parallel(cls: type[_Parallel], raw: dict[str, Any], directory: str) -> _Parallel:
    """A parallel head of any of the three formats; see `DraftHead.load`."""
    shape = READERS[format_of(raw, directory)](raw, directory)
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
