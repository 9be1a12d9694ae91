"""A small independent language model as the drafter: the untrained baseline of the first papers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jetspec.errors import JetspecError
from jetspec.targets.kv_cache import KVCache
from jetspec.trees.levels import draft_levels
from jetspec.trees.tree import Tree

if TYPE_CHECKING:
    from jetspec.targets.target import Target


class DraftModelDrafter:
    """Drafts with any causal language model over the target's tokens.

    It reads every committed token once and drafts level by level: one path at width 1, else a
    tree.

    Args:
        model: the draft model, loaded like a target.
        width: children a node may have.
        depth: levels, each one pass of the draft model.
        beam: paths of a level that the next one is drafted from.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, model: "Target", *, width: int = 1, depth: int = 8, beam: int = 8) -> None:
        self._model = model
        self._width = width
        self._depth = depth
        self._beam = beam

    def begin(self, batch: int, target: "Target") -> None:
        self._vocab_size = min(self._model.vocab_size, target.vocab_size)
        self._cache: KVCache = self._model.new_cache()
        self._valid = torch.zeros(batch, 0, dtype=torch.bool, device=target.device)

    def observe(
        self, taps: Tensor | None, positions: Tensor, valid: Tensor, tokens: Tensor
    ) -> None:
        new = tokens.shape[1]
        prefix = self._valid[:, None].expand(-1, new, -1)
        causal = torch.ones(new, new, dtype=torch.bool, device=tokens.device).tril()
        self._read(tokens, positions, torch.cat([prefix, causal & valid[:, None]], dim=2))
        self._compact(torch.cat([self._valid, valid], dim=1))

    def propose(self, anchors: Tensor, histories: Sequence[Sequence[int]]) -> Tree:
        held = self._cache.length
        place = self._valid.sum(1, keepdim=True)  # the anchor's position

        def expand(tokens: Tensor, parents: Tensor, mask: Tensor) -> Tensor:
            nonlocal place
            prefix = self._valid[:, None].expand(-1, tokens.shape[1], -1)
            hidden = self._read(tokens, place.expand_as(tokens), torch.cat([prefix, mask], dim=2))
            place = place + 1
            return self._model.logits(hidden)[..., : self._vocab_size].log_softmax(-1)

        draft = draft_levels(expand, anchors, depth=self._depth, width=self._width, beam=self._beam)
        self._cache.dynamic.crop(
            held - self._cache.length
        )  # what was drafted is read again once it is committed
        return draft

    def keep_sequences(self, rows: Tensor) -> None:
        self._valid = self._valid[rows]
        self._cache.keep_sequences(rows)

    def _read(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        # A target may have ids that the draft model's smaller table lacks; any row does for them.
        ids = tokens.clamp(max=self._model.vocab_size - 1)
        output = self._model.forward(ids, position_ids=positions, mask=mask, cache=self._cache)
        return output.hidden

    def _compact(self, keep: Tensor) -> None:
        """Drop padding rows that no sequence needs; the others move to the left, in order."""
        lengths = keep.sum(1, keepdim=True)
        longest = int(lengths.max())
        if longest < keep.shape[1]:
            self._cache.gather((~keep).to(torch.int8).argsort(dim=1, stable=True)[:, :longest])
            keep = torch.arange(longest, device=keep.device) < lengths
        self._valid = keep


def require_same_tokens(model: "Target", target: "Target", field: str) -> None:
    """Refuse a draft model that reads other tokens than the target.

    Args:
        field: the setting that named it.

    Raises:
        JetspecError: the tokenizers' vocabularies differ.
    """
    own, wanted = (m.tokenizer.get_vocab() for m in (model, target))
    if own != wanted:
        differing = len(set(own.items()) ^ set(wanted.items()))
        raise JetspecError(
            field,
            model.name,
            f"its tokenizer differs from {target.name}'s in {differing} entries; "
            "give a model of the target's family",
        )
