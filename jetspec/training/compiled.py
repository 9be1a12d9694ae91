"""Compiled layers of the heads that one process trains one after another."""

from jetspec.heads.base import DraftHead

_FORMS = 64  # of one layer: by mask, shapes, what of it is trained, and its place in the head


def compile_parts(head: DraftHead) -> None:
    """Compile a head's layers, beside those of heads of other shapes that this process trained.

    At torch's own limit, eight forms of one function, later heads would run as they are.
    """
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = max(dynamo.recompile_limit, _FORMS)
    for part in head.shards():
        part.compile()
