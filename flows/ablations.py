"""The flow `ablations`: jetspec/ablation on Ray, every variant a run nested in the ablation's."""

from typing import Any

from prefect import flow
from rich.console import Console

from flows import cluster, tracking
from flows.presets import placed, preset_path
from flows.regen_train_eval import distil, evaluate, regenerate, stage
from jetspec import storage
from jetspec.ablation.claims import VERDICTS, Outcome
from jetspec.ablation.config import AblationConfig, load_ablation
from jetspec.ablation.making import measure, outcome
from jetspec.ablation.report import sentences
from jetspec.ablation.study import absolute_storage, run_ablation
from jetspec.config import RunConfig
from jetspec.generation.corpus_text import corpus_samples
from jetspec.stages import StageResult

console = Console(stderr=True)


@flow(name="ablations", flow_run_name="{config}", persist_result=False)
def ablations(
    config: str = "ablations", overrides: list[str] | None = None, storage: str | None = None
) -> dict[str, Any]:
    """Make and measure every variant, and report.

    Args:
        config: a preset's name or the path of an ablation's file.
        overrides: `section.key=value`, laid over its base.
        storage: where output goes instead of its base's `storage`; an override wins.

    Returns:
        Where the report is, and every claim with its verdict.
    """
    plan = load_ablation(preset_path(config), placed(storage, overrides))
    base = absolute_storage(plan.base_run())
    with tracking.pipeline_run(base) as parent, cluster.connect(base.ray):
        parent.log_json(plan.model_dump(mode="json"), "ablation.json")
        result = run_ablation(
            plan,
            lambda name, run, start: make_variant(plan, name, run, start, parent),
            lambda line: console.print(line, soft_wrap=True),
        )
        log_report(parent, result)
    show(result)
    return {"uri": result.uri, "reused": result.reused, "run_id": parent.run_id, **result.facts}


def make_variant(
    plan: AblationConfig, name: str, run: RunConfig, start: str | None, parent: tracking.Run
) -> Outcome:
    """Samples, head and matrix of one run of a variant, nested in the ablation's."""
    variant = plan.variant_of(name)
    with tracking.stage_run(parent, name) as record:
        record.log_tags({"jetspec.kind": "variant"})
        told = {**variant.set, "start": plan.start_of(name), "text": variant.text}
        record.log_params(told | ({"training.seed": run.training.seed} if variant.seeds else {}))
        corpus = variant.text == "corpus"
        samples = bring_along(run, record) if corpus else regenerate(run, record)
        head = distil(run, record, samples, start)
        if plan.measure == "replay":
            measured = replayed(plan, run, record, head.uri)
        else:
            measured = evaluate(run, record, head.uri, head)
        made = outcome(plan, samples, head, measured)
        record.log_metrics(_metrics(made))
        return made


@stage
def bring_along(run: RunConfig, parent: tracking.Run) -> StageResult:
    """The answers that the training prompts' files hold, as samples."""
    with tracking.stage_run(parent, "corpus text") as record:
        result = corpus_samples(run)
        record.log_params({"uri": result.uri, "reused": result.reused})
        record.log_metrics(result.facts)
        return result


@stage
def replayed(
    plan: AblationConfig, run: RunConfig, parent: tracking.Run, head_uri: str
) -> StageResult:
    """tau of every cell along the target's own answers; see `measure` of an ablation's file."""
    with tracking.stage_run(parent, "replay") as record:
        result = measure(plan, run, head_uri)
        record.log_params({"uri": result.uri, "reused": result.reused})
        return result


def log_report(parent: tracking.Run, result: StageResult) -> None:
    """The report, and how many claims hold, on the ablation's own run."""
    verdicts = [claim["verdict"] for claim in result.facts["claims"]]
    parent.log_metrics({f"claims {name}": verdicts.count(name) for name in VERDICTS})
    parent.log_metrics({"variants failed": len(result.facts["failed"])})
    parent.log_tags({"jetspec.kind": "ablation", "jetspec.report": result.uri})
    with tracking.local_copy(result.uri) as folder:
        names = ("report.md", "findings.json")
        parent.log_files([f"{folder}/{name}" for name in names], "report")


def show(result: StageResult) -> None:
    """The verdicts and where the report is."""
    for text in sentences(result.facts["claims"]):
        console.print(text.replace("**", ""), soft_wrap=True, highlight=False)
    for name, reason in result.facts["failed"].items():
        console.print(f"failed    {name}: {reason}", style="red", soft_wrap=True)
    console.print(f"report    {storage.join(result.uri, 'report.md')}", soft_wrap=True)


def _metrics(made: Outcome) -> dict[str, Any]:
    """tau and speed-up of every drafting cell: what MLflow's comparison of variants shows."""
    found: dict[str, Any] = {}
    for record in made.records:
        if record["status"] == "ok" and record["budget"]:
            found[f"tau/{record['key']}"] = record["tau"]
            found[f"speedup/{record['key']}"] = record["speedup"]["vs_plain"]["value"]
    return found
