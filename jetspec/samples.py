"""Regenerated samples: the record, its content id, and its parquet shards on any storage.

A shard holds the samples of a fixed run of prompts and appears whole or not at all, so resuming
means skipping the shards that exist.
"""

import hashlib
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import pyarrow as pa
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
        for sample in samples:
            if (reason := _fault(sample)) is not None:
                raise ValueError(f"sample {sample.id}: {reason}")
        if self.is_written(index):
            return self.uri(index)
        buffer = io.BytesIO()
        pq.write_table(_table(samples), buffer, compression="zstd", write_page_checksum=True)
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
    samples: list[Sample] = []
    seen: dict[str, str] = {}
    for directory in directories:
        names = [name for name in list_files(directory) if _SHARD.fullmatch(name)]
        if not names:
            raise JetspecError("samples", directory, "no sample shards; run regeneration first")
        for shard in (join(directory, name) for name in names):
            for sample in read_shard(shard):
                if sample.id in seen:
                    mend = f"holds id {sample.id[:12]} of {seen[sample.id]} again; regenerate"
                    raise JetspecError("samples", shard, mend)
                seen[sample.id] = shard
                if sample.status in statuses:
                    samples.append(sample)
    return samples


def read_shard(uri: str) -> list[Sample]:
    """Every sample of one shard.

    Raises:
        JetspecError: the file is missing, damaged, or not a sample shard.
    """
    fs, path = filesystem(uri)
    try:
        with fs.open(path, "rb") as file:
            table = pq.read_table(io.BytesIO(file.read()), page_checksum_verification=True)
    except FileNotFoundError as error:
        raise JetspecError("samples", uri, "not found; check the path") from error
    except (pa.ArrowException, OSError) as error:
        raise JetspecError(
            "samples", uri, "corrupt shard; delete it and run regeneration again"
        ) from error
    if not table.schema.equals(SCHEMA):
        raise JetspecError("samples", uri, "not a sample shard: its columns differ")
    samples = [_sample(row) for row in table.to_pylist()]
    for sample in samples:
        if (reason := _fault(sample)) is not None:
            raise JetspecError("samples", uri, f"sample {sample.id[:12]}: {reason}; regenerate")
    return samples


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


def _fault(sample: Sample) -> str | None:
    if sample.status not in STATUSES:
        return f"unknown status {sample.status!r}"
    if len(sample.input_ids) != len(sample.loss_mask):
        return f"{len(sample.input_ids)} tokens but {len(sample.loss_mask)} mask entries"
    if not set(sample.loss_mask) <= {0, 1}:
        return "its loss mask holds other values than 0 and 1"
    return None


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
