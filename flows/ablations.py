"""The flow `ablations`: variants of one run side by side, and a report that says what they decide.

Every variant goes through the stages of `regen-train-eval`, whose outputs are named by what shapes
them: variants that share samples or a head share them on disk, and a rerun computes only what is
missing. A variant that fails becomes a row with its reason; the others go on.
"""

from typing import Any

from prefect import flow
from rich.console import Console

from flows import cluster, tracking
from flows.ablation_config import AblationConfig, load_ablation
from flows.ablation_report import VERDICTS, Outcome, findings, markdown, sentence
from flows.presets import placed
from flows.regen_train_eval import distil, evaluate, regenerate, stage
from jetspec import __version__, storage
from jetspec.config import RunConfig
from jetspec.errors import JetspecError
from jetspec.evaluation.matrix import read_records
from jetspec.generation.corpus_text import corpus_samples
from jetspec.records import environment
from jetspec.stages import StageResult

STAGE = "ablations"
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
    plan = load_ablation(config, placed(storage, overrides))
    base = _absolute(plan.base_run())
    runs = {name: _absolute(run) for name, run in plan.runs().items()}
    console.print(f"{len(runs)} variants: output in {base.storage}", soft_wrap=True)
    outcomes: dict[str, Outcome] = {}
    with tracking.pipeline_run(base) as parent, cluster.connect(base.ray):
        parent.log_json(plan.model_dump(mode="json"), "ablation.json")
        for number, (name, run) in enumerate(runs.items(), 1):
            console.print(f"variant {number} of {len(runs)}: {name}")
            outcomes[name] = make_variant(plan, name, run, parent, outcomes)
        if all(outcome.failure for outcome in outcomes.values()):
            failures = "; ".join(f"{n}: {o.failure}" for n, o in outcomes.items())
            raise JetspecError("ablations", f"all {len(runs)} variants failed", failures)
        result = write_report(plan, base, outcomes)
        log_report(parent, result)
    show(result)
    return {"uri": result.uri, "reused": result.reused, "run_id": parent.run_id, **result.facts}


def make_variant(
    plan: AblationConfig,
    name: str,
    run: RunConfig,
    parent: tracking.Run,
    before: dict[str, Outcome],
) -> Outcome:
    """Samples, head and matrix of one variant, as a run nested in the ablation's."""
    variant = plan.variants[name]
    try:
        with tracking.stage_run(parent, name) as record:
            record.log_tags({"jetspec.kind": "variant"})
            record.log_params({**variant.set, "start": variant.start, "text": variant.text})
            start = None
            if variant.start is not None:
                if before[variant.start].failure:
                    raise JetspecError("start", variant.start, "that variant failed")
                start = str(before[variant.start].facts["head_uri"])
            corpus = variant.text == "corpus"
            samples = bring_along(run, record) if corpus else regenerate(run, record)
            head = distil(run, record, samples, start)
            measured = evaluate(run, record, head.uri, head)
            records = read_records(measured.uri)
            record.log_metrics(_metrics(records))
    except Exception as error:  # whatever one variant dies of must not end the others
        first = next(iter(str(error).splitlines()), type(error).__name__)
        console.print(f"variant {name} failed: {first}", style="red", soft_wrap=True)
        return Outcome((), {}, failure=first[:300])
    figures = ("tau_estimate", "steps", "parameters", "loss", "seconds")
    facts = {
        "samples_uri": samples.uri,
        "head_uri": head.uri,
        "evaluation_uri": measured.uri,
        "evaluation_key": measured.key,
        **{figure: head.facts.get(figure) for figure in figures},
    }
    return Outcome(records, facts)


@stage
def bring_along(run: RunConfig, parent: tracking.Run) -> StageResult:
    """The answers that the training prompts' files hold, as samples."""
    with tracking.stage_run(parent, "corpus text") as record:
        result = corpus_samples(run)
        record.log_params({"uri": result.uri, "reused": result.reused})
        record.log_metrics(result.facts)
        return result


def write_report(
    plan: AblationConfig, base: RunConfig, outcomes: dict[str, Outcome]
) -> StageResult:
    """`report.md` and `findings.json` under the storage, named by all they rest on."""
    shape = {
        "plan": plan.model_dump(mode="json"),
        "evaluations": {
            name: outcome.facts.get("evaluation_key") or outcome.failure
            for name, outcome in outcomes.items()
        },
        "code_version": __version__,
    }
    key = storage.content_hash(shape)
    uri = storage.stage_uri(base.storage, STAGE, key)
    reused = storage.is_complete(uri)
    if not reused:
        found = findings(plan, outcomes)
        made_on = environment()
        document = {**shape, **found, "environment": made_on}
        storage.write_json(storage.join(uri, "findings.json"), document)
        with storage.atomic_write(storage.join(uri, "report.md"), "w") as file:
            file.write(markdown(plan, found, made_on))
        claims = [claim for table in found["tables"] for claim in table["claims"]]
        failed = {name: o.failure for name, o in outcomes.items() if o.failure}
        facts = {"claims": claims, "failed": failed}
        storage.write_manifest(uri, kind=STAGE, config_hash=key, **facts)
    manifest = storage.read_manifest(uri, kind=STAGE)
    facts = {name: manifest[name] for name in ("claims", "failed")}
    return StageResult(STAGE, uri, key, reused, facts)


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
    for claim in result.facts["claims"]:
        console.print(sentence(claim).replace("**", ""), soft_wrap=True, highlight=False)
    for name, reason in result.facts["failed"].items():
        console.print(f"failed    {name}: {reason}", style="red", soft_wrap=True)
    console.print(f"report    {storage.join(result.uri, 'report.md')}", soft_wrap=True)


def _metrics(records: list[dict[str, Any]]) -> dict[str, Any]:
    """tau and speed-up of every drafting cell: what MLflow's comparison of variants shows."""
    found: dict[str, Any] = {}
    for record in records:
        if record["status"] == "ok" and record["budget"]:
            found[f"tau/{record['key']}"] = record["tau"]
            found[f"speedup/{record['key']}"] = record["speedup"]["vs_plain"]["value"]
    return found


def _absolute(run: RunConfig) -> RunConfig:
    return run.model_copy(update={"storage": storage.absolute(run.storage)})
