"""Format C, DSpark's own directories: `config.json` and `model.safetensors`.

Our settings and the calibration lie beside the published keys, so that other readers find what
they know, and their directories are read with our defaults for what is ours.
"""

from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from jetspec.errors import JetspecError
from jetspec.heads.base import OWN
from jetspec.heads.config import HeadConfig
from jetspec.heads.files import CONFIG, WEIGHTS, DType, load_state, read_weights, write_tensors
from jetspec.heads.formats import FOREIGN, layer_config
from jetspec.heads.readers import dspark_shape
from jetspec.storage import join, write_json

if TYPE_CHECKING:
    from jetspec.heads.dspark import DSparkHead

_CALIBRATION = "jetspec_calibration"
_TRUNK = "trunk."  # our name for what published weights name without a prefix
_DSpark = TypeVar("_DSpark", bound="DSparkHead")


def save_dspark(head: "DSparkHead", directory: str, record: dict[str, Any], dtype: DType) -> None:
    """Write `head`; see `DraftHead.save`."""
    state = {name.removeprefix(_TRUNK): t for name, t in head.state_dict().items()}
    write_tensors(join(directory, WEIGHTS), state, dtype)
    config = {
        **layer_config(head.trunk, dtype),
        "architectures": ["Qwen3DSparkModel"],
        "block_size": head.config.block_size,
        "causal": head.config.mask == "causal",
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": head.config.markov_rank,
        "mask_token_id": head.trunk.mask_token_id,
        "num_target_layers": head.num_target_layers,
        "sample_from_anchor": True,
        "target_layer_ids": list(head.taps),
        OWN: head.config.model_dump(mode="json"),
        _CALIBRATION: [list(pair) for pair in head.calibration],
        "jetspec_training": record,
    }
    write_json(join(directory, CONFIG), config)


def load_dspark(cls: type[_DSpark], raw: dict[str, Any], directory: str) -> _DSpark:
    """A head of our own or of another trainer's directory; see `DraftHead.load`.

    Raises:
        JetspecError: also where the Markov head is of another kind.
    """
    kind = raw.get("markov_head_type", "vanilla")
    if kind != "vanilla":
        raise JetspecError("head.markov_head_type", kind, f"only vanilla is read ({directory})")
    shape = dspark_shape(raw, directory, {})
    own = raw.get(OWN, {"markov_rank": raw.get("markov_rank")})
    try:
        shared = (cls.settings.model_fields.keys() & HeadConfig.model_fields.keys()) - {"kind"}
        fields = {name: getattr(shape.config, name) for name in shared}
        config = cls.settings.model_validate(fields | own)
        calibration = tuple((float(a), float(b)) for a, b in raw.get(_CALIBRATION, ()))
    except (ValidationError, TypeError, ValueError) as error:
        found = error.errors()[0]["msg"] if isinstance(error, ValidationError) else repr(error)
        place = join(directory, CONFIG)
        raise JetspecError("head", place, f"is no DSpark head's ({found})") from error
    head = cls.unset(
        config,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        num_target_layers=shape.num_target_layers,
    )
    names = {name.removeprefix(_TRUNK): name for name in head.state_dict()}
    weights = read_weights(directory).items()
    state = {names.get(k, k): t for k, t in weights if not k.startswith(FOREIGN)}
    load_state(head, state, set(names.values()), directory)
    head.calibration = calibration
    return head.eval()
