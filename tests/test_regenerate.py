"""The regeneration stage without Ray: shards, resuming, accounting, and what bad input gets."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jetspec import storage
from jetspec.config import RunConfig, parse_config
from jetspec.errors import JetspecError
from jetspec.generation import plan as plan_module
from jetspec.generation import regenerate as module
from jetspec.generation.base import GenerationRequest, GenerationResult, ignore_tokens
from jetspec.generation.plan import prepare, read_prompts
from jetspec.generation.progress import RegenerationProgress, progress_bar
from jetspec.generation.regenerate import answer, regenerate, regenerate_shard, samples_key
from jetspec.samples import read_samples
from tests.regeneration import make_run, save_target
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def target_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def run(tmp_path: Path, target_directory: Path) -> Callable[..., RunConfig]:
    """Makes run configs over the tiny target with 14 prompts; keyword arguments go to the stage."""
    return partial(make_run, tmp_path, target_directory)


class FakeBackend:
    """Answers at once with one token; `behave` may raise or give a request's (status, error)."""

    semantics = "transformers-float32"
    on_tokens = staticmethod(ignore_tokens)

    def __init__(self, behave: Callable[[GenerationRequest], tuple[str, str | None] | None]):
        self.behave = behave
        self.calls: list[int] = []

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        self.calls.append(len(requests))
        return [self._one(request) for request in requests]

    def _one(self, request: GenerationRequest) -> GenerationResult:
        status, error = self.behave(request) or ("ok", None)
        kept = status not in ("failed", "skipped")
        ids, mask = ([5, 6, 1], [0, 0, 1]) if kept else ([], [])
        return GenerationResult(request.id, ids, mask, request.messages, status, error)  # type: ignore[arg-type]

    def close(self) -> None:
        pass


def use(monkeypatch: pytest.MonkeyPatch, behave: Any) -> FakeBackend:
    backend = FakeBackend(behave)
    monkeypatch.setattr(module, "open_backend", lambda *_: backend)
    return backend


def text(request: GenerationRequest) -> str:
    return request.messages[-1]["content"]


def directory(config: RunConfig) -> str:
    return prepare(config).uri


def dead_letters(config: RunConfig) -> list[dict[str, Any]]:
    lines = Path(directory(config), module.DEAD_LETTER).read_text().splitlines()
    return [json.loads(line) for line in lines]


def contents(uri: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(uri).glob("shard-*.parquet")}


# The whole stage


def test_every_prompt_is_answered_and_accounted_for(run: Any) -> None:
    config = run()
    seen: list[RegenerationProgress] = []
    manifest = regenerate(config, seen.append)
    samples = read_samples(directory(config), statuses=("ok", "truncated", "looping"))
    assert len(samples) == 14 and len({s.id for s in samples}) == 14
    account = manifest["accounting"]
    assert account["in"] == 14 == account["ok"] + account["truncated"] + account["looping"]
    assert manifest["tokens"] == sum(sum(s.loss_mask) for s in samples) > 0
    assert manifest["worker_seconds"] > 0 and manifest["tokens_per_second"] > 0
    assert manifest["gpu_hours"] == 0 and manifest["environment"]["versions"]["torch"]
    assert manifest["sampling"]["max_new_tokens"] == 12
    assert manifest["leaks"]["dropped"] == []
    assert len(manifest["target_fingerprint"]) == 64 and len(manifest["prompts_hash"]) == 64
    assert (seen[-1].done, seen[-1].total, seen[-1].tokens) == (14, 14, manifest["tokens"])
    assert dead_letters(config) == []


def test_the_samples_are_what_the_target_writes(run: Any) -> None:
    config = run()
    regenerate(config)
    target = tiny_target()
    sample = read_samples(directory(config), statuses=("ok", "truncated", "looping"))[5]
    (user, assistant) = sample.messages
    start = sample.loss_mask.index(1)
    assert sample.input_ids[:start] == target.render([user])
    assert assistant["role"] == "assistant"


def test_a_finished_regeneration_is_not_computed_again(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = regenerate(run())
    monkeypatch.setattr(module, "open_backend", lambda *_: pytest.fail("opened a backend"))
    assert regenerate(run()) == first


def test_equal_runs_write_equal_bytes(run: Any, tmp_path: Path) -> None:
    for settings in ({}, {"temperature": 1.0, "samples_per_prompt": 2}):
        one, two = (run(storage=tmp_path / name, **settings) for name in ("one", "two"))
        regenerate(one)
        regenerate(two)
        assert contents(directory(one)) == contents(directory(two))
        shutil.rmtree(tmp_path / "one")
        shutil.rmtree(tmp_path / "two")


def test_samples_of_one_prompt_differ_in_id_and_text(run: Any) -> None:
    config = run(temperature=1.0, samples_per_prompt=3)
    regenerate(config)
    samples = read_samples(directory(config), statuses=("ok", "truncated", "looping"))
    assert len({s.id for s in samples}) == 42
    first = [s for s in samples if s.prompt_id == samples[0].prompt_id]
    assert sorted(s.sample_index for s in first) == [0, 1, 2]
    assert len({tuple(s.input_ids) for s in first}) == 3


def test_the_key_follows_what_shapes_the_samples_only(run: Any) -> None:
    def key(**settings: Any) -> str:
        return samples_key(run(**settings), "f", "p")

    assert key() == key(workers=3) == key(max_attempts=9)
    different = [
        key(**{name: value})
        for name, value in {
            "max_new_tokens": 13,
            "temperature": 0.5,
            "top_p": 0.5,
            "seed": 1,
            "turns": "last",
            "enable_thinking": True,
            "shard_size": 5,
            "max_prompt_tokens": 50,
            "loop_min_repeats": 9,
            "backend": "endpoint",
        }.items()
    ]
    other = [samples_key(run(), "g", "p"), samples_key(run(), "f", "q")]
    assert len({key(), *different, *other}) == 13


def test_a_shard_is_four_batches_unless_told() -> None:
    config = parse_config({"regeneration": {"batch_size": 6}})
    assert plan_module.shard_size(config) == 24


# Interruption


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}])
def test_a_rerun_computes_missing_shards_only_and_gives_the_same_samples(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    whole = run(storage=tmp_path / "whole", **settings)
    regenerate(whole)
    broken = run(**settings)
    original, computed = module.regenerate_shard, []

    def stop_at_third(backend: Any, plan: Any, prompts: Any, shard: int) -> Any:
        if shard == 2 and not computed:
            raise KeyboardInterrupt
        if shard >= 2:
            computed.append(shard)
        return original(backend, plan, prompts, shard)

    monkeypatch.setattr(module, "regenerate_shard", stop_at_third)
    with pytest.raises(KeyboardInterrupt):
        regenerate(broken)
    assert not storage.is_complete(directory(broken))
    computed.append(-1)
    regenerate(broken)
    assert computed == [-1, 2, 3]
    assert contents(directory(broken)) == contents(directory(whole))


def test_what_a_killed_writer_left_is_cleaned_and_computed_again(run: Any) -> None:
    config = run()
    regenerate(config)
    uri = Path(directory(config))
    expected = contents(str(uri))
    (uri / "manifest.json").unlink()
    (uri / "shard-00001.json").unlink()
    (uri / "shard-00001.parquet").write_bytes(b"cut short")
    (uri / "shard-00003.parquet.abcd.part").write_bytes(b"half")
    manifest = regenerate(config)
    assert contents(str(uri)) == expected
    assert not list(uri.glob("*.part"))
    assert manifest["accounting"]["in"] == 14


@pytest.mark.parametrize("damage", ["truncated", "missing", "record"])
def test_a_corrupt_shard_is_named_and_not_repaired(run: Any, damage: str) -> None:
    config = run()
    regenerate(config)
    uri = Path(directory(config))
    (uri / "manifest.json").unlink()
    shard = uri / "shard-00002.parquet"
    if damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-20])
    elif damage == "missing":
        shard.unlink()
    else:
        (uri / "shard-00002.json").write_text("{")
    with pytest.raises(JetspecError, match=r"shard-00002\.parquet: corrupt.*shard-00002\.json"):
        regenerate(config)
    assert not storage.is_complete(str(uri))


def test_a_shard_corrupted_after_completion_is_named(run: Any) -> None:
    config = run()
    regenerate(config)
    shard = Path(directory(config), "shard-00000.parquet")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(JetspecError, match="shard-00000.parquet"):
        regenerate(config)


# Failures


def test_a_prompt_that_keeps_failing_is_a_dead_letter_and_the_rest_goes_on(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []

    def behave(request: GenerationRequest) -> tuple[str, str] | None:
        if "pink" in text(request) and "green" in text(request):
            tries.append(text(request))
            return "failed", "the model said no"
        return None

    use(monkeypatch, behave)
    config = run(max_attempts=3)
    account = regenerate(config)["accounting"]
    (letter,) = dead_letters(config)
    assert len(tries) == 3 and len(set(tries)) == 1
    assert (letter["status"], letter["reason"]) == ("failed", "the model said no")
    assert letter["attempts"] == 3
    assert (account["ok"], account["failed"], account["in"]) == (13, 1, 14)
    assert letter["id"] not in {s.id for s in read_samples(directory(config))}


def test_a_prompt_that_fails_once_is_answered_at_the_second_try(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []

    def behave(request: GenerationRequest) -> tuple[str, str] | None:
        tries.append(request.id)
        return ("failed", "busy") if len(tries) == 2 else None

    use(monkeypatch, behave)
    assert regenerate(run())["accounting"]["ok"] == 14


def test_a_prompt_that_makes_the_backend_raise_is_found_among_its_neighbours() -> None:
    def behave(request: GenerationRequest) -> None:
        if request.sample_index == 11:
            raise RuntimeError("index out of\nrange")

    backend = FakeBackend(behave)
    requests = [
        GenerationRequest(f"r{i}", ({"role": "user", "content": ""},), i, i) for i in range(16)
    ]
    results = answer(backend, requests, max_attempts=2)
    assert [r.id for r in results] == [r.id for r in requests]
    assert [r.id for r in results if r.status == "failed"] == ["r11"]
    assert results[11].error == "RuntimeError: index out of range"


def test_a_batch_too_big_for_the_memory_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend(lambda request: None)
    original = backend.generate

    def limited(requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        if len(requests) > 5:
            raise MemoryError
        return original(requests)

    monkeypatch.setattr(backend, "generate", limited)
    requests = [
        GenerationRequest(f"r{i}", ({"role": "user", "content": ""},), i, i) for i in range(16)
    ]
    assert {r.status for r in answer(backend, requests, max_attempts=1)} == {"ok"}


def test_an_error_of_the_user_ends_the_run_at_once(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def behave(request: GenerationRequest) -> None:
        raise JetspecError("regeneration.endpoint.url", "http://x", "cannot be reached")

    backend = use(monkeypatch, behave)
    with pytest.raises(JetspecError, match="cannot be reached"):
        regenerate(run())
    assert backend.calls == [4]
    assert not storage.is_complete(directory(run()))


def test_a_run_without_one_answer_is_an_error_and_no_output(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, lambda request: ("failed", "HTTP 500 boom"))
    with pytest.raises(JetspecError, match=r"0 of 14 prompts answered: the first: HTTP 500 boom"):
        regenerate(run())
    assert not storage.is_complete(directory(run()))


def test_skipped_and_looping_answers_are_counted_and_skipped_ones_told(run: Any) -> None:
    config = run(max_prompt_tokens=26)
    account = regenerate(config)["accounting"]
    letters = dead_letters(config)
    assert account["skipped"] == len(letters) > 0
    assert account["in"] == 14 == sum(v for k, v in account.items() if k != "in")
    assert {letter["status"] for letter in letters} == {"skipped"}
    assert all("limit 26" in letter["reason"] for letter in letters)


def test_an_excluded_request_is_a_dead_letter_with_its_reason(run: Any) -> None:
    plan = prepare(run())
    backend = FakeBackend(lambda request: None)
    record = regenerate_shard(backend, plan, read_prompts(plan), 1, {2: "killed its worker"})
    assert backend.calls == [3]
    (letter,) = record.dead_letters
    assert letter.reason == "killed its worker" and record.counts["failed"] == 1
    assert len(read_samples(plan.uri)) == 3


# Bad input


def test_several_greedy_samples_are_refused(run: Any) -> None:
    with pytest.raises(JetspecError, match=r"samples_per_prompt: 2: greedy answers are all equal"):
        regenerate(run(samples_per_prompt=2))


def test_an_output_that_cannot_be_written_is_one_line(run: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(JetspecError, match=r"cannot be written") as error:
        regenerate(run(storage=tmp_path / "file"))
    assert "\n" not in str(error.value)


def test_a_full_disk_is_one_line_and_leaves_nothing_that_looks_complete(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run()
    uri = directory(config)
    original = os.fsync

    def full(descriptor: int) -> None:
        if "shard-00001" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        original(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(JetspecError, match=r"shard-00001.parquet.*No space left on device"):
        regenerate(config)
    assert [n for n in os.listdir(uri) if n.startswith("shard-00001")] == []
    assert not storage.is_complete(uri)
    monkeypatch.setattr(os, "fsync", original)
    assert regenerate(config)["accounting"]["in"] == 14


def test_another_precision_on_a_worker_is_refused(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = use(monkeypatch, lambda request: None)
    backend.semantics = "transformers-bfloat16"
    with pytest.raises(JetspecError, match=r"target.dtype: auto: .*set fp32 or bf16"):
        regenerate(run())


def test_the_engine_writes_the_answers_of_the_default_backend(run: Any) -> None:
    def answers(config: RunConfig) -> dict[str, list[int]]:
        regenerate(config)
        return {s.prompt_id: s.input_ids for s in read_samples(directory(config))}

    default = answers(run())
    assert default and answers(run(backend="engine")) == default


def test_the_progress_bar_shows_rate_and_notes(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar() as show:
        show(RegenerationProgress(3, 10, 400, 2.0, "1 workers replaced"))
    printed = capsys.readouterr()
    assert "200 tok/s" in printed.err and not printed.out
