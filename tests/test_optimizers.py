"""Which optimizer moves which parameter, how fast, and with what decay."""

import math
import multiprocessing

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from jetspec.heads.dspark import DSparkConfig, DSparkHead
from jetspec.training import muon
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

RANKS = 3
SHAPES = ((40, 24), (7, 40), (30, 7), (4, 30), (1, 4), (12, 12))  # rows that do not divide, too few
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


def moved_by_muon(optimizer, module, steps=3):
    """The weights of `module`, in whole, after steps on the same gradients on every rank."""
    optimizer = optimizer(
        module.parameters(), lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in module.parameters():
            grad = torch.randn(p.shape, generator=generator)
            placed = (p.device_mesh, p.placements) if isinstance(p, DTensor) else None
            p.grad = distribute_tensor(grad, *placed) if placed else grad
        optimizer.step()
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]


def matrices():
    generator = torch.Generator().manual_seed(0)
    return torch.nn.ParameterList([torch.randn(shape, generator=generator) for shape in SHAPES])


def _muon_rank(rank, directory):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS
    )
    turn, cross, turned, sent = muon._zeropower_via_newtonschulz, dist.all_to_all_single, [], []
    muon._zeropower_via_newtonschulz = lambda m, **how: (turned.append(m.shape), turn(m, **how))[1]
    dist.all_to_all_single = lambda to, of, *a, **k: (
        sent.append(of.nbytes),
        cross(to, of, *a, **k),
    )
    weights = moved_by_muon(muon.ShardedMuon, fully_shard(matrices()))
    found = {"weights": [w.detach() for w in weights], "turned": turned, "sent": sent}
    torch.save(found, directory / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def muon_ranks(tmp_path_factory):
    """Of each rank: the whole weights, the shapes it orthogonalised, the bytes of its messages."""
    directory = tmp_path_factory.mktemp("muon")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # the processes share one import
    ranks = [
        context.Process(target=_muon_rank, args=(rank, directory), daemon=True)
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0] * RANKS
    return [torch.load(directory / f"{rank}.pt") for rank in range(RANKS)]


def test_sharded_muon_takes_the_steps_of_torchs_own(muon_ranks):
    """Scaled by the whole matrix's shape: a shard's would shorten the steps of tall matrices."""
    expected = moved_by_muon(torch.optim.Muon, matrices())
    for found in muon_ranks:
        for ours, theirs, start in zip(found["weights"], expected, matrices(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-4)
            assert (theirs - start).abs().max() > 1e-2, "steps this small show nothing"


def test_each_matrix_is_orthogonalised_once_and_each_entry_sent_twice(muon_ranks):
    turned = [shape for found in muon_ranks for shape in found["turned"]]
    assert sorted(turned) == sorted(3 * [torch.Size(shape) for shape in SHAPES])
    assert all(found["turned"] for found in muon_ranks)
    entries = sum(rows * columns for rows, columns in SHAPES)
    messages = [found["sent"] for found in muon_ranks]
    assert [len(m) for m in messages] == [3 * 2] * RANKS, "two all-to-alls a step"
    assert sum(map(sum, messages)) == 3 * 2 * entries * 2, "in bf16"


@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_matrices_are_shared_out_by_what_they_cost(size):
    generator = torch.Generator().manual_seed(size)
    shapes = [torch.Size(s) for s in torch.randint(1, 90, (30, 2), generator=generator).tolist()]
    owners = muon.share_out(shapes, size)
    costs = [rows * columns * min(rows, columns) for rows, columns in shapes]
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == r) for r in range(size)]
    assert set(owners) <= set(range(size)) and max(loads) - min(loads) <= max(costs)
    assert owners == muon.share_out(shapes, size), "the same on every rank"
