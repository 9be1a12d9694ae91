"""The last stage: a measured head is examined, registered as challenger, and perhaps promoted."""

import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flows import registry, tracking
from flows.metrics import head_metrics, headline_metrics
from flows.registered import ChampionRecord
from jetspec import __version__, storage
from jetspec.config import RunConfig
from jetspec.errors import JetspecError
from jetspec.promotion import Reason, Verdict, gates
from jetspec.stages import StageResult

Doctor = Callable[[RunConfig, str], Iterable[Any]]


def examine(config: RunConfig, head_uri: str) -> Iterable[Any]:
    """The doctor's findings for a head on this run's target."""
    from jetspec.heads.doctor import check_head
    from jetspec.targets.load import load_target

    return check_head(head_uri, load_target(config.target))


def promote_head(
    config: RunConfig,
    head_uri: str,
    evaluation_uri: str,
    *,
    run: tracking.Run,
    samples_uri: str | None = None,
    champion_records: list[dict[str, Any]] | None = None,
    doctor: Doctor = examine,
) -> StageResult:
    """Register a head with its evaluation as challenger; make it champion if every gate passes.

    Args:
        head_uri, evaluation_uri: complete stage directories that belong together.
        run: the MLflow run that the version names as its origin.
        samples_uri: the samples it was trained on, for the lineage.
        champion_records: cells of the champion to compare with; None takes those it was
            registered with.

    Returns:
        facts: promoted, champion (version or None), version, name, reasons, metrics.

    Raises:
        JetspecError: the evaluation is of another head or target.
    """
    from jetspec.evaluation.matrix import SERVING_TABLE, read_records

    head = storage.read_manifest(head_uri, kind="head")
    evaluation = storage.read_manifest(evaluation_uri, kind="evaluation")
    _check_pair(head_uri, head, evaluation_uri, evaluation)
    records = read_records(evaluation_uri)
    headline = headline_metrics(records, config)
    figures = {**headline, **head_metrics(records)}
    tracking.log_head(run, head_uri, figures, {"head": config.head.model_dump(mode="json")})
    champion = registry.champion(config)
    if champion_records is None and champion is not None:
        champion_records = champion.records
    if champion is not None and _same_head(champion, head):
        reason = f"this head already is champion version {champion.version}"
        verdict = Verdict(False, (Reason("new", False, reason),))
    else:
        findings = list(doctor(config, head_uri))
        verdict = gates(records, champion_records, findings, config.promotion)
    version = registry.register(
        config,
        head_uri,
        lineage=lineage(config, head_uri, evaluation_uri, samples_uri, run),
        serving_table=storage.read_json(storage.join(evaluation_uri, SERVING_TABLE)),
        records=records,
        metrics=figures,
        headline=headline,
        verdict=verdict.as_json(),
        run_id=run.run_id,
    )
    if verdict.promote:
        registry.promote(config, version.version)
    now = version.version if verdict.promote else champion.version if champion else None
    run.log_tags({"jetspec.promoted": verdict.promote, "jetspec.version": version.version})
    return StageResult(
        stage="promotion",
        uri=f"models:/{version.name}/{version.version}",
        key=storage.content_hash([version.name, version.version]),
        reused=not verdict.promote and now == version.version,
        facts={
            "promoted": verdict.promote,
            "champion": now,
            "version": version.version,
            "name": version.name,
            "reasons": list(verdict.as_json()["reasons"]),
            "metrics": headline,
        },
    )


def _same_head(champion: ChampionRecord, head: dict[str, Any]) -> bool:
    serving = storage.read_manifest(champion.head_uri, kind="head", verify=False)
    return tracking.head_hash(serving) == tracking.head_hash(head)


def _check_pair(
    head_uri: str, head: dict[str, Any], evaluation_uri: str, evaluation: dict[str, Any]
) -> None:
    if evaluation.get("head_hash") != storage.content_hash(head["files"]):
        raise JetspecError(
            "evaluation", evaluation_uri, f"is not of the head {head_uri}; evaluate that head"
        )
    if evaluation.get("target_fingerprint") != head.get("target_fingerprint"):
        raise JetspecError(
            "evaluation", evaluation_uri, "was measured on another target than the head's"
        )


def lineage(
    config: RunConfig,
    head_uri: str,
    evaluation_uri: str,
    samples_uri: str | None,
    run: tracking.Run,
) -> dict[str, Any]:
    """Where a head came from, in values that a reader can follow years later."""
    head = storage.read_manifest(head_uri, kind="head", verify=False)
    evaluation = storage.read_manifest(evaluation_uri, kind="evaluation", verify=False)
    resolved = config.model_dump(mode="json")
    data = samples_uri and storage.sha256_file(storage.join(samples_uri, storage.MANIFEST))
    return {
        "target": resolved["target"],
        "target_fingerprint": head.get("target_fingerprint"),
        "samples_uri": samples_uri,
        "data_manifest_sha256": data,
        "prompts_hash": evaluation.get("prompts_hash"),
        "head_uri": head_uri,
        "head_sha256": tracking.head_hash(head),
        "evaluation_uri": evaluation_uri,
        "code_version": code_version(),
        "config_hash": storage.content_hash(resolved),
        "config_uri": f"runs:/{run.run_id}/run.json",
        "run_id": run.run_id,
    }


def code_version() -> str:
    """The package's version, and the commit where the code runs from a clone."""
    root = Path(__file__).resolve().parent.parent
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return __version__
    return f"{__version__}+{done.stdout.strip()}"
