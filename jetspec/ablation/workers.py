"""Variants made side by side, each worker a process that takes one after another.

A trainer of a small head leaves much of a GPU idle while its host prepares the next step: several
of them fill it. Where there are several GPUs, workers take them in turn. Everything that workers
share lies on storage: one that dies loses its own variant alone, and a study that was cut goes on.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from jetspec.ablation.claims import Outcome
from jetspec.ablation.config import AblationConfig
from jetspec.ablation.making import failed, make_member, make_samples, samples_identity
from jetspec.ablation.pool import Pool, visible_gpus
from jetspec.ablation.together import Group, groups, train_together
from jetspec.config import RunConfig
from jetspec.errors import JetspecError
from jetspec.stages import StageResult

OUT_OF_TIME = "the time was up before it was made; run again to go on"
Say = Callable[[str], None]


def make_side_by_side(
    plan: AblationConfig,
    runs: Mapping[str, RunConfig],
    *,
    jobs: int,
    stop_at: float | None = None,
    start_of: Callable[[str, Mapping[str, Outcome]], str | None],
    say: Say,
) -> dict[str, Outcome]:
    """Make every run, `jobs` at a time.

    Args:
        stop_at: of `time.monotonic()`, when what is not done is left to a later study; trainings
            end a little before, each with a checkpoint.
        start_of: (run, outcomes) -> the head that it starts from.
    """
    outcomes: dict[str, Outcome] = {}
    began = time.monotonic()

    def tell(text: str) -> None:
        say(f"{time.monotonic() - began:6.1f} s  {text}")

    samples = _shared_samples(plan, runs, stop_at, outcomes, tell)
    waiting = [name for name in runs if name not in outcomes]
    # Members of a group wait until their heads are trained.
    together = groups(plan, {name: runs[name] for name in waiting})
    titles = {group.title: group for group in together.values()}

    def settle(name: str, made: Any) -> None:
        outcomes[name] = made if isinstance(made, Outcome) else failed(made)
        told = f"failed: {outcomes[name].failure}" if outcomes[name].failure else "done"
        tell(f"{name} {told} ({len(outcomes)} of {len(runs)})")

    def heard(name: str, text: str) -> None:
        tell(f"{name}: {text}")

    def settle_group(group: Group, made: Any) -> None:
        for name in group.names:
            del together[name]
        if not isinstance(made, dict):
            tell(f"{group.title}, failed: {failed(made).failure}; each is trained alone")
            return
        tell(f"{group.title}, done")
        for name, error in made.items():
            waiting.remove(name)
            settle(name, error)

    pool = _pool(min(jobs, len(waiting)))
    pool.heard = heard
    over = False  # a training found that the time is up: nothing is begun any more
    try:
        while (waiting and not over) or pool.running:
            for name in [] if over else list(waiting):
                if not pool.idle:
                    break
                if _must_wait(plan, name, runs, waiting, pool.running):
                    continue
                try:
                    start = start_of(name, outcomes)
                except JetspecError as error:
                    waiting.remove(name)
                    settle(name, error)
                    continue
                given = samples[samples_identity(plan, name, runs[name])]
                if (group := together.get(name)) is not None:
                    if group.title not in pool.running:
                        members = {member: runs[member] for member in group.names}
                        tell(f"{group.title}, begin")
                        train = partial(train_together, stop_at=stop_at)
                        pool.ask(group.title, train, members, start, given)
                    continue
                waiting.remove(name)
                tell(f"{name} begins")
                make = partial(make_member, stop_at=stop_at)
                pool.ask(name, make, plan, name, runs[name], start, given)
            for name, made in pool.answers(stop_at):
                if made is None:
                    tell(f"{name} is cut: {OUT_OF_TIME}")
                    over = True
                elif name in titles:
                    settle_group(titles[name], made)
                else:
                    settle(name, made)
            if stop_at is not None and time.monotonic() >= stop_at:
                break
    finally:
        pool.close()
    return {name: outcomes.get(name, Outcome((), {}, failure=OUT_OF_TIME)) for name in runs}


def _shared_samples(
    plan: AblationConfig,
    runs: Mapping[str, RunConfig],
    stop_at: float | None,
    outcomes: dict[str, Outcome],
    tell: Say,
) -> dict[str, StageResult]:
    """Samples by their identity, made in a process of their own: its memory goes with it."""
    found: dict[str, StageResult] = {}
    pool = _pool(1)
    pool.heard = lambda name, text: tell(f"samples of {name}: {text}")
    try:
        for name, run in runs.items():
            identity = samples_identity(plan, name, run)
            if identity in found or name in outcomes:
                continue
            pool.ask(name, make_samples, plan, name, run)
            made = next((answer for _, answer in pool.answers(stop_at)), None)
            if isinstance(made, StageResult):
                tell(f"samples of {name} are there")
                found[identity] = made
                continue
            lost = Outcome((), {}, failure=OUT_OF_TIME) if made is None else failed(made)
            tell(f"samples of {name}: {lost.failure}")
            alike = [n for n, r in runs.items() if samples_identity(plan, n, r) == identity]
            outcomes.update(dict.fromkeys(alike, lost))
            if made is None:
                outcomes.update({n: lost for n in runs if n not in outcomes})
    finally:
        pool.close()
    return found


def _must_wait(
    plan: AblationConfig,
    name: str,
    runs: Mapping[str, RunConfig],
    waiting: list[str],
    running: Mapping[str, Any],
) -> bool:
    """Whether a run that this one builds on is not made yet: its start, or one with its head."""
    start = plan.start_of(name)
    if start is not None and (start in waiting or start in running):
        return True
    own = _head_identity(plan, name, runs[name])
    writing = (other for other in running if other in runs)  # and no group
    return any(_head_identity(plan, other, runs[other]) == own for other in writing)


def _head_identity(plan: AblationConfig, name: str, run: RunConfig) -> tuple[Any, ...]:
    """Equal for runs that train the same head: two processes must not write one directory."""
    parts = run.model_dump_json(include={"head", "training"})
    return parts, samples_identity(plan, name, run), plan.start_of(name)


def _pool(size: int) -> Pool:
    threads = max(1, torch.get_num_threads() // max(1, size))
    return Pool(size, threads=threads, gpus=visible_gpus(torch.cuda.device_count()))
