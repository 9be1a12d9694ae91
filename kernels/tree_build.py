"""Exact best-first trees on the GPU, one program a tree, and their packed ancestor bits.

A node's cumulative log-probability never exceeds its parent's, so the best prefix-closed set of B
nodes is the B best of all nodes. Level by level the best B children of the kept parents survive
(a node outside its level's best B cannot be in the global best B); one selection over the levels
ends it. A selection is a threshold found by narrowing an interval of scores, and a prefix sum that
places the chosen in order: no heap and no sort. The B-th best score of one level bounds every
later level from below, so that most levels keep few nodes and need no search. Nodes come out in
(depth, parent, rank) order, and equal scores are chosen in that order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import dependent, enter

LARGEST_BUDGET = 1024


@triton.jit
def _reach(score, at, WORD: tl.constexpr):
    """0 or 1 for each score that is at least `at`."""
    return (score >= at).to(WORD)


@triton.jit
def _choose(score, count, floor, E: tl.constexpr):
    """(chosen bool [E], place int32 [E], total, worst): the `count` best, of equal ones the first.

    -inf marks a candidate that does not exist; it and scores below `floor` are never chosen.
    `place` numbers the chosen in order. `worst` is a score that `count` of them reach when more
    than `count` ask for a place, and `floor` otherwise.
    """
    # Two counts share a word; E of the widest selection does not fit 16 bits.
    WORD: tl.constexpr = tl.uint32 if E <= 32768 else tl.uint64
    HALF: tl.constexpr = 16 if E <= 32768 else 32
    LOW: tl.constexpr = (1 << HALF) - 1
    real = (score > float("-inf")) & (score >= floor)
    asking = tl.sum(real.to(tl.int32), 0)
    low = tl.min(tl.where(real, score, float("inf")), 0)
    high = tl.max(score, 0) + 1.0
    worst = floor
    open_ = asking > count
    if open_:
        worst = low
    # Invariant: at least `count` scores reach low, fewer reach high.
    while open_:
        one = low + (high - low) * 0.33333334
        two = low + (high - low) * 0.6666667
        words = _reach(score, one, WORD) + (_reach(score, two, WORD) << HALF)
        both = tl.sum(words, 0)
        first = (both & LOW).to(tl.int32)
        second = (both >> HALF).to(tl.int32)
        exact = (first == count) | (second == count)
        stuck = (one <= low) | (two >= high) | (one >= two)
        new_low = tl.where(second >= count, two, tl.where(first >= count, one, low))
        high = tl.where(second >= count, high, tl.where(first >= count, two, one))
        low = tl.where(first == count, one, new_low)
        low = tl.where(second == count, two, low)
        worst = low
        open_ = (exact | stuck) == 0
    full = asking > count
    above = real & ((score > worst) | (full == 0))
    equal = real & (score == worst) & full
    # One scan for both: how many above, and how many equal, lie at or before each candidate.
    seen = tl.cumsum(above.to(WORD) + (equal.to(WORD) << HALF), 0)
    before_above = (seen & LOW).to(tl.int32)
    before_equal = (seen >> HALF).to(tl.int32)
    room = count - tl.sum(above.to(tl.int32), 0)
    chosen = above | (equal & (before_equal <= room))
    place = before_above + tl.minimum(before_equal, room) - 1
    return chosen, place, tl.minimum(asking, count), worst


@triton.jit
def _grow(
    edge_ptr, level_score, level_rank, level_parent, level, kept, floor,
    edge_depth, edge_parent, edge_child, width, budget,
    PARENTS: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One level from at most PARENTS kept parents. Returns (kept children, the new floor)."""
    flat = tl.arange(0, PARENTS * WIDTH)  # candidates of a level, in (parent, rank) order
    slot = flat // WIDTH
    rank = flat % WIDTH
    above = (level - 1) * SLOTS + slot
    inside = (slot < kept) & (rank < width)
    below_root = inside & (level > 0)
    parent_score = tl.load(level_score + above, mask=below_root, other=0.0)
    parent_rank = tl.load(level_rank + above, mask=below_root, other=0)
    edge = tl.load(
        edge_ptr + level * edge_depth + parent_rank * edge_parent + rank * edge_child,
        mask=inside,
        other=float("-inf"),
    ).to(tl.float32)
    score = parent_score + tl.minimum(edge, 0.0)
    chosen, place, children, worst = _choose(score, budget, floor, PARENTS * WIDTH)
    at = level * SLOTS + place
    tl.store(level_score + at, score, mask=chosen)
    tl.store(level_rank + at, rank, mask=chosen)
    tl.store(level_parent + at, slot, mask=chosen)
    # `budget` nodes of one level reach `worst`: no node below it is among the best of all.
    return children, tl.maximum(floor, worst)


@triton.jit
def _build(
    cand_ptr, edge_ptr, anchor_ptr, limits_ptr, level_score, level_rank, level_parent, number,
    tokens_ptr, parents_ptr, depths_ptr, scores_ptr, sizes_ptr,
    edge_tree, edge_depth, edge_parent, edge_child, depth, width, budget,
    FEW: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr,
    NODES: tl.constexpr, LIMITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    tree = tl.program_id(0)
    most = tl.minimum(tl.load(limits_ptr + tree).to(tl.int32), budget) if LIMITS else budget
    scratch = tree.to(tl.int64) * LEVELS * SLOTS
    level_score += scratch
    level_rank += scratch
    level_parent += scratch
    number += scratch
    edge_ptr += tree.to(tl.int64) * edge_tree

    all_levels = tl.arange(0, LEVELS * SLOTS)
    tl.store(level_score + all_levels, tl.full((LEVELS * SLOTS,), float("-inf"), tl.float32))
    tl.debug_barrier()
    kept = tl.full((), 1, tl.int32)
    floor = tl.full((), float("-inf"), tl.float32)
    for level in tl.range(0, depth):
        if kept <= FEW:
            kept, floor = _grow(
                edge_ptr, level_score, level_rank, level_parent, level, kept, floor,
                edge_depth, edge_parent, edge_child, width, most, FEW, SLOTS, WIDTH,
            )  # fmt: skip
        else:
            kept, floor = _grow(
                edge_ptr, level_score, level_rank, level_parent, level, kept, floor,
                edge_depth, edge_parent, edge_child, width, most, SLOTS, SLOTS, WIDTH,
            )  # fmt: skip
        tl.debug_barrier()

    score = tl.load(level_score + all_levels)
    chosen, place, total, _ = _choose(score, most, floor, LEVELS * SLOTS)
    node = place + 1
    tl.store(number + all_levels, node)
    tl.debug_barrier()
    level = all_levels // SLOTS
    rank = tl.load(level_rank + all_levels, mask=chosen, other=0)
    slot = tl.load(level_parent + all_levels, mask=chosen, other=0)
    parent = tl.load(number + (level - 1) * SLOTS + slot, mask=chosen & (level > 0), other=0)
    token = tl.load(cand_ptr + (tree * depth + level) * width + rank, mask=chosen, other=0)

    anchor = tl.load(anchor_ptr + tree)
    out = tree * (budget + 1)
    tl.store(tokens_ptr + out + node, token, mask=chosen)
    tl.store(parents_ptr + out + node, parent, mask=chosen)
    tl.store(depths_ptr + out + node, level + 1, mask=chosen)
    tl.store(scores_ptr + out + node, score, mask=chosen)
    rest = tl.arange(0, NODES)
    # The root and the padding: an anchor without a parent.
    bare = (rest <= budget) & ((rest == 0) | (rest > total))
    tl.store(tokens_ptr + out + rest, tl.zeros((NODES,), tl.int64) + anchor, mask=bare)
    tl.store(parents_ptr + out + rest, tl.full((NODES,), -1, tl.int64), mask=bare)
    tl.store(depths_ptr + out + rest, tl.zeros((NODES,), tl.int64), mask=bare)
    tl.store(scores_ptr + out + rest, tl.where(rest == 0, 0.0, float("-inf")), mask=bare)
    tl.store(sizes_ptr + tree, total + 1)


@triton.jit
def _pack_ancestors(
    parents_ptr, sizes_ptr, bits_ptr, nodes, max_depth,
    WORDS: tl.constexpr, WORDS_POW2: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    tree = tl.program_id(1)
    node = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.arange(0, WORDS_POW2)
    live = node < tl.load(sizes_ptr + tree)
    here = tl.where(live, node, -1).to(tl.int32)
    bits = tl.zeros((ROWS, WORDS_POW2), tl.int32)
    for _ in tl.range(0, max_depth + 1):
        bit = tl.where(here >= 0, 1, 0) << (here & 31)
        bits |= tl.where((here >> 5)[:, None] == word[None, :], bit[:, None], 0)
        here = tl.load(parents_ptr + tree * nodes + here, mask=here >= 0, other=-1).to(tl.int32)
    out = bits_ptr + (tree * nodes + node[:, None]) * WORDS + word[None, :]
    tl.store(out, bits, mask=(node < nodes)[:, None] & (word < WORDS)[None, :])


@triton.jit
def _list_ancestors(
    parents_ptr, sizes_ptr, out_ptr, nodes, count, ROWS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    enter(PDL)
    tree = tl.program_id(1)
    node = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = tl.where(node < tl.load(sizes_ptr + tree), node, -1).to(tl.int32)
    for step in tl.range(0, count):
        tl.store(out_ptr + (tree * nodes + node) * count + step, here, mask=node < nodes)
        here = tl.load(parents_ptr + tree * nodes + here, mask=here >= 0, other=-1).to(tl.int32)


@dataclass(frozen=True)
class BuiltTree:
    """A batch of trees, root first, (depth, parent, rank) order; the fields of `trees.tree.Tree`.

    tokens, parents, depths long [B, budget + 1]; scores fp32 [B, budget + 1]; sizes long [B].
    Padding has the anchor's token, parent -1, depth 0, score -inf.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    scores: Tensor
    sizes: Tensor


def build_best_first(
    tokens: Tensor, edge_scores: Tensor, anchors: Tensor, budget: int,
    limits: Tensor | None = None,
) -> BuiltTree:  # fmt: skip
    """The `budget` best nodes by cumulative log q of the full candidate tree, for every row.

    Args:
        tokens: long [B, D, K], each slot's candidates.
        edge_scores: [B, D, K, K], log q(child | parent), row 0 at slot 0; -inf does not exist. May
            be an expanded view (slot scoring). Terms above 0 count as 0.
        anchors: long [B].
        budget: draft nodes, the root not counted; at most 1,024.
        limits: int [B], at least 1: a tree's own budget where it is smaller.
    """
    batch, depth, width = tokens.shape
    if not (1 <= budget <= LARGEST_BUDGET and width <= 32 and depth <= 64):
        raise ValueError(f"budget {budget}, width {width}, depth {depth}: above the largest")
    device = tokens.device
    slots, levels = triton.next_power_of_2(budget), triton.next_power_of_2(depth)
    wide = triton.next_power_of_2(width)
    scratch = torch.empty(3, batch, levels, slots, dtype=torch.int32, device=device)
    level_score = torch.empty(batch, levels, slots, dtype=torch.float32, device=device)
    out = torch.empty(3, batch, budget + 1, dtype=torch.int64, device=device)
    scores = torch.empty(batch, budget + 1, dtype=torch.float32, device=device)
    sizes = torch.empty(batch, dtype=torch.int64, device=device)
    few = min(slots, max(32, slots // 4))
    widest = max(slots * wide, levels * slots)
    _build[(batch,)](
        tokens.contiguous(), edge_scores, anchors, sizes if limits is None else limits,
        level_score, *scratch.unbind(0),
        *out.unbind(0), scores, sizes,
        edge_scores.stride(0), edge_scores.stride(1), edge_scores.stride(2),
        edge_scores.stride(3), depth, width, budget,
        FEW=few, SLOTS=slots, WIDTH=wide, LEVELS=levels,
        NODES=triton.next_power_of_2(budget + 1), LIMITS=limits is not None,
        num_warps=4 if widest <= 2048 else 8 if widest <= 8192 else 16, **dependent(),
    )  # fmt: skip
    node_tokens, parents, depths = out.unbind(0)
    return BuiltTree(node_tokens, parents, depths, scores, sizes)


def pack_ancestors(parents: Tensor, sizes: Tensor, max_depth: int) -> Tensor:
    """int32 [B, N, ceil(N / 32)]: bit u % 32 of word u // 32 of row v says u is v or its ancestor.

    Args:
        parents: long [B, N], -1 at the root. sizes: long [B]; rows beyond are all zero.
        max_depth: no node lies deeper.
    """
    batch, nodes = parents.shape
    words = triton.cdiv(nodes, 32)
    bits = torch.empty(batch, nodes, words, dtype=torch.int32, device=parents.device)
    rows = 16
    _pack_ancestors[(triton.cdiv(nodes, rows), batch)](
        parents, sizes, bits, nodes, max_depth,
        WORDS=words, WORDS_POW2=triton.next_power_of_2(words), ROWS=rows, num_warps=1,
        **dependent(),
    )  # fmt: skip
    return bits


def list_ancestors(parents: Tensor, sizes: Tensor, count: int) -> Tensor:
    """int32 [B, N, count]: a row, its parent, its grandparent, ..., -1 above the root.

    Args:
        parents: long [B, N], -1 at the root. sizes: long [B]; rows beyond are all -1.
    """
    batch, nodes = parents.shape
    out = torch.empty(batch, nodes, count, dtype=torch.int32, device=parents.device)
    rows = 32
    _list_ancestors[(triton.cdiv(nodes, rows), batch)](
        parents, sizes, out, nodes, count, ROWS=rows, num_warps=1, **dependent()
    )
    return out
