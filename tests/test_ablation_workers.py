"""Variants side by side: worker processes, what waits for what, and studies that are cut."""

import operator
import os
import time

import pytest

from jetspec.ablation import study, workers
from jetspec.ablation.claims import Outcome
from jetspec.ablation.config import AblationConfig
from jetspec.ablation.making import samples_identity
from jetspec.ablation.pool import Pool, visible_gpus
from jetspec.ablation.study import LEFT_OUT, copy_report, run_ablation
from jetspec.ablation.workers import OUT_OF_TIME, make_side_by_side
from jetspec.errors import JetspecError
from jetspec.stages import StageResult


def test_workers_take_tasks_in_turn_and_a_dead_one_loses_its_own_alone() -> None:
    pool = Pool(2, gpus=["4"])
    try:
        pool.ask("six", operator.mul, 2, 3)
        pool.ask("dead", os._exit, 7)
        assert not pool.idle
        found = {}
        while pool.running:
            found |= pool.answers()
        assert found["six"] == 6
        assert isinstance(found["dead"], JetspecError) and "exit code 7" in str(found["dead"])
        assert pool.idle
        pool.ask("wrong", operator.mul, None, None)  # the worker that is left takes the next
        ((name, error),) = pool.answers()
        assert name == "wrong" and "TypeError" in str(error)
        pool.ask("gpu", os.getenv, "CUDA_VISIBLE_DEVICES")
        assert pool.answers() == [("gpu", "4")]
        pool.ask("sleep", time.sleep, 60)
        assert pool.answers(time.monotonic() + 0.05) == []
    finally:
        pool.close()
    assert not pool.running


def test_gpus_are_those_that_the_process_may_see(monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(3) == ["0", "1", "2"] and visible_gpus(0) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert visible_gpus(2) == ["5", "7"]


def test_samples_are_shared_by_runs_that_ask_for_the_same_text() -> None:
    limit = {"set": {"prompts.limit": 5}}
    plan = plan_of({**VARIANTS, "fewer": limit})
    runs = plan.runs()
    groups: dict[str, list[str]] = {}
    for name, run in runs.items():
        groups.setdefault(samples_identity(plan, name, run), []).append(name)
    assert list(groups.values()) == [
        ["a.seed0", "a.seed1", "other", "later.seed1", "deeper"],
        ["corpus"],
        ["fewer"],
    ]


class FakePool:
    """A pool in this process: tasks are done when answers are asked for, the last asked first."""

    def __init__(self, size: int) -> None:
        self.size, self.running, self.most = size, {}, 0

    @property
    def idle(self) -> bool:
        return len(self.running) < self.size

    def ask(self, name, task, *arguments) -> None:
        self.running[name] = (task, arguments)

    def answers(self, stop_at=None):
        LOG.append(sorted(self.running))
        if stop_at is not None and time.monotonic() >= stop_at:
            return []
        name = list(self.running)[-1]
        task, arguments = self.running.pop(name)
        try:
            return [(name, task(*arguments))]
        except Exception as error:
            return [(name, error)]

    def close(self) -> None:
        LOG.append("closed")


LOG: list = []
VARIANTS = {
    "a": {"seeds": [0, 1]},
    "other": {"set": {"head.mask": "bidirectional"}},
    "later": {"start": "a", "seeds": [1], "set": {"training.freeze_backbone": True}},
    "deeper": {"set": {"evaluation.depth": 9}},  # seed 0's head, measured otherwise
    "corpus": {"text": "corpus"},
}


def plan_of(variants=VARIANTS) -> AblationConfig:
    tables = [{"title": "t", "rows": {"r": {"variant": next(iter(variants))}}}]
    base = {"evaluation": {"bootstrap_samples": 100}, "storage": "runs"}
    return AblationConfig.model_validate({"base": base, "variants": variants, "tables": tables})


@pytest.fixture
def made(monkeypatch) -> list:
    """Stages that only say what was asked of them."""
    LOG.clear()
    done = []

    def make_samples(plan, name, run):
        if plan.variant_of(name).text == "corpus":
            raise JetspecError("prompts.train", "no answers", "give files with answers")
        return StageResult("samples", "there", "k", False)

    def make_member(plan, name, run, start, samples, stop_at=None):
        done.append((name, start))
        return Outcome((), {"head_uri": f"head of {name}"})

    monkeypatch.setattr(workers, "make_samples", make_samples)
    monkeypatch.setattr(workers, "make_member", make_member)
    monkeypatch.setattr(workers, "_pool", FakePool)
    return done


def side_by_side(plan, jobs=3, **more):
    def start_of(name, before):
        return study._start(plan, name, plan.runs()[name], before)

    told: list[str] = []
    found = make_side_by_side(
        plan, plan.runs(), jobs=jobs, start_of=start_of, say=told.append, **more
    )
    return found, told


def test_what_builds_on_another_waits_for_it_and_the_rest_goes_on(made) -> None:
    plan = plan_of()
    found, told = side_by_side(plan)
    assert dict(made)["later.seed1"] == "head of a.seed1" and dict(made)["deeper"] is None
    order = [name for name, _ in made]
    assert order.index("a.seed1") < order.index("later.seed1")
    steps = [names for names in LOG if isinstance(names, list)]
    assert not any({"a.seed0", "deeper"} <= set(names) for names in steps)  # one head, one writer
    assert not any({"a.seed1", "later.seed1"} <= set(names) for names in steps)
    assert max(map(len, steps)) == 3
    assert list(found) == list(plan.runs())
    assert "no answers" in found["corpus"].failure
    assert any("later.seed1 done" in line for line in told)


def test_time_that_is_up_leaves_the_rest_to_a_later_study(made) -> None:
    found, _ = side_by_side(plan_of(), stop_at=time.monotonic() - 1)
    assert {outcome.failure for outcome in found.values()} == {OUT_OF_TIME}
    assert LOG[-1] == "closed" and not made


def test_once_a_training_is_cut_nothing_is_begun_and_what_runs_goes_on(made, monkeypatch) -> None:
    def make_member(plan, name, run, start, samples, stop_at=None):
        made.append((name, start))
        # The last asked is done first: this one is cut while two others run.
        return None if name == "other" else Outcome((), {"head_uri": name})

    monkeypatch.setattr(workers, "make_member", make_member)
    found, told = side_by_side(plan_of(), stop_at=time.monotonic() + 60)
    assert [name for name, _ in made] == ["other", "a.seed1", "a.seed0"]
    failures = {name: outcome.failure for name, outcome in found.items()}
    assert failures["a.seed0"] is failures["a.seed1"] is None
    assert failures["other"] == failures["later.seed1"] == failures["deeper"] == OUT_OF_TIME
    assert any("other is cut" in line for line in told)


def test_a_failed_start_fails_what_starts_from_it_alone(made, monkeypatch) -> None:
    def make_member(plan, name, run, start, samples, stop_at=None):
        if name == "a.seed1":
            raise MemoryError("no memory")
        return Outcome((), {"head_uri": name})

    monkeypatch.setattr(workers, "make_member", make_member)
    found, _ = side_by_side(plan_of())
    failed = {name for name, outcome in found.items() if outcome.failure}
    assert failed == {"a.seed1", "later.seed1", "corpus"}
    assert found["later.seed1"].failure == "start: a.seed1: that variant failed"


def test_only_some_variants_are_made_with_what_they_start_from(made, tmp_path) -> None:
    plan = plan_of()
    base = {**plan.base, "storage": str(tmp_path)}
    plan = plan.model_copy(update={"base": base})
    result = run_ablation(plan, jobs=2, only=["later"])
    assert sorted(name for name, _ in made) == ["a.seed0", "a.seed1", "later.seed1"]
    assert result.facts["failed"] == dict.fromkeys(("other", "deeper", "corpus"), LEFT_OUT)
    copy_report(result.uri, str(tmp_path / "out"))
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"report.md", "findings.json"}
    with pytest.raises(JetspecError, match="--only: latr: no variant"):
        run_ablation(plan, only=["latr"])
