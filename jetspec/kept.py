"""What a process that makes one run after another keeps between them.

Runs of a study ask for the same target, samples and prompts again and again. Within `keeping` the
last of each kind stays; asking for another frees it first.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

_KEPT: ContextVar[dict[str, tuple[Any, Any]] | None] = ContextVar("kept", default=None)


@contextmanager
def keeping() -> Iterator[None]:
    """Keep what `kept` makes until the block ends."""
    if _KEPT.get() is not None:
        yield
        return
    token = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(token)


def kept(kind: str, key: Any, make: Callable[[], T]) -> T:
    """What `make` gives, or gave for the same key the last time; outside `keeping` always anew.

    Args:
        kind: of each one value is kept.
        key: equal where the value would be; everything that decides it.
    """
    held = _KEPT.get()
    if held is None:
        return make()
    known, value = held.get(kind, (None, None))
    if kind in held and known == key:
        return value
    if held.pop(kind, None) is not None:
        del value
        gc.collect()  # a model's modules point at each other
    value = make()
    held[kind] = key, value
    return value
