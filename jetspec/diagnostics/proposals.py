"""What a head proposes, edges or a tree, seen alike: rows of it, and the text walked down in it."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.trees.draft import Draft
from jetspec.trees.tree import Tree

Proposal = Draft | Tree
_TREE = ("tokens", "parents", "depths", "scores", "sizes")
_OPTIONAL = ("confidence", "slot_scores")
_PADDING = {"tokens": 0, "parents": -1, "depths": 0, "scores": float("-inf")}


def select(proposal: Proposal, rows: Tensor) -> Proposal:
    """The proposals of `rows`, long [B]."""
    if isinstance(proposal, Tree):
        return Tree(**{name: getattr(proposal, name)[rows] for name in _TREE})
    own = {name: getattr(proposal, name) for name in _OPTIONAL}
    own = {name: scores[rows] for name, scores in own.items() if scores is not None}
    return Draft(proposal.tokens[rows].long(), proposal.edge_scores[rows], **own)


def stored(proposal: Proposal) -> dict[str, Tensor]:
    """The tensors to keep; rows that are one row expanded are kept once."""
    if isinstance(proposal, Tree):
        return {name: getattr(proposal, name) for name in _TREE}
    edges = proposal.edge_scores
    shared = edges.stride(2) == 0
    edges = (edges[:, :, :1] if shared else edges).float().contiguous()
    kept = {"tokens": proposal.tokens.int(), "edge_scores": edges}
    own = {name: getattr(proposal, name) for name in _OPTIONAL}
    return kept | {name: scores for name, scores in own.items() if scores is not None}


def stored_bytes(proposal: Proposal) -> int:
    """Bytes that one row takes."""
    return sum(t[:1].numel() * t.element_size() for t in stored(proposal).values())


def pad_trees(steps: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Trees of different sizes brought to one number of nodes, so that they can be joined."""
    widest = max(step["tokens"].shape[1] for step in steps)
    return [
        {
            name: F.pad(t, (0, widest - t.shape[1]), value=_PADDING[name]) if t.ndim > 1 else t
            for name, t in step.items()
        }
        for step in steps
    ]


class Level(NamedTuple):
    """One depth below the right parent, of B proposals; M candidates at most.

    Attributes:
        log_q: fp32 [B, M], of every candidate under the right parent; -inf where there is none.
        right: bool [B, M], which candidate is the text; at most one a row.
    """

    log_q: Tensor
    right: Tensor


def levels(proposal: Proposal, truth: Tensor) -> Iterator[Level]:
    """The text walked down: the candidates below the text so far, depth by depth.

    Where the text has left the candidates, a level has none at all (log q is -inf everywhere).

    Args:
        truth: long [B, D], -1 where there is no text.
    """
    if isinstance(proposal, Tree):
        yield from _tree_levels(proposal, truth)
        return
    rows = torch.arange(len(truth))
    parent = torch.zeros(len(truth), dtype=torch.long)
    alive = torch.ones(len(truth), dtype=torch.bool)
    for depth in range(truth.shape[1]):
        log_q = proposal.edge_scores[rows, depth, parent].clamp(max=0)  # [B, K]
        log_q = log_q.masked_fill(~alive[:, None], -torch.inf)
        exists = log_q > -torch.inf
        right = exists & (proposal.tokens[:, depth] == truth[:, depth, None])
        yield Level(log_q, right)
        parent, alive = right.long().argmax(1), right.any(1)


def _tree_levels(tree: Tree, truth: Tensor) -> Iterator[Level]:
    node = torch.zeros(len(truth), 1, dtype=torch.long)
    alive = torch.ones(len(truth), dtype=torch.bool)
    for depth in range(truth.shape[1]):
        children = tree.valid() & (tree.parents == node) & alive[:, None]
        log_q = (tree.scores - tree.scores.gather(1, node)).clamp(max=0)
        log_q = log_q.masked_fill(~children, -torch.inf)
        right = children & (tree.tokens == truth[:, depth, None])
        yield Level(log_q, right)
        node, alive = right.long().argmax(1, keepdim=True), right.any(1)
