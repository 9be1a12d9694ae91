"""The installed command `jetspec`: the library's commands on Ray, and the pipeline around them.

Heavy imports stay inside the commands, so that help answers at once.
"""

import os
from typing import Annotated

import typer

from flows import cli_registry as registered
from flows.cli_options import STORAGE, MlflowPort, PrefectPort, Run, Storage, where
from flows.presets import preset_path, resolve_run
from jetspec import cli as library
from jetspec.cli_bench import FORWARDED, bench
from jetspec.cli_options import HELP_OPTIONS, AsJson, HeadDir, OneLineErrors, Overrides, Samples
from jetspec.cli_output import emit, progress, show_evaluation, show_samples
from jetspec.errors import JetspecError

_MAKE, _KEEP, _LOOK, _SERVE = "Make a head", "Keep or replace it", "Look", "Services"

app = typer.Typer(
    cls=OneLineErrors,
    help=(
        "Make, measure and promote draft heads for speculative decoding.\n\n"
        "`jetspec run quickstart` does it all for a small embedded model."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={**HELP_OPTIONS, "obj": resolve_run},
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
    from jetspec.ablation.config import is_ablation, load_ablation

    comparing = is_ablation(preset_path(run))
    if comparing and only_if_target_changed:
        raise JetspecError("--only-if-target-changed", run, "an ablation has no champion; leave it")
    config = (
        load_ablation(preset_path(run), set or ()).base_run()
        if comparing
        else resolve_run(run, set or ())
    )
    from flows import service

    api = service.prepare_environment(config.storage)
    if deployed:
        if api is None:
            raise JetspecError("--deployed", run, "no Prefect server; start one with `jetspec up`")
        flow = service.ABLATIONS if comparing else service.FLOW
        raise typer.Exit(service.follow_deployment(run, set or [], flow=flow))
    from flows.quiet import one_line_failures
    from flows.tracking import tracking_uri
    from jetspec.storage import exists

    # A storage that cannot be used is told before any server starts.
    exists(config.storage)
    tracking_uri(config)

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
    config = resolve_run(run, set or ())
    from flows.cluster import connect
    from flows.regenerate import regenerate_with_ray

    with connect(config.ray):
        result = regenerate_with_ray(config)
    show_samples(result.uri, result.facts, as_json)


@app.command(rich_help_panel=_MAKE)
def train(run: Run, samples: Samples, set: Overrides = None, as_json: AsJson = False) -> None:
    """Distil a draft head from the target's answers, on Ray Train. A rerun resumes."""
    config = resolve_run(run, set or ())
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
    config = resolve_run(run, set or ())
    from flows.cluster import connect
    from flows.evaluate import evaluate_with_ray

    with connect(config.ray), progress("measuring", as_json) as advance:
        result = evaluate_with_ray(config, head, on_progress=advance)
    show_evaluation(result, as_json)


app.command(rich_help_panel=_LOOK)(registered.generate)
app.command(rich_help_panel=_LOOK)(registered.compare)
app.command(rich_help_panel=_LOOK)(library.diagnose)
app.command(rich_help_panel=_LOOK)(library.theory)
app.command(rich_help_panel=_KEEP)(registered.promote)
app.command(rich_help_panel=_KEEP)(registered.rollback)


@app.command(rich_help_panel=_SERVE)
def up(
    storage: Storage = STORAGE,
    prefect_port: PrefectPort = 4200,
    mlflow_port: MlflowPort = 5000,
) -> None:
    """Start Prefect, its worker and MLflow on this machine, and deploy the flows."""
    from flows import service

    service.up(storage, prefect_port=prefect_port, mlflow_port=mlflow_port, say=typer.echo)
    api = f"http://{service.HOST}:{prefect_port}/api"
    typer.echo(f"\nstart a run:  prefect deployment run {service.FLOW}/default --watch")
    typer.echo(f"stop:         jetspec down{where(storage)}")
    typer.echo(f"Prefect's profile `jetspec` is active; in scripts: export PREFECT_API_URL={api}")
    if os.environ.get("PREFECT_API_URL", api) != api:
        typer.echo("PREFECT_API_URL is set to another server in this shell: unset it", err=True)


@app.command(rich_help_panel=_SERVE)
def down(storage: Storage = STORAGE) -> None:
    """Stop what `jetspec up` started. Records and databases stay."""
    from flows import service

    stopped = service.down(storage)
    typer.echo(f"stopped {', '.join(stopped)}" if stopped else "nothing was running")


app.command(rich_help_panel=_LOOK)(library.doctor)
app.command(rich_help_panel=_LOOK)(library.targets)
app.command(rich_help_panel=_LOOK, context_settings=FORWARDED)(bench)
app.command(rich_help_panel=_KEEP)(library.export)
app.add_typer(registered.registry_app, name="registry", rich_help_panel=_KEEP)


def main() -> None:
    app()
