"""A GGUF file becomes a plain Hugging Face directory, once."""

import contextlib
import copy
import importlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM, modeling_gguf_pytorch_utils

from jetspec.errors import JetspecError
from jetspec.targets.fingerprint import cached_sha256
from jetspec.targets.gguf_tokenizer import save_tokenizer
from jetspec.targets.pretrained import first_line, load_causal_lm, quiet

_MAGIC = b"GGUF"
# Bump when the conversion writes something else, so that cached directories are made again.
_CONVERSION = 1
# Above this many parameters fp32 is saved as bf16: nobody runs such a target in fp32.
_FP32_PARAMETERS = 2_000_000_000


def converted_directory(gguf: Path, cache_dir: Path, name: str) -> Path:
    """The Hugging Face directory of a GGUF file, converted into `cache_dir` if it is not there.

    Concurrent callers convert once: the others wait for a lock, and the directory appears by one
    rename, whole.

    Raises:
        JetspecError: not a GGUF file, damaged, of an unknown architecture, or the cache cannot
            be written.
    """
    check_gguf(gguf)
    key = cached_sha256(gguf, cache_dir.parent)[:16]
    return build_once(cache_dir / f"{name}-{key}-v{_CONVERSION}", lambda part: convert(gguf, part))


def build_once(directory: Path, build: Callable[[Path], None]) -> Path:
    """`directory`, built by `build` under another name and renamed when whole."""
    if directory.exists():
        return directory
    part = directory.with_name(f"{directory.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{directory}.lock"):
            if not directory.exists():
                part.mkdir()
                build(part)
                os.replace(part, directory)
    except OSError as error:
        reason = error.strerror or str(error)
        raise JetspecError(
            "target.cache_dir", directory.parent, f"cannot be written ({reason})"
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return directory


def check_gguf(path: Path) -> None:
    try:
        with open(path, "rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise JetspecError("target.source", path, f"cannot be read ({error.strerror})") from error
    if magic != _MAGIC:
        raise JetspecError("target.source", path, "not a GGUF file (wrong magic); download again")


def convert(gguf: Path, directory: Path) -> None:
    """Dequantise `gguf` into `directory`: config, safetensors, tokenizer and chat template."""
    try:
        with quiet(), _own_bar(), _read_once():
            save_tokenizer(gguf, directory)
            loaded = load_causal_lm(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    except JetspecError:
        raise
    except Exception as error:  # the reader raises KeyError, ValueError, IndexError, ...
        raise JetspecError(
            "target.source", gguf, f"damaged or unsupported GGUF ({first_line(error)})"
        ) from error
    model = _without_quantizer(loaded)
    if model.num_parameters() > _FP32_PARAMETERS:
        model = model.to(torch.bfloat16)
    with quiet():
        model.save_pretrained(directory)
    _tidy(directory)


@contextlib.contextmanager
def _own_bar() -> Iterator[None]:
    """The reader's bar, which no setting reaches, as one of ours: on a terminal, gone when done."""
    console = Console(stderr=True)

    def bar(tensors: Iterable[Any], **look: Any) -> Iterable[Any]:
        hidden = not console.is_terminal
        return track(tensors, "convert", console=console, transient=True, disable=hidden)

    theirs = getattr(modeling_gguf_pytorch_utils, "tqdm", None)
    modeling_gguf_pytorch_utils.tqdm = bar
    try:
        yield
    finally:
        modeling_gguf_pytorch_utils.tqdm = theirs


@contextlib.contextmanager
def _read_once() -> Iterator[None]:
    """Every reader of one file is the same one: the tokenizer, the config and the tensors would
    each read the text of every token, which takes longer than the weights do."""
    library: Any = importlib.import_module("gguf")
    theirs = library.GGUFReader
    opened: dict[str, Any] = {}

    class Reader(theirs):  # type: ignore[misc, valid-type]
        data: np.ndarray

        def _build_fields(self, offset: int, count: int) -> int:
            # A plain array over the same map: a slice of a memmap costs three times as much.
            self.data = np.asarray(self.data)
            return int(super()._build_fields(offset, count))

    def reader(path: str | os.PathLike[str]) -> Any:
        return opened.get(str(path)) or opened.setdefault(str(path), Reader(path))

    library.GGUFReader = reader
    try:
        yield
    finally:
        library.GGUFReader = theirs


def _without_quantizer(loaded: Any) -> Any:
    """The same weights in a model that knows nothing of GGUF, so that it can be saved."""
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    return model


def _tidy(directory: Path) -> None:
    """Leave in the JSON files only what describes the model, whichever library version wrote."""
    path = directory / "config.json"
    config = {k: _shortest(v) for k, v in json.loads(path.read_text()).items()}
    for name in ("_name_or_path", "_model_name_or_path", "transformers_version"):
        config.pop(name, None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    ids = {k: v for k, v in config.items() if k.endswith("_token_id") and k != "unk_token_id"}
    path = directory / "generation_config.json"
    path.write_text(json.dumps(ids, indent=2, sort_keys=True) + "\n")


def _shortest(value: Any) -> Any:
    """GGUF stores fp32 numbers: 9.999999747378752e-06 is 1e-05."""
    if isinstance(value, float) and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    return value
