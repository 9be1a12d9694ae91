"""Background processes of this machine that a later command finds again, and stops.

A process is known by its id and its start time: an id that was given away again is never killed.
"""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from jetspec import storage
from jetspec.errors import JetspecError

_STOP_TIMEOUT_S = 6.0


@dataclass(frozen=True)
class Running:
    """A process that was started, and where its output goes."""

    name: str
    pid: int
    started: float
    url: str | None
    log: str

    @property
    def alive(self) -> bool:
        return _start_time(self.pid) == self.started


def spawn(
    name: str,
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    directory: Path,
    log: Path,
    url: str | None = None,
) -> Running:
    """Start a process that outlives this one, in a group of its own.

    Raises:
        JetspecError: the log cannot be written.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as output:
            process = subprocess.Popen(
                command,
                cwd=directory,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        reason = error.strerror or str(error)
        raise JetspecError("output", log, f"cannot be written ({reason})") from error
    return Running(name, process.pid, _start_time(process.pid) or 0.0, url, str(log))


def wait_until(process: Running, ready: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Return once `ready()`.

    Raises:
        JetspecError: the process ended or took too long; its log is named.
    """
    deadline = time.monotonic() + timeout_s
    while not ready():
        dead = not process.alive
        if dead or time.monotonic() > deadline:
            why = "ended at once" if dead else f"did not {what} in {timeout_s:.0f} s"
            raise JetspecError(process.name, why, f"read {process.log}{last_line(process.log)}")
        time.sleep(0.3)


def stop(process: Running) -> None:
    """End the process and all that descends from it: politely, then not."""
    if not process.alive:
        return
    family = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(psutil.Error):
        psutil.Process(process.pid).terminate()
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while process.alive and time.monotonic() < deadline:
        time.sleep(0.1)
    if process.alive:
        family.append(psutil.Process(process.pid))
    _, left = psutil.wait_procs(family, timeout=1)
    for remaining in left:
        with contextlib.suppress(psutil.Error):
            remaining.kill()
    psutil.wait_procs(left, timeout=5)


def last_line(log: str) -> str:
    """The end of a log in brackets, to be put behind a message; empty if there is none."""
    with contextlib.suppress(OSError):
        lines = Path(log).read_text(errors="replace").strip().splitlines()
        if lines:
            return f" (it ends: {lines[-1].strip()[:160]})"
    return ""


def read_state(path: Path) -> dict[str, Any]:
    """What `write_state` wrote; empty if it is missing or unreadable."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def write_state(path: Path, processes: Sequence[Running], **facts: Any) -> None:
    storage.write_json(str(path), {"processes": [asdict(p) for p in processes], **facts})


def known_processes(state: Mapping[str, Any]) -> list[Running]:
    """The processes of a state that are still alive, in the order of their start."""
    return [r for row in state.get("processes", []) if (r := Running(**row)).alive]


def _start_time(pid: int) -> float | None:
    """When the process started; None if there is none, or only the remains of one."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # our own child that ended would stay a zombie
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None
