"""How far a regeneration is, and the bar that shows it."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


@dataclass(frozen=True)
class RegenerationProgress:
    """Counts since this process began: `done` of `total` prompts are in finished shards.

    Attributes:
        tokens: written since the start, unfinished shards included.
        seconds: wall time since the start.
        note: the last thing worth telling, e.g. that a worker was replaced.
    """

    done: int
    total: int
    tokens: int
    seconds: float
    note: str = ""


Listener = Callable[[RegenerationProgress], None]


@contextlib.contextmanager
def progress_bar() -> Iterator[Listener]:
    """A bar with tokens per second on stderr; pass what it yields as `on_progress`."""
    columns = (
        TextColumn("regenerate"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} tok/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task("regenerate", total=None, rate=0.0, note="")

    def show(progress: RegenerationProgress) -> None:
        bar.start()  # not before there is progress: a mistake in the settings is one line alone
        bar.update(
            task,
            completed=progress.done,
            total=progress.total,
            rate=progress.tokens / max(progress.seconds, 1e-9),
            note=progress.note,
        )

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()
