"""The installed command `jetspec`: the library's commands on Ray, and the pipeline around them.

Heavy imports stay inside the commands, so that help answers at once.
"""

import os
from typing import Annotated, Any

import typer

from jetspec import cli as library
from jetspec.cli import AsJson, HeadDir, OneLineErrors, Overrides, emit
from jetspec.config import RunConfig, parse_config
from jetspec.errors import JetspecError

_RUN_HELP = "A preset (quickstart, default, nightly, ablations) or the path of a run file (YAML)."
_MAKE, _KEEP, _LOOK, _SERVE = "Make a head", "Keep or replace it", "Look", "Services"
_MORE = {"help_option_names": ["-h", "--help"]}

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

_STORAGE: str = RunConfig.model_fields["storage"].default

app = typer.Typer(
    cls=OneLineErrors,
    help=(
        "Make, measure and promote draft heads for speculative decoding.\n\n"
        "`jetspec run quickstart` does it all for a small embedded model."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=_MORE,
)
registry_app = typer.Typer(
    cls=OneLineErrors,
    help="Read the registry of heads.",
    no_args_is_help=True,
    context_settings=_MORE,
)


@app.command(rich_help_panel=_MAKE)
def run(
    run: Run,
    set: Overrides = None,
    only_if_target_changed: Annotated[
        bool,
        typer.Option(
            "--only-if-target-changed", help="Do nothing while the champion fits the target."
        ),
    ] = False,
    deployed: Annotated[
        bool,
        typer.Option(
            "--deployed", help="Let the worker of `jetspec up` run this deployment, and watch."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Regenerate, train, evaluate and promote: the whole pipeline, in this process.

    `jetspec run ablations` makes and compares variants instead, and writes a report. A rerun takes
    up what is there. While `jetspec up` runs, Prefect's page shows it.
    """
    from flows.ablation_config import is_ablation, load_ablation

    comparing = is_ablation(run)
    if comparing and only_if_target_changed:
        raise JetspecError("--only-if-target-changed", run, "an ablation has no champion; leave it")
    config = load_ablation(run, set or ()).base_run() if comparing else _resolve(run, set)
    from flows import service

    api = service.prepare_environment(config.storage)
    if deployed:
        if api is None:
            raise JetspecError("--deployed", run, "no Prefect server; start one with `jetspec up`")
        flow = service.ABLATIONS if comparing else service.FLOW
        raise typer.Exit(service.follow_deployment(run, set or [], flow=flow))
    from flows.quiet import one_line_failures

    with one_line_failures(to_stderr=as_json):
        if comparing:
            from flows.ablations import ablations

            result = ablations(run, list(set or ()))
        else:
            from flows.regen_train_eval import regen_train_eval

            result = regen_train_eval(run, list(set or ()), only_if_target_changed)
    if as_json:
        emit(result, as_json)


@app.command(rich_help_panel=_MAKE)
def regenerate(run: Run, set: Overrides = None, as_json: AsJson = False) -> None:
    """Let the target answer the training prompts, on Ray. A rerun makes only what is missing."""
    config = _resolve(run, set)
    from flows.cluster import connect
    from flows.regenerate import regenerate_with_ray

    with connect(config.ray):
        result = regenerate_with_ray(config)
    library.show_samples(result.uri, result.facts, as_json)


@app.command(rich_help_panel=_MAKE)
def train(
    run: Run,
    samples: Annotated[
        str, typer.Argument(metavar="SAMPLES", help="A samples directory, from `regenerate`.")
    ],
    set: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Distil a draft head from the target's answers, on Ray Train. A rerun resumes."""
    config = _resolve(run, set)
    from flows.cluster import connect
    from flows.distill import distill_with_ray
    from flows.registry import warm_start_uri

    start = warm_start_uri(config)
    with connect(config.ray):
        result = distill_with_ray(config, samples, start)
    emit(result, as_json)


@app.command(rich_help_panel=_MAKE)
def evaluate(run: Run, head: HeadDir, set: Overrides = None, as_json: AsJson = False) -> None:
    """Measure the matrix of methods, budgets, batch sizes and slices, on Ray."""
    config = _resolve(run, set)
    from flows.cluster import connect
    from flows.evaluate import evaluate_with_ray

    with connect(config.ray), library.progress("measuring", as_json) as advance:
        result = evaluate_with_ray(config, head, on_progress=advance)
    library.show_evaluation(result, as_json)


@app.command(rich_help_panel=_LOOK)
def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="What a user would ask.")],
    max_new_tokens: Annotated[int, typer.Option(help="Stop here at the latest.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0)] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep so many tokens; 0 keeps all.")] = 0,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens below this share of the likeliest one's.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1 shuns tokens that stand in the text already.")
    ] = 1.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="TOKEN=BIAS", help="Add to a token id's logit. May be repeated."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Fixes every draw.")] = 0,
    budget: Annotated[
        int | None, typer.Option(help="Draft nodes; by default the serving table's.", min=1)
    ] = None,
    model: Model = None,
    storage: Storage = _STORAGE,
    tracking: Tracking = None,
    as_json: AsJson = False,
) -> None:
    """Decode a prompt with the champion. Tokens that one round committed share a colour."""
    from flows import generate_view, registry

    config, name = _registered(model, storage, tracking)
    champion = registry.require_champion(config, name)
    made_for = {"storage": storage, "target": champion.lineage["target"]}
    answer = generate_view.answer(
        champion,
        parse_config(made_for),
        prompt,
        max_new_tokens=max_new_tokens,
        sampling={
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "logit_bias": tuple(generate_view.token_bias(text) for text in logit_bias or ()),
            "seed": seed,
        },
        budget=budget,
    )
    if as_json:
        emit({**answer.as_json(), "model": champion.name, "version": champion.version}, as_json)
        return
    from rich.console import Console

    console = Console()
    console.print(generate_view.colored(answer), soft_wrap=True)
    console.print(generate_view.summary(answer, champion), style="bold", highlight=False)


@app.command(rich_help_panel=_LOOK)
def compare(
    last: Annotated[int, typer.Option(help="How many of the newest versions.", min=1)] = 4,
    model: Model = None,
    storage: Storage = _STORAGE,
    tracking: Tracking = None,
    as_json: AsJson = False,
) -> None:
    """Show registered heads with their figures side by side, newest first."""
    from flows import registry

    config, name = _registered(model, storage, tracking)
    versions = registry.versions(config, name)[:last]
    if as_json:
        emit({"name": name, "versions": [v.as_json() for v in versions]}, as_json)
        return
    from rich.console import Console

    from flows.registry_view import versions_table

    Console().print(versions_table(name, versions))


@app.command(rich_help_panel=_LOOK)
def diagnose(
    head: HeadDir,
    run: library.OwnRun = None,
    samples: library.SamplesDir = None,
    answers: library.Answers = 24,
    budgets: library.Budgets = None,
    out: library.OutDir = None,
    replay_all: library.ReplayAll = False,
    set: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Say where a head is right, where it is wrong, and what tau any tree would have."""
    config = None if run is None else _resolve(run, set)
    library.refuse_lone_overrides(run, set)
    library.show_diagnosis(head, config, samples, answers, budgets, out, replay_all, as_json)


@app.command(rich_help_panel=_LOOK)
def theory(
    run: Run,
    evaluation: library.EvaluationDir = None,
    diagnosis: library.DiagnosisDir = None,
    head: library.TimedHead = None,
    costs: library.CostFile = None,
    budgets: library.Budgets = None,
    batches: library.Batches = None,
    context: library.Context = 256,
    repeats: library.Repeats = 5,
    set: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Measure what drafting costs here; predict speed-ups and the best budget by load."""
    uris = {"evaluation": evaluation, "diagnosis": diagnosis, "head": head, "costs": costs}
    shape = {"context": context, "repeats": repeats}
    library.show_theory(_resolve(run, set), budgets, batches, as_json, **uris, **shape)


@app.command(rich_help_panel=_KEEP)
def promote(
    version: Annotated[
        int | None, typer.Argument(metavar="[VERSION]", help="By default the challenger.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Promote although a gate said no.")
    ] = False,
    model: Model = None,
    storage: Storage = _STORAGE,
    tracking: Tracking = None,
    as_json: AsJson = False,
) -> None:
    """Make a registered version the champion, if its gates passed."""
    from flows import registry
    from flows.registered import check_verdict

    config, name = _registered(model, storage, tracking)
    if version is None:
        waiting = registry.challenger(config, name)
        if waiting is None:
            raise JetspecError("registry", name, "has no challenger; `jetspec run` makes one")
        version = waiting.version
    check_verdict(registry.open_version(config, version, name), force=force)
    promoted = registry.promote(config, version, name)
    _show_move(promoted, as_json)


@app.command(rich_help_panel=_KEEP)
def rollback(
    model: Model = None,
    storage: Storage = _STORAGE,
    tracking: Tracking = None,
    as_json: AsJson = False,
) -> None:
    """Give the champion's place back to the version before it."""
    from flows import registry

    config, name = _registered(model, storage, tracking)
    _show_move(registry.rollback(config, name), as_json)


@registry_app.command()
def show(
    model: Model = None,
    storage: Storage = _STORAGE,
    tracking: Tracking = None,
    as_json: AsJson = False,
) -> None:
    """Show the champion with its metrics, serving table and lineage."""
    from flows import registry

    config, name = _registered(model, storage, tracking)
    champion = registry.require_champion(config, name)
    if as_json:
        emit(champion.as_json(), as_json)
        return
    from rich.console import Console

    from flows.registry_view import champion_table

    Console().print(champion_table(champion))


@registry_app.command("list")
def list_models(
    storage: Storage = _STORAGE, tracking: Tracking = None, as_json: AsJson = False
) -> None:
    """List the registered models and the version that is champion of each."""
    from flows import registry

    config = _place(storage, tracking)
    champions = {name: registry.champion_version(config, name) for name in registry.names(config)}
    emit(champions, as_json)


@app.command(rich_help_panel=_SERVE)
def up(
    storage: Storage = _STORAGE,
    prefect_port: PrefectPort = 4200,
    mlflow_port: MlflowPort = 5000,
) -> None:
    """Start Prefect, its worker and MLflow on this machine, and deploy the flows."""
    from flows import service

    service.up(storage, prefect_port=prefect_port, mlflow_port=mlflow_port, say=typer.echo)
    api = f"http://{service.HOST}:{prefect_port}/api"
    typer.echo(f"\nstart a run:  prefect deployment run {service.FLOW}/default --watch")
    typer.echo("stop:         jetspec down")
    typer.echo(f"Prefect's profile `jetspec` is active; in scripts: export PREFECT_API_URL={api}")
    if os.environ.get("PREFECT_API_URL", api) != api:
        typer.echo("PREFECT_API_URL is set to another server in this shell: unset it", err=True)


@app.command(rich_help_panel=_SERVE)
def down(storage: Storage = _STORAGE) -> None:
    """Stop what `jetspec up` started. Records and databases stay."""
    from flows import service

    stopped = service.down(storage)
    typer.echo(f"stopped {', '.join(stopped)}" if stopped else "nothing was running")


app.command(rich_help_panel=_LOOK)(library.doctor)
app.command(rich_help_panel=_LOOK)(library.targets)
app.command(rich_help_panel=_KEEP)(library.export)
app.add_typer(registry_app, name="registry", rich_help_panel=_KEEP)


def _resolve(run: str, overrides: list[str] | None) -> RunConfig:
    from flows.presets import resolve_run

    return resolve_run(run, tuple(overrides or ()))


def _place(storage: str, tracking: str | None) -> RunConfig:
    return parse_config({"storage": storage, "tracking": {"uri": tracking}})


def _registered(model: str | None, storage: str, tracking: str | None) -> tuple[RunConfig, str]:
    """Where the registry is, and which model is meant."""
    from flows import registry

    config = _place(storage, tracking)
    known = registry.names(config)
    if model is None:
        if len(known) == 1:
            return config, known[0]
        have = ", ".join(known)
        mend = f"choose one: {have}" if known else "there is none yet; `jetspec run` makes one"
        raise JetspecError("--model", "not given", mend)
    if model not in known:
        raise JetspecError("--model", model, f"not registered (there are: {', '.join(known)})")
    return config, model


def _show_move(version: Any, as_json: bool) -> None:
    if as_json:
        emit(version.as_json(), as_json)
    else:
        typer.echo(f"champion of {version.name} is version {version.version}")


def main() -> None:
    app()
