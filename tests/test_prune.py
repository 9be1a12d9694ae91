"""Pruning a scored tree: the same rules as building one, and the true best prefix-closed set."""

import itertools

import pytest
import torch

from jetspec.errors import JetspecError
from jetspec.trees.build import build_tree
from jetspec.trees.config import TreeConfig
from jetspec.trees.draft import Draft
from jetspec.trees.prune import prune_tree
from jetspec.trees.tree import Tree
from tests.tiny import random_draft


def random_tree(seed, nodes=9, batch=2, coarse=False):
    """Ragged random trees with distinct siblings; `coarse` scores are full of ties."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(2, nodes + 1, (batch,), generator=generator)
    parents = torch.full((batch, nodes), -1)
    depths, scores = torch.zeros(batch, nodes).long(), torch.zeros(batch, nodes)
    for row in range(batch):
        for node in range(1, nodes):
            if node >= sizes[row]:
                scores[row, node] = -torch.inf
                continue
            parent = int(torch.randint(node, (1,), generator=generator))
            drop = torch.rand((), generator=generator) * 2
            parents[row, node], depths[row, node] = parent, depths[row, parent] + 1
            scores[row, node] = scores[row, parent] - (drop.round() if coarse else drop)
    tokens = torch.arange(nodes).expand(batch, -1) + 10
    return Tree(tokens, parents, depths, scores, sizes)


def kept(tree, row):
    return {int(t): float(s) for t, s in zip(tree.tokens[row], tree.scores[row], strict=True)
            if s > -torch.inf}  # fmt: skip


def prefix_closed(tree, row, size, budget):
    """Every prefix-closed set of at most `budget` draft nodes, by brute force."""
    parents = tree.parents[row].tolist()
    for count in range(min(budget, size - 1) + 1):
        for chosen in itertools.combinations(range(1, size), count):
            if all(parents[node] in (0, *chosen) for node in chosen):
                yield chosen


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("budget", [1, 3, 5, 20])
def test_best_first_pruning_is_the_true_best_prefix_closed_set(budget, coarse):
    for seed in range(8):
        tree = random_tree(seed, coarse=coarse)
        pruned = prune_tree(tree, TreeConfig(budget=budget))
        pruned.validate()
        for row in range(2):
            size = int(tree.sizes[row])
            weights = tree.scores[row].double().exp()
            best = max(
                float(weights[list(chosen)].sum())
                for chosen in prefix_closed(tree, row, size, budget)
            )
            found = kept(pruned, row)
            assert sum(torch.tensor(list(found.values())).double().exp()) - 1 == pytest.approx(best)
            assert len(found) == min(budget, size - 1) + 1
            whole = kept(tree, row)
            assert all(whole[token] == score for token, score in found.items())


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("width", [1, 2])
def test_width_keeps_the_best_children_wherever_they_stand(width, coarse):
    """Siblings in no order, some tied: of equal ones the first, and nothing below a lost one."""
    lost = 0
    for seed in range(8):
        tree = random_tree(seed, nodes=12, coarse=coarse)
        pruned = prune_tree(tree, TreeConfig(budget=12, width=width))
        pruned.validate()
        for row in range(2):
            parents, scores = tree.parents[row].tolist(), tree.scores[row].tolist()
            expected, reached = [], [0]
            while reached:
                node = reached.pop()
                expected.append(node + 10)
                below = [
                    child for child in range(1, int(tree.sizes[row])) if parents[child] == node
                ]
                reached += sorted(below, key=lambda child: (-scores[child], child))[:width]
            assert sorted(kept(pruned, row)) == sorted(expected)
            lost += int(tree.sizes[row]) - len(expected)
    assert lost > 20


@pytest.mark.parametrize("limits", [{}, {"depth": 2}, {"width": 2}, {"depth": 3, "width": 3}])
@pytest.mark.parametrize("builder", ["chain", "algorithm1", "best_first"])
def test_pruning_the_full_tree_is_building_the_small_one(builder, limits):
    for seed in range(4):
        draft = random_draft(seed, 2, 4, 4, path=False, coarse=False)
        draft = Draft(draft.tokens, draft.edge_scores.sort(descending=True).values)
        anchors = torch.tensor([60, 61])
        full = build_tree(draft, anchors, TreeConfig(budget=4 + 16 + 64 + 256))
        for budget in (1, 2, 7, 30):
            config = TreeConfig(builder=builder, budget=budget, **limits)
            pruned, built = build_tree(full, anchors, config), build_tree(draft, anchors, config)
            pruned.validate()
            for row in range(2):
                assert paths(pruned, row) == paths(built, row)


def paths(tree, row):
    found = set()
    for node in range(int(tree.sizes[row])):
        path, above = [], node
        while above >= 0:
            path.append(int(tree.tokens[row, above]))
            above = int(tree.parents[row, above])
        found.add(tuple(path))
    return found


def test_chain_of_a_ragged_tree_follows_the_likeliest_child():
    tree = random_tree(3, nodes=12)
    pruned = prune_tree(tree, TreeConfig(builder="chain", budget=12))
    for row in range(2):
        node, expected = 0, [10]
        children = [n for n in range(12) if tree.parents[row, n] == node]
        while children:
            node = max(children, key=lambda n: float(tree.scores[row, n]))
            expected.append(node + 10)
            children = [n for n in range(12) if tree.parents[row, n] == node]
        assert list(kept(pruned, row)) == expected


def test_scores_that_need_distributions_are_refused():
    with pytest.raises(JetspecError, match=r"tree\.score: entropy"):
        prune_tree(random_tree(0), TreeConfig(score="entropy"))
