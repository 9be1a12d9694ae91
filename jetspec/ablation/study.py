"""An ablation from its file to its report.

Every variant goes through the stages of a run, whose outputs are named by what shapes them:
variants that share samples or a head share them on disk, and a rerun computes only what is missing.
A variant that fails becomes a row with its reason; the others go on.
"""

from collections.abc import Callable
from typing import Any

from jetspec import __version__, storage
from jetspec.ablation.config import AblationConfig, Variant
from jetspec.ablation.report import Outcome, findings, markdown
from jetspec.config import RunConfig
from jetspec.errors import JetspecError
from jetspec.evaluation.matrix import evaluate, read_records
from jetspec.generation.corpus_text import corpus_samples
from jetspec.generation.plan import prepare
from jetspec.generation.regenerate import regenerate
from jetspec.heads.shipped import head_directory
from jetspec.records import environment
from jetspec.stages import StageResult
from jetspec.training.stage import distil_head

STAGE = "ablations"
MakeVariant = Callable[[str, RunConfig, str | None], Outcome]
"""(name, run, the head that training starts from) -> outcome."""


def run_ablation(
    plan: AblationConfig,
    make: MakeVariant | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> StageResult:
    """Make and measure every variant, and report.

    Args:
        make: makes one variant; None runs the library's stages in this process.
        say: told one line at every variant, and why one failed.

    Returns:
        facts: `claims` with their verdicts, and `failed` variants with their reasons.

    Raises:
        JetspecError: a setting is wrong, or every variant failed.
    """
    make = make or (lambda name, run, start: _make(plan.variants[name], run, start))
    base = absolute_storage(plan.base_run())
    runs = {name: absolute_storage(run) for name, run in plan.runs().items()}
    say(f"{len(runs)} variants: output in {base.storage}")
    outcomes: dict[str, Outcome] = {}
    for number, (name, run) in enumerate(runs.items(), 1):
        say(f"variant {number} of {len(runs)}: {name}")
        try:
            outcomes[name] = make(name, run, _start(plan.variants[name], run, outcomes))
        except Exception as error:  # whatever one variant dies of must not end the others
            first = next(iter(str(error).splitlines()), type(error).__name__)
            say(f"variant {name} failed: {first}")
            outcomes[name] = Outcome((), {}, failure=first[:300])
    if all(outcome.failure for outcome in outcomes.values()):
        failures = "; ".join(f"{n}: {o.failure}" for n, o in outcomes.items())
        raise JetspecError("ablations", f"all {len(runs)} variants failed", failures)
    return _write_report(plan, base, outcomes)


def outcome(samples: StageResult, head: StageResult, measured: StageResult) -> Outcome:
    """A variant whose stages are done."""
    figures = ("tau_estimate", "steps", "parameters", "loss", "seconds")
    facts = {
        "samples_uri": samples.uri,
        "head_uri": head.uri,
        "evaluation_uri": measured.uri,
        "evaluation_key": measured.key,
        **{figure: head.facts.get(figure) for figure in figures},
    }
    return Outcome(read_records(measured.uri), facts)


def _make(variant: Variant, run: RunConfig, start: str | None) -> Outcome:
    """A variant by the library's own stages, one after another in this process."""
    if variant.text == "corpus":
        samples = corpus_samples(run)
    else:
        manifest, stage = regenerate(run), prepare(run)
        samples = StageResult("samples", stage.uri, stage.key, reused=False, facts=manifest)
    head = distil_head(run, samples.uri, warm_start=start)
    return outcome(samples, head, evaluate(run, head.uri))


def _start(variant: Variant, run: RunConfig, before: dict[str, Outcome]) -> str | None:
    """The head that training starts from: another variant's, else the run's own warm start."""
    if variant.start is None:
        start = run.training.warm_start
        return None if start is None else head_directory(start)
    if before[variant.start].failure:
        raise JetspecError("start", variant.start, "that variant failed")
    return str(before[variant.start].facts["head_uri"])


def _write_report(
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
        facts: dict[str, Any] = {"claims": claims, "failed": failed}
        storage.write_manifest(uri, kind=STAGE, config_hash=key, **facts)
    manifest = storage.read_manifest(uri, kind=STAGE)
    facts = {name: manifest[name] for name in ("claims", "failed")}
    return StageResult(STAGE, uri, key, reused, facts)


def absolute_storage(run: RunConfig) -> RunConfig:
    """The run with a storage that means the same from every working directory."""
    return run.model_copy(update={"storage": storage.absolute(run.storage)})
