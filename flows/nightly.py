"""Does the target differ from the one the champion was made for? If not, there is nothing to do."""

from dataclasses import asdict, dataclass
from typing import Any

from jetspec.config import RunConfig
from jetspec.heads.shipped import SHIPPED


@dataclass(frozen=True)
class Decision:
    """What a run that only follows the target should do.

    Attributes:
        go: make a new head.
        reason: one sentence for the record.
        fingerprint: the target's, now.
        champion_version: the registered version that was compared, if any.
        warm_start: `champion` when its weights are where training starts.
    """

    go: bool
    reason: str
    fingerprint: str
    champion_version: int | None = None
    warm_start: str | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def decide(
    fingerprint: str, champion_version: int | None, champion_fingerprint: str | None
) -> Decision:
    """No champion: go. Same fingerprint: skip. Another one: go, starting from the champion."""
    if champion_version is None:
        return Decision(True, "no champion yet", fingerprint)
    if champion_fingerprint == fingerprint:
        reason = f"the target is the one champion {champion_version} was made for"
        return Decision(False, reason, fingerprint, champion_version)
    was = (champion_fingerprint or "unknown")[:12]
    reason = f"the target changed from {was} to {fingerprint[:12]}"
    return Decision(True, reason, fingerprint, champion_version, "champion")


def check_target(config: RunConfig) -> Decision:
    """The decision for this run's target, its fingerprint taken without loading the model."""
    from flows import registry
    from jetspec.targets.load import target_fingerprint

    fingerprint = target_fingerprint(config.target)
    champion = registry.champion(config)
    if champion is None:
        return decide(fingerprint, None, None)
    return decide(fingerprint, champion.version, champion.fingerprint)


def following(config: RunConfig, decision: Decision) -> RunConfig:
    """The config of the run that `decision` asks for: a head of the user's own stays the start."""
    if decision.warm_start is None or config.training.warm_start not in (None, SHIPPED):
        return config
    training = config.training.model_copy(update={"warm_start": decision.warm_start})
    return config.model_copy(update={"training": training})


def record_skip(config: RunConfig, decision: Decision) -> str:
    """Keep the skip as a finished run in MLflow; returns its run id."""
    from flows import tracking

    facts = {
        "target_fingerprint": decision.fingerprint,
        "champion_version": decision.champion_version,
    }
    return tracking.log_skip(config, decision.reason, facts)
