"""Tree builders: from a draft's edges to the tree that the target verifies.

Budgets count draft nodes; the root is free. Builders see edges only, so slot and path scores pass
through the same code.
"""

import functools
import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from jetspec.errors import JetspecError
from jetspec.trees.config import TreeConfig
from jetspec.trees.draft import Draft
from jetspec.trees.drawn import Draws, SlotProposal, draw_order
from jetspec.trees.prune import prune_tree
from jetspec.trees.regrow import regrow_tree
from jetspec.trees.scores import order_edges
from jetspec.trees.tree import Tree


class Nodes(NamedTuple):
    """A tree's shape before tokens are filled in: all long [B, N + 1], root first; sizes [B].

    `ranks` is the node's place among its slot's candidates (0 at the root).
    """

    parents: Tensor
    ranks: Tensor
    depths: Tensor
    sizes: Tensor


def build_tree(
    draft: Draft | Tree, anchors: Tensor, config: TreeConfig, draws: Draws | None = None
) -> Tree:
    """The tree of at most `config.budget` draft nodes under each anchor.

    Args:
        draft: candidates and edges of B sequences, or a scored tree to be pruned.
        anchors: long [B], the last committed tokens.
        config: builder, budget, depth, width and score.
        draws: draw each node's children from the draft rather than taking its best, as the
            residual rule needs; for builders whose shape is fixed (see rules.py).

    Raises:
        JetspecError: the draft is a tree, and settings ask for what only slots can give.
    """
    if isinstance(draft, Tree):
        if config.widths:
            raise JetspecError("tree.widths", config.widths, "this head drafts trees, not slots")
        if draws is None and config.builder != "static":
            return prune_tree(draft, config)
        shape = SHAPES[config.builder](config, int(draft.depths.max()), config.width)
        parents, numbers, depths = (field[0] for field in shape[:3])
        return regrow_tree(draft, config, (parents, numbers, depths), draws)
    draft = draft.narrow(config.width, config.depth, config.widths)
    if draws is None:
        nodes, log_q = BUILDERS[config.builder](draft, config), None
    else:
        log_q, keys = draw_order(draft, draws)
        nodes = _fill(SHAPES[config.builder](config, draft.depth, draft.width), keys)
    widest = int(nodes.sizes.max())
    parents, ranks, depths = (field[:, :widest] for field in nodes[:3])
    real = torch.arange(widest, device=anchors.device) < nodes.sizes[:, None]
    parents = parents.masked_fill(~real, -1)
    depths = depths.masked_fill(~real, 0)
    return Tree(
        tokens=_tokens(draft, anchors, ranks, depths),
        parents=parents,
        depths=depths,
        scores=_cumulative(draft, parents, ranks, depths).masked_fill(~real, -torch.inf),
        sizes=nodes.sizes,
        proposal=None if log_q is None else SlotProposal(draft.tokens, log_q, ranks),
    )


def chain(draft: Draft, config: TreeConfig) -> Nodes:
    """One path: from every node to its likeliest child, whatever the configured score."""
    batch, depth, width = draft.tokens.shape
    steps = min(depth, config.budget)
    rank = torch.zeros(batch, 1, dtype=torch.long, device=draft.tokens.device)
    ranks, exists = [rank], []
    for slot in range(steps):
        row = draft.edge_scores[:, slot].gather(1, rank[..., None].expand(-1, -1, width))[:, 0]
        best, rank = row.max(-1, keepdim=True)  # [B, 1]
        ranks.append(rank)
        exists.append(best > -torch.inf)
    order = torch.arange(steps + 1, device=rank.device).expand(batch, -1)
    unbroken = torch.cat(exists, 1).long().cumprod(1).sum(1)
    return Nodes(order - 1, torch.cat(ranks, 1), order, unbroken + 1)


def algorithm1(draft: Draft, config: TreeConfig) -> Nodes:
    """Algorithm 1 of arXiv 2606.18394 as printed.

    A max-heap holds the nodes by score. The best is popped and ALL its top-W children enter the
    tree at once (as many as the budget still holds), until the budget is spent: a popped node's
    unlikely children take the place of likelier nodes elsewhere, which is what `best_first` mends.
    Equal scores pop in the order they entered.
    """
    edges = order_edges(draft.edge_scores, config, draft.confidence).cpu().numpy()  # [B, D, K, K]
    rows = [_algorithm1_row(edge, config.budget) for edge in edges]
    widest = max(len(row) for row in rows)
    padded = [row + [(-1, 0, 0)] * (widest - len(row)) for row in rows]
    fields = torch.tensor(padded, dtype=torch.long, device=draft.tokens.device)
    sizes = torch.tensor([len(row) for row in rows], device=draft.tokens.device)
    parents, ranks, depths = fields.unbind(-1)
    return Nodes(parents, ranks, depths, sizes)


def _algorithm1_row(edges: np.ndarray, budget: int) -> list[tuple[int, int, int]]:
    """(parent, rank, depth) of every node of one tree; edges: float array [D, K, K]."""
    deepest = len(edges)
    nodes = [(-1, 0, 0)]
    frontier = [(0.0, 0)]  # (-score, node); node numbers grow, so ties pop first in, first out
    while frontier and len(nodes) <= budget:
        cost, parent = heapq.heappop(frontier)
        _, rank, depth = nodes[parent]
        if depth == deepest:
            continue
        for child_rank, term in enumerate(edges[depth, rank].tolist()):
            if len(nodes) > budget:
                break
            if term == float("-inf"):
                continue
            heapq.heappush(frontier, (cost - term, len(nodes)))
            nodes.append((parent, child_rank, depth + 1))
    return nodes


def best_first(draft: Draft, config: TreeConfig) -> Nodes:
    """Exact: the `budget` best nodes of the full candidate tree.

    A node's score never exceeds its parent's (see scores.py), so the best prefix-closed set is
    simply the best nodes of all. Level by level the best `budget` survive (a node outside its
    level's best `budget` is outside the best `budget` overall) as far as they reach the worst of
    an earlier level's `budget`, then one selection over all levels. Ties go by (depth, parent,
    rank), which keeps a parent before an equal child.
    """
    return scored_best_first(draft, config)[0]


def scored_best_first(draft: Draft, config: TreeConfig) -> tuple[Nodes, Tensor]:
    """`best_first`, and the sums [B, N + 1] of the configured score that it ordered nodes by.

    Of missing nodes the sum is -inf. On a GPU one launch builds all trees.
    """
    edges = order_edges(draft.edge_scores, config, draft.confidence)
    if edges.is_cuda and _in_one_launch(draft, config):
        return built_in_one_launch(edges, config.budget)
    batch, depth, width = draft.tokens.shape
    device = draft.tokens.device
    score = torch.zeros(batch, 1, device=device)
    rank = torch.zeros(batch, 1, dtype=torch.long, device=device)
    levels, start = [], 0  # start: where the parents' level begins in the list of all nodes
    floor = torch.full((batch, 1), -torch.inf, device=device)
    for slot in range(depth):
        row = edges[:, slot].gather(1, rank[..., None].expand(-1, -1, width))  # [B, M, K]
        children = (score[..., None] + row).flatten(1)  # in (parent, rank) order
        kept = _best(children, config.budget)
        score = children.gather(1, kept)
        if kept.shape[1] == config.budget:  # what so many nodes of one level beat is out
            floor = torch.maximum(floor, score.amin(1, keepdim=True))
        inside = int(((score >= floor) & (score > -torch.inf)).sum(1).max())
        kept = kept.gather(1, _best(score, max(inside, 1)))
        score, rank = children.gather(1, kept), kept % width
        levels.append((score, start + kept // width, rank, torch.full_like(kept, slot + 1)))
        start += levels[-2][0].shape[1] if slot else 1
    score, parents, ranks, depths = (torch.cat(field, 1) for field in zip(*levels, strict=True))
    kept = _best(score, config.budget)
    exists = score.gather(1, kept) > -torch.inf
    # Missing candidates are chosen only where real ones run out: move them behind the real ones.
    kept = kept.gather(1, (~exists).long().argsort(dim=1, stable=True))

    new_index = torch.zeros(batch, score.shape[1] + 1, dtype=torch.long, device=device)
    numbers = torch.arange(1, kept.shape[1] + 1, device=device)
    new_index.scatter_(1, kept + 1, numbers.expand_as(kept))
    parents = new_index.gather(1, parents.gather(1, kept))
    root = torch.zeros(batch, 1, dtype=torch.long, device=device)
    nodes = Nodes(
        torch.cat([root - 1, parents], 1),
        torch.cat([root, ranks.gather(1, kept)], 1),
        torch.cat([root, depths.gather(1, kept)], 1),
        exists.sum(1) + 1,
    )
    return nodes, torch.cat([torch.zeros_like(score[:, :1]), score.gather(1, kept)], 1)


def _in_one_launch(draft: Draft, config: TreeConfig) -> bool:
    return draft.width <= 32 and draft.depth <= 64 and config.budget <= 1024


def built_in_one_launch(edges: Tensor, budget: int) -> tuple[Nodes, Tensor]:
    """What `scored_best_first` gives, from the kernel.

    Args:
        edges: [B, D, K, K], the terms of `order_edges`.
    """
    from kernels.tree_build import build_best_first

    batch, depth, width = edges.shape[:3]
    ranks = torch.arange(width, device=edges.device).expand(batch, depth, -1)  # tokens are ranks
    anchors = ranks.new_zeros(batch)
    built = build_best_first(ranks, edges, anchors, budget)
    return Nodes(built.parents, built.tokens, built.depths, built.sizes), built.scores


def static(draft: Draft, config: TreeConfig) -> Nodes:
    """One shape for every sequence and round: known ahead, whatever the draft turns out to be.

    It is the best that `config.rank_rates` can tell: the node of child ranks r1, r2, ... is taken
    to be accepted with the product of their rates. Children are a node's best, in order.
    """
    return _fill(static_shape(config, draft.depth, draft.width), draft.edge_scores)


@functools.lru_cache(maxsize=64)
def static_shape(config: TreeConfig, depth: int, width: int) -> Nodes:
    """The shape of `static` trees, a batch of one; `ranks` number a node's children."""
    rates = torch.tensor(config.rank_rates[:width]).log()
    slots = torch.zeros(1, depth, len(rates), dtype=torch.long)
    shape = TreeConfig(budget=config.budget)
    return best_first(Draft.from_slot_scores(slots, rates.expand(1, depth, -1)), shape)


def chain_shape(config: TreeConfig, depth: int, width: int) -> Nodes:
    """A path, in the form of `static_shape`."""
    order = torch.arange(min(depth, config.budget) + 1)[None]
    return Nodes(order - 1, torch.zeros_like(order), order, torch.tensor([order.shape[1]]))


def _fill(shape: Nodes, keys: Tensor) -> Nodes:
    """Choose the candidates of a fixed shape: a node's children in descending order of their keys.

    Args:
        shape: a batch of one; `ranks` number a node's children.
        keys: [B, D, K, K], of child j under parent i; a child at -inf does not exist, and neither
            does what hangs below it.
    """
    batch, device = keys.shape[0], keys.device
    parents, numbers, depths = (field[0].to(device) for field in shape[:3])  # [M]
    sorted_keys, order = keys.sort(dim=-1, descending=True, stable=True)
    ranks = torch.zeros(batch, len(parents), dtype=torch.long, device=device)
    exists = torch.ones_like(ranks, dtype=torch.bool)
    for slot in range(int(shape.depths.max())):
        here = (depths == slot + 1).nonzero()[:, 0]  # [m]
        above, number = parents[here], numbers[here]
        row = (slice(None), slot)
        index = (torch.arange(batch, device=device)[:, None], ranks[:, above], number)
        ranks[:, here] = order[row][index]
        exists[:, here] = exists[:, above] & (sorted_keys[row][index] > -torch.inf)
    kept = (~exists).long().argsort(dim=1, stable=True)  # missing nodes go behind the real ones
    new_index = kept.argsort(dim=1)
    parents = parents.expand(batch, -1).gather(1, kept)
    parents = new_index.gather(1, parents.clamp(min=0)).masked_fill(parents < 0, -1)
    return Nodes(
        parents,
        ranks.gather(1, kept),
        depths.expand(batch, -1).gather(1, kept),
        exists.sum(1),
    )


def _best(scores: Tensor, count: int) -> Tensor:
    """Indices [B, count], ascending, of the best scores [B, M]; of equal ones the first.

    Equal to a stable sort, by a threshold: much cheaper, and independent of top-k's tie order.
    """
    batch, total = scores.shape
    if total <= count:
        return torch.arange(total, device=scores.device).expand(batch, -1)
    threshold = scores.topk(count, dim=1, sorted=False).values.amin(1, keepdim=True)
    above = scores > threshold
    equal = scores == threshold
    room = count - above.sum(1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(1) <= room))
    return chosen.nonzero()[:, 1].view(batch, count)


def _tokens(draft: Draft, anchors: Tensor, ranks: Tensor, depths: Tensor) -> Tensor:
    """Tokens [B, N + 1] of nodes given by depth and rank; the root's is the anchor."""
    width = draft.width
    slot = (depths - 1).clamp(min=0) * width + ranks
    tokens = draft.tokens.flatten(1).gather(1, slot)
    return torch.where(depths == 0, anchors[:, None], tokens)


def _cumulative(draft: Draft, parents: Tensor, ranks: Tensor, depths: Tensor) -> Tensor:
    """Cumulative log q [B, N + 1], summed from the root down so that rounding is the builders'."""
    width = draft.width
    above = parents.clamp(min=0)
    edge = ((depths - 1).clamp(min=0) * width + ranks.gather(1, above)) * width + ranks
    log_q = draft.edge_scores.flatten(1).gather(1, edge).float()
    scores = torch.zeros_like(log_q)
    for depth in range(1, draft.depth + 1):
        scores = torch.where(depths == depth, scores.gather(1, above) + log_q, scores)
    return scores


BUILDERS: dict[str, Callable[[Draft, TreeConfig], Nodes]] = {
    "chain": chain,
    "algorithm1": algorithm1,
    "best_first": best_first,
    "static": static,
}
# Shapes that no score decides: what they hold may be drawn.
SHAPES: dict[str, Callable[[TreeConfig, int, int], Nodes]] = {
    "chain": chain_shape,
    "static": static_shape,
}
