"""An ablation from its file to its report.

Every variant goes through the stages of a run, whose outputs are named by what shapes them:
variants that share samples or a head share them on disk, and a rerun computes only what is missing.
A variant that fails becomes a row with its reason; the others go on.
"""

import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from jetspec import __version__, storage
from jetspec.ablation.claims import Outcome
from jetspec.ablation.config import AblationConfig
from jetspec.ablation.making import failed, make_member, make_samples
from jetspec.ablation.report import findings, markdown
from jetspec.ablation.together import Group, groups, train_together
from jetspec.ablation.workers import make_side_by_side
from jetspec.config import RunConfig
from jetspec.errors import JetspecError
from jetspec.heads.shipped import head_directory
from jetspec.kept import keeping
from jetspec.records import environment
from jetspec.stages import StageResult

STAGE = "ablations"
REPORT, FINDINGS = "report.md", "findings.json"
LEFT_OUT = "left out of this study"
MakeVariant = Callable[[str, RunConfig, str | None], Outcome]
"""(name, run, the head that training starts from) -> outcome."""


def run_ablation(
    plan: AblationConfig,
    make: MakeVariant | None = None,
    say: Callable[[str], None] = lambda line: None,
    *,
    jobs: int = 1,
    only: Collection[str] = (),
    stop_after: float | None = None,
) -> StageResult:
    """Make and measure every variant, and report.

    Args:
        make: makes one run of a variant; None runs the library's stages.
        say: told one line at every variant, and why one failed.
        jobs: runs made side by side by the library's stages, each in a process.
        only: variants to make, and those that they start from; empty is all.
        stop_after: seconds from now when what is not done is left to a later study. The report
            says so; a later study takes everything up where it was cut.

    Returns:
        facts: `claims` with their verdicts, and `failed` runs with their reasons.

    Raises:
        JetspecError: a setting is wrong, or every variant failed.
    """
    stop_at = None if stop_after is None else time.monotonic() + stop_after
    chosen = _chosen(plan, only)
    base = absolute_storage(plan.base_run())
    runs = {name: absolute_storage(run) for name, run in plan.runs().items() if name in chosen}
    say(f"{len(runs)} variants: output in {base.storage}")

    def start_of(name: str, before: Mapping[str, Outcome]) -> str | None:
        return _start(plan, name, runs[name], before)

    if make is None and (jobs > 1 or stop_at is not None):
        made = make_side_by_side(plan, runs, jobs=jobs, stop_at=stop_at, start_of=start_of, say=say)
    else:
        with keeping():
            made = _one_by_one(plan, runs, make, start_of, say)
    if all(outcome.failure for outcome in made.values()):
        by_reason: dict[str, list[str]] = {}
        for name, outcome in made.items():
            by_reason.setdefault(str(outcome.failure), []).append(name)
        failures = "; ".join(f"{', '.join(names)}: {why}" for why, names in by_reason.items())
        raise JetspecError("ablations", f"all {len(runs)} variants failed", failures)
    left_out = Outcome((), {}, failure=LEFT_OUT)
    outcomes = {name: made.get(name, left_out) for name in plan.runs()}
    return _write_report(plan, base, outcomes)


def _one_by_one(
    plan: AblationConfig,
    runs: Mapping[str, RunConfig],
    make: MakeVariant | None,
    start_of: Callable[[str, Mapping[str, Outcome]], str | None],
    say: Callable[[str], None],
) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    together = groups(plan, runs) if make is None else {}
    lost: dict[str, JetspecError] = {}
    for number, (name, run) in enumerate(runs.items(), 1):
        say(f"variant {number} of {len(runs)}: {name}")
        try:
            start = start_of(name, outcomes)
            if make is not None:
                outcomes[name] = make(name, run, start)
            else:
                tell = partial(_tell, say, name)
                samples = make_samples(plan, name, run, tell=tell)
                if (group := together.get(name)) is not None:
                    for member in group.names:
                        del together[member]
                    lost |= _together({n: runs[n] for n in group.names}, group, start, samples, say)
                if name in lost:
                    raise lost[name]
                made = make_member(plan, name, run, start, samples, tell=tell)
                assert made is not None  # its time is not limited
                outcomes[name] = made
        except Exception as error:  # whatever one variant dies of must not end the others
            outcomes[name] = failed(error)
            say(f"variant {name} failed: {outcomes[name].failure}")
    return outcomes


def _tell(say: Callable[[str], None], name: str, text: str) -> None:
    say(f"{name}: {text}")


def _together(
    members: Mapping[str, RunConfig],
    group: Group,
    start: str | None,
    samples: StageResult,
    say: Callable[[str], None],
) -> dict[str, JetspecError]:
    """Train a group's heads; what its members' training died of, by name."""
    say(group.title)
    try:
        return train_together(members, start, samples, tell=partial(_tell, say, group.title)) or {}
    except Exception as error:  # what ends them together may spare each of them alone
        say(f"{group.title}, failed: {failed(error).failure}; each is trained alone")
        return {}


def _chosen(plan: AblationConfig, only: Collection[str]) -> set[str]:
    """Names of the runs to make."""
    wanted = set(only) or set(plan.variants)
    for name in only:
        if name not in plan.variants:
            known = ", ".join(plan.variants)
            raise JetspecError("--only", name, f"no variant is called so; choose from {known}")
    # Starts stand before what starts from them: backwards, one pass finds them all.
    for name, variant in reversed(plan.variants.items()):
        if name in wanted and variant.start is not None:
            wanted.add(variant.start)
    return {member for name in wanted for member in plan.members(name).values()}


def _start(
    plan: AblationConfig, name: str, run: RunConfig, before: Mapping[str, Outcome]
) -> str | None:
    """The head that training starts from: another variant's, else the run's own warm start."""
    other = plan.start_of(name)
    if other is None:
        start = run.training.warm_start
        return None if start is None else head_directory(start)
    if before[other].failure:
        raise JetspecError("start", other, "that variant failed")
    return str(before[other].facts["head_uri"])


def _write_report(
    plan: AblationConfig, base: RunConfig, outcomes: dict[str, Outcome]
) -> StageResult:
    """The report and its figures under the storage, named by all they rest on."""
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
        storage.write_json(storage.join(uri, FINDINGS), document)
        with storage.atomic_write(storage.join(uri, REPORT), "w") as file:
            file.write(markdown(plan, found, made_on))
        claims = [claim for table in found["tables"] for claim in table["claims"]]
        failed = {name: o.failure for name, o in outcomes.items() if o.failure}
        facts: dict[str, Any] = {"claims": claims, "failed": failed}
        storage.write_manifest(uri, kind=STAGE, config_hash=key, **facts)
    manifest = storage.read_manifest(uri, kind=STAGE)
    facts = {name: manifest[name] for name in ("claims", "failed")}
    return StageResult(STAGE, uri, key, reused, facts)


def copy_report(uri: str, directory: str) -> None:
    """The report and its figures in a directory of the user's; what lies there is replaced."""
    for name in (REPORT, FINDINGS):
        fs, path = storage.filesystem(storage.join(uri, name))
        with (
            fs.open(path, "rb") as source,
            storage.atomic_write(storage.join(directory, name)) as file,
        ):
            file.write(source.read())


def absolute_storage(run: RunConfig) -> RunConfig:
    """The run with a storage that means the same from every working directory."""
    return run.model_copy(update={"storage": storage.absolute(run.storage)})
