"""How deep a text agrees with every tree of many shapes that one draft makes.

Greedy acceptance asks for the deepest node whose whole path is the text behind the anchor. Of a
chain that is read off the draft's edges. The exact best-first tree of a budget is the beginning of
a larger one's, so one build serves all budgets: a path's nodes are numbered in the order in which
best-first takes them. For slots' chains and best-first trees, without calibration or widths by
depth, nothing here waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jetspec.errors import JetspecError
from jetspec.trees.build import build_tree, scored_best_first
from jetspec.trees.config import TreeConfig
from jetspec.trees.draft import Draft
from jetspec.trees.tree import Tree

_NEVER = torch.iinfo(torch.long).max


@dataclass(frozen=True)
class Shape:
    """One way to draft with a head.

    Attributes:
        scores: `slot` takes the head's edges out, `path` and None leave the draft as it is.
    """

    tree: TreeConfig
    scores: str | None = None


def agreed(draft: Draft | Tree, anchors: Tensor, text: Tensor, shapes: Sequence[Shape]) -> Tensor:
    """long [S, R], for every shape and row: depth of the deepest node whose whole path is the text.

    Args:
        draft: of R rows.
        anchors: long [R].
        text: long [R, D], what follows each anchor, -1 beyond its answer; D is at least as deep as
            the deepest shape.

    Raises:
        JetspecError: `slot` of a draft that has path scores alone, or as `build_tree`.
    """
    found: dict[int, Tensor] = {}
    families: dict[Shape, list[int]] = {}
    for number, shape in enumerate(shapes):
        families.setdefault(_family(shape, draft), []).append(number)
    for family, numbers in families.items():
        trees = [shapes[number].tree for number in numbers]
        own = _scored(draft, family.scores)
        found |= zip(numbers, _of_family(own, anchors, text, trees), strict=True)
    return torch.stack([found[number] for number in range(len(shapes))])


def _family(shape: Shape, draft: Draft | Tree) -> Shape:
    """Shapes with the same one are answered together."""
    alike: dict[str, int | None] = {}
    if shape.tree.builder == "best_first":
        alike = {"budget": 1}
    elif shape.tree.builder == "chain" and isinstance(draft, Draft):
        alike = {"budget": 1, "depth": None}
    return Shape(shape.tree.model_copy(update=alike), shape.scores)


def _scored(draft: Draft | Tree, scores: str | None) -> Draft | Tree:
    if scores != "slot":
        return draft
    bare = None if isinstance(draft, Tree) else draft.without_edges()
    if bare is not None:
        return bare
    if isinstance(draft, Draft) and draft.edge_scores.stride(2) == 0:
        return draft  # a head of slot scores
    raise JetspecError("evaluation.scores", "slot", "this head has path scores alone")


def _of_family(
    draft: Draft | Tree, anchors: Tensor, text: Tensor, trees: Sequence[TreeConfig]
) -> list[Tensor]:
    """long [R] for each of `trees`, which differ in what `_family` leaves out."""
    largest = max(trees, key=lambda tree: tree.budget)
    if isinstance(draft, Draft) and largest.builder == "chain":
        longest = _chain(draft.narrow(largest.width, None, largest.widths), text)
        return [longest.clamp(max=min(tree.budget, tree.depth or tree.budget)) for tree in trees]
    if isinstance(draft, Draft) and largest.builder == "best_first":
        draft = draft.narrow(largest.width, largest.depth, largest.widths)
        nodes, scores = scored_best_first(draft, largest)
        slot = (nodes.depths - 1).clamp(min=0)
        right = _ranks(draft, text).gather(1, slot) == nodes.ranks
        real = torch.arange(nodes.depths.shape[1], device=text.device) < nodes.sizes[:, None]
        right = (right | (nodes.depths == 0)) & real
        parents, depths, deepest = nodes.parents, nodes.depths, draft.depth
    else:
        tree = build_tree(draft, anchors, largest)
        parents, depths, scores, deepest = tree.parents, tree.depths, tree.scores, text.shape[1]
        slot = (depths - 1).clamp(min=0, max=deepest - 1)
        same = (text.gather(1, slot) == tree.tokens) & (depths <= deepest)
        right = (same | (depths == 0)) & tree.valid()
    right = _whole_paths(right, parents, deepest)
    if largest.builder != "best_first":
        return [(depths * right).amax(1)]
    order = _order(scores)
    # The root, and every node that is not on the text's path, lands in column 0.
    path = order.new_full((len(order), deepest + 1), _NEVER).scatter_(1, depths * right, order)
    return [(path[:, 1:] <= tree.budget).sum(1) for tree in trees]


def _ranks(draft: Draft, text: Tensor) -> Tensor:
    """long [R, D]: the place of each slot's token of the text among its candidates, or -1."""
    same = draft.tokens == text[:, : draft.depth, None]
    place = same.to(torch.int8).argmax(-1)
    return torch.where(same.any(-1), place, -1)


def _chain(draft: Draft, text: Tensor) -> Tensor:
    """long [R]: tokens of the text that the chain of likeliest children agrees with."""
    ranks = _ranks(draft, text)
    above = torch.nn.functional.pad(ranks[:, :-1], (1, 0)).clamp(min=0)
    index = above[..., None, None].expand(-1, -1, 1, draft.width)
    best, likeliest = draft.edge_scores.gather(2, index)[:, :, 0].max(-1)
    return ((likeliest == ranks) & (best > -torch.inf)).long().cumprod(1).sum(1)


def _whole_paths(right: Tensor, parents: Tensor, deepest: int) -> Tensor:
    """bool [R, N + 1]: nodes that are right with all of their ancestors."""
    above = parents.clamp(min=0)
    for _ in range(deepest.bit_length()):  # twice as many ancestors in every step
        right = right & right.gather(1, above)
        above = above.gather(1, above)
    return right


def _order(scores: Tensor) -> Tensor:
    """long [R, N + 1]: each node's place when best-first takes nodes one by one; the root's is 0.

    Of equal scores the first node is taken first, as builders have it.
    """
    taken = scores.argsort(dim=1, descending=True, stable=True)
    places = torch.arange(scores.shape[1], device=scores.device).expand_as(taken)
    return torch.empty_like(taken).scatter_(1, taken, places)
