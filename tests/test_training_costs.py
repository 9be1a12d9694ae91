"""What the parts of a training step cost: told apart without changing the step."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode

from jetspec.training import benchmarks, costs
from jetspec.training import step as step_module
from jetspec.training.costs import Parts, kernels_by_part

SMALL = ["--shape", "tiny", "--batch", "2", "--micro", "1", "--row-tokens", "32", "--anchors", "4"]


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(costs.time, "perf_counter", lambda: now[0])

    def work(seconds):
        now[0] += seconds

    return work


def test_a_part_does_not_answer_for_the_parts_in_it(clock):
    parts = Parts(torch.device("cpu"))

    def outer():
        clock(1)
        parts.call("inner", clock, 10)
        parts.call("path scores: x", lambda: parts.call("inner", clock, 100))
        clock(2)
        return "result"

    assert parts.call("outer", outer) == "result"
    assert parts.host == {"outer": 3, "inner": 10, "path scores: x": 100}


def event(name, start, end, device=DeviceType.CUDA, annotation=False):
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(
        name=name, time_range=span, device_type=device, is_user_annotation=annotation
    )


def test_a_kernel_belongs_to_the_innermost_part_that_is_open():
    def part(name, start, end):
        return event(costs._PART + name, start, end, DeviceType.CPU, True)

    events = [
        part("whole", 0, 100), part("a", 10, 40), part("b", 20, 30), part("a", 50, 60),
        event("aten::mm", 12, 20, DeviceType.CPU),
        event(costs._PART + "a", 10, 40, annotation=True),
        *(event("kernel", begin, begin + 3) for begin in (55, 1, 12, 22, 25, 33, 40, 99, 120)),
    ]  # fmt: skip
    assert kernels_by_part(reversed(events)) == {
        "whole": (9.0, 3), "a": (9.0, 3), "b": (6.0, 2), "the rest": (3.0, 1)
    }  # fmt: skip


def test_counting_a_runs_parts_leaves_its_steps_as_they_are():
    args = ["--head", '{"edge_rank": 2}']
    runs = [made(*args) for _ in range(2)]
    backward, mask = torch.Tensor.backward, step_module.attention_mask
    parts = Parts(runs[0].device)
    with parts.of(runs[0]):
        counted = [runs[0]._step(step, runs[0].plan(step)) for step in range(2)]
        attributes = set(vars(runs[0]))
    assert parts.host.keys() >= {"batch", "teacher", "mask", "head", "distillation", "backward"}
    assert "_clip" in attributes and "_clip" not in vars(runs[0])
    assert (torch.Tensor.backward, step_module.attention_mask) == (backward, mask)
    for step, health in enumerate(counted):
        assert torch.equal(runs[1]._step(step, runs[1].plan(step)), health)


def made(*arguments):
    """The run that a command measures."""
    runs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmarks, "costs", lambda run, steps: runs.append(run) or EMPTY)
        benchmarks.main([*SMALL, "--parts", *arguments])
    return runs[0]


EMPTY = {"step": 0.0, "host": 0.0, "device": None, "parts": {}}


def test_a_group_is_told_by_producer(tmp_path, capsys):
    names = ["markov", "context", "second pass"]
    path = tmp_path / "record.json"
    benchmarks.main(
        [*SMALL, "--steps", "1", "--log-every", "1", "--head", '{"edge_rank": 2}',
         "--json", str(path), "--group", *names]
    )  # fmt: skip
    record = json.loads(path.read_text())["parts"]
    assert {f"path scores: {name}" for name in names} <= record["parts"].keys()
    assert record["host"] == pytest.approx(sum(part["host"] for part in record["parts"].values()))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(record["parts"]) and "path scores: context" in "".join(lines)


class Waits(TorchDispatchMode):
    """Refuses what a GPU would have to be waited for."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function.overloadpacket)
        waits = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero")
        assert not any(word in name for word in waits), name
        if name in ("aten.index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_"):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), name
        return function(*args, **(kwargs or {}))


def test_a_group_is_enqueued_without_waiting_for_anything() -> None:
    shape = benchmarks.shapes()["tiny"]
    target, _ = benchmarks.random_models(shape)
    heads = {
        name: costs.HeadConfig.model_validate(
            shape.head | {"edge_rank": 2, "edge_rows": "learned"} | settings
        )
        for name, settings in costs.PRODUCERS.items()
    }
    config = benchmarks.TrainingConfig(
        anchors=4, sequence_length=24, batch_size=2, micro_batch_size=1, heldout_fraction=0.2
    )
    run = costs.group(heads, config, target, benchmarks.random_rows(8, 24, target.vocab_size))
    run.optimizers = []  # fused on a GPU, not here
    plan = run.plan(0)
    with Waits():
        health = run._step(0, plan)
        with pytest.raises(AssertionError, match="_local_scalar_dense"):
            health[0, 0].item()
    assert health.shape == (2, len(heads)) and torch.isfinite(health).all()
