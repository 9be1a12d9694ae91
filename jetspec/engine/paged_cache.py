"""KV memory in pages: a free list on the host, one tensor and one page table on the device."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jetspec.errors import JetspecError


class PagedCache:
    """Keys and values of every layer, and which pages belong to which running sequence.

    Memory follows the rows in use: `resize` takes and gives back pages as a sequence's committed
    rows and the nodes of its next round come and go. `reserve` promises a sequence the pages of
    its longest state, so that one that was admitted never has to wait.

    Args:
        slots: sequences that may run at once.
        max_rows: rows a sequence may hold at most, the nodes of a round included.
        pages: pages in all; None is enough for every slot at its longest.
    """

    def __init__(
        self, *, layers: int, slots: int, max_rows: int, kv_heads: int, head_dim: int,
        page_size: int, dtype: torch.dtype, device: torch.device, pages: int | None = None,
    ) -> None:  # fmt: skip
        self.page_size = page_size
        self.max_pages = -(-max_rows // page_size)
        self.pages = slots * self.max_pages if pages is None else pages
        # Zeros: attention multiplies masked values by 0, so every row must be finite.
        self.kv = torch.zeros(
            layers, 2, self.pages, kv_heads, page_size, head_dim, dtype=dtype, device=device
        )
        self.table = torch.zeros(slots, self.max_pages, dtype=torch.int32, device=device)
        self._staging = torch.zeros(slots, self.max_pages, dtype=torch.int32)
        self._rows = self._staging.numpy()  # the same memory
        self._free = list(range(self.pages - 1, -1, -1))
        self._held = np.zeros(slots, np.int64)  # pages, by slot
        self._reserved = [0] * slots
        self._promised = 0  # pages, the sum of those
        self._changed = False

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(keys, values), each [pages, kv_heads, page_size, head_dim]."""
        return self.kv[index, 0], self.kv[index, 1]

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def fits(self, rows: int) -> bool:
        """Whether a sequence of at most this many rows can be promised its pages now."""
        return -(-rows // self.page_size) <= self.pages - self._promised

    def reserve(self, slot: int, rows: int) -> None:
        """Promise a slot the pages of `rows` rows, until it is released."""
        self._promised -= self._reserved[slot]
        self._reserved[slot] = -(-rows // self.page_size)
        self._promised += self._reserved[slot]

    def release(self, slot: int) -> None:
        """Give back a slot's pages and its promise."""
        self.reserve(slot, 0)
        self.resize(slot, 0)

    def resize_all(self, slots: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """`resize` for many slots; one whose pages do for its rows costs next to nothing."""
        other = -(-rows // self.page_size) != self._held[slots]
        for slot, wanted in zip(slots[other].tolist(), rows[other].tolist(), strict=True):
            self.resize(slot, wanted)

    def resize(self, slot: int, rows: int) -> None:
        """Hold exactly the pages that `rows` rows need; `upload` makes it known to the device.

        Raises:
            JetspecError: no page is left, or the sequence outgrows the table.
        """
        held, wanted = int(self._held[slot]), -(-rows // self.page_size)
        if wanted > self.max_pages:
            raise JetspecError("engine.max_rows", rows, "the sequence outgrew it; raise max_rows")
        if wanted - held > len(self._free):
            raise JetspecError("engine.pages", self.pages, "all in use; fewer slots or more pages")
        pages = self._rows[slot]
        self._free += pages[wanted:held].tolist()
        for place in range(held, wanted):
            pages[place] = self._free.pop()
            self._changed = True
        self._held[slot] = wanted

    def upload(self) -> None:
        """Send the page table to the device if it has new entries; rounds under way keep theirs."""
        if self._changed:
            # A pinned copy of its own: the host may go on editing before the device has read it.
            pinned = self._staging.pin_memory() if self.table.is_cuda else self._staging
            self.table.copy_(pinned, non_blocking=True)
            self._changed = False
