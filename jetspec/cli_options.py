"""What both command lines share: their options, how they read a run, and how they fail."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from jetspec.config import RunConfig, load_config
from jetspec.errors import JetspecError
from jetspec.heads.shipped import head_directory
from jetspec.settings import first_mistake

_UNWRITABLE = {errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT}
INTERRUPTED = 130
USER_ERROR = 2
HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
# What a wrong command line raises; typer names this class's children only.
_UsageError: type[Exception] = typer.BadParameter.mro()[1]


class OneLineErrors(TyperGroup):
    """A group whose user errors are one line on stderr and exit status 2; Ctrl-C is 130."""

    def make_context(
        self, info_name: str | None, args: Any, parent: Any = None, **more: Any
    ) -> Any:
        with _one_line(str(info_name)):
            return super().make_context(info_name, args, parent, **more)

    def invoke(self, ctx: Any) -> Any:
        with _one_line(ctx.command_path):
            return super().invoke(ctx)


@contextmanager
def _one_line(command: str) -> Iterator[None]:
    """Tell a mistake in what the body parses or runs in one line, and end the program."""
    try:
        yield
        return
    except JetspecError as error:
        line = str(error)
    except _UsageError as error:
        line = _wrong_usage(error, command)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        line = f"output: {error.filename or 'disk'}: cannot be written ({error.strerror})"
    typer.secho(f"error: {line}", fg="red", err=True)
    raise typer.Exit(USER_ERROR)


def _wrong_usage(error: Any, command: str) -> str:
    """What is wrong with the command line itself: the option and its value, or the command."""
    message = error.format_message()
    if len(message.splitlines()) != 1:  # the help of a group that was called without a command
        raise error
    if isinstance(error.__cause__, ValidationError) and error.param is not None:
        return str(first_mistake(error.__cause__, error.param.opts[0]))
    command = error.ctx.command_path if error.ctx else command
    return f"{command}: {message.rstrip('.')}: see `{command} -h`"


RunFile = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run file (YAML); the command `jetspec` takes a preset's name too."
    ),
]
Samples = Annotated[
    str, typer.Argument(metavar="SAMPLES", help="A samples directory, from `regenerate`.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Change one setting of the run, e.g. --set training.epochs=2. May be repeated.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a script, nothing else.")]
HeadDir = Annotated[
    str,
    typer.Argument(
        metavar="HEAD",
        help="A head directory, its URI, or `shipped`: the one that comes with the package.",
        callback=head_directory,
    ),
]
Budgets = Annotated[
    str | None,
    typer.Option(metavar="N,N,...", help="Tree budgets, e.g. 16,64,256; by default the run's."),
]
OwnRun = Annotated[
    str | None,
    typer.Argument(metavar="[RUN]", help="A run file; none takes the head's own record."),
]
SamplesDir = Annotated[
    str | None,
    typer.Option("--samples", help="A samples directory; by default the head's held-out ones."),
]
Answers = Annotated[int, typer.Option(help="Look at so many answers at most.", min=1)]
OutDir = Annotated[
    str | None,
    typer.Option(help="Keep figures, facts and the log of drafts in this new directory."),
]
ReplayAll = Annotated[
    bool, typer.Option("--replay-all", help="Check every predicted tau by replay.")
]
Jobs = Annotated[
    int,
    typer.Option(help="Make so many variants at a time, each in a process; GPUs in turn.", min=1),
]
Only = Annotated[
    str | None, typer.Option(metavar="A,B,...", help="Variants to make; by default all.")
]
StopAfter = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS", help="Report what is done by then; a rerun makes the rest.", min=1
    ),
]
ReportDir = Annotated[
    str | None, typer.Option(help="Copy the report and its figures to this directory.")
]
EvaluationDir = Annotated[
    str | None,
    typer.Argument(metavar="[EVALUATION]", help="A finished evaluation to compare with."),
]
DiagnosisDir = Annotated[
    str | None, typer.Option(help="Take tau from this directory of `diagnose --out`.")
]
TimedHead = Annotated[str | None, typer.Option(help="Time this head; by default the evaluation's.")]
CostFile = Annotated[
    str | None, typer.Option(help="Costs measured before: a file of `theory --json`.")
]
Batches = Annotated[
    str | None, typer.Option(metavar="N,N,...", help="Batch sizes; by default the run's.")
]
Context = Annotated[int, typer.Option(help="Tokens that each sequence holds.", min=1)]
Repeats = Annotated[int, typer.Option(help="Timed runs of each size.", min=1)]
TargetSource = Annotated[
    str,
    typer.Option(
        "--target", help="The target: `embedded`, a directory, a .gguf file, or a hub id."
    ),
]


def load_run(ctx: typer.Context, run: str, overrides: list[str] | None) -> RunConfig:
    """The settings of a run, with the command's overrides.

    An app that knows runs by more than their path has its own `load_config` in its context.
    """
    load = ctx.obj or load_config
    return load(run, tuple(overrides or ()))


def numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """Whole numbers from 1 on, written with commas between them."""
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise JetspecError(option, text, "write whole numbers with commas, e.g. 16,64,256")
    return tuple(map(int, parts))


def choice(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise JetspecError(option, value, f"choose from {', '.join(allowed)}")


def require_new(option: str, directory: str) -> None:
    from jetspec import storage

    if storage.list_files(directory):
        raise JetspecError(option, directory, "is not empty; give a new directory")
