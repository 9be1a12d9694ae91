"""Which cells a matrix has."""

import pytest
from pydantic import ValidationError

from jetspec.errors import JetspecError
from jetspec.evaluation.cells import BASELINES, Cell, cells, grouped
from jetspec.evaluation.config import EvaluationConfig


def test_every_group_has_both_baselines_first_and_once():
    config = EvaluationConfig(budgets=(16, 64), batch_sizes=(1, 4), temperatures=(0.0, 1.0))
    groups = grouped(cells(config, ["code", "math"], head_depth=15))
    assert len(groups) == 2 * 2 * 2
    for members in groups.values():
        assert [c.method for c in members[:2]] == list(BASELINES)
        assert [c.method for c in members].count("plain") == 1


def test_tree_cells_are_the_product_of_builders_and_budgets():
    config = EvaluationConfig(methods=("tree",), builders=("best_first", "algorithm1"))
    trees = [c for c in cells(config, ["math"]) if c.method == "tree"]
    assert {(c.builder, c.budget) for c in trees} == {
        (builder, budget) for builder in ("best_first", "algorithm1") for budget in (16, 64, 128)
    }


def test_chain_is_no_longer_than_the_head_drafts_and_measured_once():
    config = EvaluationConfig(methods=("chain",), budgets=(4, 16, 64))
    chains = [c.budget for c in cells(config, ["math"], head_depth=7) if c.method == "chain"]
    assert chains == [4, 7]


def test_baselines_have_budget_zero():
    assert {c.budget for c in cells(EvaluationConfig(methods=()), ["math"])} == {0}


def test_keys_are_unique_file_names():
    config = EvaluationConfig(batch_sizes=(1, 4), temperatures=(0.0, 0.6))
    found = [c.key for c in cells(config, ["math", "math/zh", "math zh"], head_depth=15)]
    assert len(set(found)) == len(found)
    assert all(set(key) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-") for key in found)


def test_key_changes_with_every_field():
    base = Cell("tree", "best_first", 16, 1, "math", 0.0)
    others = [
        Cell("chain", "best_first", 16, 1, "math", 0.0),
        Cell("tree", "algorithm1", 16, 1, "math", 0.0),
        Cell("tree", "best_first", 64, 1, "math", 0.0),
        Cell("tree", "best_first", 16, 4, "math", 0.0),
        Cell("tree", "best_first", 16, 1, "code", 0.0),
        Cell("tree", "best_first", 16, 1, "math", 1.0),
    ]
    assert base.key not in {cell.key for cell in others}


def test_unknown_slice_is_refused_with_the_ones_there_are():
    with pytest.raises(JetspecError, match="slices: maths: .*choose from code, math, all"):
        cells(EvaluationConfig(slices=("maths",)), ["code", "math"])


def test_all_slices_in_one_cell():
    assert {c.slice for c in cells(EvaluationConfig(slices=("all",)), ["code", "math"])} == {"all"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"budgets": (0,)},
        {"budgets": ()},
        {"batch_sizes": (0,)},
        {"batch_sizes": ()},
        {"temperatures": (-1.0,)},
        {"slices": ()},
        {"methods": ("beam",)},
    ],
)
def test_impossible_matrices_are_refused(wrong):
    with pytest.raises(ValidationError):
        EvaluationConfig(**wrong)
