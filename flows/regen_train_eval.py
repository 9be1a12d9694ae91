"""The flow `regen-train-eval`: regenerate, distil, choose, evaluate, promote.

Ids, URIs and small records cross the edges between tasks; the data stays where it was written.
Every stage's output directory is named by the hash of all that shapes it, so a rerun finds what is
there and computes only what is missing.
"""

from typing import Any

from prefect import flow, task
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task
from rich.console import Console

from flows import cluster, nightly, registry, summary, tracking
from flows.distill import distill_with_ray
from flows.evaluate import evaluate_with_ray
from flows.presets import placed, resolve_run
from flows.promote import promote_head
from flows.regenerate import regenerate_with_ray
from jetspec.config import RunConfig
from jetspec.errors import JetspecError
from jetspec.evaluation.matrix import read_records
from jetspec.evaluation.selection import select_head
from jetspec.stages import StageResult
from jetspec.storage import absolute, read_manifest

console = Console(stderr=True)


def _worth_retrying(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """A mistake that the user must mend stays a mistake; anything else may pass."""
    return not isinstance(state.result(raise_on_failure=False), JetspecError)


# A stage is tried twice; its result is a small record that is not persisted.
stage = task(
    retries=1,
    retry_delay_seconds=5,
    retry_condition_fn=_worth_retrying,
    persist_result=False,
)


@flow(name="regen-train-eval", flow_run_name="{config}", persist_result=False)
def regen_train_eval(
    config: str = "default",
    overrides: list[str] | None = None,
    only_if_target_changed: bool = False,
    storage: str | None = None,
) -> dict[str, Any]:
    """Make a draft head for the run's target and promote it if it is better.

    Args:
        config: a preset's name or the path of a run file.
        overrides: `section.key=value`, laid over the run file.
        only_if_target_changed: do nothing while the champion was made for the target as it is.
        storage: where output goes instead of the run file's `storage`; an override wins.

    Returns:
        The outcome of every stage as small JSON values.
    """
    run = resolve_run(config, placed(storage, overrides))
    run = run.model_copy(update={"storage": absolute(run.storage)})
    if only_if_target_changed:
        decision = nightly.check_target(run)
        if not decision.go:
            run_id = nightly.record_skip(run, decision)
            console.print(f"skipped: {decision.reason}")
            return {"skipped": True, "reason": decision.reason, "run_id": run_id}
        run = nightly.following(run, decision)
    console.print(f"run {run.name}: output in {run.storage}", soft_wrap=True)
    if run.target.source == "embedded":
        console.print("the embedded model is fetched and converted at its first use: a minute")
    with tracking.pipeline_run(run) as parent, cluster.connect(run.ray):
        samples = regenerate(run, parent)
        start = registry.warm_start_uri(run)
        head = distil(run, parent, samples, start)
        chosen = choose(run, parent, head, start)
        evaluation = evaluate(run, parent, chosen, head)
        promotion = promote(run, parent, chosen, evaluation, samples)
        records = read_records(evaluation.uri)
        summary.log_figures(parent, records, head)
    outcome = summary.outcome(run, parent, samples, head, chosen, evaluation, promotion)
    summary.show(console, run, records, outcome)
    return outcome


@stage
def regenerate(run: RunConfig, parent: tracking.Run) -> StageResult:
    """The target answers the training prompts."""
    with tracking.stage_run(parent, "regenerate") as record:
        result = regenerate_with_ray(run)
        record.log_params({"uri": result.uri, "reused": result.reused})
        record.log_metrics(result.facts)
        return result


@stage
def distil(
    run: RunConfig, parent: tracking.Run, samples: StageResult, start: str | None
) -> StageResult:
    """A head learns to draft those answers."""
    with tracking.stage_run(parent, "train") as record:
        result = distill_with_ray(run, samples.uri, start)
        record.log_params({"uri": result.uri, "reused": result.reused, "warm_start": start})
        record.log_metrics(result.facts)
        record.log_curve(summary.training_curve(result.uri))
        return result


@stage
def choose(run: RunConfig, parent: tracking.Run, head: StageResult, start: str | None) -> str:
    """The trained head, or the one it started from if that drafts better.

    Returns:
        The directory of the head that goes on to the matrix.
    """
    if start is None or not _same_target(start, head):
        return head.uri
    with tracking.stage_run(parent, "choose") as record:
        result = select_head(run, [head.uri, start])
        record.log_json(result.facts, "selection.json")
        for row, name in zip(result.facts["heads"], ("after", "before"), strict=True):
            record.log_metrics({f"tau_{name}": row["tau"]})
        summary.show_choice(console, result.facts)
        return str(result.facts["chosen"])


def _same_target(start: str, head: StageResult) -> bool:
    """A head of the target as it was drafts for the target as it is only by luck."""
    manifest = read_manifest(start, kind="head", verify=False)
    return bool(manifest["target_fingerprint"] == head.facts["target_fingerprint"])


@stage
def evaluate(run: RunConfig, parent: tracking.Run, head_uri: str, head: StageResult) -> StageResult:
    """The matrix, a nested run a cell, and the head as a model with its figures."""
    with tracking.stage_run(parent, "evaluate") as record:
        with summary.progress(console) as on_progress:
            result = evaluate_with_ray(run, head_uri, on_progress)
        record.log_params({"uri": result.uri, "head": head_uri, "reused": result.reused})
        tracking.log_cells(record, read_records(result.uri))
        return result


@stage
def promote(
    run: RunConfig,
    parent: tracking.Run,
    head_uri: str,
    evaluation: StageResult,
    samples: StageResult,
) -> StageResult:
    """The gates, the registry, and the champion alias last."""
    with tracking.stage_run(parent, "promote") as record:
        result = promote_head(
            run,
            head_uri,
            evaluation.uri,
            run=parent,
            samples_uri=samples.uri,
            champion_records=_champion_on_these_prompts(run, evaluation),
        )
        record.log_json(result.facts, "verdict.json")
        return result


def _champion_on_these_prompts(
    run: RunConfig, evaluation: StageResult
) -> list[dict[str, Any]] | None:
    """The champion's cells where its registered ones cannot be compared: other prompts or target.

    None keeps the registered ones. A champion that does not fit the target any more is not
    measured: its gate says so.
    """
    champion = registry.champion(run)
    if champion is None or not champion.records:
        return None
    facts = evaluation.facts
    known = champion.records[0]
    same = all(known.get(name) == facts[name] for name in ("prompts_hash", "target_fingerprint"))
    if same:
        return None
    gate = run.promotion
    cells = run.evaluation.model_copy(
        update={
            "methods": ("tree",),
            "budgets": (gate.budget,),
            "builders": (gate.builder,),
            "batch_sizes": (gate.batch_size,),
        }
    )
    narrowed = run.model_copy(update={"evaluation": cells})
    try:
        measured = evaluate_with_ray(narrowed, champion.head_uri, other_target=True)
    except JetspecError as error:
        console.print(f"champion {champion.version} not measured: {error}")
        return None
    return read_records(measured.uri)
