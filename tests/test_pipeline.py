"""The whole flow through the real command: Prefect, Ray and MLflow around a tiny target."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jetspec.samples import read_samples
from tests.workspace import Workspace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, dict[str, Any]]:
    """A workspace whose pipeline was killed in its first stage and then ran; what that run told."""
    workspace = Workspace.create(tmp_path_factory.mktemp("pipeline"))
    process = start(workspace)
    deadline = time.monotonic() + 240
    while not list(workspace.root.glob("runs/samples/*/shard-*.parquet")):
        assert process.poll() is None and time.monotonic() < deadline, "never wrote a shard"
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not list(workspace.root.glob("runs/heads/*")), "killed too late to show anything"
    return workspace, outcome(start(workspace))


def start(workspace: Workspace, *options: str) -> "subprocess.Popen[str]":
    """`jetspec run` in a process group of its own, as a shell would start it."""
    command = [sys.executable, "-c", "from flows.cli import main; main()"]
    return subprocess.Popen(
        [*command, "run", workspace.run, "--json", *options],
        cwd=workspace.root,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parent.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def outcome(process: "subprocess.Popen[str]") -> dict[str, Any]:
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err[-3000:]
    return dict(json.loads(out))


def sample_ids(uri: str) -> list[str]:
    return [sample.id for sample in read_samples(uri, statuses=("ok", "truncated", "looping"))]


def test_one_command_leaves_samples_a_head_a_matrix_and_a_verdict(finished) -> None:
    _, result = finished
    counts = result["samples"]["accounting"]
    assert counts["in"] == 10 == sum(count for name, count in counts.items() if name != "in")
    assert result["evaluation"]["output_checks"]["failed"] == 0
    assert result["evaluation"]["failed"] == 0
    gates = {reason["gate"]: reason["passed"] for reason in result["promotion"]["reasons"]}
    assert gates["lossless"] and gates["doctor"]
    assert result["promotion"]["version"] == 1


def test_a_killed_driver_loses_nothing_and_doubles_nothing(finished) -> None:
    workspace, result = finished
    elsewhere = ("--set", f"storage={workspace.root / 'unbroken'}")
    unbroken = workspace.stage("regenerate", workspace.run, *elsewhere)["uri"]
    ids = sample_ids(result["samples"]["uri"])
    assert len(ids) == len(set(ids)) == 10
    assert ids == sample_ids(unbroken)


def test_a_second_run_regenerates_nothing_and_trains_nothing(finished) -> None:
    workspace, first = finished
    second = outcome(start(workspace))
    assert second["samples"]["regenerated"] == 0
    assert second["samples"]["uri"] == first["samples"]["uri"]
    assert second["head"]["reused"] and second["evaluation"]["reused"]
    assert second["promotion"]["version"] == first["promotion"]["version"]
