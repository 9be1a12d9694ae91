"""Rows of prompts from JSONL and Parquet files on any storage, and their conversations."""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

from jetspec.errors import JetspecError
from jetspec.storage import filesystem

_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
_COLUMNS = ("messages", "conversations", "prompt", "question")
_FACTS = ("slice", "domain", "source", "split")
# ShareGPT's names for the speakers.
_ROLES = {"human": "user", "gpt": "assistant"}


def read_rows(uri: str, field: str, presets: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Every row of the file, directory or glob pattern `uri`, with `where` and `stem` added.

    Args:
        field: the setting that named it, for errors.
        presets: names the user may have meant instead.

    Raises:
        JetspecError: nothing is there, or a file is damaged or of another format.
    """
    fs, path = filesystem(uri)
    try:
        paths = _expand(fs, path)
    except Exception as error:  # every store has its own classes
        raise JetspecError(field, uri, f"cannot be read ({_reason(error)})") from error
    if not paths:
        known = f"bundled, {', '.join(presets)}" if presets else "bundled"
        raise JetspecError(
            field, uri, f"not found; give a {', '.join(_SUFFIXES)} file or one of {known}"
        )
    for name in paths:
        where = f"{uri}" if len(paths) == 1 else name
        suffix = next((s for s in _SUFFIXES if name.endswith(s)), None)
        if suffix is None:
            raise JetspecError(field, where, f"unknown format; give {', '.join(_SUFFIXES)}")
        stem = name.rsplit("/", 1)[-1].removesuffix(suffix)
        rows = 0
        for row in _rows_of_file(fs, name, suffix, where):
            rows += 1
            row["stem"] = stem
            yield row
        if rows == 0:
            raise JetspecError(field, where, "empty file; add prompts to it")


def file_marks(uri: str) -> list[tuple[str, str]]:
    """(name, mark) of the files behind `uri`; a mark changes with what its store says of a file."""
    fs, path = filesystem(uri)
    try:
        return [(name, str(fs.ukey(name))) for name in _expand(fs, path)]
    except Exception:  # every store has its own classes; whoever reads it says what is wrong
        return []


def rows_of_lines(lines: Iterable[bytes] | IO[bytes], where: str) -> Iterator[dict[str, Any]]:
    """The JSON objects of `lines`; blank lines are passed over.

    Raises:
        JetspecError: a line is not a JSON object, named by its number.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{where}:{number}"
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise JetspecError("prompts", place, f"not valid JSON ({error})") from error
        if not isinstance(row, dict):
            raise JetspecError("prompts", place, "not a JSON object; one object a line")
        yield {**row, "where": place, "stem": where}


def messages_of(row: dict[str, Any], where: str) -> list[dict[str, str]]:
    """The conversation of a row, cut after its last user turn: the target writes the answers.

    The row carries `messages` (role, content), `conversations` (from, value), or a `prompt` or
    `question` as text.

    Raises:
        JetspecError: none of these, an unknown role, an empty turn, or turns in an order that no
            chat template takes.
    """
    column = next((name for name in _COLUMNS if row.get(name) is not None), None)
    if column is None:
        raise JetspecError("prompts", where, f"no {', '.join(_COLUMNS)} in the row; add one")
    value = row[column]
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise JetspecError("prompts", where, f"{column} must be text or a list of messages")
    messages = [_message(turn, f"{where} turn {i}") for i, turn in enumerate(value, 1)]
    # Several public sets carry an empty system turn where there is none.
    if messages and messages[0] == {"role": "system", "content": ""}:
        del messages[0]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    _check_order(messages, where)
    return messages


def _message(turn: dict[str, Any], where: str) -> dict[str, str]:
    role = turn.get("role") or turn.get("from")
    role = _ROLES.get(str(role), role)
    if role not in ("system", "user", "assistant"):
        raise JetspecError("prompts", where, f"role {role!r}; use system, user or assistant")
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    if isinstance(content, list):
        content = _text_of_parts(content, where)
    if not isinstance(content, str):
        raise JetspecError("prompts", where, "its content is not text; give text")
    return {"role": role, "content": content}


def _text_of_parts(parts: list[Any], where: str) -> str:
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise JetspecError("prompts", where, "its content holds more than text; give text")
    return "\n".join(str(text) for text in texts)


def _check_order(messages: list[dict[str, str]], where: str) -> None:
    if not messages:
        raise JetspecError("prompts", where, "no user turn; add one")
    for index, message in enumerate(messages):
        if message["role"] == "system" and index > 0:
            raise JetspecError("prompts", where, "system turn not at the start; move it")
        if message["role"] != "system" and not message["content"].strip():
            raise JetspecError("prompts", where, f"empty {message['role']} turn; fill it")
    turns = [m["role"] for m in messages if m["role"] != "system"]
    wanted = ["user" if i % 2 == 0 else "assistant" for i in range(len(turns))]
    if not turns or turns != wanted:
        raise JetspecError(
            "prompts", where, f"turns {', '.join(turns) or 'none'}; alternate user and assistant"
        )


def _expand(fs: Any, path: str) -> list[str]:
    if any(sign in path for sign in "*?["):
        return sorted(str(name) for name in fs.glob(path))
    if fs.isdir(path):
        names = (str(name) for name in fs.ls(path, detail=False))
        return sorted(name for name in names if name.endswith(_SUFFIXES))
    return [path] if fs.exists(path) else []


def _rows_of_file(fs: Any, path: str, suffix: str, where: str) -> Iterator[dict[str, Any]]:
    try:
        with fs.open(path, "rb") as file:
            if suffix == ".parquet":
                yield from _rows_of_parquet(file, where)
            elif suffix == ".jsonl.gz":
                with gzip.open(file) as lines:
                    yield from rows_of_lines(lines, where)
            else:
                yield from rows_of_lines(file, where)
    except (OSError, EOFError, zlib.error) as error:
        raise JetspecError("prompts", where, f"cannot be read ({_reason(error)})") from error


def _rows_of_parquet(file: Any, where: str) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        parquet = pq.ParquetFile(file)
        wanted = {*_COLUMNS, *_FACTS}
        columns = [name for name in parquet.schema_arrow.names if name in wanted]
        number = 0
        for batch in parquet.iter_batches(columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield {**row, "where": f"{where} row {number}"}
    except pa.ArrowException as error:
        raise JetspecError("prompts", where, f"damaged Parquet ({_reason(error)})") from error


def _reason(error: BaseException) -> str:
    strerror = getattr(error, "strerror", None)
    return str(strerror or (str(error).splitlines() or [type(error).__name__])[0])
