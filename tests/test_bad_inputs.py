"""What bad input gets, through the real command line: one line that names field, value and mend,
exit status 2, and nothing half-written that looks complete."""

import errno
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.cli import app
from jetspec.config import parse_config
from jetspec.errors import JetspecError
from jetspec.storage import MANIFEST
from tests.answers import save_target
from tests.tiny import tiny_target
from tests.workspace import Workspace, invoke, one_line


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, str, str]:
    """A project with samples and a head."""
    workspace = Workspace.create(tmp_path_factory.mktemp("project"))
    samples = workspace.stage("regenerate", workspace.run)["uri"]
    head = workspace.stage("train", workspace.run, samples)["uri"]
    return workspace, samples, head


@pytest.fixture
def workspace(made: tuple[Workspace, str, str]) -> Iterator[Workspace]:
    """The project; whatever the test's command does, no new output may look complete."""
    before = complete(made[0].root)
    yield made[0]
    assert complete(made[0].root) == before
    assert not list(made[0].root.rglob("*.part"))


def complete(root: Path) -> set[Path]:
    return {path.parent for path in root.rglob(MANIFEST)}


def copied(directory: str, to: Path) -> Path:
    """A copy to break, so that other tests keep the whole one."""
    return Path(shutil.copytree(directory, to / Path(directory).name))


@pytest.mark.parametrize("command", [["run"], ["regenerate"]])
def test_unknown_config_key(workspace: Workspace, command: list[str]) -> None:
    run = workspace.write_run("typo.yaml", training={"epoch": 3})
    line = one_line(invoke(app, *command, run))
    assert "training.epoch: 3: unknown key" in line


def test_unknown_key_in_an_override(workspace: Workspace) -> None:
    line = one_line(workspace.library("regenerate", workspace.run, "--set", "head.layers=2"))
    assert "head.layers: 2" in line


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("storage=", "storage: null: is empty; give a valid string, or leave the key out"),
        ("storage=''", "storage: '': is empty; give a value, or leave the key out"),
        ("target.dtype=''", "target.dtype: '': is empty; give 'auto', 'bf16' or 'fp32', or leave"),
        ("training.epochs=null", "training.epochs: null: is empty; give a valid integer, or leave"),
        ("training=", "training: null: is a section; write its settings below it"),
        ("=4", "--set: =4: write it as section.key=value"),
        ("head={kind: eagle3, mask: causal}", "head.mask: causal: unknown key of `eagle3` heads"),
        ("head.layers=null", "head.layers: null: unknown key"),
        ("evaluation.budgets=16", "evaluation.budgets: 16: is a list; write it as [value, ...]"),
        ("prompts.train=a.jsonl", "prompts.train: a.jsonl: is a list of sources; write it as [{"),
        ("prompts.eval=[gsm8k]", "prompts.eval: ['gsm8k']: is a list of sources; write it as [{"),
    ],
)
def test_an_empty_setting_is_told_from_a_wrong_one(
    workspace: Workspace, setting: str, line: str
) -> None:
    shown = one_line(workspace.library("regenerate", workspace.run, "--set", setting))
    assert shown.startswith(f"error: {line}")


def test_missing_run_file(workspace: Workspace) -> None:
    assert "nope.yaml: not found" in one_line(invoke(app, "run", "nope.yaml"))


@pytest.mark.parametrize("command", [["run"], ["theory"], ["diagnose", "/no/head"]])
def test_unknown_preset_lists_those_there_are(command: list[str]) -> None:
    assert "quickstart" in one_line(invoke(app, *command, "quickstrat"))


@pytest.mark.parametrize("option", ["target.source=/no/model", "target.source=/no/model.gguf"])
def test_missing_target(workspace: Workspace, option: str) -> None:
    line = one_line(workspace.library("regenerate", workspace.run, "--set", option))
    assert "target.source: /no/model" in line


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_missing_directory_is_not_called_incomplete(workspace: Workspace, command: str) -> None:
    line = one_line(workspace.library(command, workspace.run, "/no/such"))
    assert "/no/such: not found" in line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nonsense"], "No such command 'nonsense': see `"),
        (["--nonsense"], "No such option: --nonsense: see `"),
        (["registry", "nonsense"], "registry: No such command 'nonsense': see `"),
        (["run"], "run: Missing argument 'RUN': see `"),
        (["run", "quickstart", "--nonsense"], "run: No such option: --nonsense: see `"),
        (["generate", "--seed"], "Option '--seed' requires an argument: see `"),
        (["generate", "--budget", "0", "hi"], "--budget: 0: Input should be greater than"),
        (["generate", "--temperature", "x", "hi"], "--temperature: x: Input should be a valid"),
    ],
)
def test_a_wrong_command_line_is_one_line(arguments: list[str], line: str) -> None:
    assert line in one_line(invoke(app, *arguments))


def test_a_group_without_a_command_shows_its_help() -> None:
    for arguments in ([], ["registry"]):
        shown = invoke(app, *arguments)
        assert "Usage: " in shown.output
        assert "error: " not in shown.output


@pytest.mark.parametrize("storage", ["memory://runs", "nonsense://runs"])
def test_a_storage_that_cannot_be_used_is_told_before_a_server_starts(storage: str) -> None:
    line = one_line(invoke(app, "run", "quickstart", "--set", f"storage={storage}"))
    assert storage in line


def test_missing_prompt_file(workspace: Workspace) -> None:
    run = workspace.write_run("missing.yaml", prompts={"train": [{"source": "/no/such.jsonl"}]})
    assert "/no/such.jsonl" in one_line(workspace.library("regenerate", run))


def test_head_of_another_target(made: tuple[Workspace, str, str], workspace: Workspace) -> None:
    _, _, head = made
    if not (workspace.root / "other").exists():
        save_target(tiny_target("llama", seed=1), workspace.root / "other")
    run = workspace.write_run("other.yaml", target={"source": str(workspace.root / "other")})
    line = one_line(workspace.library("evaluate", run, head))
    assert "was distilled for target" in line


def test_unreachable_endpoint(workspace: Workspace) -> None:
    endpoint = {"url": "http://127.0.0.1:9/v1", "model": "m"}
    settings = {"backend": "endpoint", "endpoint": endpoint}
    run = workspace.write_run("endpoint.yaml", regeneration=settings)
    assert "http://127.0.0.1:9/v1" in one_line(workspace.library("regenerate", run))


def test_output_that_cannot_be_written(workspace: Workspace) -> None:
    blocked = workspace.root / "a_file"
    blocked.write_text("")
    setting = f"storage={blocked}/runs"
    line = one_line(workspace.library("regenerate", workspace.run, "--set", setting))
    assert "cannot be written" in line
    assert "a_file" in line


def test_full_disk(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run = workspace.write_run("full.yaml", regeneration={"max_new_tokens": 9})
    monkeypatch.setattr(os, "fsync", full)
    assert "No space left on device" in one_line(workspace.library("regenerate", run))


def test_corrupt_shard(
    made: tuple[Workspace, str, str], workspace: Workspace, tmp_path: Path
) -> None:
    samples = copied(made[1], tmp_path)
    shard = min(samples.glob("*.parquet"))
    shard.write_bytes(shard.read_bytes()[:-20])
    line = one_line(workspace.library("train", workspace.run, str(samples)))
    assert shard.name in line
    assert "corrupt" in line


def test_broken_manifest(
    made: tuple[Workspace, str, str], workspace: Workspace, tmp_path: Path
) -> None:
    samples = copied(made[1], tmp_path)
    for text in ('{"kind": "samp', '{"kind": "samples"}', "[]"):
        (samples / MANIFEST).write_text(text)
        line = one_line(workspace.library("train", workspace.run, str(samples)))
        assert MANIFEST in line


def test_samples_without_a_manifest(
    made: tuple[Workspace, str, str], workspace: Workspace, tmp_path: Path
) -> None:
    samples = copied(made[1], tmp_path)
    (samples / MANIFEST).unlink()
    line = one_line(workspace.library("train", workspace.run, str(samples)))
    assert "incomplete" in line


def test_a_head_where_samples_are_asked_for(
    made: tuple[Workspace, str, str], workspace: Workspace
) -> None:
    line = one_line(workspace.library("train", workspace.run, made[2]))
    assert "holds head, give a samples directory" in line


@pytest.mark.parametrize("budgets", ["[0]", "[-4]", "[16, 0]"])
def test_budget_zero(made: tuple[Workspace, str, str], workspace: Workspace, budgets: str) -> None:
    setting = f"evaluation.budgets={budgets}"
    line = one_line(workspace.library("evaluate", workspace.run, made[2], "--set", setting))
    assert "evaluation.budgets" in line


@pytest.mark.parametrize("part", ["train", "eval"])
def test_empty_prompts(made: tuple[Workspace, str, str], workspace: Workspace, part: str) -> None:
    empty = workspace.root / "empty.jsonl"
    empty.write_text("")
    run = workspace.write_run("empty.yaml", prompts={part: [{"source": str(empty)}]})
    command = ("regenerate", run) if part == "train" else ("evaluate", run, made[2])
    line = one_line(workspace.library(*command))
    assert f"prompts.{part}" in line or "empty.jsonl" in line


def test_port_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for flag in ("--prefect-port", "--mlflow-port"):
            line = one_line(invoke(app, "up", "--storage", str(tmp_path), flag, port, *other(flag)))
            assert f"{flag}: {port}: port taken" in line
    assert not (tmp_path / "services" / "services.json").exists()


def other(flag: str) -> tuple[str, str]:
    """A free port for the service that is not under test."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = str(probe.getsockname()[1])
    return ("--mlflow-port" if flag == "--prefect-port" else "--prefect-port", free)


def test_storage_of_objects_without_a_tracking_server() -> None:
    line = one_line(invoke(app, "registry", "show", "--storage", "s3://bucket/runs"))
    assert "tracking.uri" in line


def test_a_process_of_its_own_shows_the_same_line_and_status(workspace: Workspace) -> None:
    command: list[Any] = [sys.executable, "-m", "jetspec", "regenerate", workspace.root / "no.yaml"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert "not found" in done.stderr


@pytest.mark.parametrize(
    ("head", "line"),
    [
        ({"edges": "selector"}, "head.edge_rank: not set: must be 1 or more for selector"),
        ({"edge_rank": 4, "edges": "lattice", "edge_rows": "learned"}, "head.edge_rows: learned: "),
        ({"taps": [1, 1]}, "head.taps: [1, 1]: layers must differ"),
    ],
)
def test_settings_that_contradict_each_other_are_named_with_their_value(head, line) -> None:
    with pytest.raises(JetspecError) as caught:
        parse_config({"head": head})
    assert str(caught.value).startswith(line)
