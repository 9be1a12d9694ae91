"""What every drafter does, once a round."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from jetspec.trees.draft import Draft
from jetspec.trees.tree import Tree

if TYPE_CHECKING:
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

    def propose(self, anchors: Tensor, histories: Sequence[Sequence[int]]) -> Draft | Tree:
        """Candidates after each anchor: edges between slots, or a tree that is still to be pruned.

        Args:
            anchors: long [B], the last committed tokens.
            histories: per sequence the prompt and all committed tokens, the anchor last.
        """

    def keep_sequences(self, rows: Tensor) -> None:
        """Only these rows of the batch (long) still run."""
