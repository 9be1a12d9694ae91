"""The loop filter: answers that end by repeating themselves until they are cut."""

from collections.abc import Sequence

import numpy as np

MIN_REPEATS = 4
"""Cycles at the tail from which an answer counts as looping."""

MIN_LOOP_TOKENS = 16
"""A shorter tail is ordinary text: a run of spaces, a row of zeros, a rule of dashes."""


def is_looping(tokens: Sequence[int], min_repeats: int = MIN_REPEATS) -> bool:
    """Whether the tail of `tokens` is one cycle repeated `min_repeats` times or more.

    The last repeat may be unfinished, since a loop is cut anywhere. The repeated tail must also be
    at least `MIN_LOOP_TOKENS` long. Stop tokens are the caller's to remove.
    """
    ids = np.asarray(tokens)
    longest = len(ids) // min_repeats
    backwards = ids[-1 - longest :][::-1]
    # In a cycle the last token stands one period earlier too; few periods pass that.
    for period in (1 + np.flatnonzero(backwards[1:] == backwards[:1])).tolist():
        span = max(period * min_repeats, MIN_LOOP_TOKENS)
        if span > len(ids):
            continue
        tail = ids[-span:]
        if np.array_equal(tail[period:], tail[:-period]):
            return True
    return False
