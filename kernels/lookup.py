"""Prompt lookup on the GPU: every sequence's draft is copied from its own text, in one launch.

A program reads its sequence's tokens once from the start to the anchor, 4 bytes each, and as many
of them again as go on matching. What it costs follows the text, not the memory set aside for it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import dependent, enter

STEP = 4096  # tokens read at once


@triton.jit
def _look_up(
    history_ptr, prefix_ptr, limits_ptr, tokens_ptr, sizes_ptr, capacity, ngram, depth,
    STEP: tl.constexpr, NODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    seq = tl.program_id(0)
    history_ptr += seq.to(tl.int64) * capacity
    last = tl.load(prefix_ptr + seq)  # where the anchor stands
    lane = tl.arange(0, STEP)
    best = tl.full((STEP,), -1, tl.int64)
    for first in tl.range(0, last, STEP):
        end = first + lane  # where a match would end
        same = end < last
        length = tl.zeros((STEP,), tl.int32)
        for back in tl.range(0, tl.minimum(ngram, last)):
            same = same & (end >= back)
            token = tl.load(history_ptr + end - back, mask=same, other=-1)
            same = same & (token == tl.load(history_ptr + last - back))
            length += same.to(tl.int32)
        # Of the longest matches the last one has the largest number.
        rank = length.to(tl.int64) * capacity + end
        best = tl.maximum(best, tl.where(length > 0, rank, -1))
    found = tl.max(best, 0)
    hit = found >= 0
    end = (tl.where(hit, found, 0) % capacity).to(tl.int32)
    # A copy that reaches the anchor goes on with what it has copied.
    period = tl.where(hit, last - end, 1)
    node = tl.arange(0, NODES)
    at = tl.where(node == 0, last, end + 1 + (node - 1) % period)
    token = tl.load(history_ptr + at, mask=(node == 0) | (hit & (node <= depth)), other=0)
    tl.store(tokens_ptr + seq * (depth + 1) + node, token.to(tl.int64), mask=node <= depth)
    limit = tl.minimum(tl.load(limits_ptr + seq).to(tl.int32), depth)
    tl.store(sizes_ptr + seq, tl.where(hit, 1 + limit, 1).to(tl.int64))


def look_up(
    history: Tensor, prefix: Tensor, limits: Tensor, *, ngram: int, depth: int
) -> tuple[Tensor, Tensor]:
    """The anchors and what followed where each text's last tokens stood before.

    Of all earlier places that end with the text's last n tokens those of the largest n <= `ngram`
    count, and of those the last. The `depth` tokens behind it are the draft; one that reaches the
    end of the text goes on copying itself.

    Args:
        history: int32 [B, R], the tokens of each text; what lies beyond its anchor is not read.
        prefix: int32 [B], tokens before the anchor, less than R.
        limits: long [B], draft tokens of each sequence, at least 1.

    Returns:
        tokens long [B, 1 + depth], the anchor first, 0 where nothing was found; sizes long [B],
        the tokens that count: 1 + min(depth, limit), or 1 where nothing was found.
    """
    batch, capacity = history.shape
    tokens = torch.empty(batch, 1 + depth, dtype=torch.int64, device=history.device)
    sizes = torch.empty(batch, dtype=torch.int64, device=history.device)
    step = min(STEP, triton.next_power_of_2(capacity))
    _look_up[(batch,)](
        history, prefix, limits, tokens, sizes, capacity, ngram, depth,
        STEP=step, NODES=triton.next_power_of_2(1 + depth), num_warps=8 if step > 1024 else 4,
        **dependent(),
    )  # fmt: skip
    return tokens, sizes
