"""One trained head seen two ways: as it is, and with its path scores taken out."""

import copy
from typing import Any

from jetspec.errors import JetspecError
from jetspec.heads.parallel import ParallelHead


def scored_head(head: Any | None, scores: str | None) -> Any | None:
    """The head that drafts with `scores`, its weights shared with `head`.

    Args:
        scores: `slot`: its edges and its second pass are left out, which is what a parallel head
            drafts before they correct it; `path`: the head itself; None: whatever it is.

    Raises:
        JetspecError: `path` of a head that has slot scores alone, or `slot` of one that has none.
    """
    if head is None or scores is None:
        return head
    if scores == "path":
        if not head.scores_paths:
            raise JetspecError("evaluation.scores", scores, "this head has slot scores alone")
        return head
    if not head.scores_paths:
        return head
    if not isinstance(head, ParallelHead):
        kind = head.config.kind
        raise JetspecError("evaluation.scores", scores, f"a {kind} head has path scores alone")
    bare = copy.copy(head)
    bare._modules = {**head._modules, "edges": None, "rescorer": None}
    bare.config = head.config.model_copy(update={"edges": None, "edge_rank": 0, "rescore": "none"})
    return bare
