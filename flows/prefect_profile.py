"""The Prefect profile `jetspec`: it makes a plain `prefect` command talk to `jetspec up`'s server.

`up` activates it, `down` gives the profile that was active before back.
"""

import os
import tomllib
from pathlib import Path

NAME = "jetspec"
_DEFAULT = "ephemeral"


def activate(api: str) -> str:
    """Write and activate the profile; returns the name of the one active before."""
    from prefect.settings.profiles import load_profiles, save_profiles

    profiles = load_profiles()
    previous = profiles.active_name or _DEFAULT
    if NAME in profiles.names:
        profiles.remove_profile(NAME)
    profiles.update_profile(NAME, {"PREFECT_API_URL": api})  # type: ignore[dict-item]
    profiles.set_active(NAME)
    save_profiles(profiles)
    return _DEFAULT if previous == NAME else previous


def restore(previous: str) -> None:
    """Remove the profile; activate `previous` unless the user has chosen another since."""
    from prefect.settings.profiles import load_profiles, save_profiles

    profiles = load_profiles()
    if NAME not in profiles.names:
        return
    profiles.remove_profile(NAME)
    if profiles.active_name == NAME:
        profiles.set_active(previous if previous in profiles.names else _DEFAULT)
    save_profiles(profiles)


def active_name() -> str | None:
    """The active profile, read without importing prefect, whose settings freeze on import."""
    home = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
    path = Path(os.environ.get("PREFECT_PROFILES_PATH", home / "profiles.toml")).expanduser()
    try:
        active = tomllib.loads(path.read_text()).get("active")
    except (OSError, tomllib.TOMLDecodeError):
        return None
    return str(active) if active else None
