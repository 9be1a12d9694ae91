"""Run files: presets by name, and files that hold only what differs from another."""

from pathlib import Path

import pytest
import yaml

from flows.presets import preset_path, resolve_run
from jetspec.config import load_config
from jetspec.errors import JetspecError


def write(path: Path, **values: object) -> str:
    path.write_text(yaml.safe_dump(values))
    return str(path)


@pytest.mark.parametrize("name", ["default", "nightly"])
def test_the_deployed_runs_are_the_quickstart_under_another_name(name: str) -> None:
    renamed = resolve_run("quickstart").model_copy(update={"name": name})
    assert resolve_run(name) == renamed


def test_a_file_with_a_base_changes_only_what_it_says(tmp_path: Path) -> None:
    run = write(
        tmp_path / "mine.yaml",
        base="quickstart",
        name="mine",
        training={"epochs": 9},
        evaluation={"budgets": [4, 8]},
    )
    ours, theirs = resolve_run(run), resolve_run("quickstart")
    assert ours.training == theirs.training.model_copy(update={"epochs": 9})
    assert ours.evaluation == theirs.evaluation.model_copy(update={"budgets": (4, 8)})
    assert (ours.name, ours.regeneration) == ("mine", theirs.regeneration)


def test_bases_are_followed_and_overrides_come_last(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", name="a", training={"epochs": 2, "anchors": 7})
    write(tmp_path / "b.yaml", base="a.yaml", training={"epochs": 3})
    run = write(tmp_path / "c.yaml", base="./b.yaml", head={"num_layers": 2})
    config = load_config(run, ("training.anchors=5",))
    assert (config.name, config.training.epochs, config.training.anchors) == ("a", 3, 5)
    assert config.head.num_layers == 2


def test_a_base_in_a_circle_is_one_line(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", base="b")
    run = write(tmp_path / "b.yaml", base="a")
    with pytest.raises(JetspecError, match=r"base: .*leads back"):
        load_config(run)


@pytest.mark.parametrize("base", ["quikstart", "no/such.yaml", 7, ["quickstart"]])
def test_an_unknown_base_is_one_line(tmp_path: Path, base: object) -> None:
    with pytest.raises(JetspecError, match="base: .*not found"):
        resolve_run(write(tmp_path / "run.yaml", base=base))


def test_a_base_in_the_command_line_is_an_unknown_key() -> None:
    with pytest.raises(JetspecError, match="base: gpu: unknown key"):
        resolve_run("quickstart", ("base=gpu",))


def test_a_value_that_is_not_yaml_is_one_line() -> None:
    with pytest.raises(JetspecError, match=r"--set: prompts.limit=\[1: the value is not YAML"):
        resolve_run("quickstart", ("prompts.limit=[1",))


def test_a_preset_is_a_file_that_ships() -> None:
    assert preset_path("gpu").is_file()
    with pytest.raises(JetspecError, match=r"run: gpus: no such preset \(there are: "):
        resolve_run("gpus")
