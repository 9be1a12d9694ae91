"""One run is one YAML file: every section's model lives beside the code it configures."""

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationError

from jetspec.errors import JetspecError
from jetspec.evaluation.config import EvaluationConfig
from jetspec.generation.config import RegenerationConfig
from jetspec.heads.config import HeadConfig, HeadSettings
from jetspec.heads.registry import parse_head
from jetspec.promotion import PromotionConfig
from jetspec.prompts import PromptsConfig
from jetspec.settings import Settings, first_mistake
from jetspec.targets.config import TargetConfig
from jetspec.training.config import TrainingConfig


class RayConfig(Settings):
    """Which Ray cluster does the work: `local` starts one here, `auto` or an address joins one."""

    address: str = "local"
    cpus: int | None = Field(None, ge=1)


class TrackingConfig(Settings):
    """Where MLflow keeps runs and the registry; None is a sqlite file under the run's storage."""

    uri: str | None = None
    experiment: str = "jetspec"


class RunConfig(Settings):
    """Everything that shapes a run. `storage` is a directory or any URI that fsspec opens."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    storage: str = Field("runs", min_length=1)
    target: TargetConfig = TargetConfig()
    prompts: PromptsConfig = PromptsConfig()
    regeneration: RegenerationConfig = RegenerationConfig()
    head: Annotated[SerializeAsAny[HeadSettings], BeforeValidator(parse_head)] = HeadConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    promotion: PromotionConfig = PromotionConfig()
    ray: RayConfig = RayConfig()
    tracking: TrackingConfig = TrackingConfig()


def load_config(
    path: str | Path, overrides: tuple[str, ...] = (), presets: Path | None = None
) -> RunConfig:
    """The run file at `path`, with `section.key=value` overrides laid over it (values are YAML).

    A file with `base: NAME` holds only what differs from another: from that preset, or from the
    run file at that path.

    Args:
        presets: the directory of the presets; None is that of the file itself.

    Raises:
        JetspecError: the file or its base is missing or is not YAML, bases go round in a circle,
            or a field is unknown or out of range.
    """
    raw = _read_run(Path(path), presets)
    for override in overrides:
        _apply(raw, override)
    return parse_config(raw)


def _read_run(path: Path, presets: Path | None, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    if path.resolve() in above:
        raise JetspecError("base", path.stem, "leads back to the run file itself")
    try:
        raw = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except FileNotFoundError as error:
        raise JetspecError("config", path, "not found; give the path of a run file") from error
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise JetspecError("config", path, f"cannot be read ({error})") from error
    if not isinstance(raw, dict):
        raise JetspecError("config", path, "must be a mapping of sections")
    base = raw.pop("base", None)
    if base is None:
        return raw
    named = isinstance(base, str) and not base.endswith((".yaml", ".yml"))
    place = (presets or path.parent) / f"{base}.yaml" if named else path.parent / str(base)
    if not place.is_file():
        raise JetspecError("base", base, f"not found ({place}); name a preset or a run file")
    return _laid_over(_read_run(place, presets, (*above, path.resolve())), raw)


def _laid_over(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes`, section by section; lists are replaced whole."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = _laid_over(old, value) if both else value  # type: ignore[arg-type]
    return merged


def parse_config(raw: dict[str, Any]) -> RunConfig:
    """A validated config from plain values; the first wrong field becomes a one-line error."""
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        raise first_mistake(error, "config") from error


def _apply(raw: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    if not sign or not all(key.split(".")):
        raise JetspecError("--set", override, "write it as section.key=value")
    *sections, last = key.split(".")
    for section in sections:
        raw = raw.setdefault(section, {})
        if not isinstance(raw, dict):
            raise JetspecError("--set", override, f"{section} is not a section")
    try:
        raw[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise JetspecError("--set", override, "the value is not YAML; quote it") from error
