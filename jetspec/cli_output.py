"""What the commands print: records, tables, and progress on stderr."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer


def emit(value: Any, as_json: bool) -> None:
    """A record for a script (JSON), or for a reader (one line a field)."""
    value = vars(value) if hasattr(value, "__dataclass_fields__") else value
    if as_json:
        typer.echo(json.dumps(value, indent=1, ensure_ascii=False, default=str))
        return
    width = max(map(len, value), default=0)
    for key, item in value.items():
        text = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False, default=str)
        typer.echo(f"{key:{width}}  {text}")


def show_samples(uri: str, facts: dict[str, Any], as_json: bool) -> None:
    """Where regenerated samples lie, and what became of every request."""
    kept = ("accounting", "tokens", "tokens_per_second", "worker_seconds", "leaks")
    emit({"uri": uri, **{name: facts[name] for name in kept if name in facts}}, as_json)


def show_evaluation(result: Any, as_json: bool) -> None:
    """The table of cells, or the stage's record."""
    if as_json:
        emit(result, as_json)
        return
    from jetspec.evaluation.matrix import read_records
    from jetspec.evaluation.report import cells_table

    show_view(cells_table(read_records(result.uri)))
    typer.echo(result.uri)


def show_view(view: Any) -> None:
    """A table or a page of tables."""
    from rich.console import Console

    Console().print(view)


def show_metrics(step: int, metrics: dict[str, float]) -> None:
    """One line of training progress."""
    shown = "  ".join(f"{key} {value:.4g}" for key, value in metrics.items() if key != "step")
    typer.echo(f"step {step}  {shown}", err=True)


def ignore(*anything: Any) -> None:
    """A listener that does not listen."""


@contextmanager
def progress(verb: str, silent: bool) -> Iterator[Any]:
    """A bar on stderr; yields a call `(done, total, *anything)`."""
    if silent or not sys.stderr.isatty():
        yield ignore
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(verb, total=None)
        yield lambda done, total, *rest: bar.update(task, completed=done, total=total)


@contextmanager
def stages(silent: bool) -> Iterator[Any]:
    """A line on stderr that tells what is being done; yields a call `(what)`."""
    if silent or not sys.stderr.isatty():
        yield ignore
        return
    from rich.console import Console

    with Console(stderr=True).status("") as line:
        yield line.update
