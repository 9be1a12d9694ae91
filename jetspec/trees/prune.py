"""From a scored tree to the part of it that fits the budget, by the builders' own rules.

A head that scores nodes by all of their ancestors cannot say so in edges between neighbouring
slots. It hands over a tree, larger than the budget, whose scores are final.
"""

import heapq
from collections.abc import Callable

import torch
from torch import Tensor

from jetspec.errors import JetspecError
from jetspec.trees.config import TreeConfig
from jetspec.trees.tree import Tree


def prune_tree(tree: Tree, config: TreeConfig) -> Tree:
    """The part of `tree` that `config` asks for: builder, budget, depth and width.

    Args:
        tree: scores never grow from a node to its child.

    Raises:
        JetspecError: a builder that reads slots, or a score that needs whole distributions.
    """
    if config.score != "cumulative":
        raise JetspecError("tree.score", config.score, "this head's trees are cumulative; set that")
    if config.builder not in PRUNERS:
        raise JetspecError(
            "tree.builder", config.builder, f"this head's trees take {', '.join(PRUNERS)}"
        )
    return keep_nodes(tree, PRUNERS[config.builder](tree, allowed_nodes(tree, config), config))


def keep_nodes(tree: Tree, keep: Tensor) -> Tree:
    """The tree of the nodes `keep`, bool [B, N + 1]: the root and a prefix-closed set, in order."""
    sizes = keep.sum(1)
    order = (~keep).to(torch.int8).argsort(dim=1, stable=True)[:, : int(sizes.max())]
    real = torch.arange(order.shape[1], device=order.device) < sizes[:, None]
    number = keep.long().cumsum(1) - 1
    above = tree.parents.gather(1, order)
    parents = number.gather(1, above.clamp(min=0)).masked_fill(above < 0, -1)
    return Tree(
        tokens=tree.tokens.gather(1, order),
        parents=parents.masked_fill(~real, -1),
        depths=tree.depths.gather(1, order).masked_fill(~real, 0),
        scores=tree.scores.gather(1, order).masked_fill(~real, -torch.inf),
        sizes=sizes,
    )


def best_nodes(tree: Tree, allowed: Tensor, config: TreeConfig) -> Tensor:
    """The `budget` best nodes of all. A child's score never exceeds its parent's and parents come
    first among equals, so they are prefix-closed by themselves."""
    score = tree.scores.masked_fill(~allowed, -torch.inf)
    order = score[:, 1:].argsort(dim=1, descending=True, stable=True)[:, : config.budget] + 1
    keep = torch.zeros_like(allowed).scatter_(1, order, True) & allowed
    keep[:, 0] = True
    return keep


def best_path(tree: Tree, allowed: Tensor, config: TreeConfig) -> Tensor:
    """One path: from every node to its likeliest child."""
    node = torch.zeros_like(tree.sizes)[:, None]
    keep = torch.zeros_like(allowed)
    keep[:, 0] = True
    for _ in range(min(config.budget, int(tree.depths.max()))):
        children = allowed & (tree.parents == node)
        best, child = tree.scores.masked_fill(~children, -torch.inf).max(1, keepdim=True)
        node = torch.where(best > -torch.inf, child, node)  # a path that has ended stays there
        keep.scatter_(1, node, True)
    return keep


def popped_nodes(tree: Tree, allowed: Tensor, config: TreeConfig) -> Tensor:
    """Algorithm 1 as printed: the best node is popped and all its children enter at once."""
    keep = torch.zeros_like(allowed)
    fields = zip(tree.parents.tolist(), tree.scores.tolist(), allowed.tolist(), strict=True)
    for row, (parents, scores, may) in enumerate(fields):
        children: list[list[int]] = [[] for _ in parents]
        for node in sorted(range(1, len(parents)), key=lambda n: -scores[n]):
            if may[node]:
                children[parents[node]].append(node)
        entered, heap = [0], [(0.0, 0, 0)]  # (-score, order of entry, node)
        while heap and len(entered) <= config.budget:
            for child in children[heapq.heappop(heap)[2]][: config.budget + 1 - len(entered)]:
                heapq.heappush(heap, (-scores[child], len(entered), child))
                entered.append(child)
        keep[row, entered] = True
    return keep


def allowed_nodes(tree: Tree, config: TreeConfig) -> Tensor:
    """bool [B, N + 1]: draft nodes within the depth whose whole path lies in the width."""
    allowed = tree.valid() & (tree.depths > 0)
    if config.depth is not None:
        allowed &= tree.depths <= config.depth
    siblings = tree.parents[:, :, None] == tree.parents[:, None, :]
    ahead = tree.scores[:, None, :] > tree.scores[:, :, None]
    order = torch.arange(tree.tokens.shape[1], device=allowed.device)
    tied = (tree.scores[:, None, :] == tree.scores[:, :, None]) & (order < order[:, None])
    allowed &= (siblings & (ahead | tied)).sum(2) < config.width
    above = tree.parents.clamp(min=0)
    for _ in range(int(tree.depths.max())):
        allowed &= (tree.parents <= 0) | allowed.gather(1, above)
    return allowed


PRUNERS: dict[str, Callable[[Tree, Tensor, TreeConfig], Tensor]] = {
    "chain": best_path,
    "algorithm1": popped_nodes,
    "best_first": best_nodes,
}
