"""The files of a head directory: tensors and a config, written so that no half looks whole."""

from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor

from jetspec.errors import JetspecError
from jetspec.storage import atomic_write, exists, filesystem, join, list_files, read_json

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
# Path scores lie beside the trunk, so that readers of format A never meet them.
EDGES = "edges.safetensors"
RESCORER = "rescorer.safetensors"
BESIDE = frozenset({EDGES, RESCORER})
DType = Literal["fp32", "bf16"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load_state(
    module: torch.nn.Module, state: dict[str, Tensor], wanted: set[str], directory: str
) -> None:
    """Put `state` into `module`, whose weights of these names must be just the `wanted` ones.

    Raises:
        JetspecError: weights are missing, superfluous or of another shape.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    for problem, names in (
        ("lacks", sorted(wanted - state.keys())),
        ("has weights this head does not know:", sorted(state.keys() - wanted)),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise JetspecError(
                "head", directory, f"{problem} {names[0]}{more}; wrong head or config"
            )
    for name, tensor in state.items():
        if tuple(tensor.shape) != shapes[name]:
            raise JetspecError(
                "head",
                directory,
                f"{name} is {tuple(tensor.shape)}, config.json makes it {shapes[name]}; mend one",
            )
    module.load_state_dict(state, strict=False)


def write_tensors(uri: str, state: dict[str, Tensor], dtype: DType) -> None:
    tensors = {name: t.detach().to("cpu", _DTYPES[dtype]).contiguous() for name, t in state.items()}
    with atomic_write(uri) as file:
        file.write(safetensors.torch.save(tensors, metadata={"format": "pt"}))


def read_tensors(uri: str) -> dict[str, Tensor]:
    """Tensors of one safetensors file.

    Raises:
        JetspecError: the file is missing or damaged.
    """
    fs, path = filesystem(uri)
    try:
        with fs.open(path, "rb") as file:
            return safetensors.torch.load(file.read())
    except FileNotFoundError as error:
        raise JetspecError("head", uri, "not found; the head is incomplete") from error
    except safetensors.SafetensorError as error:
        raise JetspecError("head", uri, f"damaged ({error}); make the head again") from error


def read_weights(directory: str) -> dict[str, Tensor]:
    """All weights of a head's trunk, from one file or from shards."""
    names = [n for n in list_files(directory) if n.endswith(".safetensors") and n not in BESIDE]
    if not names:
        raise JetspecError("head", directory, f"no {WEIGHTS}; give a head directory")
    state: dict[str, Tensor] = {}
    for name in names:
        state |= read_tensors(join(directory, name))
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


def read_beside(directory: str) -> dict[str, Tensor]:
    """The weights that lie beside the trunk's, by the names that a head has for them."""
    state: dict[str, Tensor] = {}
    for name in (n for n in list_files(directory) if n in BESIDE):
        part = name.partition(".")[0]
        tensors = read_tensors(join(directory, name))
        state |= {f"{part}.{key}": tensor for key, tensor in tensors.items()}
    return state


def read_config(directory: str) -> dict[str, Any]:
    if not exists(join(directory, CONFIG)):
        raise JetspecError("head", directory, f"no {CONFIG}; give a head directory")
    raw = read_json(join(directory, CONFIG))
    if not isinstance(raw, dict):
        raise JetspecError("head", join(directory, CONFIG), "must be a mapping")
    return raw
