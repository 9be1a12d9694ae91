"""Prompts into pages: the pass before a sequence's first round."""

import torch
from torch import Tensor

from jetspec.engine.layers import Rows
from jetspec.engine.paged_cache import PagedCache
from jetspec.engine.round import Round
from kernels.place import place_rows

PREFILL_CHUNK = 512  # prompt tokens of one sequence in one pass


def read_prompts(
    round: Round, cache: PagedCache, prompts: list[list[int]], table: Tensor
) -> Tensor:
    """Keys and values of a group's prompts, and the head's context, chunk by chunk.

    Args:
        table: int [G, max_pages], the pages of each prompt's slot.

    Returns:
        [G, d], the hidden state of every prompt's last token.
    """
    device, longest = table.device, max(len(prompt) for prompt in prompts)
    ids = torch.tensor([p + [0] * (longest - len(p)) for p in prompts], device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    last: Tensor | None = None
    for first in range(0, longest, PREFILL_CHUNK):
        chunk = ids[:, first : first + PREFILL_CHUNK]
        nodes = chunk.shape[1]
        counts = (lengths - first).clamp(0, nodes)
        prefix = torch.full_like(counts, first).int()
        placed = place_rows(prefix, counts.int(), table, cache.page_size, nodes, sizes=counts)
        rows = Rows(len(prompts), nodes, *placed[:2], table, prefix, placed[2], None,
                    first + nodes)  # fmt: skip
        hidden, taps = round.model.forward(chunk.flatten(), rows, cache, round.taps)
        if round.head and round.head_cache:
            round.head.extend(torch.cat(taps, -1), *placed[:2], round.head_cache)
        hidden = hidden.view(len(prompts), nodes, -1)
        at = (lengths - 1 - first).clamp(0, nodes - 1)
        ends = hidden[torch.arange(len(prompts), device=device), at]
        here = ((lengths > first) & (lengths <= first + nodes))[:, None]
        last = ends if last is None else torch.where(here, ends, last)
    assert last is not None
    return last
