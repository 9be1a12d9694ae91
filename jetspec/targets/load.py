"""From a target's name to a frozen model: embedded, directory, GGUF file or hub id."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from jetspec.errors import JetspecError
from jetspec.kept import kept
from jetspec.storage import content_hash
from jetspec.targets.config import TargetConfig
from jetspec.targets.embedded import NAME, embedded_directory
from jetspec.targets.fingerprint import fingerprint, fingerprint_of_model, weight_files
from jetspec.targets.fp8 import to_fp8
from jetspec.targets.gguf import check_gguf, converted_directory
from jetspec.targets.pretrained import first_line, quiet, sdpa_or_eager
from jetspec.targets.target import Target

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_target(config: TargetConfig) -> Target:
    """The frozen target of a run; where runs keep it between them, the same object again.

    Raises:
        JetspecError: the source cannot be found, is partial or damaged, or does not fit the
            reference path; one line each.
    """
    directory, name = target_directory(config)
    mark = _fingerprint(directory, config)
    key = config.model_dump_json(), mark
    return kept("target", key, lambda: _load(config, directory, name, mark))


def _load(config: TargetConfig, directory: Path, name: str, mark: str) -> Target:
    device = resolve_device(config)
    dtype = resolve_dtype(config, device)
    with quiet():
        tokenizer = _load_tokenizer(directory)
        model = _load_model(directory, dtype).to(device)
    if config.weights == "fp8":
        to_fp8(model, name)
    target = Target(model, tokenizer, name, mark)
    if len(tokenizer) > target.vocab_size:
        raise JetspecError(
            "target.source",
            config.source,
            f"tokenizer has {len(tokenizer)} tokens, the model {target.vocab_size}; they differ",
        )
    return target


def from_model(model: Any, tokenizer: Any, name: str) -> Target:
    """A target over a model already in memory; its fingerprint is read from its tensors."""
    return Target(model, tokenizer, name, fingerprint_of_model(model, tokenizer))


def load_tokenizer(config: TargetConfig) -> Any:
    """Only the tokenizer of a target, for work that needs no weights in memory."""
    directory, _ = target_directory(config)
    with quiet():
        return _load_tokenizer(directory)


def target_fingerprint(config: TargetConfig) -> str:
    """The fingerprint without loading the model."""
    directory, _ = target_directory(config)
    return _fingerprint(directory, config)


def _fingerprint(directory: Path, config: TargetConfig) -> str:
    """Of the files; rounded weights are another target."""
    files = [(path.name, path.stat()) for path in sorted(directory.iterdir()) if path.exists()]
    facts = [(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in files]
    of_files = kept(
        "fingerprint",
        (str(directory), facts),
        lambda: fingerprint(directory, cache_root(config)),
    )
    if config.weights == "own":
        return of_files
    return content_hash({"target": of_files, "weights": config.weights})


def cache_root(config: TargetConfig) -> Path:
    return Path(config.cache_dir).expanduser().absolute()


def target_directory(config: TargetConfig) -> tuple[Path, str]:
    """The Hugging Face directory behind a source, checked, and the name records give it."""
    source = config.source
    is_hub_id = not _is_local(source)
    if config.revision is not None and not is_hub_id:
        raise JetspecError("target.revision", config.revision, f"{source} has none; leave it out")
    if source == "embedded":
        directory, name = embedded_directory(cache_root(config)), NAME
    elif source.endswith(".gguf"):
        path = Path(source).expanduser()
        if not path.is_file():
            raise JetspecError("target.source", source, "not found; check the path")
        check_gguf(path)
        name = path.stem
        directory = converted_directory(path, cache_root(config) / "targets", name)
    elif Path(source).expanduser().is_dir():
        directory = Path(source).expanduser().absolute()
        name = directory.name
    elif Path(source).expanduser().is_file():
        raise JetspecError("target.source", source, "a file; give a directory or a .gguf file")
    elif is_hub_id:
        directory, name = _snapshot(source, config.revision), source
    else:
        raise JetspecError("target.source", source, "not found; check the path")
    check_directory(directory, source)
    return directory, name


def _is_local(source: str) -> bool:
    """Whether a source names something on this machine, there or not."""
    return (
        source == "embedded"
        or source.endswith(".gguf")
        or source.startswith(("/", ".", "~"))
        or Path(source).expanduser().exists()
        or not _HUB_ID.fullmatch(source)
    )


def check_directory(directory: Path, source: str) -> None:
    """Refuse a model directory that is partial or damaged, before gigabytes are read.

    Raises:
        JetspecError: which file is missing or cut short.
    """
    if not (directory / "config.json").is_file():
        raise JetspecError("target.source", source, "no config.json; give a model directory")
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise JetspecError("target.source", source, "no tokenizer files; add tokenizer.json")
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            shards = sorted(set(weight_map.values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise JetspecError("target.source", index, f"broken weight index ({error})") from error
        missing = [name for name in shards if not (directory / name).is_file()]
        if missing:
            raise JetspecError(
                "target.source",
                source,
                f"{len(missing)} of {len(shards)} weight files missing, first {missing[0]}; "
                "download them",
            )
    files = weight_files(directory)
    if not files:
        raise JetspecError("target.source", source, "no weight files; add model.safetensors")
    for path in files:
        if path.suffix == ".safetensors":
            _check_safetensors(path)


def _check_safetensors(path: Path) -> None:
    """A safetensors file says in its first bytes how long it must be."""
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= size - 8:
                raise ValueError("header longer than the file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        if end != size:
            raise ValueError(f"{size} bytes where {end} are promised")
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise JetspecError(
            "target.source", path, f"truncated or damaged safetensors ({error}); download again"
        ) from error


def _snapshot(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=_HUB_FILES))
    except GatedRepoError as error:
        raise JetspecError(
            "target.source", hub_id, "gated; accept its licence on the hub and log in"
        ) from error
    except RepositoryNotFoundError as error:
        raise JetspecError(
            "target.source", hub_id, "neither a local path nor a model on the hub"
        ) from error
    except RevisionNotFoundError as error:
        raise JetspecError("target.revision", revision, f"not a revision of {hub_id}") from error
    except Exception as error:  # connection, proxy, offline mode and disk errors of several kinds
        offline = isinstance(error, LocalEntryNotFoundError | ConnectionError)
        reason = "no local path, and the hub cannot be reached" if offline else first_line(error)
        raise JetspecError(
            "target.source", hub_id, f"{reason}; give a directory, a .gguf file or embedded"
        ) from error


def _load_tokenizer(directory: Path) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # tokenizer files fail in as many ways as there are formats
        raise JetspecError(
            "target.source", directory, f"its tokenizer cannot be read ({first_line(error)})"
        ) from error
    if not getattr(tokenizer, "chat_template", None):
        raise JetspecError(
            "target.source", directory, "no chat template; add chat_template.jinja to it"
        )
    return tokenizer


def _load_model(directory: Path, dtype: torch.dtype) -> Any:
    try:
        return sdpa_or_eager(directory, dtype)
    except Exception as error:  # unknown architectures, missing weights, shapes, memory
        raise JetspecError(
            "target.source", directory, f"cannot be loaded as a causal LM ({first_line(error)})"
        ) from error


def resolve_device(config: TargetConfig) -> torch.device:
    """The device of a run: `auto` is the GPU when there is one."""
    cuda = torch.cuda.is_available()
    if config.device == "auto":
        return torch.device("cuda" if cuda else "cpu")
    try:
        device = torch.device(config.device)
    except RuntimeError as error:
        raise JetspecError("target.device", config.device, "use auto, cpu or cuda") from error
    if device.type == "cuda" and (not cuda or (device.index or 0) >= torch.cuda.device_count()):
        raise JetspecError("target.device", config.device, "no such GPU here; use auto or cpu")
    return device


def resolve_dtype(config: TargetConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[config.dtype]
