"""What a process keeps between runs, and that nothing stale is given."""

import json
import weakref

import pytest
import torch

from jetspec import prompts as prompts_module
from jetspec.config import parse_config
from jetspec.generation.plan import prepare
from jetspec.heads.registry import save_head
from jetspec.kept import keeping, kept
from jetspec.prompts import PromptsConfig, load_prompts
from jetspec.targets import load
from jetspec.targets.config import TargetConfig
from jetspec.targets.load import load_target
from jetspec.training import stage
from jetspec.training.stage import training_samples
from tests.answers import sample, save_target, write_samples
from tests.tiny import tiny_head, tiny_target
from tests.workspace import Workspace, run_settings


class Thing:
    pass


def test_the_last_of_each_kind_stays_until_another_is_asked_for_or_the_block_ends() -> None:
    assert kept("a", 1, Thing) is not kept("a", 1, Thing)
    with keeping():
        first = kept("a", 1, Thing)
        other = kept("b", 1, Thing)
        with keeping():
            assert kept("a", 1, Thing) is first
        gone = weakref.ref(first)
        del first

        def make() -> Thing:
            assert gone() is None, "two at a time"
            return Thing()

        second = kept("a", 2, make)
        assert kept("a", 2, Thing) is second and kept("b", 1, Thing) is other
        gone = weakref.ref(second)
        del second
    assert gone() is None


def test_what_could_not_be_made_is_not_kept() -> None:
    with keeping():
        with pytest.raises(ZeroDivisionError):
            kept("a", 1, lambda: 1 // 0)
        assert kept("a", 1, lambda: None) is None
        assert kept("a", 1, lambda: pytest.fail("made again")) is None


def test_a_target_is_loaded_once_and_again_when_its_files_or_settings_change(tmp_path) -> None:
    target = tiny_target("llama")
    save_target(target, tmp_path / "target")
    config = TargetConfig(
        source=str(tmp_path / "target"), dtype="fp32", device="cpu", cache_dir=str(tmp_path / "c")
    )
    assert load_target(config) is not load_target(config)
    with keeping():
        first = load_target(config)
        assert load_target(config) is first
        assert load_target(config.model_copy(update={"dtype": "bf16"})) is not first
        path = tmp_path / "target" / "generation_config.json"
        raw = json.loads(path.read_text())
        path.write_text(json.dumps({**raw, "eos_token_id": 2}))
        again = load_target(config)
        assert again is not first and again.fingerprint != first.fingerprint


def test_a_fingerprint_is_read_from_the_files_once(tmp_path, monkeypatch) -> None:
    save_target(tiny_target("llama"), tmp_path / "target")
    config = TargetConfig(source=str(tmp_path / "target"), cache_dir=str(tmp_path / "c"))
    read, calls = load.fingerprint, []
    monkeypatch.setattr(load, "fingerprint", lambda *a: calls.append(a) or read(*a))
    with keeping():
        assert load.target_fingerprint(config) == load.target_fingerprint(config)
    assert len(calls) == 1


def test_samples_are_read_once_and_again_when_others_are_asked_for(tmp_path, monkeypatch) -> None:
    config = parse_config(run_settings(tmp_path))
    one, two = (
        write_samples([sample(i, [1, 2, 3, i], [1])], str(tmp_path / str(i))) for i in (5, 6)
    )
    read, calls = stage.read_columns, []
    monkeypatch.setattr(stage, "read_columns", lambda *uris: calls.append(uris) or read(*uris))
    with keeping():
        assert training_samples(config, one) is training_samples(config, one)
        assert training_samples(config, two).tokens.tolist() == [1, 2, 3, 6]
        more = config.training.model_copy(update={"more_samples": (one,)})
        both = training_samples(config.model_copy(update={"training": more}), two)
    assert both.ids == ("sample-0006", "sample-0005")
    assert calls == [(one,), (two,), (two, one)]


def test_a_start_is_read_once_and_again_when_it_changes(tmp_path, monkeypatch) -> None:
    target = tiny_target("llama")
    start = tiny_head(target, block_size=4)
    save_head(start, str(tmp_path), target_fingerprint=target.fingerprint)
    read, calls = stage.load_head, []
    monkeypatch.setattr(stage, "load_head", lambda uri: calls.append(uri) or read(uri))
    with keeping():
        for _ in range(2):
            head = stage.starting_head(start.config, target, str(tmp_path), seed=1)
            assert torch.equal(head.fc.weight, start.fc.weight)
            with torch.no_grad():
                head.fc.weight.add_(1)  # as training does
        assert len(calls) == 1
        save_head(head, str(tmp_path), target_fingerprint=target.fingerprint)
        again = stage.starting_head(start.config, target, str(tmp_path), seed=1)
    assert torch.equal(again.fc.weight, start.fc.weight + 1) and len(calls) == 2


def test_prompts_are_compared_once_and_again_when_a_file_changes(tmp_path, monkeypatch) -> None:
    workspace = Workspace.create(tmp_path)
    config = parse_config(run_settings(tmp_path))
    find, calls = prompts_module.find_leaks, []
    monkeypatch.setattr(prompts_module, "find_leaks", lambda *a: calls.append(a) or find(*a))
    with keeping():
        plan = prepare(config)
        assert prepare(config) == plan and len(calls) == 1
        load_prompts(config.prompts.model_copy(update={"limit": 3}))
        load_prompts(PromptsConfig())
        assert len(calls) == 3
        load_prompts(config.prompts)
        with open(workspace.root / "train.jsonl", "a") as file:
            file.write(json.dumps({"prompt": "and what is new?", "slice": "chat"}) + "\n")
        assert len(load_prompts(config.prompts).train) == plan.prompts + 1
        assert len(calls) == 5
