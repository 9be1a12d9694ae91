"""Drafting with a trained head."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from jetspec.trees.draft import Draft
from jetspec.trees.tree import Tree

if TYPE_CHECKING:
    from jetspec.heads.base import DraftHead
    from jetspec.targets.target import Target


class HeadDrafter:
    """Drafts with a head by its hooks `new_cache`, `extend` and `draft`.

    Args:
        head: the draft head; it names the layers it taps.
        target: lends its embedding and its lm_head.
        width: candidates a slot.
        depth: slots to draft; None is as deep as the head was trained.
    """

    def __init__(
        self, head: "DraftHead", target: "Target", *, width: int, depth: int | None = None
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
        self._head.extend(self._cache, taps, positions, valid, tokens)

    def propose(self, anchors: Tensor, histories: Sequence[Sequence[int]]) -> Draft | Tree:
        embed, logits = self._target.embed, self._target.logits
        return self._head.draft(self._cache, anchors, embed, logits, self._width, self._depth)

    def keep_sequences(self, rows: Tensor) -> None:
        self._cache.keep_sequences(rows)
