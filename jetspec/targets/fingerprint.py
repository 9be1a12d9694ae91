"""One sha256 that changes whenever the target could answer differently.

It covers the config, the generation config, the tokenizer's files, the chat template and the
hashes of the weight files; not file times, paths, or the library version that saved them.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from jetspec.errors import JetspecError
from jetspec.storage import atomic_write, content_hash, sha256_file

_TOKENIZER_JSON = ("tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
_TOKENIZER_RAW = ("tokenizer.model", "merges.txt", "vocab.txt", "spiece.model")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
# Written by the saving library about itself; a re-save must not look like another target.
_VOLATILE = frozenset(
    {"transformers_version", "name_or_path", "is_local", "local_files_only", "backend"}
)


def fingerprint(directory: str | Path, cache_dir: str | Path | None = None) -> str:
    """The fingerprint of a Hugging Face directory, as 64 hex digits.

    Args:
        cache_dir: where hashes of large files are kept by size and times, so that gigabytes are
            read once; None hashes everything again.

    Raises:
        JetspecError: the directory has no config or no weights.
    """
    root = Path(directory)
    config = _json(root / "config.json")
    if config is None:
        raise JetspecError("target.source", root, "no config.json; give a model directory")
    tokenizer_config = _json(root / "tokenizer_config.json") or {}
    tokenizer: dict[str, Any] = {"tokenizer_config.json": _stable(tokenizer_config)}
    for name in _TOKENIZER_JSON:
        if (value := _json(root / name)) is not None:
            tokenizer[name] = content_hash(value)
    for path in sorted(root.iterdir()):
        if path.name in _TOKENIZER_RAW or path.suffix == ".tiktoken":
            tokenizer[path.name] = sha256_file(str(path))
    weights = weight_files(root)
    if not weights:
        raise JetspecError("target.source", root, "no weight files; give a model directory")
    return content_hash(
        {
            "config": _stable(config),
            "generation_config": _stable(_json(root / "generation_config.json") or {}),
            "tokenizer": tokenizer,
            "chat_template": _chat_template(root, tokenizer_config),
            "weights": {path.name: cached_sha256(path, cache_dir) for path in weights},
        }
    )


def fingerprint_of_model(model: Any, tokenizer: Any) -> str:
    """The fingerprint of a model that has no files: the same parts, read from memory."""
    weights = {}
    for name, tensor in sorted(model.state_dict().items()):
        data = tensor.detach().cpu().contiguous()
        digest = hashlib.sha256(str((data.dtype, tuple(data.shape))).encode())
        digest.update(data.flatten().view(torch.uint8).numpy().tobytes())
        weights[name] = digest.hexdigest()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described = backend.to_str() if backend is not None else type(tokenizer).__qualname__
    return content_hash(
        {
            "config": _stable(model.config.to_dict()),
            "tokenizer": described,
            "chat_template": getattr(tokenizer, "chat_template", None),
            "weights": weights,
        }
    )


def weight_files(root: Path) -> list[Path]:
    """The weight files of a model directory, safetensors alone when there are any."""
    files = sorted(path for path in root.iterdir() if path.suffix in _WEIGHT_SUFFIXES)
    safe = [path for path in files if path.suffix == ".safetensors"]
    return safe or files


def _chat_template(root: Path, tokenizer_config: dict[str, Any]) -> Any:
    """The template in force: its own file wins over the tokenizer config's field."""
    path = root / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    return tokenizer_config.get("chat_template")


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _stable(item)
            for key, item in value.items()
            if key not in _VOLATILE and key != "chat_template" and not str(key).startswith("_")
        }
    if isinstance(value, list | tuple):
        return [_stable(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise JetspecError("target.source", path, f"not valid JSON ({error})") from error


def cached_sha256(path: Path, cache_dir: str | Path | None) -> str:
    """A file's sha256, read again only when its size or times differ from those in the cache."""
    if cache_dir is None:
        return sha256_file(str(path))
    stat = path.stat()
    facts = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    key = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:32]
    record = Path(cache_dir).expanduser() / "hashes" / f"{key}.json"
    try:
        known = json.loads(record.read_text())
        if known["facts"] == facts:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    digest = sha256_file(str(path))
    try:
        with atomic_write(str(record), "w") as file:
            json.dump({"facts": facts, "sha256": digest, "path": str(path)}, file)
    except JetspecError:
        pass  # a cache that cannot be written only costs time
    return digest
