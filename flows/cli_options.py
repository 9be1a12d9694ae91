"""Options of the command `jetspec` beyond those of the library's commands."""

import shlex
from typing import Annotated

import typer

from jetspec.config import RunConfig
from jetspec.storage import absolute

_RUN_HELP = "A preset (quickstart, default, gpu, nightly, ablations) or a run file's path (YAML)."

Run = Annotated[str, typer.Argument(metavar="RUN", help=_RUN_HELP)]
Storage = Annotated[str, typer.Option(help="Where runs keep their output: a directory or a URI.")]
Tracking = Annotated[
    str | None,
    typer.Option(help="An MLflow server's URI, if runs do not keep their records in the storage."),
]
Model = Annotated[
    str | None,
    typer.Option("--model", help="A registered model; not needed while there is only one."),
]
PrefectPort = Annotated[int, typer.Option(help="Port of the Prefect server.", min=1, max=65535)]
MlflowPort = Annotated[int, typer.Option(help="Port of MLflow.", min=1, max=65535)]

STORAGE: str = RunConfig.model_fields["storage"].default


def where(storage: str, tracking: str | None = None) -> str:
    """The options, each after a space, that a command needs to find what was made there."""
    text = "" if absolute(storage) == absolute(STORAGE) else f" --storage {shlex.quote(storage)}"
    return text if tracking is None else f"{text} --tracking {shlex.quote(tracking)}"
