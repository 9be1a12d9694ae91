"""The head that comes with the package: `shipped` stands for its directory wherever one is named.

It drafts for the embedded model, so that a first run starts from something that drafts well.
"""

from importlib.resources import files

SHIPPED = "shipped"


def head_directory(uri: str) -> str:
    """`uri` itself, or the directory inside the package when it is the word `shipped`."""
    if uri != SHIPPED:
        return uri
    return str(files("jetspec") / "data" / "heads" / "smollm2-135m-instruct")
