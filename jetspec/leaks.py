"""Training prompts that evaluation also asks: equal ones, and ones that share a run of words.

Texts are compared without case, punctuation and spacing. A run is ten words; Chinese and Japanese
are written without spaces, and there fifteen characters carry about as much as ten words.
A run that many evaluation prompts share is a wording ("please reason step by step ..."), not a
question: such wordings are cut out of both sides before anything is compared.
"""

import hashlib
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_UNITS = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")
_IS_CJK = re.compile(rf"[{_CJK}]")
# A run is complete at a weight of 30: ten words of 3, or fifteen characters of 2.
_RUN, _WORD, _CHARACTER = 30, 3, 2
_WORDING_PROMPTS = 10  # a run in this many evaluation prompts is a wording,
_WORDING_SHARE = 0.5  # or in this share of a small set
_WORDING_AT_LEAST = 3
_BATCH = 20_000  # training prompts compared at a time
_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class LeakReport:
    """What the comparison found.

    Attributes:
        checked: training prompts compared.
        exact: dropped for a turn equal to an evaluation turn.
        runs: dropped for a shared run.
        dropped: ids of both kinds, in order.
        wordings: runs that were taken for common wordings and not for leaks.
    """

    checked: int
    exact: int
    runs: int
    dropped: tuple[str, ...]
    wordings: int

    def facts(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "checked": self.checked,
            "exact": self.exact,
            "runs": self.runs,
            "dropped": list(self.dropped),
            "wordings": self.wordings,
        }


class Asked(Protocol):
    """What is compared: a conversation with a name."""

    @property
    def id(self) -> str: ...

    @property
    def messages(self) -> Sequence[Mapping[str, str]]: ...


def find_leaks(train: Sequence[Asked], held_out: Sequence[Asked]) -> LeakReport:
    """Which of `train` ask what `held_out` asks.

    User turns are compared, nothing else: any training turn with the opening turn of an evaluation
    prompt for equality (later ones are often just "thanks"), and all with all for runs.
    """
    known = _Units()
    measured = _Texts(held_out, known)
    wordings = measured.common_runs()
    measured.cut(wordings)
    runs = np.unique(measured.free_runs()[0])
    questions = measured.questions()
    dropped: dict[str, str] = {}
    for start in range(0, len(train), _BATCH):
        batch = train[start : start + _BATCH]
        texts = _Texts(batch, known)
        texts.cut(wordings)
        for turn, readings in enumerate(texts.turn_texts()):
            if not questions.isdisjoint(readings):
                dropped[batch[texts.owners[turn]].id] = "exact"
        hashes, turns = texts.free_runs()
        for turn in np.unique(turns[np.isin(hashes, runs)]):
            dropped.setdefault(batch[texts.owners[turn]].id, "run")
    kinds = list(dropped.values())
    ids = tuple(prompt.id for prompt in train if prompt.id in dropped)
    return LeakReport(len(train), kinds.count("exact"), kinds.count("run"), ids, len(wordings))


def units_of(text: str) -> list[str]:
    """The words of `text`, and each Chinese or Japanese character by itself."""
    return _UNITS.findall(unicodedata.normalize("NFKC", text).casefold())


class _Units(dict[str, int]):
    """A number for every unit that was ever looked up, and by number its hash and its weight."""

    def __init__(self) -> None:
        self.hashes: list[int] = []
        self.weights: list[int] = []

    def __missing__(self, unit: str) -> int:
        self[unit] = number = len(self)
        self.hashes.append(_hash64(unit))
        self.weights.append(_CHARACTER if _IS_CJK.match(unit) else _WORD)
        return number


class _Texts:
    """The user turns of some prompts as one array of unit hashes, and the runs in it.

    Attributes:
        owners: prompt index of each turn.
    """

    def __init__(self, prompts: Sequence[Asked], known: _Units) -> None:
        self.prompts = len(prompts)
        self.owners: list[int] = []
        self._units: list[str] = []
        lengths: list[int] = []
        for index, prompt in enumerate(prompts):
            for message in prompt.messages:
                if message["role"] == "user":
                    units = units_of(message["content"])
                    self.owners.append(index)
                    lengths.append(len(units))
                    self._units.extend(units)
        numbers = np.fromiter(map(known.__getitem__, self._units), np.int64, len(self._units))
        values = np.array(known.hashes, dtype=np.uint64)[numbers]
        weights = np.array(known.weights, dtype=np.int64)[numbers]
        self._ends = np.cumsum(np.array(lengths, dtype=np.int64))
        self._turns = np.repeat(np.arange(len(lengths)), lengths)
        self._covered = np.zeros(len(values) + 1, dtype=np.int64)
        self._hashes, self._starts, self._stops = self._runs(values, weights)

    def _runs(
        self, values: NDArray[np.uint64], weights: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
        """Hash, start and stop of the shortest complete run from each unit, within its turn.

        hash(i, j) = sum over k in [i, j) of value_k · base^(k - i), modulo 2^64.
        """
        count = len(values)
        weight_before = np.concatenate(([0], np.cumsum(weights)))
        starts = np.arange(count)
        stops = np.searchsorted(weight_before, weight_before[:-1] + _RUN, side="left")
        inside = stops <= self._ends[self._turns] if count else np.zeros(0, dtype=bool)
        starts, stops = starts[inside], stops[inside]
        with np.errstate(over="ignore"):
            powers = np.concatenate(
                ([np.uint64(1)], np.cumprod(np.full(count, _BASE, dtype=np.uint64)))
            )
            sums = np.concatenate(
                ([np.uint64(0)], np.cumsum(values * powers[:-1], dtype=np.uint64))
            )
            inverse = np.uint64(pow(int(_BASE), -1, 1 << 64))
            shifts = np.concatenate(
                ([np.uint64(1)], np.cumprod(np.full(count, inverse, dtype=np.uint64)))
            )
            hashes = (sums[stops] - sums[starts]) * shifts[starts]
        return hashes, starts, stops

    def common_runs(self) -> NDArray[np.uint64]:
        """Runs that so many of these prompts share that they are a wording."""
        share = max(_WORDING_AT_LEAST, int(np.ceil(_WORDING_SHARE * self.prompts)))
        owners = np.array(self.owners, dtype=np.int64)[self._turns[self._starts]]
        pairs = np.unique(np.stack([self._hashes, owners.astype(np.uint64)]), axis=1)
        hashes, counts = np.unique(pairs[0], return_counts=True)
        return hashes[counts >= min(_WORDING_PROMPTS, share)]

    def cut(self, wordings: NDArray[np.uint64]) -> None:
        """Take the units of every such run out of the comparison."""
        found = np.isin(self._hashes, wordings)
        edges = np.zeros(len(self._covered), dtype=np.int64)
        np.add.at(edges, self._starts[found], 1)
        np.add.at(edges, self._stops[found], -1)
        self._covered = (np.cumsum(edges) > 0).astype(np.int64)

    def free_runs(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Hash and turn of every run that touches no wording."""
        before = np.concatenate(([0], np.cumsum(self._covered)))
        free = before[self._stops] == before[self._starts]
        return self._hashes[free], self._turns[self._starts[free]]

    def questions(self) -> set[str]:
        """The opening turn of every prompt, whole and without wordings."""
        found: set[str] = set()
        last = -1
        for owner, readings in zip(self.owners, self.turn_texts(), strict=True):
            if owner != last:
                found.update(text for text in readings if text)
            last = owner
        return found

    def turn_texts(self) -> list[tuple[str, str]]:
        """Each turn's units, all of them and those outside wordings."""
        texts, start = [], 0
        before = np.append(0, np.cumsum(self._covered))
        touched = np.diff(before[self._ends], prepend=0).tolist()
        for end, hidden_units in zip(self._ends.tolist(), touched, strict=True):
            units = self._units[start:end]
            whole = rest = " ".join(units)
            if hidden_units:
                rest = " ".join(compress(units, (self._covered[start:end] == 0).tolist()))
            texts.append((whole, rest))
            start = end
        return texts


def _hash64(unit: str) -> int:
    return int.from_bytes(hashlib.blake2b(unit.encode(), digest_size=8).digest(), "little")
