"""Regeneration on Ray actors: dead workers, dead drivers, and prompts that kill."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from flows import regenerate as flow
from flows.cluster import connect, worker_count
from flows.regenerate import RegenerationWorker, regenerate_with_ray
from jetspec import storage
from jetspec.config import RayConfig, RunConfig
from jetspec.errors import JetspecError
from jetspec.generation.plan import Plan, prepare
from jetspec.generation.regenerate import DEAD_LETTER, regenerate
from jetspec.samples import read_samples
from tests.regeneration import QUESTIONS, make_run, save_target

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with connect(RayConfig(address="local", cpus=2)):
        yield


@pytest.fixture(scope="module")
def target_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def run(tmp_path: Path, target_directory: Path) -> Callable[..., RunConfig]:
    return partial(make_run, tmp_path, target_directory)


def contents(uri: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(uri).glob("shard-*.parquet")}


def unbroken(run: Callable[..., RunConfig], tmp_path: Path, **settings: Any) -> dict[str, bytes]:
    """The shards of the same run, computed in this process without a break."""
    config = run(storage=tmp_path / "unbroken", **settings)
    regenerate(config)
    return contents(prepare(config).uri)


class DyingWorker(RegenerationWorker):
    """Kills its own process, as the memory killer would, in the middle of a generation.

    The questions that kill, and how often each may, lie in `deadly.json` beside the target's cache.
    """

    def open(self, plan: Plan) -> None:
        super().open(plan)
        place = Path(plan.config.target.cache_dir) / "deadly.json"
        answer, count = self._backend.generate, self._backend.on_tokens

        def generate(requests: Any) -> Any:
            deadly = json.loads(place.read_text())
            for request in requests:
                question = request.messages[-1]["content"]
                if deadly.get(question, 0) > 0:
                    deadly[question] -= 1
                    place.write_text(json.dumps(deadly))
                    self._backend.on_tokens = _die
            return answer(requests)

        def _die(written: int) -> None:
            count(written)
            os.kill(os.getpid(), signal.SIGKILL)

        self._backend.generate = generate  # type: ignore[method-assign]


class NeverOpening(RegenerationWorker):
    def open(self, plan: Plan) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def let_die(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, deadly: dict[str, int]) -> None:
    (tmp_path / "cache").mkdir(exist_ok=True)
    (tmp_path / "cache" / "deadly.json").write_text(json.dumps(deadly))
    monkeypatch.setattr(flow, "_ACTOR", ray.remote(DyingWorker))


def test_a_pool_with_a_killed_worker_writes_what_one_process_writes(
    cluster: None, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_die(monkeypatch, tmp_path, {QUESTIONS[5]: 1})
    config = run(workers=2, temperature=1.0)
    result = regenerate_with_ray(config)
    deadly = json.loads((tmp_path / "cache" / "deadly.json").read_text())
    assert deadly == {QUESTIONS[5]: 0}, "no worker was killed"
    assert (result.stage, result.reused) == ("samples", False)
    assert result.facts["accounting"]["in"] == 14
    assert contents(result.uri) == unbroken(run, tmp_path, temperature=1.0)
    samples = read_samples(result.uri, statuses=("ok", "truncated", "looping"))
    assert len({sample.id for sample in samples}) == 14
    again = regenerate_with_ray(config)
    assert again.reused and (again.uri, again.key) == (result.uri, result.key)
    assert again.facts == result.facts
    json.dumps(result.facts)


def test_a_prompt_that_kills_its_workers_is_a_dead_letter_and_the_rest_goes_on(
    cluster: None, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadly = QUESTIONS[12]  # of the last shard, which has two: each half is one prompt
    let_die(monkeypatch, tmp_path, {deadly: 99})
    result = regenerate_with_ray(run(workers=1, max_attempts=1))
    (letter,) = [
        json.loads(line) for line in Path(result.uri, DEAD_LETTER).read_text().splitlines()
    ]
    assert letter["status"] == "failed" and "killed its worker 1 times" in letter["reason"]
    samples = read_samples(result.uri, statuses=("ok", "truncated", "looping"))
    asked = {sample.messages[0]["content"] for sample in samples}
    assert asked == set(QUESTIONS) - {deadly}
    assert letter["prompt_id"] not in {sample.prompt_id for sample in samples}
    assert result.facts["accounting"]["failed"] == 1 and result.facts["accounting"]["in"] == 14


def test_workers_that_die_before_their_first_shard_end_the_run(
    cluster: None, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow, "_ACTOR", ray.remote(NeverOpening))
    config = run(workers=1, max_attempts=1)
    with pytest.raises(JetspecError, match=r"1 workers in a row died before") as error:
        regenerate_with_ray(config)
    assert "\n" not in str(error.value)
    assert not storage.is_complete(prepare(config).uri)


def test_a_workers_error_reaches_the_user_in_one_line(
    cluster: None, run: Any, target_directory: Path
) -> None:
    config = run(workers=1, backend="endpoint", endpoint={"url": "http://127.0.0.1:9/v1"})
    with pytest.raises(JetspecError, match=r"endpoint.url: http://127.0.0.1:9/v1: cannot be"):
        regenerate_with_ray(config)
    blocked = run(workers=1)
    shard = Path(prepare(blocked).uri, "shard-00002.json")
    shard.mkdir()  # in the way of the record
    (shard / "file").touch()
    with pytest.raises(JetspecError, match="shard-00002"):
        regenerate_with_ray(blocked)
    assert not storage.is_complete(prepare(blocked).uri)


def test_a_killed_driver_leaves_whole_shards_and_a_rerun_completes_the_set(
    cluster: None, run: Any, tmp_path: Path
) -> None:
    settings = {"shard_size": 1, "max_new_tokens": 120, "batch_size": 1, "temperature": 1.0}
    config = run(**settings)
    uri = prepare(config).uri
    (tmp_path / "run.json").write_text(config.model_dump_json())
    script = (
        "import sys; from flows.regenerate import regenerate_with_ray; "
        "from jetspec.config import RunConfig; "
        "regenerate_with_ray(RunConfig.model_validate_json(open(sys.argv[1]).read()))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "run.json")]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until(lambda: len(list(Path(uri).glob("shard-*.json"))) >= 2, driver)
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    whole = sorted(path.name for path in Path(uri).glob("shard-*.json"))
    assert 2 <= len(whole) < 14, "killed too late to show anything"
    assert not storage.is_complete(uri)
    kept = {name: Path(uri, name).stat().st_mtime_ns for name in whole}

    regenerate_with_ray(config)
    assert {name: Path(uri, name).stat().st_mtime_ns for name in whole} == kept
    assert contents(uri) == unbroken(run, tmp_path, **settings)
    samples = read_samples(uri, statuses=("ok", "truncated", "looping"))
    assert len({sample.id for sample in samples}) == len(samples) == 14
    assert not list(Path(uri).glob("*.part"))


def _wait_until(condition: Callable[[], bool], process: Any = None, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "took too long"
        assert process is None or process.poll() is None, "the driver ended by itself"
        time.sleep(0.05)


# The cluster


def test_an_existing_connection_is_used_and_left_alone(cluster: None) -> None:
    with connect(RayConfig(address="nowhere:1")):
        assert ray.is_initialized()
    assert ray.is_initialized()


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9", "no such thing"])
def test_an_unreachable_cluster_is_one_line(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with (
        pytest.raises(JetspecError, match="ray.address") as error,
        connect(RayConfig(address=address)),
    ):
        pass
    assert "\n" not in str(error.value)


def test_cpus_are_for_a_local_cluster_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    config = RayConfig(address="auto", cpus=3)
    with pytest.raises(JetspecError, match="ray.cpus"), connect(config):
        pass


def test_a_pool_has_one_worker_a_gpu_and_never_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 8.0, "GPU": 4.0})
    assert worker_count(None, gpu=True) == 4
    assert worker_count(None, gpu=False) == 1
    assert worker_count(6, gpu=False) == 6
    with pytest.raises(JetspecError, match=r"workers: 6: the cluster has 4 GPUs"):
        worker_count(6, gpu=True)
