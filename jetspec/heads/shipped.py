"""Heads that come with the package: `shipped` in a run file starts from the embedded model's."""

from importlib.resources import files

from jetspec.errors import JetspecError

SHIPPED = "shipped"


def resolve_shipped(warm_start: str | None) -> str | None:
    """A warm start's URI, with `shipped` replaced by the directory inside the package.

    Raises:
        JetspecError: this installation carries no head.
    """
    if warm_start != SHIPPED:
        return warm_start
    directory = files("jetspec") / "data" / "heads" / "smollm2-135m-instruct"
    if not directory.is_dir():
        raise JetspecError(
            "training.warm_start", SHIPPED, "no head comes with this installation; leave it out"
        )
    return str(directory)
