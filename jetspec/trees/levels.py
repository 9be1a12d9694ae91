"""Drafting level by level, for drafters that read a token before they name the next one.

A parallel head scores a whole block at once; an autoregressive one (EAGLE-3, a draft model) runs
once a level. The best paths of a level, by cumulative log-probability, are read next; every
candidate seen on the way is a node of the tree that is handed over, and the budget's best of all
levels are chosen from it afterwards (EAGLE-2's expansion and reranking).
"""

from typing import Protocol

import torch
from torch import Tensor

from jetspec.trees.tree import Tree

_KEPT = 4  # times the width: what a level hands over, so that a tree stays small to prune


class Expand(Protocol):
    """Reads the next level's nodes; called once a level, with the nodes in drafting order."""

    def __call__(self, tokens: Tensor, parents: Tensor, mask: Tensor) -> Tensor:
        """log q of what follows each of M nodes, [B, M, V].

        Args:
            tokens: long [B, M], the nodes read now; the anchor in the first call.
            parents: long [B, M], each node's parent among the nodes of the call before.
            mask: bool [B, M, N], which of all N nodes read so far (these are the last M) a node
                sees: its ancestors and itself.
        """


def draft_levels(expand: Expand, anchors: Tensor, *, depth: int, width: int, beam: int) -> Tree:
    """Draft `depth` levels below each anchor.

    Args:
        anchors: long [B], the last committed tokens.
        width: children a node may have. A level keeps its 4 x `width` best paths: no best tree of
            so many nodes loses one by it, as far as `beam` reaches.
        beam: paths of a level that are read for the next one.

    Returns:
        The tree of all that was kept, best path first in every level, to be pruned to a budget.
    """
    batch, device = anchors.shape[0], anchors.device
    read = anchors[:, None]
    above = torch.zeros_like(read)
    scores = torch.zeros(read.shape, device=device)
    mask = torch.ones(batch, 1, 1, dtype=torch.bool, device=device)
    tokens, parents, totals, depths = [read], [above - 1], [scores], [above]
    start = 0  # where the level that is read begins among all nodes
    for level in range(1, depth + 1):
        log_q = expand(read, above, mask).float().clamp(max=0)
        best, children = log_q.topk(min(width, log_q.shape[-1]), dim=-1)  # [B, M, W]
        count = best.shape[-1]
        # A stable order: of equal paths the one with the better parent, then the better rank.
        paths = (scores[..., None] + best).flatten(1).sort(dim=1, descending=True, stable=True)
        kept = paths.indices[:, : _KEPT * count]
        parent = kept // count
        tokens.append(children.flatten(1).gather(1, kept))
        parents.append(start + parent)
        totals.append(paths.values[:, : _KEPT * count])
        depths.append(torch.full_like(kept, level))

        start += tokens[-2].shape[1]
        read, above, scores = tokens[-1][:, :beam], parent[:, :beam], totals[-1][:, :beam]
        seen = mask.gather(1, above[..., None].expand(-1, -1, mask.shape[2]))
        own = torch.eye(read.shape[1], dtype=torch.bool, device=device).expand(batch, -1, -1)
        mask = torch.cat([seen, own], dim=2)
    nodes = torch.cat(tokens, dim=1)
    return Tree(
        tokens=nodes,
        parents=torch.cat(parents, dim=1),
        depths=torch.cat(depths, dim=1),
        scores=torch.cat(totals, dim=1),
        sizes=torch.full_like(anchors, nodes.shape[1]),
    )
