"""Linear layers whose weights are set once, by whoever makes the head: fresh, or from a file."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn

_UNSET = ContextVar("unset", default=False)


class Linear(nn.Linear):
    """torch's, which within `weights_unset` leaves out its own draw."""

    def reset_parameters(self) -> None:
        if not _UNSET.get():
            super().reset_parameters()
        elif self.bias is not None:
            nn.init.zeros_(self.bias)


@contextmanager
def weights_unset() -> Iterator[None]:
    """Linear layers made in here hold whatever memory held: their maker sets every weight."""
    token = _UNSET.set(True)
    try:
        yield
    finally:
        _UNSET.reset(token)
