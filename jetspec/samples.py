"""Regenerated samples: the record, its content id, and its parquet shards on any storage.

A shard holds the samples of a fixed run of prompts and appears whole or not at all, so resuming
means skipping the shards that exist.
"""

import hashlib
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jetspec.errors import JetspecError
from jetspec.storage import atomic_write, content_hash, exists, filesystem, join, list_files

Status = Literal["ok", "truncated", "looping"]
STATUSES: tuple[Status, ...] = ("ok", "truncated", "looping")
_SHARD = re.compile(r"shard-\d{5,}\.parquet")
_MESSAGE = pa.struct([pa.field("role", pa.string()), pa.field("content", pa.string())])
SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("slice", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("messages", pa.list_(_MESSAGE), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.int8()), nullable=False),
        pa.field("sample_index", pa.int32(), nullable=False),
    ]
)

_FLAGS = pa.array([0, 1], pa.int8())
_TRAINED_ON = ("id", "prompt_id", "status", "input_ids", "loss_mask")


@dataclass(frozen=True)
class Sample:
    """One conversation answered by the target.

    Attributes:
        id: content hash of everything that shaped it (`sample_id`).
        status: `truncated` hit the token limit, `looping` ends in a repeated cycle.
        messages: the prompt with the generated assistant turns in place.
        input_ids: the whole conversation in the target's tokens.
        loss_mask: 0 for prompt tokens, 1 for generated ones; as long as `input_ids`.
        sample_index: which of the prompt's samples this is.
    """

    id: str
    prompt_id: str
    slice: str
    status: Status
    messages: tuple[dict[str, str], ...]
    input_ids: list[int]
    loss_mask: list[int]
    sample_index: int


@dataclass(frozen=True)
class SampleColumns:
    """What training reads of N samples, in flat arrays: no object a token.

    Attributes:
        ids, prompt_ids: as a sample's.
        tokens: int32 [total]; mask: int8 [total], its loss mask.
        offsets: int64 [N + 1], where each sample begins.
    """

    ids: tuple[str, ...]
    prompt_ids: tuple[str, ...]
    tokens: np.ndarray
    mask: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def of(cls, samples: Sequence[Any]) -> "SampleColumns":
        """Samples in memory: anything with `id`, `prompt_id`, `input_ids` and `loss_mask`.

        Raises:
            JetspecError: a sample whose mask and tokens differ in length.
        """
        for sample in samples:
            if len(sample.input_ids) != len(sample.loss_mask):
                raise JetspecError(
                    "samples", sample.id, "loss_mask and input_ids differ in length; regenerate"
                )
        return cls(
            ids=tuple(sample.id for sample in samples),
            prompt_ids=tuple(sample.prompt_id for sample in samples),
            tokens=_joined([np.asarray(s.input_ids, np.int32) for s in samples], np.int32),
            mask=_joined([np.asarray(s.loss_mask, np.int8) for s in samples], np.int8),
            offsets=_offsets([np.array([len(s.input_ids) for s in samples], np.int64)]),
        )


def sample_id(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    fingerprint: str,
    sampling: Mapping[str, Any],
    sample_index: int,
    semantics: str,
) -> str:
    """sha256 over all that decides a sample's content, as 64 hex digits.

    Args:
        messages: the prompt, without generated turns.
        fingerprint: the target's.
        sampling: resolved parameters (temperature, top_p, seed, limits, template settings).
        semantics: the backend's name for what decides its bytes.
    """
    return content_hash(
        {
            "messages": [dict(message) for message in messages],
            "tools": [dict(tool) for tool in tools or ()],
            "fingerprint": fingerprint,
            "sampling": dict(sampling),
            "sample_index": sample_index,
            "semantics": semantics,
        }
    )


def shard_name(index: int) -> str:
    return f"shard-{index:05d}.parquet"


def shard_count(prompts: int, shard_size: int) -> int:
    """Shard i holds prompts [i·shard_size, (i+1)·shard_size)."""
    return -(-prompts // shard_size)


class SampleWriter:
    """Writes the shards of one directory, each atomically and once."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def uri(self, index: int) -> str:
        return join(self.directory, shard_name(index))

    def is_written(self, index: int) -> bool:
        return exists(self.uri(index))

    def write(self, index: int, samples: Sequence[Sample]) -> str:
        """Write shard `index` and return its URI; one that exists is kept as it is.

        Raises:
            JetspecError: the directory cannot be written.
        """
        table = _table(samples)
        if (fault := _fault(table)) is not None:
            raise ValueError(f"sample {fault[0]}: {fault[1]}")
        if self.is_written(index):
            return self.uri(index)
        buffer = io.BytesIO()
        pq.write_table(table, buffer, compression="zstd", write_page_checksum=True)
        with atomic_write(self.uri(index)) as file:
            file.write(buffer.getvalue())
        return self.uri(index)


def read_samples(
    *directories: str, statuses: Sequence[Status] = ("ok", "truncated")
) -> list[Sample]:
    """The samples of every shard in `directories` with one of `statuses`, in shard order.

    Raises:
        JetspecError: no shards, a corrupt one (named), or one id twice.
    """
    tables = _read_all(directories, statuses, SCHEMA.names)
    return [_sample(row) for table in tables for row in table.to_pylist()]


def read_columns(
    *directories: str, statuses: Sequence[Status] = ("ok", "truncated")
) -> SampleColumns:
    """The same samples as `read_samples` gives, as columns: many times faster and smaller.

    Raises:
        JetspecError: as `read_samples`.
    """
    ids: list[str] = []
    prompt_ids: list[str] = []
    tokens, mask, lengths = [], [], []
    for table in _read_all(directories, statuses, _TRAINED_ON):
        ids += table["id"].to_pylist()
        prompt_ids += table["prompt_id"].to_pylist()
        tokens.append(pc.list_flatten(table["input_ids"]).to_numpy())
        mask.append(pc.list_flatten(table["loss_mask"]).to_numpy())
        lengths.append(pc.list_value_length(table["input_ids"]).to_numpy())
    return SampleColumns(
        ids=tuple(ids),
        prompt_ids=tuple(prompt_ids),
        tokens=_joined(tokens, np.int32),
        mask=_joined(mask, np.int8),
        offsets=_offsets(lengths),
    )


def read_shard(uri: str) -> list[Sample]:
    """Every sample of one shard.

    Raises:
        JetspecError: the file is missing, damaged, or not a sample shard.
    """
    return [_sample(row) for row in _read_table(uri, SCHEMA.names).to_pylist()]


def _read_all(
    directories: Sequence[str], statuses: Sequence[Status], columns: Sequence[str]
) -> Iterator[pa.Table]:
    """The rows of every shard with one of `statuses`."""
    seen: dict[str, str] = {}
    for directory in directories:
        names = [name for name in list_files(directory) if _SHARD.fullmatch(name)]
        if not names:
            raise JetspecError("samples", directory, "no sample shards; run regeneration first")
        for shard in (join(directory, name) for name in names):
            table = _read_table(shard, columns)
            for id in table["id"].to_pylist():
                if id in seen:
                    mend = f"holds id {id[:12]} of {seen[id]} again; regenerate"
                    raise JetspecError("samples", shard, mend)
                seen[id] = shard
            yield table.filter(pc.is_in(table["status"], pa.array(statuses, pa.string())))


def _read_table(uri: str, columns: Sequence[str]) -> pa.Table:
    """Some columns of a shard, every sample found to be without fault."""
    fs, path = filesystem(uri)
    try:
        with fs.open(path, "rb") as file:
            shard = pq.ParquetFile(io.BytesIO(file.read()), page_checksum_verification=True)
            table = shard.read(columns=list(columns)) if shard.schema_arrow.equals(SCHEMA) else None
    except FileNotFoundError as error:
        raise JetspecError("samples", uri, "not found; check the path") from error
    except (pa.ArrowException, OSError) as error:
        raise JetspecError(
            "samples", uri, "corrupt shard; delete it and run regeneration again"
        ) from error
    if table is None:
        raise JetspecError("samples", uri, "not a sample shard: its columns differ")
    if (fault := _fault(table)) is not None:
        raise JetspecError("samples", uri, f"sample {fault[0][:12]}: {fault[1]}; regenerate")
    return table


def samples_hash(samples: Sequence[Sample]) -> str:
    """sha256 over the ids in order: what a training run was fed."""
    return hashlib.sha256("\n".join(sample.id for sample in samples).encode()).hexdigest()


@dataclass(frozen=True)
class Accounting:
    """Where every requested sample went: in = ok + truncated + looping + failed + skipped."""

    in_: int = 0
    ok: int = 0
    truncated: int = 0
    looping: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: "Accounting") -> "Accounting":
        return Accounting(*(a + b for a, b in zip(self._all(), other._all(), strict=True)))

    def check(self) -> "Accounting":
        """Itself.

        Raises:
            JetspecError: samples are unaccounted for.
        """
        total, *parts = self._all()
        if total != sum(parts):
            raise JetspecError(
                "samples", f"{total} in, {sum(parts)} accounted for", "the output is not complete"
            )
        return self

    def facts(self) -> dict[str, int]:
        """Plain JSON values, with `in_` written `in`."""
        names = ("in", "ok", "truncated", "looping", "failed", "skipped")
        return dict(zip(names, self._all(), strict=True))

    @classmethod
    def from_facts(cls, facts: Mapping[str, int]) -> "Accounting":
        return cls(*(facts[n] for n in ("in", *STATUSES, "failed", "skipped")))

    @classmethod
    def of(cls, samples: Sequence[Sample], failed: int = 0, skipped: int = 0) -> "Accounting":
        """The account of samples that were answered, beside those that were not."""
        counts = Counter(sample.status for sample in samples)
        parts = (*(counts[status] for status in STATUSES), failed, skipped)
        return cls(len(samples) + failed + skipped, *parts)

    def _all(self) -> tuple[int, ...]:
        return (self.in_, self.ok, self.truncated, self.looping, self.failed, self.skipped)


def _fault(table: pa.Table) -> tuple[str, str] | None:
    """(id, what is wrong) of the first sample that contradicts itself."""
    unknown = pc.invert(pc.is_in(table["status"], pa.array(STATUSES)))
    if (row := pc.index(unknown, True).as_py()) >= 0:
        return table["id"][row].as_py(), f"unknown status {table['status'][row].as_py()!r}"
    tokens, mask = (
        pc.list_value_length(table[name]).to_numpy() for name in ("input_ids", "loss_mask")
    )
    if len(rows := np.flatnonzero(tokens != mask)):
        reason = f"{tokens[rows[0]]} tokens but {mask[rows[0]]} mask entries"
        return table["id"][int(rows[0])].as_py(), reason
    values = pc.list_flatten(table["input_ids"])
    flags = pc.list_flatten(table["loss_mask"])
    checks = {
        "a token is missing": pc.is_valid(values),
        "its loss mask holds other values than 0 and 1": pc.is_in(flags, _FLAGS),
    }
    for reason, good in checks.items():
        if (place := pc.index(good, False).as_py()) >= 0:
            row = int(np.searchsorted(np.cumsum(tokens), place, side="right"))
            return table["id"][row].as_py(), reason
    return None


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts], dtype=dtype)


def _offsets(lengths: Sequence[np.ndarray]) -> np.ndarray:
    """int64 [N + 1] from the lengths of N samples, in parts."""
    return np.cumsum(np.concatenate([np.zeros(1, np.int64), *lengths]), dtype=np.int64)


def _table(samples: Sequence[Sample]) -> pa.Table:
    columns: dict[str, list[Any]] = {
        name: [getattr(sample, name) for sample in samples] for name in SCHEMA.names
    }
    columns["messages"] = [
        [{"role": m["role"], "content": m["content"]} for m in sample.messages]
        for sample in samples
    ]
    return pa.table(columns, schema=SCHEMA)


def _sample(row: dict[str, Any]) -> Sample:
    messages = tuple(dict(message) for message in row["messages"])
    return Sample(**{**row, "messages": messages, "status": cast(Status, row["status"])})
