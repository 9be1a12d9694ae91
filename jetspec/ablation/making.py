"""One run of a variant, by the library's own stages in this process."""

import json
from collections.abc import Mapping
from typing import Any

from jetspec.ablation.claims import Outcome
from jetspec.ablation.config import AblationConfig
from jetspec.ablation.pool import tell_study
from jetspec.ablation.progress import StageProgress, Tell, TrainingProgress
from jetspec.config import RunConfig
from jetspec.evaluation import matrix, replayed
from jetspec.evaluation.matrix import evaluate, read_records
from jetspec.evaluation.replayed import replay
from jetspec.generation.corpus_text import corpus_samples
from jetspec.generation.plan import prepare
from jetspec.generation.regenerate import regenerate
from jetspec.stages import StageResult
from jetspec.training.loop import Stop
from jetspec.training.stage import distil_head

_FIGURES = ("tau_estimate", "steps", "parameters", "loss", "seconds")


def samples_identity(plan: AblationConfig, member: str, run: RunConfig) -> str:
    """Equal for runs that train on the same samples."""
    parts = run.model_dump(mode="json", include={"target", "prompts", "regeneration"})
    return json.dumps([parts, plan.variant_of(member).text], sort_keys=True)


def make_samples(
    plan: AblationConfig, member: str, run: RunConfig, *, tell: Tell = tell_study
) -> StageResult:
    """The text that a run trains on; where rounds are replayed, also what they are replayed on."""
    progress = StageProgress(tell)
    if plan.variant_of(member).text == "corpus":
        samples = corpus_samples(run)
    else:
        manifest, stage = regenerate(run, on_progress=progress.answers), prepare(run)
        samples = StageResult("samples", stage.uri, stage.key, reused=False, facts=manifest)
    if plan.measure == "replay":
        # Prompt lookup needs no head, and its rounds need the answers that all others share.
        alone = run.evaluation.model_copy(update={"methods": ("lookup",), "scores": None})
        replay(run.model_copy(update={"evaluation": alone}), None, on_progress=progress.cells)
    return samples


def make_member(
    plan: AblationConfig,
    member: str,
    run: RunConfig,
    start: str | None,
    samples: StageResult,
    *,
    tell: Tell = tell_study,
    stop_at: float | None = None,
) -> Outcome | None:
    """Train and measure one run of a variant.

    Args:
        start: the head that training starts from.
        tell: told now and then how far it is.
        stop_at: of `time.monotonic()`, when the training should have left a checkpoint.

    Returns:
        None if the time was up.
    """
    report = TrainingProgress(run.training, tell, stop_at=stop_at)
    try:
        head = distil_head(run, samples.uri, warm_start=start, report=report)
    except Stop:
        return None
    return outcome(plan, samples, head, measure(plan, run, head.uri, tell))


def measure(
    plan: AblationConfig, run: RunConfig, head_uri: str, tell: Tell = tell_study
) -> StageResult:
    """The run's matrix, decoded or replayed."""
    stage = replay if plan.measure == "replay" else evaluate
    return stage(run, head_uri, on_progress=StageProgress(tell).cells)


def outcome(
    plan: AblationConfig, samples: StageResult, head: StageResult, measured: StageResult
) -> Outcome:
    """A run whose stages are done."""
    facts: Mapping[str, Any] = {
        "samples_uri": samples.uri,
        "head_uri": head.uri,
        "evaluation_uri": measured.uri,
        "evaluation_key": measured.key,
        **{figure: head.facts.get(figure) for figure in _FIGURES},
    }
    kind = replayed.STAGE if plan.measure == "replay" else matrix.STAGE
    return Outcome(read_records(measured.uri, kind), facts)


def failed(error: BaseException) -> Outcome:
    """A run that died of `error`, in a line."""
    first = next(iter(str(error).splitlines()), type(error).__name__)
    return Outcome((), {}, failure=first[:300])
