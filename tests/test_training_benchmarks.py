"""The measurement of training in miniature: two processes, gloo, random weights."""

import argparse
import json
import multiprocessing
import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from jetspec.training import benchmarks, flops
from jetspec.training.world import World
from tests.test_training_loop import _free_port

ARGUMENTS = {
    "steps": 2, "log_every": 1, "batch": 4, "micro": 1, "row_tokens": 24, "anchors": 4,
    "compile": False, "optimizer": "adamw", "peak": flops.PEAKS["H200"], "chunk": 64,
}  # fmt: skip
SMALL = ["--shape", "tiny", "--batch", "4", "--micro", "1", "--row-tokens", "24", "--anchors", "4"]


def _worker(rank, port, path):
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2",
        "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
    }  # fmt: skip
    torch.set_num_threads(1)
    steps = ["--steps", "2", "--log-every", "1", "--resume"]
    benchmarks.main([*SMALL, *steps, "--json", str(path / f"{rank}.json")])


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    path = tmp_path_factory.mktemp("training")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    port = _free_port()
    workers = [context.Process(target=_worker, args=(r, port, path), daemon=True) for r in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert not (path / "1.json").exists()
    return json.loads((path / "0.json").read_text())


def test_ddp_and_fsdp2_take_the_steps_of_one_process(record) -> None:
    one, ddp, fsdp2 = record["runs"]
    assert [run["processes"] for run in record["runs"]] == [1, 2, 2]
    assert (one["strategy"], ddp["strategy"], fsdp2["strategy"]) == ("one process", "ddp", "fsdp2")
    for run in (ddp, fsdp2):
        assert [entry["step"] for entry in run["curve"]] == [1, 2]
        assert run["largest_loss_difference"] < 1e-4
        assert run["flop_per_step"] == one["flop_per_step"]
        assert run["mfu"] * run["seconds_per_step"] * 2 * flops.PEAKS["H200"] == pytest.approx(
            run["flop_per_step"]
        )


def test_one_process_two_and_one_again_give_the_unbroken_losses(record) -> None:
    for run in record["resumed"]:
        assert run["processes"] == [1, 2, 1] and len(run["resumed"]) == 3
        assert run["largest_relative_difference"] < 1e-4
        assert run["unbroken"][0] != run["unbroken"][2], "a loss that stands still shows nothing"


class Products(TorchDispatchMode):
    """Counts the operations of matrix products with a weight."""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.flops += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def test_counted_operations_are_those_of_a_step(monkeypatch) -> None:
    """Attention apart, whose dense masks on a CPU compute what the formula does not count."""
    args = argparse.Namespace(**ARGUMENTS)
    counts = []
    step = benchmarks.train.__globals__["Run"]._step

    def counted(self, *numbered):
        with Products() as products:
            health = step(self, *numbered)
        counts.append(products.flops)
        return health

    monkeypatch.setattr(benchmarks.train.__globals__["Run"], "_step", counted)
    shape = benchmarks.shapes()["tiny"]
    run = benchmarks.timed(shape, args, "ddp", World())
    target, head = benchmarks.random_models(shape)
    slots = run["curve"][-1]["slots_per_token"] * 96
    whole = flops.step_flops(head, target, 4, 24, anchors=4, slots=slots)
    assert whole == run["flop_per_step"]
    attention = 4 * 32 * 2 * 96 * 12 + 12 * 32 * (4 * 4 * 4) * (12 + 2)
    assert counts[-1] == pytest.approx(whole - attention, rel=0.1)


def test_a_runs_utilisation_is_its_steps_flop_over_the_peak() -> None:
    target, head = benchmarks.random_models(benchmarks.shapes()["tiny"])
    config = benchmarks.settings(argparse.Namespace(**ARGUMENTS | {"optimizer": "muon"}), "ddp")
    assert config.optimizer == "muon"
    rates = {"steps_per_second": 5.0, "tokens_per_second": 480.0, "slots_per_second": 100.0}
    step = flops.step_flops(head, target, 4, 24, anchors=config.anchors, slots=20.0)
    assert flops.utilisation(head, target, rates, config, 1e9) == pytest.approx(5 * step / 1e9)
    assert flops.utilisation(head, target, rates, config, None) is None
    for change in ({"freeze_backbone": True}, {"hidden_states": "cache"}):
        other = config.model_copy(update=change)
        assert flops.utilisation(head, target, rates, other, 1e9) is None
    assert flops.peak_flops(torch.device("cpu"), 2) is None
