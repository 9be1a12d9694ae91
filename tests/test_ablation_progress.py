"""What a study hears of its running tasks, and trainings that end before the time is up."""

import time
from types import SimpleNamespace

import pytest

from jetspec.ablation import making, together
from jetspec.ablation.making import make_member
from jetspec.ablation.pool import Pool, tell_study
from jetspec.ablation.progress import EVERY, StageProgress, TrainingProgress
from jetspec.ablation.together import train_together
from jetspec.generation.progress import RegenerationProgress
from jetspec.stages import StageResult
from jetspec.training.config import TrainingConfig
from jetspec.training.loop import Stop


def test_what_a_task_tells_is_heard_before_its_answer() -> None:
    tell_study("nobody listens")
    heard: list[tuple[str, str]] = []
    pool = Pool(1)
    pool.heard = lambda name, text: heard.append((name, text))
    try:
        pool.ask("one", tell_study, "so far")
        assert pool.answers() == [("one", None)]
        assert heard == [("one", "so far")]
        pool.ask("two", time.sleep, 60)
        assert pool.answers(time.monotonic() + 0.05) == [] and len(heard) == 1
    finally:
        pool.close()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


METRICS = {"loss": 2.5, "edge_loss": 1.25, "epoch": 0.5, "grad_norm": 9.0}


def listening(stop_at=None, **settings):
    clock, told = Clock(), []
    config = TrainingConfig(**{"log_every": 10, "epochs": 2, **settings})
    return clock, told, TrainingProgress(config, told.append, stop_at=stop_at, clock=clock)


def test_a_training_tells_steps_pace_and_losses_now_and_then() -> None:
    clock, told, report = listening()
    for step in range(10, 70, 10):
        clock.now += EVERY / 2.5
        report(step, METRICS | {"epoch": step / 100})
    assert told == [
        "step 10 of 200, loss 2.5, edge_loss 1.25",
        f"step 40 of 200, {EVERY / 25:.3g} s a step, {160 * EVERY / 25:.0f} s left, "
        "loss 2.5, edge_loss 1.25",
    ]


def test_a_training_that_stops_early_counts_to_where_it_stops() -> None:
    _, told, report = listening(max_steps=15)
    report(10, {"loss/a": 1.0, "edge_loss/b": 2.0, "epoch": 0.1})
    assert told == ["step 10 of 15, loss/a 1, edge_loss/b 2"]


def test_the_last_report_that_is_sure_to_come_ends_the_training() -> None:
    clock, _, report = listening(stop_at=1100.0)
    for step, now in ((10, 1030.0), (20, 1060.0)):  # the next one at 1090
        clock.now = now
        report(step, METRICS)
    clock.now = 1090.0  # and the one behind it too late
    with pytest.raises(Stop):
        report(30, METRICS)


def test_cells_and_answers_are_counted_now_and_then() -> None:
    clock, told = Clock(), []
    progress = StageProgress(told.append, clock)
    for done in (1, 2, 3, 4):
        clock.now += 0.6 * EVERY
        if done < 3:
            progress.answers(RegenerationProgress(done, 9, 600, 20.0))
        else:
            progress.cells(done, 9, {})
    assert told == [
        "600 tokens written, 30 a second; 2 of 9 answers are in finished shards",
        "measured 4 of 9 cells",
    ]


def test_a_task_whose_time_is_up_answers_nothing(monkeypatch) -> None:
    """Neither a failure nor a result: a later study goes on from its checkpoint."""

    def train(*args, report, **options):
        report(10, METRICS)

    monkeypatch.setattr(making, "distil_head", train)
    monkeypatch.setattr(together, "distil_heads_together", train)
    stage = StageResult("head", "there", "k", reused=False)
    stages = iter([stage, StageResult("head", "there", "l", reused=False)])
    monkeypatch.setattr(together, "head_stage", lambda *a: (next(stages), False))
    run = SimpleNamespace(training=TrainingConfig())
    told: list[str] = []
    options = {"tell": told.append, "stop_at": time.monotonic()}
    assert make_member(None, "a", run, None, stage, **options) is None
    assert train_together({"a": run, "b": run}, "start", stage, **options) is None
    assert [line.split(",")[0] for line in told] == ["step 10 of 120"] * 2
