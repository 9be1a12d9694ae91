"""Mixtures of experts: routing, grouped products, and Qwen3-MoE in the engine."""

import pytest
import torch

from jetspec.decode import decode
from jetspec.errors import JetspecError
from jetspec.trees.config import TreeConfig
from tests.test_kernels_setup import interpreted
from tests.tiny import tiny_head, tiny_target

reference = interpreted("kernels.reference")
kernels = interpreted("kernels.experts")
mlp = interpreted("kernels.mlp")

from jetspec.engine.engine import Engine  # noqa: E402
from jetspec.engine.experts import Experts  # noqa: E402

PROMPTS = [[5, 9, 11, 4], [7, 8]]


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("parts", [0, 3])
def test_routing_equals_the_reference_and_takes_the_lower_of_equal_experts(normalise, parts):
    logits = torch.randn(*(parts,) * (parts > 0), 9, 11).mul(2).round()  # many ties
    ids, weights = kernels.route(logits, 3, normalise=normalise)
    summed = logits if not parts else logits.sum(0)
    expected = reference.route(summed, 3, normalise=normalise)
    assert torch.equal(ids, expected[0])
    assert (weights - expected[1]).abs().max() < 1e-6
    assert not normalise or (weights.sum(-1) - 1).abs().max() < 1e-6


def test_pairs_are_listed_by_expert_in_order() -> None:
    ids = torch.tensor([[2, 0], [0, 3], [2, 3]], dtype=torch.int32)
    pairs, counts = kernels.list_pairs(ids, 5)
    assert counts.tolist() == [2, 0, 2, 2, 0]
    listed = [pairs[e, :n].tolist() for e, n in enumerate(counts.tolist())]
    assert listed == [[1, 2], [], [0, 4], [3, 5], []]


@pytest.mark.parametrize("tokens", [1, 40])
def test_grouped_products_equal_one_row_at_a_time(tokens) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, 32)
    gate_up, down = torch.randn(6, 96, 32) * 0.2, torch.randn(6, 32, 48) * 0.2
    ids, weights = kernels.route(torch.randn(tokens, 6), 2, normalise=True)
    pairs, counts = kernels.list_pairs(ids, 6)
    both = kernels.first_product(x, gate_up, pairs, counts, weights)
    ours = kernels.second_product(mlp.silu_mul(both), down, pairs, counts, weights)
    expected = reference.experts(x, gate_up, down, ids, weights)
    assert (ours - expected).abs().max() < 1e-5


def test_rows_have_the_same_bits_whatever_shares_the_pass() -> None:
    torch.manual_seed(0)
    x, logits = torch.randn(30, 32), torch.randn(30, 6)
    experts = Experts(
        torch.randn(6, 32), torch.randn(6, 96, 32), torch.randn(6, 32, 48), 2, normalise=True
    )
    assert torch.equal(experts.run(x, logits)[:, 7:9], experts.run(x[7:9], logits[7:9]))


@pytest.mark.parametrize("exact", [False, True])
def test_qwen3_moe_decodes_as_the_reference_loop_does(exact) -> None:
    model = tiny_target("qwen3_moe", hidden_size=64, num_layers=2)
    head = tiny_head(model, block_size=4, num_layers=1, num_taps=1)
    tree = TreeConfig(builder="best_first", depth=2, budget=3, width=3)
    engine = Engine(
        model, head, tree=tree, slots=2, max_rows=64, page_size=16, kernels=True, exact=exact
    )
    assert isinstance(engine.model.layers[0].mlp, Experts)
    ours = engine.decode(PROMPTS, max_new_tokens=3).generations
    theirs = decode(model, PROMPTS, max_new_tokens=3).generations
    assert [g.tokens for g in ours] == [g.tokens for g in theirs]


def test_dense_layers_among_sparse_ones_stay_dense_and_other_layouts_are_refused() -> None:
    model = tiny_target("qwen3_moe", num_layers=1)
    sparse = model.model.base_model.layers[0].mlp
    assert Experts.of(torch.nn.Linear(2, 2)) is None
    sparse.experts.down_proj = torch.nn.Parameter(sparse.experts.down_proj[:, :, :16].clone())
    with pytest.raises(JetspecError, match="fused ones of Qwen3-MoE"):
        Experts.of(sparse)
