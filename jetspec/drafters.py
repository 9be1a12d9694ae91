"""Drafters: what proposes candidates for the next slots."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from jetspec.trees.draft import Draft

if TYPE_CHECKING:
    from jetspec.heads.parallel import ParallelHead
    from jetspec.targets.target import Target


class Drafter(Protocol):
    """Proposes a draft for every running sequence, once a round.

    Attributes:
        taps: target layers whose outputs `observe` wants; empty when it needs none.
    """

    taps: tuple[int, ...]

    def begin(self, batch: int, target: "Target") -> None:
        """A new batch of sequences starts; forget the last one."""

    def observe(
        self, taps: Tensor | None, positions: Tensor, valid: Tensor, tokens: Tensor
    ) -> None:
        """Tokens whose target states are now known: the prompt, then each round's accepted path.

        Args:
            taps: [B, T, n_taps * d], or None when `self.taps` is empty.
            positions, tokens: long [B, T].
            valid: bool [B, T]; valid entries come first in a row.
        """

    def propose(self, anchors: Tensor, histories: Sequence[Sequence[int]]) -> Draft:
        """Candidates of the slots after each anchor.

        Args:
            anchors: long [B], the last committed tokens.
            histories: per sequence the prompt and all committed tokens, the anchor last.
        """

    def keep_sequences(self, rows: Tensor) -> None:
        """Only these rows of the batch (long) still run."""


class HeadDrafter:
    """Drafts with a parallel head: one pass over [anchor, MASK, MASK, ...].

    Args:
        head: the draft head; it names the layers it taps.
        target: lends its embedding and its lm_head.
        width: candidates a slot.
        depth: slots to draft; None is as deep as the head was trained.
    """

    def __init__(
        self, head: "ParallelHead", target: "Target", *, width: int, depth: int | None = None
    ) -> None:
        self.taps = head.taps
        self._head = head
        self._target = target
        self._width = width
        self._depth = depth

    def begin(self, batch: int, target: "Target") -> None:
        self._cache = self._head.new_cache(batch)

    def observe(
        self, taps: Tensor | None, positions: Tensor, valid: Tensor, tokens: Tensor
    ) -> None:
        assert taps is not None
        self._head.extend(self._cache, taps, positions, valid)

    def propose(self, anchors: Tensor, histories: Sequence[Sequence[int]]) -> Draft:
        embed, logits = self._target.embed, self._target.logits
        return self._head.draft(self._cache, anchors, embed, logits, self._width, self._depth)

    def keep_sequences(self, rows: Tensor) -> None:
        self._cache.keep_sequences(rows)


class LookupDrafter:
    """Prompt lookup: the continuation of the last place where the current suffix stood before.

    The longest suffix of at most `max_ngram` tokens that occurs earlier decides; of equally long
    matches the most recent. A copy that runs into the end of the text goes on copying itself. The
    draft is a chain (K = 1); a sequence without a match drafts nothing.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, *, max_ngram: int = 3, depth: int = 10) -> None:
        self._max_ngram = max_ngram
        self._depth = depth

    def begin(self, batch: int, target: "Target") -> None:
        pass

    def observe(
        self, taps: Tensor | None, positions: Tensor, valid: Tensor, tokens: Tensor
    ) -> None:
        pass

    def propose(self, anchors: Tensor, histories: Sequence[Sequence[int]]) -> Draft:
        copies = [self._continuation(np.asarray(history)) for history in histories]
        tokens = torch.tensor(np.stack(copies), device=anchors.device)[..., None]  # [B, D, 1]
        log_q = torch.zeros(tokens.shape, device=anchors.device).masked_fill(tokens < 0, -torch.inf)
        return Draft.from_slot_scores(tokens.clamp(min=0), log_q)

    def keep_sequences(self, rows: Tensor) -> None:
        pass

    def _continuation(self, history: np.ndarray) -> np.ndarray:
        """The next `depth` tokens by lookup, or -1 everywhere."""
        ends = np.flatnonzero(history[:-1] == history[-1])  # where a match of one token ends
        if not len(ends):
            return np.full(self._depth, -1, dtype=np.int64)
        for back in range(1, self._max_ngram):
            longer = ends[(ends >= back) & (history[ends - back] == history[-1 - back])]
            if not len(longer):
                break
            ends = longer
        start = ends[-1] + 1
        period = len(history) - start
        return history[start + np.arange(self._depth) % period].astype(np.int64)
