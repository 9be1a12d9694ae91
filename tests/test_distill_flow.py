"""Distillation on Ray Train: one and two workers, killed ones, and mistakes told in one line."""

import os
import signal
from pathlib import Path

import psutil
import pytest
import torch

from flows import distill as flow
from flows.cluster import connect
from flows.distill import distill_with_ray
from jetspec.config import RayConfig, RunConfig, parse_config
from jetspec.errors import JetspecError
from jetspec.storage import read_json
from jetspec.targets.load import load_target
from jetspec.training.stage import distil_head
from tests.answers import greedy_samples, save_target, write_samples
from tests.test_training_loop import BASE, comparable
from tests.tiny import tiny_target

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """One CPU, so that workers and this process add up with one thread, in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")  # of workers, dead or done
        with connect(RayConfig(address="local", cpus=1)):
            yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """Plain values of a run on disk; its samples are in `samples`."""
    root = tmp_path_factory.mktemp("distil")
    source = save_target(tiny_target("llama", spread=0.08), root / "target")
    cache = str(root / "cache")
    target = load_target(
        RunConfig.model_validate({"target": {"source": source, "cache_dir": cache}}).target
    )
    made = greedy_samples(target, count=12, tokens=12, stop_token_ids=())
    write_samples(made, str(root / "samples"))
    return {
        "samples": str(root / "samples"),
        "target": {"source": source, "cache_dir": cache},
        "head": {"num_layers": 1, "block_size": 4, "num_taps": 2, "edge_rank": 2},
        "training": BASE | {"epochs": 30, "loss": BASE["loss"].model_dump()},
    }


def make(raw, storage, **training):
    plain = {key: value for key, value in raw.items() if key != "samples"}
    plain |= {"storage": str(storage), "training": raw["training"] | training}
    return parse_config(plain)


def curve(uri):
    return comparable(read_json(f"{uri}/training.json")["curve"])


@pytest.fixture(scope="module")
def unbroken(raw, tmp_path_factory):
    """The curve of the same run in this process."""
    config = make(raw, tmp_path_factory.mktemp("unbroken"))
    return curve(distil_head(config, raw["samples"]).uri)


def train_workers():
    """Processes of Ray Train's workers on this cluster."""
    children = psutil.Process().children(recursive=True)
    return [p for p in children if p.name().startswith("ray::RayTrainWorker")]


def test_worker_killed_in_the_middle_is_replaced_and_ends_as_if_unbroken(raw, tmp_path, unbroken):
    killed, seen = [], []

    def report(step, metrics):
        seen.append(step)
        if step >= 4 and not killed:
            for worker in train_workers():
                killed.append(worker.pid)
                os.kill(worker.pid, signal.SIGKILL)

    config = make(raw, tmp_path)
    result = distill_with_ray(config, raw["samples"], report=report)
    assert len(killed) == 1
    steps = [entry["step"] for entry in unbroken]
    assert seen.count(1) == 1 and sorted(set(seen)) == steps, "it began again from the start"
    assert curve(result.uri) == unbroken
    assert not list(Path(tmp_path, "checkpoints").glob("*/*"))
    again = distill_with_ray(config, raw["samples"])
    assert again.reused and again.facts == result.facts


def test_two_ray_workers_take_the_steps_of_one(raw, tmp_path):
    alone = distil_head(make(raw, tmp_path / "one", epochs=5), raw["samples"])
    result = distill_with_ray(make(raw, tmp_path / "two", epochs=5, workers=2), raw["samples"])
    assert result.facts["workers"] == 2
    for ours, theirs in zip(curve(alone.uri), curve(result.uri), strict=True):
        assert theirs == pytest.approx(ours, rel=1e-3, abs=1e-6)


def test_mistake_found_by_a_worker_is_told_at_once_and_in_one_line(raw, tmp_path, monkeypatch):
    fits = []
    original = flow.TorchTrainer.fit
    monkeypatch.setattr(flow.TorchTrainer, "fit", lambda self: (fits.append(1), original(self))[1])
    config = make(raw, tmp_path, hidden_states="cache", cache_limit_gb=1e-6)
    with pytest.raises(JetspecError, match="cache_limit_gb") as caught:
        distill_with_ray(config, raw["samples"])
    assert len(fits) == 1 and "\n" not in str(caught.value)
    assert not list(tmp_path.glob("heads/*/manifest.json"))
