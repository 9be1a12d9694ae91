"""Registering, promoting and rolling back, against a real registry in a sqlite file."""

import json
import socket
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from flows import processes, registered, registry, service, tracking
from jetspec import storage
from jetspec.config import RunConfig, parse_config
from jetspec.errors import JetspecError
from jetspec.targets.config import TargetConfig

Register = Callable[..., registered.Version]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def config(store: Path, request: pytest.FixtureRequest) -> RunConfig:
    """One database for the module, one registered name a test."""
    return parse_config({"storage": str(store), "target": {"source": f"org/{request.node.name}"}})


@pytest.fixture
def add(config: RunConfig, make_adder: Callable[..., Register]) -> Register:
    return make_adder(config)


@pytest.fixture
def make_adder(tmp_path: Path) -> Callable[[RunConfig], Register]:
    """A function that logs and registers a head whose weights are the given text."""
    return lambda config: _adder(config, tmp_path)


def _adder(config: RunConfig, tmp_path: Path) -> Register:
    def add(weights: str, tau: float = 2.0, register: Callable = registry.register) -> Any:
        head = tmp_path / weights
        if not head.exists():
            head.mkdir()
            (head / "config.json").write_text("{}")
            # The name of the test keeps its heads apart from those of the others.
            (head / "model.safetensors").write_text(f"{config.target.source} {weights}")
            storage.write_manifest(str(head), kind="head", config_hash="c")
        with tracking.pipeline_run(config) as run:
            tracking.log_head(run, str(head), {"tau": tau})
        return register(
            config,
            str(head),
            lineage={"target_fingerprint": "f" * 64, "target": {"source": "x"}},
            serving_table=[[1, 16, 15]],
            records=[{"key": "k", "tau": tau}],
            metrics={"tau": tau, "tau/k": tau},
            headline={"tau": tau},
            verdict={"promote": True},
            run_id=run.run_id,
        )

    return add


def test_a_champion_comes_back_with_metrics_lineage_table_and_files(
    config: RunConfig, add: Register
) -> None:
    version = add("a")
    assert registry.champion(config) is None
    registry.promote(config, version.version)
    found = registry.champion(config)
    assert found is not None
    assert found.version == version.version
    assert found.fingerprint == "f" * 64
    assert found.metrics == {"tau": 2.0, "tau/k": 2.0}
    assert found.serving_table == [[1, 16, 15]]
    assert found.records == [{"key": "k", "tau": 2.0}]
    assert found.previous_champion is None
    assert (Path(found.head_uri) / "model.safetensors").exists()
    shown = json.loads(json.dumps(found.as_json()))
    assert shown["lineage"]["target"] == {"source": "x"}
    assert shown["records"] == 1


def test_registering_again_makes_no_second_version(config: RunConfig, add: Register) -> None:
    assert add("a").version == add("a").version
    assert add("a", tau=2.5).version == 2
    assert add("b").version == 3
    name = registered.registered_name(config.target)
    assert [v.version for v in registry.versions(config, name)] == [3, 2, 1]


def test_a_later_evaluation_of_a_head_leaves_an_older_versions_files_alone(
    config: RunConfig, add: Register
) -> None:
    first = add("a", tau=2.0)
    registry.promote(config, first.version)
    add("a", tau=9.0)
    found = registry.champion(config)
    assert found is not None
    assert found.metrics["tau"] == 2.0


def test_rollback_walks_back_one_champion_at_a_time(config: RunConfig, add: Register) -> None:
    one, two, three = add("a"), add("b"), add("c")
    for version in (one, two, three):
        registry.promote(config, version.version)
    assert registry.rollback(config).version == two.version
    assert registry.rollback(config).version == one.version
    with pytest.raises(JetspecError, match="first champion"):
        registry.rollback(config)
    found = registry.champion(config)
    assert found is not None
    assert found.version == one.version


def test_promoting_the_champion_again_does_not_make_it_its_own_predecessor(
    config: RunConfig, add: Register
) -> None:
    one, two = add("a"), add("b")
    for version in (one, two, two):
        registry.promote(config, version.version)
    found = registry.champion(config)
    assert found is not None
    assert found.previous_champion == one.version


@pytest.mark.parametrize(
    "step",
    [
        "log_model_artifacts",
        "create_model_version",
        "set_registered_model_alias",
        "set_model_version_tag",
    ],
)
def test_a_crash_at_any_step_leaves_the_old_champion_and_a_retry_completes(
    step: str, config: RunConfig, add: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = add("a")
    registry.promote(config, old.version)

    def crash(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt(step)

    with monkeypatch.context() as patch:
        # Logging the head is not under test: the step breaks once registering begins.
        def register(*args: Any, **kwargs: Any) -> registered.Version:
            patch.setattr(MlflowClient, step, crash)
            return registry.register(*args, **kwargs)

        with pytest.raises(KeyboardInterrupt, match=step):
            registry.promote(config, add("b", register=register).version)
    found = registry.champion(config)
    assert found is not None
    assert found.version == old.version
    new = add("b")
    registry.promote(config, new.version)
    found = registry.champion(config)
    assert found is not None
    assert (found.version, found.previous_champion) == (new.version, old.version)
    assert new.version == old.version + 1


def test_a_version_whose_files_are_gone_is_not_promoted(config: RunConfig, add: Register) -> None:
    old, new = add("a"), add("b")
    registry.promote(config, old.version)
    opened = registry.open_version(config, new.version)
    (Path(opened.head_uri) / "model.safetensors").unlink()
    with pytest.raises(JetspecError, match="not whole"):
        registry.promote(config, new.version)
    found = registry.champion(config)
    assert found is not None
    assert found.version == old.version


def test_an_unknown_version_names_those_there_are(config: RunConfig, add: Register) -> None:
    add("a")
    with pytest.raises(JetspecError, match=r"version: 7: .*there are: 1"):
        registry.promote(config, 7)


def test_a_head_that_was_not_logged_is_refused(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    storage.write_manifest(str(tmp_path), kind="head", config_hash="c")
    with pytest.raises(JetspecError, match="not logged"):
        registry.register(
            config,
            str(tmp_path),
            lineage={},
            serving_table=[],
            records=[],
            metrics={},
            headline={},
            verdict={},
        )


def test_asking_for_a_champion_where_nothing_ran_creates_nothing(tmp_path: Path) -> None:
    config = parse_config({"storage": str(tmp_path / "none")})
    assert registry.champion(config) is None
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("embedded", "jetspec-smollm2-135m-instruct"),
        ("Qwen/Qwen3-8B", "jetspec-qwen-qwen3-8b"),
        ("/models/My Model", "jetspec-my-model"),
        ("/models/tiny.Q4_1.gguf", "jetspec-tiny-q4-1"),
    ],
)
def test_names_follow_the_target(source: str, name: str) -> None:
    assert registered.registered_name(TargetConfig(source=source)) == name


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An MLflow server that keeps its artefacts to itself: clients see none of its disk."""
    root = tmp_path_factory.mktemp("server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--workers", "1"]
    command += ["--port", str(port), "--backend-store-uri", f"sqlite:///{root}/mlflow.db"]
    command += ["--artifacts-destination", str(root / "artifacts")]
    process = processes.spawn(
        "mlflow", command, environment=service.NO_JOBS, directory=root, log=root / "log"
    )
    url = f"http://127.0.0.1:{port}"
    try:
        processes.wait_until(process, lambda: _answers(f"{url}/health"), "answer", 120)
        yield url
    finally:
        processes.stop(process)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=3):
            return True
    except OSError:
        return False


@pytest.mark.slow
def test_a_tracking_server_holds_the_champion_for_other_machines(
    server: str, tmp_path: Path, make_adder: Callable[..., Register]
) -> None:
    config = parse_config(
        {
            "storage": str(tmp_path / "runs"),
            "tracking": {"uri": server},
            "target": {"source": "org/served", "cache_dir": str(tmp_path / "cache")},
        }
    )
    add = make_adder(config)
    first, second = add("a"), add("b", tau=2.5)
    registry.promote(config, first.version)
    registry.promote(config, second.version)
    found = registry.champion(config)
    assert found is not None
    assert found.head_uri.startswith(str(tmp_path / "cache"))
    assert (Path(found.head_uri) / "model.safetensors").read_text() == "org/served b"
    assert (found.metrics["tau"], found.previous_champion) == (2.5, first.version)
    assert registry.rollback(config).version == first.version
    assert not (tmp_path / "runs").exists()
