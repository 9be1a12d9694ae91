"""Commands on registered heads: the ones that need a registry and no run file."""

from typing import Annotated, Any, cast, get_args

import typer

from flows.cli_options import STORAGE, Model, Storage, Tracking
from jetspec.cli_options import HELP_OPTIONS, AsJson, OneLineErrors, choice
from jetspec.cli_output import emit, show_view
from jetspec.config import RunConfig, parse_config
from jetspec.errors import JetspecError
from jetspec.rules import Rule
from jetspec.trees.config import Builder

registry_app = typer.Typer(
    cls=OneLineErrors,
    help="Read the registry of heads.",
    no_args_is_help=True,
    context_settings=HELP_OPTIONS,
)


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
    builder: Annotated[
        str | None,
        typer.Option(
            help="The tree's shape: `chain`, `best_first`, `algorithm1` or `static`; by default "
            "the serving table's."
        ),
    ] = None,
    rule: Annotated[
        str | None,
        typer.Option(
            help="How a drafted token is accepted: `greedy` at temperature 0; above it "
            "`sample_and_match`, or `residual`, which needs a `chain` or `static` builder."
        ),
    ] = None,
    model: Model = None,
    storage: Storage = STORAGE,
    tracking: Tracking = None,
    as_json: AsJson = False,
) -> None:
    """Decode a prompt with the champion. Tokens that one round committed share a colour."""
    from flows import generate_view, registry

    if not prompt.strip():
        raise JetspecError("PROMPT", f"'{prompt}'", "is empty; write what a user would ask")
    for option, value, names in (("--builder", builder, Builder), ("--rule", rule, Rule)):
        if value is not None:
            choice(option, value, get_args(names))
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
        builder=builder,
        rule=cast(Rule | None, rule),
    )
    if as_json:
        emit({**answer.as_json(), "model": champion.name, "version": champion.version}, as_json)
        return
    from rich.console import Console

    console = Console()
    console.print(generate_view.colored(answer), soft_wrap=True)
    figures = generate_view.summary(answer, champion)
    console.print(figures, style="bold", highlight=False, markup=False, soft_wrap=True)


def compare(
    last: Annotated[int, typer.Option(help="How many of the newest versions.", min=1)] = 4,
    model: Model = None,
    storage: Storage = STORAGE,
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
    from flows.registry_view import versions_table

    show_view(versions_table(name, versions))


def promote(
    version: Annotated[
        int | None, typer.Argument(metavar="[VERSION]", help="By default the challenger.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Promote although a gate said no.")
    ] = False,
    model: Model = None,
    storage: Storage = STORAGE,
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


def rollback(
    model: Model = None,
    storage: Storage = STORAGE,
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
    storage: Storage = STORAGE,
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
    from flows.registry_view import champion_table

    show_view(champion_table(champion))


@registry_app.command("list")
def list_models(
    storage: Storage = STORAGE, tracking: Tracking = None, as_json: AsJson = False
) -> None:
    """List the registered models and the version that is champion of each."""
    from flows import registry

    config = _place(storage, tracking)
    champions = {name: registry.champion_version(config, name) for name in registry.names(config)}
    emit(champions if as_json else {n: v or "none" for n, v in champions.items()}, as_json)


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
