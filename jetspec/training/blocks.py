"""Blocks of a training batch: anchors, slots, and the one mask they attend under."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

_TILE = 128  # queries, and keys, that flex_attention takes or leaves together

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Chunk(NamedTuple):
    """Slots [begin, end) of a batch and the teachers [first, last) that teach them."""

    begin: int
    end: int
    first: int
    last: int


def plan_chunks(shared: np.ndarray, size: int) -> tuple[Chunk, ...]:
    """Chunks of at most `size` slots; `shared` int [M], ascending, is each slot's teacher."""
    chunks = []
    for begin in range(0, len(shared), size):
        end = min(begin + size, len(shared))
        chunks.append(Chunk(begin, end, int(shared[begin]), int(shared[end - 1]) + 1))
    return tuple(chunks)


@dataclass
class Batch:
    """R rows of T tokens with A blocks each; D = block_size - 1 slots carry a loss.

    A row holds one sample or several (documents), then padding.

    Attributes:
        input_ids: long [R, T].
        positions: long [R, T], each token's position in its document.
        documents: long [R, T], which document of the row; -1 is padding.
        samples: long [R, T], where the token lies in the corpus (flat); 0 at padding.
        anchors: long [R, A], index of each block's anchor in its row.
        starts: long [R, A], index where the anchor's document begins. A block that does not exist
            has anchor = start, an empty context.
        labels: long [R, A, D], the target's own token for every slot.
        weights: fp32 [R, A, D], loss weight of every slot; 0 where there is no token to predict.
        slots: long [M], the slots with weight, flat indices into [R, A, 1 + D], in the order of
            the position that teaches them, so that neighbours share teachers.
        teachers: long [U], flat indices into [R, T] of the hidden states that teach, ascending.
        shared: long [M], which of `teachers` teaches each slot.
        chunks: how losses walk through `slots`; host numbers, so that a GPU need not be read.
    """

    input_ids: Tensor
    positions: Tensor
    documents: Tensor
    samples: Tensor
    anchors: Tensor
    starts: Tensor
    labels: Tensor
    weights: Tensor
    slots: Tensor
    teachers: Tensor
    shared: Tensor
    chunks: tuple[Chunk, ...]

    @property
    def block_size(self) -> int:
        return self.weights.shape[2] + 1

    def to(self, device: torch.device) -> "Batch":
        """The batch on `device`; copies to a GPU run beside its work."""
        if device.type == "cpu":
            return self
        return self._each(lambda tensor: tensor.pin_memory().to(device, non_blocking=True))

    def pinned(self) -> "Batch":
        """The batch in memory that a GPU copies from by itself."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if isinstance(value, Tensor):
                values[name] = change(value)
        return Batch(**values)

    def slot_ids(self, mask_token_id: int) -> Tensor:
        """long [R, A * block_size]: every block is its anchor's token and masks behind it."""
        ids = torch.full(
            (*self.anchors.shape, self.block_size), mask_token_id, device=self.anchors.device
        )
        ids[:, :, 0] = self.input_ids.gather(1, self.anchors)
        return ids.flatten(1)

    def true_ids(self) -> Tensor:
        """long [R, A * block_size]: every block is its anchor's token and the true ones behind it;
        rubbish behind the answer's end, where no slot has weight."""
        anchor = self.input_ids.gather(1, self.anchors)[:, :, None]
        return torch.cat([anchor, self.labels], dim=2).flatten(1)

    def slot_positions(self) -> Tensor:
        """long [R, A * block_size]: the anchor at n, slot k at n + k."""
        first = self.positions.gather(1, self.anchors)
        steps = torch.arange(self.block_size, device=first.device)
        return (first[:, :, None] + steps).flatten(1)

    def chosen(self) -> Tensor:
        """long [M]: `slots` counted among the slots that can carry a loss, [R, A, D]."""
        return self.slots - self.slots // self.block_size - 1

    def parents(self) -> Tensor:
        """long [R, A, D]: the true token before every slot's own, the teacher-forced parent."""
        anchor = self.input_ids.gather(1, self.anchors)[:, :, None]
        return torch.cat([anchor, self.labels[:, :, :-1]], dim=2)


def causal_mask(documents: Tensor) -> Tensor:
    """bool [R, T, T] for the teacher: earlier tokens of the same document.

    Args:
        documents: long [R, T], see `Batch`.
    """
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    same = documents[:, :, None] == documents[:, None, :]
    return causal & same & (documents >= 0)[:, :, None]


def block_mask_function(
    anchors: Tensor, starts: Tensor, context: int, block_size: int, *, causal: bool
) -> MaskFunction:
    """Who attends to whom: keys are `context` tokens, then the slots; queries are the slots.

    A slot sees its own document strictly before its anchor, and slots of its own block: all of
    them, or under the causal mask those up to itself. The anchor's hidden state and everything
    behind it stay unseen, and so do other blocks.

    Args:
        anchors: long [R, A]; starts: long [R, A], see `Batch`.

    Returns:
        mask(row, head, query, key) -> bool, which flex_attention compiles and `dense_mask`
        evaluates.
    """

    def mask(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // block_size
        seen = (key >= starts[row, block]) & (key < anchors[row, block])
        slot = key - context
        own = (slot >= 0) & (slot // block_size == block)
        if causal:
            own = own & (slot <= query)
        return ((key < context) & seen) | own

    return mask


def dense_mask(
    mask: MaskFunction, rows: int, queries: int, keys: int, device: torch.device
) -> Tensor:
    """The mask function evaluated everywhere: bool [rows, queries, keys]."""
    row, query, key = (torch.arange(size, device=device) for size in (rows, queries, keys))
    head = torch.zeros((), dtype=torch.long, device=device)
    return mask(row[:, None, None], head, query[None, :, None], key[None, None, :])


def attention_mask(batch: Batch, *, causal: bool) -> Tensor | BlockMask:
    """The batch's mask in the form its device wants: a BlockMask on CUDA, else a dense one."""
    rows, context = batch.input_ids.shape
    queries = batch.anchors.shape[1] * batch.block_size
    mask = block_mask_function(
        batch.anchors, batch.starts, context, batch.block_size, causal=causal
    )
    device = batch.anchors.device
    if device.type != "cuda":
        return dense_mask(mask, rows, queries, context + queries, device)
    if _TILE % batch.block_size or context % _TILE or queries % _TILE:
        return create_block_mask(mask, rows, None, queries, context + queries, device=str(device))
    return tiled_mask(batch, mask)


def tiled_mask(batch: Batch, mask: MaskFunction) -> BlockMask:
    """`create_block_mask` of the batch's mask, found from the bounds of its blocks instead of from
    every pair of a query and a key.

    Context and slots must fill whole tiles of 128, and several blocks one tile.
    """
    rows, context = batch.input_ids.shape
    queries = batch.anchors.shape[1] * batch.block_size
    device = batch.anchors.device
    inside = rows, -1, _TILE // batch.block_size, 1
    starts, anchors = batch.starts.view(inside), batch.anchors.view(inside)
    first = torch.arange(0, context, _TILE, device=device)  # [C], of every tile of the context
    some = (starts.maximum(first) < anchors.minimum(first + _TILE)).any(2)  # [R, tiles of slots, C]
    whole = ((starts <= first) & (anchors >= first + _TILE)).all(2)
    own = torch.eye(queries // _TILE, dtype=torch.bool, device=device).expand(rows, -1, -1)
    partly = torch.cat([some & ~whole, own], dim=2)
    wholly = torch.cat([whole, torch.zeros_like(own)], dim=2)
    return BlockMask.from_kv_blocks(
        *_listed(partly),
        *_listed(wholly),
        BLOCK_SIZE=_TILE,
        mask_mod=mask,
        seq_lengths=(queries, context + queries),
    )


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """bool [R, Q, K] -> int32 (how many are set [R, 1, Q], which, before those that are not)."""
    order = tiles.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1)[:, None].to(torch.int32), order[:, None].to(torch.int32)
