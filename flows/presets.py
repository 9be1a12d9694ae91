"""The run files that ship with the project, named without their path."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from jetspec.config import RunConfig, load_config
from jetspec.errors import JetspecError

_RUNS = files("flows") / "runs"


def preset_names() -> list[str]:
    return sorted(p.name.removesuffix(".yaml") for p in _RUNS.iterdir() if p.name.endswith(".yaml"))


def resolve_run(run: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The config behind `run`: a preset's name, or the path of a YAML file.

    Raises:
        JetspecError: neither exists, or the file is not a valid run.
    """
    if _is_path(run):
        return load_config(run, tuple(overrides), Path(str(_RUNS)))
    preset = preset_path(run)
    if not preset.is_file():
        names = ", ".join(preset_names())
        raise JetspecError("run", run, f"no such preset (there are: {names}) or .yaml file")
    return load_config(preset, tuple(overrides))


def placed(storage: str | None, overrides: Sequence[str] | None) -> tuple[str, ...]:
    """The overrides of a flow run: a deployment's storage first, so that one of its own wins."""
    place = () if storage is None else (f"storage={storage}",)
    return (*place, *(overrides or ()))


def preset_path(run: str) -> Path:
    """The file that `run` names, whether it is there or not."""
    return Path(run) if _is_path(run) else Path(str(_RUNS / f"{run}.yaml"))


def _is_path(run: str) -> bool:
    return run.endswith((".yaml", ".yml")) or "/" in run
