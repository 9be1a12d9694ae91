"""Local services: started once, found again, stopped whole, and never someone else's process."""

import contextlib
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from flows import prefect_profile, processes, service
from jetspec.errors import JetspecError

ROOT = Path(__file__).resolve().parent.parent
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
# A child that would outlive its parent.
FAMILY = [
    sys.executable,
    "-c",
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
    " start_new_session=True)\n"
    "print(child.pid, flush=True)\ntime.sleep(60)",
]
STUB_FLOW = """
from pathlib import Path
from prefect import flow

@flow(name="regen-train-eval")
def regen_train_eval(
    config: str = "default",
    overrides: list[str] = [],
    only_if_target_changed: bool = False,
    storage: str | None = None,
) -> dict:
    told = f"{storage} {overrides} {only_if_target_changed}"
    Path(__file__).with_name(f"ran-{config}").write_text(told)
    return {}
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def spawn(tmp_path: Path, command: list[str]) -> processes.Running:
    return processes.spawn(
        "test", command, environment={}, directory=tmp_path, log=tmp_path / "test.log"
    )


def eventually(check: Any, seconds: float = 20) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := check()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def test_stop_ends_a_process_and_what_it_started(tmp_path: Path) -> None:
    process = spawn(tmp_path, FAMILY)
    child = int(eventually(lambda: (tmp_path / "test.log").read_text().strip()))
    processes.stop(process)
    assert not process.alive
    assert eventually(
        lambda: (
            not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
        )
    )


def test_an_id_that_was_given_to_another_process_is_not_killed(tmp_path: Path) -> None:
    process = spawn(tmp_path, SLEEP)
    try:
        stale = processes.Running("old", process.pid, process.started - 100, None, process.log)
        assert not stale.alive
        processes.stop(stale)
        assert process.alive
    finally:
        processes.stop(process)


def test_a_process_that_dies_at_once_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    process = spawn(tmp_path, [sys.executable, "-c", "raise SystemExit('no such database')"])
    with pytest.raises(JetspecError, match=r"ended at once.*test\.log.*no such database"):
        processes.wait_until(process, lambda: False, "answer", 20)


def fake_services(*commands: list[str]) -> list[service.Service]:
    """A web server in Prefect's place, and any others."""
    port = free_port()
    web = (sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port))
    first = service.Service("prefect", web, {}, port, "/", "--prefect-port")
    return [first, *(service.Service("worker", tuple(c), {}) for c in commands)]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(service, "_deploy", lambda *args: None)
    monkeypatch.setattr(service, "_worker_online", lambda api: True)
    monkeypatch.setattr(prefect_profile, "activate", lambda api: "mine")
    return monkeypatch


def up(storage: Path) -> list[processes.Running]:
    return service.up(
        str(storage), prefect_port=1, mlflow_port=2, project=ROOT, say=lambda line: None
    )


def test_up_twice_starts_once_and_down_twice_stops_once(
    fakes: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = fake_services(SLEEP)
    fakes.setattr(service, "services", lambda *args: wanted)
    restored: list[str] = []
    fakes.setattr(prefect_profile, "restore", restored.append)
    try:
        first = up(tmp_path)
        assert [r.name for r in first] == ["prefect", "worker"]
        assert up(tmp_path) == first == service.running(str(tmp_path))
    finally:
        stopped = service.down(str(tmp_path))
    assert stopped == ["prefect", "worker"]
    assert restored == ["mine"]
    assert not any(r.alive for r in first)
    assert service.down(str(tmp_path)) == []


def test_a_start_that_fails_leaves_nothing_running(
    fakes: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = fake_services([sys.executable, "-c", "pass"])
    fakes.setattr(service, "services", lambda *args: wanted)
    fakes.setattr(service, "_worker_online", lambda api: False)
    with pytest.raises(JetspecError, match=r"worker: ended at once"):
        up(tmp_path)
    assert not (tmp_path / "services" / "services.json").exists()
    assert wanted[0].port is not None
    service._check_port_free(wanted[0])


def test_what_is_left_after_a_crash_is_replaced(fakes: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted = fake_services(SLEEP)
    fakes.setattr(service, "services", lambda *args: wanted)
    fakes.setattr(prefect_profile, "restore", lambda name: None)
    try:
        web, worker = up(tmp_path)
        processes.stop(worker)
        again = up(tmp_path)
        assert all(r.alive for r in again)
        assert not web.alive
    finally:
        service.down(str(tmp_path))


def test_a_storage_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JetspecError, match=r"--storage: .*file: is a file"):
        up(tmp_path / "file")


@pytest.mark.parametrize(("code", "answers"), [(503, True), (422, False)])
def test_a_busy_server_is_asked_again_and_a_refusal_is_final(
    code: int, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def urlopen(request: urllib.request.Request, timeout: float) -> Any:
        calls.append(request.full_url)
        if len(calls) == 1:
            raise urllib.error.HTTPError(request.full_url, code, "no", Message(), None)
        return io.BytesIO(b"[1]")

    monkeypatch.setattr(service, "_BUSY_WAITS_S", (0.0,))
    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    if answers:
        assert service._call("http://server/api", {}) == [1]
    else:
        with pytest.raises(urllib.error.HTTPError):
            service._call("http://server/api", {})
    assert len(calls) == 1 + answers


def test_a_project_without_prefect_yaml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JetspecError, match=r"prefect\.yaml"):
        service.up(str(tmp_path), prefect_port=1, mlflow_port=2, project=tmp_path)


@pytest.fixture
def profiles(tmp_path: Path) -> Any:
    """Prefect's profiles in a file of their own."""
    from prefect.settings import PREFECT_PROFILES_PATH, temporary_settings

    path = tmp_path / "profiles.toml"
    with temporary_settings({PREFECT_PROFILES_PATH: path}):
        yield path


def test_the_profile_that_was_active_comes_back(profiles: Path) -> None:
    profiles.write_text('active = "work"\n[profiles.work]\nPREFECT_API_URL = "http://work/api"\n')
    previous = prefect_profile.activate("http://127.0.0.1:4200/api")
    assert previous == "work"
    assert 'active = "jetspec"' in profiles.read_text()
    assert prefect_profile.activate("http://127.0.0.1:4201/api") == "ephemeral"
    prefect_profile.restore(previous)
    assert 'active = "work"' in profiles.read_text()
    assert "http://work/api" in profiles.read_text()
    assert "jetspec" not in profiles.read_text()


def test_a_profile_chosen_since_stays_active(profiles: Path) -> None:
    previous = prefect_profile.activate("http://127.0.0.1:4200/api")
    text = profiles.read_text().replace('active = "jetspec"', 'active = "mine"')
    profiles.write_text(text + "\n[profiles.mine]\n")
    prefect_profile.restore(previous)
    assert 'active = "mine"' in profiles.read_text()


def test_runs_use_the_running_server_but_never_instead_of_the_users(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(service, "api_url", lambda storage: "http://ours/api")
    os.environ["PREFECT_API_URL"] = "http://theirs/api"
    assert service.prepare_environment(str(tmp_path)) == "http://theirs/api"
    del os.environ["PREFECT_API_URL"]
    assert service.prepare_environment(str(tmp_path)) == "http://ours/api"
    assert os.environ["PREFECT_API_URL"] == "http://ours/api"


def test_a_profile_left_by_a_dead_server_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "environ", {"PREFECT_HOME": str(tmp_path)})
    (tmp_path / "profiles.toml").write_text('active = "jetspec"\n')
    assert service.prepare_environment(str(tmp_path)) is None
    assert os.environ["PREFECT_PROFILE"] == "ephemeral"


def test_deployments_are_those_the_documentation_names() -> None:
    project = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    deployments = {d["name"]: d for d in project["deployments"]}
    assert set(deployments) == {"default", "nightly", "ablations"}
    for name, deployment in deployments.items():
        path, function = deployment["entrypoint"].split(":")
        flow = service.ABLATIONS if name == "ablations" else service.FLOW
        assert f'@flow(name="{flow}"' in (ROOT / path).read_text().replace("\n    ", "")
        assert f"def {function}(" in (ROOT / path).read_text()
        assert deployment["work_pool"]["name"] == service.POOL
    nightly = deployments["nightly"]
    assert nightly["parameters"]["only_if_target_changed"] is True
    assert nightly["schedules"][0]["cron"]
    assert nightly["triggers"][0]["expect"] == ["jetspec.target.updated"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_after_up_the_documented_commands_start_runs(tmp_path: Path) -> None:
    """The real servers with a flow that only leaves a file: by hand, then by the event."""
    project = tmp_path / "project"
    (project / "flows").mkdir(parents=True)
    (project / "flows" / "regen_train_eval.py").write_text(STUB_FLOW)
    other = STUB_FLOW.replace("regen-train-eval", "ablations").replace(
        "regen_train_eval", "ablations"
    )
    (project / "flows" / "ablations.py").write_text(other)
    shutil.copy(ROOT / "prefect.yaml", project)
    runs = tmp_path / "runs"
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")},
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PYTHONPATH": str(ROOT),
    }

    def python(program: str) -> str:
        program = f"from pathlib import Path\nfrom flows import service\n{program}"
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def prefect(*arguments: str) -> None:
        command = [sys.executable, "-m", "prefect", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    try:
        python(
            f"service.up({str(runs)!r}, prefect_port={free_port()}, mlflow_port={free_port()},"
            f" project=Path({str(project)!r}))"
        )
        changes = ("--param", 'overrides=["prompts.limit=8"]')
        prefect("deployment", "run", "regen-train-eval/default", "--watch", *changes)
        ran = (project / "flows" / "ran-default").read_text()
        assert ran == f"{runs} ['prompts.limit=8'] False"
        prefect("event", "emit", "jetspec.target.updated", "--resource-id", "jetspec.target")
        nightly = project / "flows" / "ran-nightly"
        assert eventually(nightly.exists, 120)
        assert nightly.read_text() == f"{runs} [] True"
    finally:
        stopped = python(f"import json; print(json.dumps(service.down({str(runs)!r})))")
    assert json.loads(stopped) == ["prefect", "mlflow", "worker"]
    with contextlib.suppress(FileNotFoundError):
        assert "jetspec" not in (tmp_path / "prefect" / "profiles.toml").read_text()
