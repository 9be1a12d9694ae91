"""Which optimizer moves which parameter, how fast, and with what decay."""

import math

import pytest
import torch

from jetspec.heads.dspark import DSparkConfig, DSparkHead
from jetspec.training.config import TrainingConfig
from jetspec.training.optimizers import (
    RATIO,
    clip_gradients,
    clipped_apart,
    learning_rate,
    make_optimizers,
    set_learning_rate,
)
from tests.tiny import tiny_head, tiny_target

KINDS = ("markov", "lattice", "dspark")


def made(kind, **settings):
    target = tiny_target("qwen3", num_layers=1)
    if kind == "dspark":
        shape = {"block_size": 4, "num_layers": 1, "num_taps": 1, "markov_rank": 4}
        head = DSparkHead.new(DSparkConfig(**shape), target)
    else:
        head = tiny_head(target, edges=kind, edge_rank=4, edge_width=32, num_layers=1)
    module = torch.nn.ModuleDict({"head": head})
    config = TrainingConfig(weight_decay=0.1, betas=(0.8, 0.9), **settings)
    return head, module, config


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_is_moved_once_and_only_matrices_decay(kind, optimizer):
    rates = {"learning_rate": 1e-3, "path_learning_rate": 4e-3, "optimizer": optimizer}
    head, module, config = made(kind, **rates)
    frozen = next(iter(head.parameters())).requires_grad_(False)
    found = make_optimizers(config, head, module, sharded=False, fused=False)
    assert len(found) == (2 if optimizer == "muon" else 1)
    set_learning_rate(found, 5e-4)
    groups = [(o, group) for o in found for group in o.param_groups]
    moved = [id(p) for _, group in groups for p in group["params"]]
    trained = {id(p) for p in head.parameters() if p.requires_grad}
    assert len(moved) == len(set(moved)) and set(moved) == trained and id(frozen) not in moved
    path = {id(p) for p in head.path_parameters()}
    sorts = set()
    for o, group in groups:
        for p in group["params"]:
            sorts.add((id(p) in path, p.ndim > 1))
            assert group["weight_decay"] == (0.1 if p.ndim > 1 else 0)
            assert group["lr"] == pytest.approx(2e-3 if id(p) in path else 5e-4)
            assert group[RATIO] == (4 if id(p) in path else 1)
            turned = optimizer == "muon" and p.ndim == 2 and id(p) not in path
            assert isinstance(o, torch.optim.Muon) is turned
        if isinstance(o, torch.optim.Muon):
            assert group["adjust_lr_fn"] == "match_rms_adamw", "one learning rate serves both"
        else:
            assert group["betas"] == (0.8, 0.9)
    assert sorts >= {(True, True), (False, True), (False, False)}
    if kind != "markov":
        assert (True, False) in sorts, "path scores with vectors of their own"


def test_a_frozen_backbone_leaves_muon_nothing():
    head, module, config = made("markov", optimizer="muon")
    path = {id(p) for p in head.path_parameters()}
    for parameter in head.parameters():
        parameter.requires_grad_(id(parameter) in path)
    (adamw,) = make_optimizers(config, head, module, sharded=False, fused=False)
    assert isinstance(adamw, torch.optim.AdamW)
    assert [len(part) for part in clipped_apart(head, module)] == [0, len(path)]


def test_each_part_is_clipped_to_the_limit_and_the_norm_of_all_is_told():
    head, module, _ = made("markov")
    parts = clipped_apart(head, module)
    for part, value in zip(parts, (3.0, 0.001), strict=True):
        for parameter in part:
            parameter.grad = torch.full_like(parameter, value)

    def norm(part):
        return math.sqrt(sum(float(p.grad.double().pow(2).sum()) for p in part))

    before = [norm(part) for part in parts]
    told = clip_gradients(parts, 0.5)
    assert float(told) == pytest.approx(math.hypot(*before), rel=1e-4)
    assert norm(parts[0]) == pytest.approx(0.5, rel=1e-4) and before[1] < 0.5
    assert norm(parts[1]) == pytest.approx(before[1], rel=1e-6)


@pytest.mark.parametrize("total", [1, 7, 100])
def test_the_schedule_is_a_ramp_and_half_a_cosine(total):
    config = TrainingConfig(learning_rate=2.0, warmup_fraction=0.25, final_lr_fraction=0.1)
    ramp = math.ceil(total / 4)
    for step in range(total + 1):
        if step < ramp:
            expected = 2.0 * (step + 1) / ramp
        else:
            angle = math.pi * (step - ramp) / max(1, total - ramp)
            expected = 2.0 * 0.1 + 2.0 * 0.9 * (1 + math.cos(angle)) / 2
        assert learning_rate(config, step, total) == pytest.approx(expected)
    still = TrainingConfig(learning_rate=2.0, warmup_fraction=0.0)
    assert learning_rate(still, 0, total) == 2.0
