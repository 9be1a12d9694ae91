import torch

from jetspec.evaluation.path_costs import SLOT, VARIANTS, path_costs
from jetspec.heads.config import HeadConfig
from jetspec.trees.config import TreeConfig
from tests.tiny import tiny_target


def test_every_variant_is_measured_beside_the_slot_head():
    target = tiny_target("llama")
    shape = HeadConfig(num_layers=1, block_size=4, num_taps=2)
    rows = path_costs(
        target, shape, VARIANTS, context=5, tree=TreeConfig(budget=6, width=3), repeats=1
    )
    by_name = {row["name"]: row for row in rows}
    assert by_name.keys() == VARIANTS.keys() and by_name[SLOT]["ratio"] == 1
    assert all(row["seconds"] > 0 for row in rows)
    added = by_name["markov, rank 128"]["parameters"] - by_name[SLOT]["parameters"]
    assert added == 3 * 128 * target.hidden_size
    assert by_name["second pass, shared, 64 nodes"]["parameters"] == by_name[SLOT]["parameters"]
    assert torch.is_grad_enabled()
