"""The target's keys and values, held in rows that can be compacted after every round."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


class KVCache:
    """Keys and values of a batch, all sequences padded to one length.

    Rows are numbered in the order they were appended; which of them a token may see is the
    caller's mask, so padding rows may hold anything finite.
    """

    def __init__(self) -> None:
        self.dynamic: Any = DynamicCache()

    @property
    def length(self) -> int:
        """Rows held, equal for every sequence of the batch."""
        layers = self.dynamic.layers
        if not layers or layers[0].keys is None:
            return 0
        return int(layers[0].keys.shape[-2])

    @property
    def batch_size(self) -> int:
        layers = self.dynamic.layers
        if not layers or layers[0].keys is None:
            return 0
        return int(layers[0].keys.shape[0])

    def gather(self, index: Tensor) -> None:
        """Keep rows `index` [B, L] of each sequence, in that order.

        After acceptance this drops the rejected nodes. Sequences that keep fewer rows than L
        point their padding anywhere.
        """
        for layer in self.dynamic.layers:
            layer.keys = _take_rows(layer.keys, index)
            layer.values = _take_rows(layer.values, index)

    def keep_sequences(self, rows: Tensor) -> None:
        """Keep the sequences `rows` [B'] (long) of the batch, in that order."""
        for layer in self.dynamic.layers:
            layer.keys = layer.keys.index_select(0, rows.to(layer.keys.device))
            layer.values = layer.values.index_select(0, rows.to(layer.values.device))


def _take_rows(states: Tensor, index: Tensor) -> Tensor:
    """states [B, H, S, D], index [B, L] -> [B, H, L, D]."""
    heads, width = states.shape[1], states.shape[3]
    rows = index.to(states.device)[:, None, :, None].expand(-1, heads, -1, width)
    return torch.gather(states, 2, rows)
