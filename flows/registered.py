"""What the registry holds of a head: its name, a version in short, and a version in full."""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jetspec.errors import JetspecError
from jetspec.targets.config import TargetConfig

NAME_PREFIX = "jetspec-"


@dataclass(frozen=True)
class Version:
    """One registered head, as the registry knows it without opening its files.

    Attributes:
        created: milliseconds since 1970.
        metrics: the headline figures.
        tags: lineage in short, e.g. `target_fingerprint`, `head_uri`.
    """

    name: str
    version: int
    model_id: str
    aliases: tuple[str, ...]
    created: int
    metrics: dict[str, float]
    tags: dict[str, str]

    @property
    def fingerprint(self) -> str:
        return self.tags.get("target_fingerprint", "")

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "aliases": list(self.aliases)}


@dataclass(frozen=True)
class ChampionRecord:
    """A registered head with its files at hand.

    Attributes:
        head_uri: local directory with the head's files, for load_head.
        fingerprint: of the target that the head drafts for.
        metrics: the headline figures and those of each cell.
        lineage: target, data, code, config and run behind it.
        serving_table: which budget to use at which batch size.
        records: the cells it was judged on.
    """

    name: str
    version: int
    model_id: str
    head_uri: str
    fingerprint: str
    metrics: dict[str, float]
    lineage: dict[str, Any]
    serving_table: Any
    verdict: dict[str, Any]
    records: list[dict[str, Any]]
    previous_champion: int | None

    def as_json(self) -> dict[str, Any]:
        """Everything a script needs; of the records only how many there are."""
        return {**asdict(self), "records": len(self.records)}


def registered_name(target: TargetConfig) -> str:
    """`jetspec-<slug>` after the target's name: stable while its weights change."""
    source = target.source
    if source == "embedded":
        source = "SmolLM2-135M-Instruct"
    elif source.endswith(".gguf") or source.startswith(("/", ".", "~")) or Path(source).exists():
        source = Path(source).expanduser().absolute().name.removesuffix(".gguf")
    return NAME_PREFIX + re.sub(r"[^a-z0-9]+", "-", source.lower()).strip("-")


def check_verdict(record: ChampionRecord, *, force: bool) -> None:
    """Refuse a version that its gates refused, unless forced.

    Raises:
        JetspecError: the first gate that said no, and why.
    """
    if force or record.verdict.get("promote"):
        return
    failed = [r for r in record.verdict.get("reasons", []) if not r["passed"]]
    said = "; ".join(f"{r['gate']}: {r['detail']}" for r in failed) or "no verdict is recorded"
    raise JetspecError(
        "version", record.version, f"its gates said no ({said}); --force promotes it all the same"
    )
