"""What the host knows of one call of `Engine.decode`: which prompt runs where, and its answer.

What every round touches is an array over slots, so that a step costs the host a few array
operations however many slots there are. Python looks at a sequence by itself when it begins, ends
or needs another page, and never in between.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from jetspec.decode import Generation

Ints = NDArray[np.int64]

IDLE = -1


class Job:
    """The prompts of one call and the answers so far.

    Args:
        keys: long [prompts], on the device, of the sampling noise.
        slots: sequences that may run at once.
        limits: draft nodes of each prompt's rounds.
        depth: draft tokens that a round may accept at most.
        new_tokens: longest answer.
        on_tokens, on_answer: see `Engine.decode`.

    Attributes:
        generations: in the order of the prompts; each is filled when its sequence ends.
        waiting: prompts that have no slot yet, longest first.
        prompt: [slots], the prompt that runs in each slot, or IDLE.
        fresh: slots that were filled since the last round was enqueued; their anchors' tokens are
            known to the device alone.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], *, keys: Tensor, slots: int,
        limits: Sequence[int], depth: int, stops: Collection[int], new_tokens: int,
        on_tokens: Callable[[int], None], on_answer: Callable[[int, Generation], None],
    ) -> None:  # fmt: skip
        self.prompts, self.keys, self.limits = prompts, keys, limits
        self.new_tokens = new_tokens
        self.generations = [Generation() for _ in prompts]
        # A pass over a group of prompts pads to its longest: those of like length go together.
        order = sorted(range(len(prompts)), key=lambda prompt: len(prompts[prompt]), reverse=True)
        self.waiting = deque(order)
        self.prompt: Ints = np.full(slots, IDLE)
        self.fresh: list[int] = []
        self._stops = sorted(stops)
        self._on_tokens, self._on_answer = on_tokens, on_answer
        self._answered: list[int] = []  # prompts, since the last `hand_over`
        self._prompt_tokens: Ints = np.zeros(slots, np.int64)
        self._written: Ints = np.zeros(slots, np.int64)
        self._rounds: Ints = np.zeros(slots, np.int64)
        # A round that ends an answer may write beyond it; nobody reads that.
        self._tokens = np.zeros((slots, new_tokens + depth + 1), np.int32)
        self._committed = np.zeros((slots, new_tokens), np.int32)  # tokens, by round

    @property
    def running(self) -> Ints:
        """The slots in which a sequence runs, ascending."""
        return np.flatnonzero(self.prompt != IDLE)

    @property
    def free(self) -> list[int]:
        """The other slots."""
        return np.flatnonzero(self.prompt == IDLE).tolist()

    def rows(self, slots: Ints) -> Ints:
        """Committed rows of the caches that the host knows of; an anchor has none yet."""
        return self._prompt_tokens[slots] + np.maximum(self._written[slots] - 1, 0)

    def begin(self, group: dict[int, int]) -> None:
        """Prompts (slot -> prompt) were read; their anchors' tokens come with the next round's."""
        slots = list(group)
        self.prompt[slots] = list(group.values())
        self._prompt_tokens[slots] = [len(self.prompts[prompt]) for prompt in group.values()]
        self._written[slots] = self._rounds[slots] = 0
        self.fresh += slots

    def take(self, took_part: Ints, fresh: list[int], anchors: Ints, out: Ints) -> list[int]:
        """Take over what a round committed; returns the slots whose sequences ended.

        Args:
            took_part: [slots], `prompt` when the round was enqueued.
            fresh: slots whose anchors arrive with this round.
            anchors: [slots], only read where `fresh`.
            out: [slots, depth + 2], see `State.out`.
        """
        before = int(self._written.sum())
        slots = np.array(fresh, np.int64)
        ended = self._append(slots, np.ones_like(slots), anchors[slots, None])
        # Where another prompt runs now, or none, the round was enqueued before the end was known.
        slots = np.flatnonzero((self.prompt != IDLE) & (self.prompt == took_part))
        lengths = out[slots, 0]
        self._committed[slots, self._rounds[slots]] = lengths
        self._rounds[slots] += 1
        ended += self._append(slots, lengths, out[slots, 1:])
        self._on_tokens(int(self._written.sum()) - before)
        return ended

    def hand_over(self) -> None:
        """Report the answers that ended since the last call."""
        for prompt in self._answered:
            self._on_answer(prompt, self.generations[prompt])
        self._answered.clear()

    def _append(self, slots: Ints, lengths: Ints, tokens: Ints) -> list[int]:
        """Add lengths [R] of tokens [R, T] up to a stop token or the limit; the slots that end."""
        if not len(slots):
            return []
        written, steps = self._written[slots], np.arange(tokens.shape[1])
        self._tokens[slots[:, None], written[:, None] + steps] = tokens
        kept = np.minimum(lengths, self.new_tokens - written)
        stopping = np.zeros(tokens.shape, bool)
        for stop in self._stops:
            stopping |= tokens == stop
        rows, at = np.nonzero(stopping & (steps < kept[:, None]))
        stopped, first = np.unique(rows, return_index=True)  # `nonzero` goes along the rows
        kept[stopped] = at[first] + 1
        self._written[slots] += kept
        full = np.flatnonzero(written + kept == self.new_tokens)
        ends = dict.fromkeys(full.tolist(), "length") | dict.fromkeys(stopped.tolist(), "stop")
        for row, finish in ends.items():
            self._end(int(slots[row]), finish)
        return slots[list(ends)].tolist()

    def _end(self, slot: int, finish: str) -> None:
        prompt = int(self.prompt[slot])
        self._answered.append(prompt)
        generation = self.generations[prompt]
        generation.finish = finish
        generation.tokens = self._tokens[slot, : self._written[slot]].tolist()
        generation.rounds = self._committed[slot, : self._rounds[slot]].tolist()
        generation.accepted = [tokens - 1 for tokens in generation.rounds]
        if generation.rounds:  # the end may have cut the last one
            generation.rounds[-1] -= 1 + sum(generation.rounds) - len(generation.tokens)
        self.prompt[slot] = IDLE
