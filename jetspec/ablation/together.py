"""Runs of an ablation that train path scores on one frozen head: their heads, in one training."""

from collections.abc import Mapping
from typing import NamedTuple

from jetspec.ablation.config import AblationConfig
from jetspec.ablation.making import samples_identity
from jetspec.ablation.pool import tell_study
from jetspec.ablation.progress import Tell, TrainingProgress
from jetspec.config import RunConfig
from jetspec.errors import JetspecError
from jetspec.stages import StageResult
from jetspec.training.loop import Stop
from jetspec.training.stage import head_stage
from jetspec.training.together import distil_heads_together, shared_shape


class Group(NamedTuple):
    """Runs that can be trained together; `title` is what the study calls them."""

    title: str
    names: tuple[str, ...]


def groups(plan: AblationConfig, runs: Mapping[str, RunConfig]) -> dict[str, Group]:
    """The group of every run that has one."""
    alike: dict[tuple[str | None, ...], list[str]] = {}
    for name, run in runs.items():
        shape = shared_shape(run)
        if shape is not None:
            key = shape, samples_identity(plan, name, run), plan.start_of(name)
            alike.setdefault(key, []).append(name)
    return {
        name: Group(f"{names[0]} and {len(names) - 1} more, trained together", tuple(names))
        for names in alike.values()
        if len(names) > 1
        for name in names
    }


def train_together(
    runs: Mapping[str, RunConfig],
    start: str | None,
    samples: StageResult,
    *,
    tell: Tell = tell_study,
    stop_at: float | None = None,
) -> dict[str, JetspecError] | None:
    """Make the heads of a group that are not there; one alone is left to its own run.

    Args:
        tell, stop_at: as `making.make_member` takes them.

    Returns:
        by name, what a run's training died of while the others went on; None if the time was up.
    """
    if start is None:
        return {}  # each run says what it lacks
    found = {name: head_stage(run, samples.uri, start)[0] for name, run in runs.items()}
    if len({stage.key for stage in found.values() if not stage.reused}) < 2:
        return {}
    config = next(iter(runs.values())).training
    report = TrainingProgress(config, tell, stop_at=stop_at)
    try:
        made = distil_heads_together(runs, samples.uri, warm_start=start, report=report)
    except Stop:
        return None
    return {name: result for name, result in made.items() if isinstance(result, JetspecError)}
