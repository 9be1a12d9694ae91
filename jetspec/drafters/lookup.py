"""Prompt lookup: an untrained drafter that copies from the text itself."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from jetspec.trees.draft import Draft

if TYPE_CHECKING:
    from jetspec.targets.target import Target


class LookupDrafter:
    """Prompt lookup: the continuation of the last place where the current suffix stood before.

    The longest suffix of at most `max_ngram` tokens that occurs earlier decides; of equally long
    matches the most recent. A copy that runs into the end of the text goes on copying itself. The
    draft is a chain (K = 1); a sequence without a match drafts nothing.

    It keeps nothing of a batch: one will do for many, and for the engine, which makes the same
    drafts on the device (`kernels.lookup`).

    Attributes:
        max_ngram: longest suffix that is looked for.
        depth: tokens that are copied.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, *, max_ngram: int = 3, depth: int = 10) -> None:
        self.max_ngram = max_ngram
        self.depth = depth

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
            return np.full(self.depth, -1, dtype=np.int64)
        for back in range(1, self.max_ngram):
            longer = ends[(ends >= back) & (history[ends - back] == history[-1 - back])]
            if not len(longer):
                break
            ends = longer
        start = ends[-1] + 1
        period = len(history) - start
        return history[start + np.arange(self.depth) % period].astype(np.int64)
