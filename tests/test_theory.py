"""Formulas against enumeration and simulation; costs and predictions against what they mean."""

import random

import pytest
import torch

from jetspec.theory.formulas import (
    acceptance_of,
    expected_chain_tokens,
    expected_speedup,
    expected_tree_tokens,
    needed_tau,
    round_speedup,
    tree_expectation,
)
from jetspec.trees.build import build_tree
from jetspec.trees.config import TreeConfig
from tests.tiny import random_draft


def test_chain_formula_equals_the_sum_of_powers():
    for acceptance in (0.0, 0.3, 0.9, 1.0):
        for length in (1, 5, 15):
            assert expected_chain_tokens(acceptance, length) == pytest.approx(
                sum(acceptance**k for k in range(length + 1))
            )


def test_tree_formula_equals_simulation():
    # Root with children 1 and 2 (at most one of them is right), 3 under 1, 4 under 2.
    parents, p = [-1, 0, 0, 1, 2], [1.0, 0.6, 0.3, 0.5, 0.4]
    draw = random.Random(0)
    total = 0
    for _ in range(40_000):
        u = draw.random()
        branch = 1 if u < p[1] else 2 if u < p[1] + p[2] else 0
        total += 1
        if branch:
            total += 1 + (draw.random() < p[3 if branch == 1 else 4])
    assert expected_tree_tokens(parents, p) == pytest.approx(total / 40_000, abs=0.02)


def test_a_wide_tree_is_not_worth_a_chain_of_its_budget():
    wide = expected_tree_tokens([-1, 0, 0, 0, 0], [1.0, 0.6, 0.2, 0.1, 0.05])
    assert wide == pytest.approx(1.95) and wide < expected_chain_tokens(0.6, 4)


def test_a_chain_as_a_tree_gives_the_chain_formula():
    assert expected_tree_tokens([-1, 0, 1, 2], [1, 0.7, 0.7, 0.7]) == pytest.approx(
        expected_chain_tokens(0.7, 3)
    )


def test_speedup_formula_charges_every_draft():
    assert expected_speedup(6.0, 16, 0.00845) == pytest.approx(6.0 / 1.1352)


@pytest.mark.parametrize("path", [False, True])
@pytest.mark.parametrize("builder", ["chain", "best_first", "algorithm1"])
def test_tree_expectation_equals_enumerating_every_text(builder, path):
    """Every text over the candidates with its probability, walked down the tree one by one."""
    depth, width, batch = 3, 3, 4
    draft = random_draft(1, batch, depth, width, path=path, coarse=False)
    config = TreeConfig(builder=builder, budget=6, width=width)
    tree = build_tree(draft, torch.full((batch,), 60), config)
    for row in range(batch):
        children = {
            (int(tree.parents[row, n]), int(tree.tokens[row, n])): n
            for n in range(1, int(tree.sizes[row]))
        }
        told = float(tree_expectation(tree)[row])
        assert told == pytest.approx(_enumerated(draft, row, children), abs=1e-5)


def _enumerated(draft, row, children, depth=0, rank=0, node=0):
    """E[tokens] from one node on: 1 + the sum over the next token of its probability times rest."""
    total = 1.0
    if depth == draft.depth:
        return total
    for child in range(draft.width):
        below = children.get((node, int(draft.tokens[row, depth, child])))
        if below is not None:
            q = float(draft.edge_scores[row, depth, rank, child].exp())
            total += q * _enumerated(draft, row, children, depth + 1, child, below)
    return total


def test_expectation_grows_with_budget_and_exact_best_first_is_never_below_algorithm_1():
    for seed in range(20):
        draft = random_draft(seed, 3, 5, 6, path=bool(seed % 2), coarse=seed % 3 == 0)
        anchors = torch.full((3,), 60)
        before = torch.ones(3)
        for budget in (1, 2, 5, 13, 40):
            exact, printed = (
                tree_expectation(build_tree(draft, anchors, TreeConfig(builder=b, budget=budget)))
                for b in ("best_first", "algorithm1")
            )
            assert (exact >= printed - 1e-5).all()
            assert (exact >= before - 1e-5).all() and (exact <= draft.depth + 1).all()
            before = exact


def test_formulas_move_the_way_costs_and_acceptance_move():
    acceptances, lengths = [i / 10 for i in range(11)], range(1, 20)
    for low, high in zip(acceptances, acceptances[1:], strict=False):
        for n in lengths:
            assert expected_chain_tokens(low, n) < expected_chain_tokens(high, n) <= n + 1
            assert expected_chain_tokens(low, n) <= expected_chain_tokens(low, n + 1)
    for tau, n in ((1.0, 4), (4.5, 16)):
        assert expected_speedup(tau, n, 0.01) > expected_speedup(tau, n, 0.02)
        assert expected_speedup(tau, n, 0.01) > expected_speedup(tau, n + 1, 0.01)
        assert expected_speedup(tau, n, 0.0) == tau


def test_speedup_with_a_dear_verification_contains_the_printed_formula_and_its_break_even():
    assert round_speedup(6.0, 1.0, 16 * 0.00845) == pytest.approx(expected_speedup(6, 16, 0.00845))
    assert round_speedup(6.0, 2.0, 0.1) < round_speedup(6.0, 1.0, 0.1)
    cost = needed_tau(1.7, 0.3, 0.2)
    assert round_speedup(cost, 1.7, 0.3, 0.2) == pytest.approx(1)


def test_acceptance_is_found_back_from_tau():
    for a in (0.0, 0.37, 0.95, 1.0):
        assert acceptance_of(expected_chain_tokens(a, 15), 15) == pytest.approx(a, abs=1e-6)
