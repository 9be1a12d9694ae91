"""The head stage: samples in, a finished head directory out.

One process a worker calls `distil_head`: alone (`python -m jetspec train`), under torchrun, or in a
Ray Train worker.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from jetspec import __version__
from jetspec.config import RunConfig
from jetspec.errors import JetspecError
from jetspec.heads.base import DraftHead
from jetspec.heads.config import HeadSettings
from jetspec.heads.doctor import require_fit, training_record
from jetspec.heads.registry import load_head, new_head, save_head
from jetspec.kept import kept
from jetspec.records import environment
from jetspec.samples import SampleColumns, read_columns
from jetspec.stages import StageResult
from jetspec.storage import (
    content_hash,
    filesystem,
    is_complete,
    join,
    list_files,
    read_manifest,
    stage_uri,
    write_json,
    write_manifest,
)
from jetspec.targets.load import load_target, target_fingerprint
from jetspec.targets.target import Target
from jetspec.training.loop import Report, TrainResult, train
from jetspec.training.world import World


def head_key(config: RunConfig, fingerprint: str, samples_uri: str, warm_start: str | None) -> str:
    """Hash of everything that shapes the head.

    Raises:
        JetspecError: the samples or the warm start are not complete.
    """
    shaping = {
        "code_version": __version__,
        "target": fingerprint,
        "samples": _files(samples_uri, "samples"),
        "head": config.head.model_dump(mode="json"),
        "training": config.training.shaping(),
        "enable_thinking": config.regeneration.enable_thinking,
        "warm_start": None if warm_start is None else _files(warm_start, "head"),
    }
    if config.training.more_samples:
        more = [_files(uri, "samples") for uri in config.training.more_samples]
        shaping["more_samples"] = more
    return content_hash(shaping)


def head_stage(
    config: RunConfig, samples_uri: str, warm_start: str | None
) -> tuple[StageResult, bool]:
    """(where the stage's output is or will be, whether it is there already)."""
    key = head_key(config, target_fingerprint(config.target), samples_uri, warm_start)
    uri = stage_uri(config.storage, "heads", key)
    if not is_complete(uri):
        return StageResult("head", uri, key, reused=False), False
    manifest = read_manifest(uri, kind="head")
    return StageResult("head", uri, key, reused=True, facts=_facts(manifest)), True


def distil_head(
    config: RunConfig,
    samples_uri: str,
    *,
    warm_start: str | None = None,
    world: World = World(),
    report: Report = lambda step, metrics: None,
) -> StageResult:
    """Train the run's head and write its directory, or reuse it when it is there.

    Every process of `world` calls this; rank 0 writes. A run that was broken off resumes from its
    last checkpoint.

    Args:
        warm_start: a head directory whose weights training starts from; None starts fresh. The
            word `champion` of the run file has to be looked up in the registry by the caller.

    Raises:
        JetspecError: incomplete samples, a warm start that does not fit, or what `train` raises.
    """
    if warm_start == "champion":
        raise JetspecError(
            "training.warm_start", warm_start, "needs the registry; give a directory"
        )
    if config.training.freeze_backbone and warm_start is None:
        mend = "a fresh head would stay as it is; set training.warm_start"
        raise JetspecError("training.freeze_backbone", True, mend)
    stage, done = head_stage(config, samples_uri, warm_start)
    if done:
        return stage
    target = load_target(config.target)
    align_weights(target)
    head = starting_head(
        config.head, target, warm_start, config.training.seed,
        tell=_say if world.rank == 0 else lambda line: None,
    )  # fmt: skip
    checkpoints = stage_uri(config.storage, "checkpoints", stage.key)
    result = train(
        config.training,
        head,
        target,
        training_samples(config, samples_uri),
        directory=checkpoints,
        world=world,
        report=report,
    )
    facts: dict[str, Any] = {}
    if world.rank == 0:
        facts = write_stage(config, stage, target, result, samples_uri, warm_start, world)
        fs, path = filesystem(checkpoints)
        fs.rm(path, recursive=True)
    world.sum(torch.zeros(1, device=target.device))  # nobody leaves before the manifest is there
    return StageResult("head", stage.uri, stage.key, reused=False, facts=facts)


def training_samples(config: RunConfig, samples_uri: str) -> SampleColumns:
    """The run's samples and `training.more_samples`, of complete directories.

    Raises:
        JetspecError: one is not complete, or what `read_columns` raises.
    """
    uris = (samples_uri, *config.training.more_samples)
    files = tuple(_files(uri, "samples") for uri in uris)
    return kept("samples", (uris, files), lambda: read_columns(*uris))


def align_weights(target: Target) -> None:
    """Copy weights that lie askew in memory.

    Matrix products on a CPU round by alignment, and a file's tensors lie where its header happens
    to end: without this, a resumed run could differ from an unbroken one in the last bit.
    """
    if target.device.type == "cpu":
        for parameter in target.model.parameters():
            if parameter.data_ptr() % 64:
                parameter.data = parameter.data.clone()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def starting_head(
    config: HeadSettings,
    target: Target,
    warm_start: str | None,
    seed: int,
    *,
    tell: Callable[[str], None] = lambda line: None,
) -> DraftHead:
    """Fresh weights, or those of `warm_start`.

    Path scores are fresh where the warm start has none, or of another producer or from other rows;
    in everything else its shape must be the run's.

    Args:
        tell: called with one line where the warm start has path scores that are not taken.

    Raises:
        JetspecError: the first setting in which they differ.
    """
    head = new_head(config, target, seed)
    if warm_start is None:
        return head
    fs, path = filesystem(warm_start)
    marks = [(name, fs.ukey(f"{path}/{name}")) for name in list_files(warm_start)]
    start = kept("start", (warm_start, marks), lambda: load_head(warm_start))
    require_fit(start, target, warm_start)
    if start.config.kind != config.kind:
        mend = f"the warm start {warm_start} is {start.config.kind}; set that"
        raise JetspecError("head.kind", config.kind, mend)
    for name in type(head.config).model_fields:
        if name in head.added_to(start):
            continue
        value, theirs = getattr(head.config, name), getattr(start.config, name)
        if theirs != value:
            raise JetspecError(
                f"head.{name}", value, f"the warm start {warm_start} has {theirs}; set that"
            )
    head.load_state_dict(head.inherited(start), strict=False)
    if (left := head.left_behind(start)) is not None:
        tell(f"warm start {warm_start}: {left}")
    return head


def write_stage(
    config: RunConfig,
    stage: StageResult,
    target: Target,
    result: TrainResult,
    samples_uri: str,
    warm_start: str | None,
    world: World,
    more: Mapping[str, Any] = {},
) -> dict[str, Any]:
    """Write a finished head's directory; returns the facts of its manifest.

    Args:
        more: further facts.
    """
    record = training_record(target, enable_thinking=config.regeneration.enable_thinking)
    save_head(result.head, stage.uri, target_fingerprint=target.fingerprint, training=record)
    devices = "gpu" if target.device.type == "cuda" else "cpu"
    facts = {
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "samples_uri": samples_uri,
        "samples_key": _files(samples_uri, "samples"),
        "more_samples": list(config.training.more_samples),
        "more_samples_keys": [_files(uri, "samples") for uri in config.training.more_samples],
        "warm_start": warm_start,
        **_earlier(warm_start),
        "tau_estimate": result.tau_estimate,
        "steps": result.steps,
        "parameters": sum(p.numel() for p in result.head.parameters()),
        "counts": result.counts,
        "seconds": round(result.seconds, 3),
        "worker_seconds": round(result.seconds * world.size, 3),
        f"{devices}_hours": result.seconds * world.size / 3600,
        "workers": world.size,
        "loss": result.curve[-1]["loss"] if result.curve else None,
        **more,
    }
    settings = config.model_dump(mode="json", include={"target", "head", "training"})
    write_json(
        join(stage.uri, "training.json"),
        {
            "curve": result.curve,
            "facts": facts,
            "config": settings,
            "environment": environment(),
        },
    )
    write_manifest(stage.uri, kind="head", config_hash=stage.key, **facts)
    return facts


def _facts(manifest: dict[str, Any]) -> dict[str, Any]:
    own = {"kind", "code_version", "config_hash", "files"}
    return {key: value for key, value in manifest.items() if key not in own}


def _earlier(warm_start: str | None) -> dict[str, float]:
    """Steps and worker-seconds that went into the head that training started from, its own starts
    included; nothing where its manifest does not say."""
    if warm_start is None:
        return {}
    start = read_manifest(warm_start, kind="head")
    spent = start.get("worker_seconds")
    if spent is None or (start.get("warm_start") and "earlier_worker_seconds" not in start):
        return {}
    return {
        "earlier_steps": start["steps"] + start.get("earlier_steps", 0),
        "earlier_worker_seconds": spent + start.get("earlier_worker_seconds", 0.0),
    }


def _files(directory: str, kind: str) -> str:
    """Hash of a complete directory's contents."""
    return content_hash(read_manifest(directory, kind=kind)["files"])
