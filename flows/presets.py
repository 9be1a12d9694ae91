"""The run files that ship with the project, named without their path."""

from importlib.resources import files
from pathlib import Path

from jetspec.config import RunConfig, load_config
from jetspec.errors import JetspecError

_RUNS = files("flows") / "runs"


def preset_names() -> list[str]:
    return sorted(p.name.removesuffix(".yaml") for p in _RUNS.iterdir() if p.name.endswith(".yaml"))


def resolve_run(run: str, overrides: tuple[str, ...] = ()) -> RunConfig:
    """The config behind `run`: a preset's name, or the path of a YAML file.

    Raises:
        JetspecError: neither exists, or the file is not a valid run.
    """
    if run.endswith((".yaml", ".yml")) or "/" in run:
        return load_config(run, overrides)
    preset = _RUNS / f"{run}.yaml"
    if not preset.is_file():
        names = ", ".join(preset_names())
        raise JetspecError("run", run, f"no such preset (there are: {names}) or .yaml file")
    return load_config(Path(str(preset)), overrides)
