"""Keys and values of the fused context, one pair a layer, kept between rounds."""

import torch
from torch import Tensor

from jetspec.heads.layers import KeysValues


class HeadCache:
    """The context of B sequences, left-aligned: row b holds its first `lengths[b]` entries.

    Entries are written once, when their tokens are committed, and never projected again.

    Attributes:
        lengths: long [B], context rows held by each sequence; lowering an entry forgets its tail.
    """

    def __init__(self, batch: int, layers: int, heads: int, head_dim: int, like: Tensor) -> None:
        self.lengths = torch.zeros(batch, dtype=torch.long, device=like.device)
        # One row more than the capacity: rows that are not valid are written there.
        self._store = like.new_empty(layers, 2, batch, 1, heads, head_dim)
        self._bound = 0  # an upper bound of max(lengths) that needs no device read

    @property
    def batch(self) -> int:
        return self._store.shape[2]

    @property
    def width(self) -> int:
        """Rows that `layer` returns: an upper bound of every length."""
        return self._bound

    def destinations(self, valid: Tensor) -> Tensor:
        """Where the valid rows of a chunk go, bool [B, T] -> long [B, T]; makes room for them."""
        chunk, capacity = valid.shape[1], self._store.shape[3] - 1
        if self._bound + chunk > capacity:
            self._bound = int(self.lengths.max()) if self.batch else 0
            if self._bound + chunk > capacity:
                self._grow(2 * (self._bound + chunk))
        trash = self._store.shape[3] - 1
        places = self.lengths[:, None] + valid.long().cumsum(1) - 1
        return torch.where(valid, places, trash)

    def write(self, layer: int, places: Tensor, keys_values: KeysValues) -> None:
        """Store keys and values [B, T, Hkv, hd] of one layer at `places` [B, T]."""
        rows = torch.arange(self.batch, device=places.device)[:, None]
        for side, values in enumerate(keys_values):
            self._store[layer, side, rows, places] = values.to(self._store.dtype)

    def commit(self, valid: Tensor) -> None:
        """Count the rows just written in every layer."""
        self.lengths = self.lengths + valid.sum(1)
        self._bound += valid.shape[1]
        if self.batch and self.lengths.device.type == "cpu":
            self._bound = int(self.lengths.max())

    def layer(self, index: int) -> KeysValues:
        """Keys and values [B, width, Hkv, hd]; rows beyond a sequence's length are rubbish."""
        key, value = self._store[index, :, :, : self._bound]
        return key, value

    def valid(self) -> Tensor:
        """bool [B, width]: rows that hold context."""
        return torch.arange(self._bound, device=self.lengths.device) < self.lengths[:, None]

    def keep_sequences(self, rows: Tensor) -> None:
        """Drop the sequences that are not in `rows` (long), keep these in this order."""
        self.lengths = self.lengths[rows]
        self._store = self._store[:, :, rows]

    def _grow(self, capacity: int) -> None:
        shape = list(self._store.shape)
        shape[3] = capacity + 1
        # Zeros, not rubbish: a masked NaN in an unused row would still poison attention.
        store = self._store.new_zeros(shape)
        store[:, :, :, : self._bound] = self._store[:, :, :, : self._bound]
        self._store = store
