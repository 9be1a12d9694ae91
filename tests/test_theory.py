"""Formulas against enumeration and simulation; costs and predictions against what they mean."""

import json
import random

import pytest
import torch

from jetspec.evaluation.budgets import serving_table
from jetspec.theory.costs import Cost, CostTable, DraftCost, interpolate, measure_costs
from jetspec.theory.formulas import (
    acceptance_of,
    expected_chain_tokens,
    expected_speedup,
    expected_tree_tokens,
    needed_tau,
    round_speedup,
    tree_expectation,
)
from jetspec.theory.predict import best_budgets, compare, taus_of
from jetspec.theory.report import theory_view
from jetspec.trees.build import build_tree
from jetspec.trees.config import TreeConfig
from tests.measured import group, runner
from tests.tiny import random_draft, tiny_head, tiny_target
from tests.workspace import Workspace, one_line


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


def table(seconds, drafts=(), context=8):
    """A cost table from {(batch, tokens): seconds} and {batch: seconds}."""
    facts = {"target": "t", "dtype": "float32", "device": "cpu", "context": context, "repeats": 1}
    return CostTable(
        tuple(Cost(b, context, n, s, 0.0) for (b, n), s in seconds.items()),
        tuple(DraftCost(b, context, s, 0.0) for b, s in dict(drafts).items()),
        facts,
    )


def test_costs_between_measured_sizes_lie_on_the_line_and_beyond_them_on_its_end():
    assert interpolate(3, [1, 5], [10.0, 30.0]) == 20
    assert interpolate(9, [1, 5], [10.0, 30.0]) == 50
    assert interpolate(7, [2], [4.0]) == 4
    costs = table({(1, 1): 1.0, (1, 17): 1.5, (4, 1): 2.0, (4, 17): 6.0}, {1: 0.2, 4: 0.4})
    assert costs.relative(9, 1) == 1.25 and costs.relative(17, 4) == 3
    assert costs.forward_seconds(17, 2) == pytest.approx(3.0)  # a third of the way from 1 to 4
    assert costs.draft_seconds(3) == pytest.approx(0.2 + 0.2 * 2 / 3)
    assert costs.draft_cost(16, 1) == pytest.approx(0.2 / 16 / 1.5)


def test_measured_costs_hold_every_size_and_leave_the_caches_as_they_were():
    target = tiny_target("qwen2")
    head = tiny_head(target)
    costs = measure_costs(target, head, tokens=[5], batches=[1, 2], context=6, repeats=2, width=4)
    assert [(c.batch, c.tokens) for c in costs.forwards] == [(1, 1), (1, 5), (2, 1), (2, 5)]
    assert [d.batch for d in costs.drafts] == [1, 2]
    assert all(c.seconds > 0 for c in (*costs.forwards, *costs.drafts))
    assert costs.relative(1, 2) == 1
    again = CostTable.from_json(json.loads(json.dumps(costs.as_json())))
    assert again == costs
    assert measure_costs(target, None, tokens=[], batches=[1], context=4, repeats=1).drafts == ()


def test_predictions_stand_beside_what_was_measured():
    records = group({("tree", 16): runner(tau=3.0, round_seconds=0.2)})
    costs = table({(1, 1): 0.1, (1, 17): 0.12}, {1: 0.04})
    (row,) = compare(records, costs)
    tau = next(r["tau"] for r in records if r["method"] == "tree")
    assert row.printed == pytest.approx(tau / 1.4, abs=1e-3)
    assert row.dear == pytest.approx(tau / 1.6, abs=1e-3) and row.needed == pytest.approx(1.6)
    assert row.measured == pytest.approx(tau * 0.1 / 0.2, rel=0.01)
    assert row.overhead == pytest.approx(0.2)
    assert taus_of(records) == [{"tree": "tree 16", "budget": 16, "tau": pytest.approx(tau)}]


def test_the_best_budget_is_the_fastest_and_never_grows_where_verification_gets_dearer():
    taus = [
        {"tree": f"tree {n}", "budget": n, "tau": tau}
        for n, tau in ((4, 2.0), (16, 3.0), (64, 3.8), (256, 4.2))
    ]
    sizes = (1, 5, 17, 65, 257)
    seconds = {(b, n): 1 + 0.002 * b * n for b in (1, 4, 16, 64, 256) for n in sizes}
    costs = table(seconds, {b: 0.1 for b in (1, 4, 16, 64, 256)})
    choices = best_budgets(taus, costs, (1, 2, 4, 16, 64, 256))
    chosen = [choice.budget for choice in choices]
    assert chosen == sorted(chosen, reverse=True) and len(set(chosen)) > 2 and chosen[-1] == 0
    for choice in choices:
        speeds = [choice.batch / costs.forward_seconds(1, choice.batch)]
        for row in taus:
            verify = costs.forward_seconds(row["budget"] + 1, choice.batch)
            speeds.append(choice.batch * row["tau"] / (verify + 0.1))
        assert choice.tok_s == pytest.approx(max(speeds), abs=1e-3)
        assert choice.speedup == pytest.approx(max(speeds) / speeds[0], abs=1e-3)
        second = sorted(speeds)[-2]
        assert choice.margin == pytest.approx(max(speeds) / second, abs=1e-3)


def test_costs_that_are_the_measured_ones_choose_what_the_serving_table_chose():
    records = []
    for batch, dear in ((1, 0.12), (4, 0.5)):
        methods = {("tree", 4): runner(2.0, 0.11), ("tree", 64): runner(3.0, dear)}
        records += group(methods, batch_size=batch, count=4)
    costs = table(
        {(1, 1): 0.1, (1, 5): 0.11, (1, 65): 0.12, (4, 1): 0.1, (4, 5): 0.11, (4, 65): 0.5}
    )
    predicted = best_budgets(taus_of(records), costs, (1, 4))
    measured = serving_table(records, 0.0)
    assert [c.budget for c in predicted] == [row["budget"] for row in measured] == [64, 4]


def test_theory_reads_an_evaluation_and_fits_eighty_columns(tmp_path, capsys):
    workspace = Workspace.create(tmp_path)
    samples = workspace.stage("regenerate", workspace.run)["uri"]
    head = workspace.stage("train", workspace.run, samples)["uri"]
    evaluation = workspace.stage("evaluate", workspace.run, head)["uri"]
    quick = ("--repeats", "1", "--context", "8")
    facts = workspace.stage("theory", workspace.run, evaluation, *quick, "--batches", "1,2")
    assert [row["batch"] for row in facts["best"]] == [1, 2]
    assert {row["label"] for row in facts["comparison"]} == {"chain 3", "tree 4"}
    assert facts["costs"]["drafts"]
    from rich.console import Console

    Console(width=80).print(theory_view(facts))
    shown = capsys.readouterr().out
    assert "Best budget by load" in shown and "withheld" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(facts))
    reused = workspace.stage("theory", workspace.run, evaluation, "--costs", str(file))
    assert reused["costs"]["forwards"] == facts["costs"]["forwards"]
    file.write_text('{"forwards": [{}], "drafts": [], "facts": {}}')
    wrong = workspace.library("theory", workspace.run, "--costs", str(file))
    assert "not a cost table" in one_line(wrong)
    lost = workspace.library("theory", workspace.run, "--diagnosis", str(tmp_path))
    assert "no diagnosis" in one_line(lost)
