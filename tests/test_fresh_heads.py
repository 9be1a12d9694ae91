"""A fresh head's weights: the same for the same seed for ever, and drawn once."""

import pytest
import torch
from torch import nn

from jetspec.heads.linear import Linear, weights_unset
from jetspec.heads.registry import head_class, load_head, new_head, save_head
from tests.tiny import tiny_target

SHAPE = {"num_layers": 2, "num_taps": 2, "block_size": 4}
# A sum over all weights of a head of seed 3, in the order in which the head holds them.
HEADS = {
    "slots": ("parallel", SHAPE, 0.786096),
    "gated": ("parallel", SHAPE | {"edge_rank": 3}, 0.747681),
    "learned": ("parallel", SHAPE | {"edge_rank": 3, "edge_rows": "learned"}, -6.728298),
    "selector": ("parallel", SHAPE | {"edges": "selector", "edge_rank": 3}, 0.82259),
    "lattice": (
        "parallel",
        SHAPE | {"edges": "lattice", "edge_rank": 3, "edge_width": 32},
        3.243762,
    ),
    "second pass": ("parallel", SHAPE | {"rescore": "own", "conv_rank": 2}, 4.151869),
    "dspark": ("dspark", SHAPE | {"markov_rank": 3}, 0.527809),
    "eagle": ("eagle3", {"num_taps": 2}, 3.470395),
}


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def fresh(target, name, seed=3):
    kind, settings, _ = HEADS[name]
    return new_head(head_class(kind).settings(**settings), target, seed)


def told_apart(head):
    """A number that any change of order, scale or value would move."""
    flat = torch.cat([weight.double().flatten() for weight in head.state_dict().values()])
    return float(flat @ torch.sin(torch.arange(len(flat), dtype=torch.float64)))


@pytest.mark.parametrize("name", HEADS)
def test_a_seed_gives_the_weights_it_has_always_given(target, name):
    assert told_apart(fresh(target, name)) == pytest.approx(HEADS[name][2], abs=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_weights_are_drawn_once(target, name, tmp_path):
    """Torch's own source of randomness, from which layers draw unless they are told not to, is
    left alone where a head is made fresh, made again for a copy's weights, or read."""
    state = torch.get_rng_state()
    head = fresh(target, name)
    head.empty_copy()
    save_head(head, str(tmp_path), target_fingerprint="x")
    load_head(str(tmp_path))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", HEADS)
def test_no_weight_is_left_to_what_memory_held(target, name, tmp_path):
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # unset memory is NaN now
    try:
        assert torch.empty(1).isnan()
        head = fresh(target, name)
        save_head(head, str(tmp_path), target_fingerprint="x")
        loaded = load_head(str(tmp_path))
    finally:
        torch.use_deterministic_algorithms(was)
    for key, weight in loaded.state_dict().items():
        assert weight.isfinite().all() and torch.equal(weight, head.state_dict()[key]), key


def test_linear_layers_made_elsewhere_are_drawn_as_torch_draws_them():
    with weights_unset():
        pass
    torch.manual_seed(0)
    ours = Linear(3, 4)
    torch.manual_seed(0)
    theirs = nn.Linear(3, 4)
    assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias)
    with weights_unset():
        assert torch.equal(Linear(3, 4).bias, torch.zeros(4))
