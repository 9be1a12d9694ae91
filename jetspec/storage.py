"""Files behind one URI scheme: a local path or anything fsspec opens.

A stage's output directory is complete if and only if its manifest exists. The manifest is
written last and atomically, and lists every file with its size and sha256.
"""

import contextlib
import hashlib
import json
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import fsspec

from jetspec import __version__
from jetspec.errors import JetspecError

MANIFEST = "manifest.json"


def filesystem(uri: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of `uri` and the path inside it."""
    try:
        return fsspec.core.url_to_fs(uri)
    except (ImportError, ValueError) as error:
        raise JetspecError("storage", uri, f"cannot be opened ({error})") from error


def is_local(uri: str) -> bool:
    return "://" not in uri or uri.startswith("file://")


def absolute(uri: str) -> str:
    """`uri` with a local path made absolute: Ray workers run in directories of their own."""
    if not is_local(uri):
        return uri
    return str(Path(uri.removeprefix("file://")).expanduser().absolute())


def join(uri: str, *parts: str) -> str:
    return "/".join([uri.rstrip("/"), *parts])


def exists(uri: str) -> bool:
    fs, path = filesystem(uri)
    fs.invalidate_cache()
    with _reading(uri):
        return bool(fs.exists(path))


def list_files(uri: str) -> list[str]:
    """Names of the plain files in the directory `uri`, sorted; empty if it is not there."""
    fs, path = filesystem(uri)
    fs.invalidate_cache()
    with _reading(uri):
        if not fs.exists(path):
            return []
        entries = fs.ls(path, detail=True)
    return sorted(e["name"].rsplit("/", 1)[-1] for e in entries if e["type"] == "file")


@contextlib.contextmanager
def atomic_write(uri: str, mode: str = "wb") -> Iterator[IO[Any]]:
    """Write a file that appears whole or not at all.

    Locally: a temporary neighbour, flushed to disk, then renamed. Object stores: an upload
    becomes visible when it is closed.

    Raises:
        JetspecError: the place cannot be written (read-only, full, no permission).
    """
    fs, path = filesystem(uri)
    if not is_local(uri):
        with _spooled_upload(fs, path, uri, mode) as file:
            yield file
        return
    part = f"{path}.{uuid.uuid4().hex[:8]}.part"
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(part, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise JetspecError("output", uri, f"cannot be written ({_reason(error)})") from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)


@contextlib.contextmanager
def _spooled_upload(fs: Any, path: str, uri: str, mode: str) -> Iterator[IO[Any]]:
    """Collect the file here and upload it when it is whole.

    fsspec's own writers complete the upload when they close, also on the way out of an error.
    """
    encoding = None if "b" in mode else "utf-8"
    with tempfile.NamedTemporaryFile(mode, encoding=encoding) as file:
        yield file
        file.flush()
        try:
            fs.put_file(file.name, path)
        except Exception as error:  # every store has its own classes
            raise JetspecError("output", uri, f"cannot be written ({_reason(error)})") from error


@contextlib.contextmanager
def _reading(uri: str) -> Iterator[None]:
    """Turn a store's own errors (no permission, unreachable, missing) into one line."""
    try:
        yield
    except FileNotFoundError as error:
        raise JetspecError("file", uri, "not found; check the path") from error
    except (JetspecError, ValueError):
        raise
    except Exception as error:  # every store has its own classes
        raise JetspecError("storage", uri, f"cannot be read ({_reason(error)})") from error


def _reason(error: BaseException) -> str:
    strerror = getattr(error, "strerror", None)
    return str(strerror or (str(error).splitlines() or [type(error).__name__])[0])


def write_json(uri: str, value: Any) -> None:
    with atomic_write(uri, "w") as file:
        json.dump(value, file, indent=1, sort_keys=True, ensure_ascii=False)
        file.write("\n")


def read_json(uri: str) -> Any:
    """The parsed file.

    Raises:
        JetspecError: the file is missing or is not JSON.
    """
    fs, path = filesystem(uri)
    try:
        with _reading(uri), fs.open(path, "r", encoding="utf-8") as file:
            return json.load(file)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise JetspecError("file", uri, f"not valid JSON ({error}); make it again") from error


def sha256_file(uri: str) -> str:
    fs, path = filesystem(uri)
    digest = hashlib.sha256()
    with _reading(uri), fs.open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def content_hash(value: Any) -> str:
    """sha256 over the canonical JSON of `value` (keys sorted, no spaces), as 64 hex digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def stage_uri(storage: str, stage: str, key: str) -> str:
    """The output directory of one stage run: its name is the hash of everything that shapes it."""
    return join(absolute(storage), stage, key[:16])


def is_complete(directory: str) -> bool:
    return exists(join(directory, MANIFEST))


def write_manifest(directory: str, *, kind: str, config_hash: str, **facts: Any) -> dict[str, Any]:
    """Close a stage's output: list its files with sizes and sha256, then write the manifest.

    Args:
        kind: what the directory holds, e.g. "samples", "head", "evaluation".
        config_hash: hash of the settings that made it.
        facts: small JSON values the next stage or the registry reads (row counts, counters).
    """
    fs, path = filesystem(directory)
    names = [n for n in list_files(directory) if n != MANIFEST and not n.endswith(".part")]
    files = {
        name: {"size": fs.size(f"{path}/{name}"), "sha256": sha256_file(join(directory, name))}
        for name in names
    }
    manifest = {
        "kind": kind,
        "code_version": __version__,
        "config_hash": config_hash,
        "files": files,
        **facts,
    }
    write_json(join(directory, MANIFEST), manifest)
    return manifest


def read_manifest(directory: str, *, kind: str, verify: bool = True) -> dict[str, Any]:
    """The manifest of a complete directory, its files checked.

    Args:
        verify: compare every file's sha256; without it only presence and size are compared.

    Raises:
        JetspecError: no manifest, another kind, or a file missing or altered.
    """
    uri = join(directory, MANIFEST)
    if not exists(uri):
        if not exists(directory):
            raise JetspecError(kind, directory, f"not found; give a {kind} directory")
        raise JetspecError(kind, directory, "has no manifest: incomplete, run its stage again")
    manifest = read_json(uri)
    if not isinstance(manifest, dict) or "files" not in manifest or "kind" not in manifest:
        raise JetspecError(kind, uri, "broken manifest; delete the directory and run its stage")
    if manifest["kind"] != kind:
        raise JetspecError(kind, directory, f"holds {manifest['kind']}, give a {kind} directory")
    fs, path = filesystem(directory)
    for name, facts in manifest["files"].items():
        whole = fs.exists(f"{path}/{name}") and fs.size(f"{path}/{name}") == facts["size"]
        if not whole or (verify and sha256_file(join(directory, name)) != facts["sha256"]):
            raise JetspecError(
                kind, join(directory, name), "missing or corrupt; delete the directory and rerun"
            )
    return manifest
