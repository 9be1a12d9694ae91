"""`jetspec up` and `jetspec down`: Prefect server, worker and MLflow as processes of this machine.

State is one file under the storage, so `down` finds what `up` started, whatever happened between.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from flows import prefect_profile
from flows.processes import (
    Running,
    known_processes,
    last_line,
    read_state,
    spawn,
    stop,
    wait_until,
    write_state,
)
from jetspec import storage as files
from jetspec.config import RunConfig
from jetspec.errors import JetspecError

HOST = "127.0.0.1"
POOL = "jetspec"
FLOW = "regen-train-eval"
ABLATIONS = "ablations"
START_TIMEOUT_S = 120.0
_BUSY_WAITS_S = (1.0, 3.0, 9.0)

# Nothing here reports home.
QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "TOKENIZERS_PARALLELISM": "false",
}

# MLflow's background jobs score traces, of which there are none.
NO_JOBS = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


@dataclass(frozen=True)
class Service:
    """A process to keep running.

    Attributes:
        port: where it listens; None if it only calls others.
        health: path that answers 200 once it works.
        flag: the option of `jetspec up` that moves its port.
    """

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]
    port: int | None = None
    health: str = ""
    flag: str = ""

    @property
    def url(self) -> str | None:
        return f"http://{HOST}:{self.port}" if self.port else None


def services(storage: str, prefect_port: int, mlflow_port: int) -> list[Service]:
    """Prefect server, MLflow and the worker, in the order of their start."""
    root = Path(storage)
    api = f"http://{HOST}:{prefect_port}/api"
    database = f"sqlite+aiosqlite:///{root / 'services' / 'prefect.db'}"
    python = (sys.executable, "-m")
    # The tracking database and artefacts are those that runs under this storage write directly.
    mlflow: tuple[str, ...] = (
        "mlflow",
        "server",
        "--host",
        HOST,
        "--port",
        str(mlflow_port),
        "--workers",
        "1",
    )
    mlflow += ("--backend-store-uri", f"sqlite:///{root / 'mlflow.db'}")
    mlflow += ("--default-artifact-root", str(root / "mlartifacts"), "--no-serve-artifacts")
    server: tuple[str, ...] = (
        "prefect",
        "server",
        "start",
        "--host",
        HOST,
        "--port",
        str(prefect_port),
    )
    worker: tuple[str, ...] = ("prefect", "worker", "start", "--pool", POOL, "--type", "process")
    worker += ("--limit", "1", "--install-policy", "never")
    return [
        Service(
            "prefect",
            (*python, *server),
            {"PREFECT_API_URL": api, "PREFECT_API_DATABASE_CONNECTION_URL": database},
            prefect_port,
            "/api/health",
            "--prefect-port",
        ),
        Service("mlflow", (*python, *mlflow), NO_JOBS, mlflow_port, "/health", "--mlflow-port"),
        Service("worker", (*python, *worker), {"PREFECT_API_URL": api}),
    ]


def up(
    storage: str,
    *,
    prefect_port: int,
    mlflow_port: int,
    project: Path | None = None,
    say: Callable[[str], None] = print,
) -> list[Running]:
    """Start what is not running, deploy the flows, and make `prefect` talk to this server.

    Args:
        storage: a local directory; databases, logs and the state file go below it.
        project: the directory of prefect.yaml; None is the one this code was cloned into.

    Raises:
        JetspecError: a port is taken, the storage is not local, or a process does not come up.
    """
    if not files.is_local(storage):
        raise JetspecError("--storage", storage, "must be a local directory")
    storage = files.absolute(storage)
    if Path(storage).exists() and not Path(storage).is_dir():
        raise JetspecError("--storage", storage, "is a file; give a directory")
    project = project or Path(__file__).resolve().parent.parent
    if not (project / "prefect.yaml").is_file():
        raise JetspecError("prefect.yaml", project, "not found; run from a clone of the project")
    wanted = services(storage, prefect_port, mlflow_port)
    alive = {r.name: r for r in running(storage)}
    if len(alive) == len(wanted):
        if [alive[s.name].url for s in wanted] != [s.url for s in wanted]:
            raise JetspecError(
                "--storage", storage, "its services run on other ports; `jetspec down` first"
            )
        say("already running")
        return list(alive.values())
    if alive:
        say(f"stopping what is left of an earlier start: {', '.join(sorted(alive))}")
        down(storage)
    for service in wanted:
        _check_port_free(service)
    try:
        return _start(storage, project, wanted, say)
    except BaseException:
        down(storage)
        raise


def down(storage: str) -> list[str]:
    """Stop everything that `up` started under this storage; names of what was running."""
    storage = files.absolute(storage)
    state = read_state(_state_file(storage))
    alive = known_processes(state)
    for process in reversed(alive):
        stop(process)
    if "profile" in state:
        prefect_profile.restore(state["profile"])
    _state_file(storage).unlink(missing_ok=True)
    return [process.name for process in alive]


def running(storage: str) -> list[Running]:
    """The processes of `up` that are still alive, in the order of their start."""
    return known_processes(read_state(_state_file(files.absolute(storage))))


def api_url(storage: str) -> str | None:
    """The API of the Prefect server under this storage, if it answers."""
    server = next((r for r in running(storage) if r.name == "prefect"), None)
    if server is None or not _answers(f"{server.url}/api/health"):
        return None
    return f"{server.url}/api"


def prepare_environment(storage: str) -> str | None:
    """Settings for flows run in this process; call it before prefect is imported.

    A running server of `up` records the run. Without one Prefect keeps its own, temporary one,
    unless the user named a server.

    Returns:
        the API in use, or None for a temporary server.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    # On two busy cores the temporary server needs more than Prefect's 20 s.
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    if "PREFECT_API_URL" in os.environ:
        return os.environ["PREFECT_API_URL"]
    url = api_url(storage) if files.is_local(storage) else None
    if url is not None:
        os.environ["PREFECT_API_URL"] = url
    elif prefect_profile.active_name() == prefect_profile.NAME:
        # Left by an `up` whose processes are gone: its server would not answer.
        os.environ.setdefault("PREFECT_PROFILE", "ephemeral")
    return url


def follow_deployment(name: str, overrides: Sequence[str] = (), *, flow: str = FLOW) -> int:
    """Queue a run of the deployment `name` and watch it; the exit status of the watching."""
    command = [sys.executable, "-m", "prefect", "deployment", "run", f"{flow}/{name}", "--watch"]
    if overrides:
        command += ["--param", f"overrides={json.dumps(list(overrides))}"]
    return subprocess.run(command, check=False).returncode


def _start(
    storage: str, project: Path, wanted: list[Service], say: Callable[[str], None]
) -> list[Running]:
    started: list[Running] = []

    def start(service: Service) -> Running:
        process = spawn(
            service.name,
            service.command,
            environment={**QUIET, **service.environment},
            directory=project,
            log=Path(storage) / "services" / f"{service.name}.log",
            url=service.url,
        )
        started.append(process)
        write_state(_state_file(storage), started)
        return process

    say(f"starting; logs are in {storage}/services")
    # Two servers come up side by side; the worker needs the first.
    serving = [(service, start(service)) for service in wanted if service.port]
    for service, process in serving:
        url = f"{service.url}{service.health}"
        wait_until(process, partial(_answers, url), "answer", START_TIMEOUT_S)
        say(f"{service.name:8} {service.url}")
    api = f"{wanted[0].url}/api"
    for service in wanted:
        if not service.port:
            process = start(service)
            wait_until(process, partial(_worker_online, api), "take work", START_TIMEOUT_S)
            say(f"{service.name:8} pool {POOL}")
    _deploy(api, project, storage)
    write_state(_state_file(storage), started, profile=prefect_profile.activate(api))
    return started


def _deploy(api: str, project: Path, storage: str) -> None:
    """Deploy prefect.yaml; a storage elsewhere than the project's own becomes a parameter."""
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"],
        cwd=project,
        env={**os.environ, **QUIET, "PREFECT_API_URL": api},
        capture_output=True,
        text=True,
        check=False,
    )
    log = Path(storage) / "services" / "deploy.log"
    log.write_text(done.stdout + done.stderr)
    if done.returncode != 0:
        raise JetspecError("deploy", "failed", f"read {log}{last_line(str(log))}")
    if Path(storage) == project / RunConfig.model_fields["storage"].default:
        return
    found = _call(f"{api}/deployments/filter", {"flows": {"name": {"any_": [FLOW, ABLATIONS]}}})
    for deployment in found:
        parameters = {**deployment["parameters"], "storage": storage}
        try:
            _call(f"{api}/deployments/{deployment['id']}", {"parameters": parameters}, "PATCH")
        except OSError as error:
            raise JetspecError("deploy", deployment["name"], f"failed ({error})") from error


def _worker_online(api: str) -> bool:
    try:
        workers = _call(f"{api}/work_pools/{POOL}/workers/filter", {})
    except (OSError, ValueError):
        return False
    return any(worker["status"] == "ONLINE" for worker in workers)


def _call(url: str, body: dict[str, Any], method: str = "POST") -> Any:
    """One request; a server that is too busy just now is asked again."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method=method
    )
    for wait in (*_BUSY_WAITS_S, None):
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                text = response.read()
            return json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE or wait is None:
                raise
        time.sleep(wait)
    return None


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=3) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False


def _check_port_free(service: Service) -> None:
    if service.port is None:
        return
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, service.port))
        except OSError as error:
            raise JetspecError(
                service.flag,
                service.port,
                f"port taken or not allowed; stop what uses it or give {service.flag} another",
            ) from error


def _state_file(storage: str) -> Path:
    return Path(storage) / "services" / "services.json"
