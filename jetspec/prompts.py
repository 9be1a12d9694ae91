"""Prompts: where they come from, their slices, and what a run trains and is measured on."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from pydantic import Field, field_validator

from jetspec.errors import JetspecError
from jetspec.kept import kept
from jetspec.leaks import LeakReport, find_leaks
from jetspec.prompt_files import file_marks, messages_of, read_rows, rows_of_lines
from jetspec.prompt_presets import PRESETS, read_preset
from jetspec.settings import Settings
from jetspec.storage import content_hash

_BUNDLED = "data/prompts.jsonl"


class PromptSource(Settings):
    """One source of prompts.

    Attributes:
        source: `bundled`, a preset's name, or the URI of JSONL (`.jsonl`, `.jsonl.gz`) or Parquet
            files: one file, a directory of them, or a glob pattern.
        split: which part of the bundled set or preset; for files, rows whose `split` says so.
        slice: slice name for all its prompts; None keeps each row's own.
        mirror: a preset is read from this directory, laid out like its hub repository.
        limit: at most this many prompts, evenly over slices, in a seeded order.
    """

    source: str = Field(default="bundled", min_length=1)
    split: str | None = None
    slice: str | None = Field(default=None, min_length=1)
    mirror: str | None = None
    limit: int | None = Field(default=None, ge=1)


class PromptsConfig(Settings):
    """Training and evaluation prompts. Training prompts that leak into evaluation are dropped.

    Attributes:
        limit: at most this many training prompts in all, evenly over slices, in a seeded order.
    """

    train: tuple[PromptSource, ...] = (PromptSource(source="bundled", split="train"),)
    eval: tuple[PromptSource, ...] = (PromptSource(source="bundled", split="eval"),)
    limit: int | None = Field(default=None, ge=1)
    seed: int = 0

    @field_validator("train", "eval", mode="before")
    @classmethod
    def _listed(cls, sources: object) -> object:
        entries = sources if isinstance(sources, list | tuple) else [sources]
        if entries is not sources or any(isinstance(entry, str) for entry in entries):
            raise ValueError("is a list of sources; write it as [{source: NAME_OR_FILE}, ...]")
        return sources


@dataclass(frozen=True)
class Prompt:
    """One conversation that waits for the target's answer: its last turn is the user's.

    Attributes:
        id: content hash of the messages, 12 hex digits.
        source: the data set or file it came from.
    """

    id: str
    slice: str
    messages: tuple[dict[str, str], ...]
    source: str


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a run.

    Attributes:
        leaks: training prompts that were dropped because evaluation asks the same.
        duplicates: rows dropped because the same conversation came before in the same set.
        hash: sha256 over ids and slices of both sets, in order.
    """

    train: list[Prompt]
    eval: list[Prompt]
    leaks: LeakReport
    duplicates: int
    hash: str

    def slices(self) -> list[str]:
        """The evaluation slices, sorted."""
        return sorted({prompt.slice for prompt in self.eval})


def load_prompts(config: PromptsConfig) -> PromptSet:
    """Both prompt sets of a run, the leaking training prompts dropped.

    Raises:
        JetspecError: a source cannot be read, a row is malformed, or nothing is left to train on.
    """
    own = [s.source for s in (*config.train, *config.eval) if s.source not in (*PRESETS, "bundled")]
    marks = [file_marks(uri) for uri in own]
    return kept("prompts", (config.model_dump_json(), marks), lambda: _load_prompts(config))


def _load_prompts(config: PromptsConfig) -> PromptSet:
    held_out, repeated_held_out = _distinct(_load_all(config.eval, config.seed, "prompts.eval"))
    loaded, repeated = _distinct(_load_all(config.train, config.seed, "prompts.train"))
    leaks = find_leaks(loaded, held_out)
    dropped = set(leaks.dropped)
    train = [prompt for prompt in loaded if prompt.id not in dropped]
    if not train:
        raise JetspecError(
            "prompts.train", f"all {len(loaded)} prompts leak", "give other evaluation prompts"
        )
    if config.limit is not None:
        train = balanced(train, config.limit, config.seed)
    identity = [[(p.id, p.slice) for p in part] for part in (train, held_out)]
    return PromptSet(train, held_out, leaks, repeated + repeated_held_out, content_hash(identity))


def load_source(source: PromptSource, seed: int = 0, field: str = "prompts") -> list[Prompt]:
    """The prompts of one source, limited.

    Raises:
        JetspecError: it cannot be read, or holds no prompt.
    """
    prompts = [_prompt(row, source) for row in _rows(source, field)]
    if not prompts:
        split = f" in split {source.split!r}" if source.split else ""
        raise JetspecError(field, source.source, f"no prompts{split}; check the file")
    return prompts if source.limit is None else balanced(prompts, source.limit, seed)


def make_prompt(messages: Sequence[dict[str, str]], slice: str, source: str) -> Prompt:
    kept = tuple({"role": m["role"], "content": m["content"]} for m in messages)
    return Prompt(content_hash(list(kept))[:12], slice, kept, source)


def balanced(prompts: Sequence[Prompt], limit: int, seed: int) -> list[Prompt]:
    """At most `limit` prompts, as evenly over slices as their sizes allow, in the given order.

    Which ones is decided by a hash of seed and id, so that a larger limit keeps the smaller one's.
    """
    if len(prompts) <= limit:
        return list(prompts)
    by_slice: dict[str, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_slice[prompt.slice].append(index)
    queues = [
        sorted(indices, key=lambda i: _rank(prompts[i], seed))
        for _, indices in sorted(by_slice.items())
    ]
    chosen: list[int] = []
    turn = 0
    while len(chosen) < limit:
        chosen.extend(queue[turn] for queue in queues if turn < len(queue))
        turn += 1
    return [prompts[index] for index in sorted(chosen[:limit])]


def _rank(prompt: Prompt, seed: int) -> str:
    return hashlib.sha256(f"{seed}:{prompt.id}".encode()).hexdigest()


def _load_all(sources: Sequence[PromptSource], seed: int, field: str) -> list[Prompt]:
    if not sources:
        raise JetspecError(field, "[]", "give at least one source")
    return [prompt for source in sources for prompt in load_source(source, seed, field)]


def _rows(source: PromptSource, field: str) -> Iterable[dict[str, Any]]:
    """Rows with `messages`, and `slice` and `source` where they carry them."""
    if source.source in PRESETS:
        return read_preset(source.source, split=source.split, mirror=source.mirror)
    if source.mirror is not None:
        raise JetspecError(f"{field}.mirror", source.mirror, "only a preset has a mirror")
    if source.source == "bundled":
        with resources.files("jetspec").joinpath(_BUNDLED).open("rb") as file:
            rows: Iterable[dict[str, Any]] = list(rows_of_lines(file, "bundled"))
    else:
        rows = read_rows(source.source, field, presets=tuple(PRESETS))
    return (row for row in rows if source.split in (None, row.get("split")))


def _prompt(row: dict[str, Any], source: PromptSource) -> Prompt:
    where = row["where"]
    name = source.slice or row.get("slice") or row.get("domain") or row["stem"]
    return make_prompt(messages_of(row, where), str(name), str(row.get("source") or row["stem"]))


def _distinct(prompts: Sequence[Prompt]) -> tuple[list[Prompt], int]:
    """The first of each id: two samples of one prompt differ by their index, never by a copy."""
    first = {prompt.id: prompt for prompt in reversed(prompts)}
    kept = [prompt for prompt in prompts if first.pop(prompt.id, None) is not None]
    return kept, len(prompts) - len(kept)
