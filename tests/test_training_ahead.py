"""What the host does ahead of a GPU: plans made by a thread, the teacher's pass recorded."""

import contextlib
import threading

import pytest
import torch

from jetspec.training import hidden_cache, loop, plans
from jetspec.training.hidden_cache import OnlineTeacher, RecordedTeacher, cuda_graph
from jetspec.training.plans import made_ahead
from tests.answers import greedy_samples
from tests.test_training_loop import Broken, break_at, comparable, run, settings
from tests.tiny import tiny_head, tiny_target

GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama", spread=0.08)


@pytest.fixture
def threads(monkeypatch):
    """The devices that threads took for theirs."""
    taken = []
    monkeypatch.setattr(plans.torch.cuda, "set_device", taken.append)
    return taken


def test_steps_are_made_in_order_by_a_thread_that_is_two_ahead(threads):
    made, here = [], threading.get_ident()
    third = threading.Event()

    def make(step):
        assert threading.get_ident() != here and threads == [GPU]
        made.append(step)
        if len(made) == 3:
            third.set()
        return -step

    with made_ahead(make, range(3, 9), GPU) as steps:
        assert next(steps) == -3 and third.wait(10) and made == [3, 4, 5]
        assert list(steps) == [-4, -5, -6, -7, -8]
    with made_ahead(lambda step: step, range(0), GPU) as steps:
        assert list(steps) == []


def test_a_plan_that_fails_fails_at_its_own_step_and_none_is_made_behind_the_end(threads):
    made = []

    def make(step):
        made.append(step)
        return 1 // (2 - step)

    with made_ahead(make, range(50), GPU) as steps:
        assert [next(steps), next(steps)] == [0, 1]
        with pytest.raises(ZeroDivisionError):
            next(steps)
    assert len(made) < 6


def test_a_run_whose_plans_are_made_ahead_takes_the_same_steps_and_resumes(
    target, tmp_path, monkeypatch, threads
):
    samples = greedy_samples(target, count=20, tokens=16, stop_token_ids=())
    config = settings(epochs=3)
    alone = run(target, samples, tmp_path / "alone", config=config)
    monkeypatch.setattr(loop, "made_ahead", lambda make, steps, _: made_ahead(make, steps, GPU))
    with pytest.raises(Broken):
        run(target, samples, tmp_path / "broken", config=config, report=break_at(4))
    resumed = run(target, samples, tmp_path / "broken", config=config)
    assert len(threads) == 2
    assert comparable(resumed.curve) == comparable(alone.curve)
    expected = alone.head.state_dict()
    assert all(torch.equal(w, expected[name]) for name, w in resumed.head.state_dict().items())


def batches(target):
    samples = greedy_samples(target, count=4, tokens=12, stop_token_ids=())
    corpus = loop.Corpus.from_samples(samples, 48)
    maker = loop.BatchMaker(corpus, settings(), 5, fixed_shape=True)
    return [maker.make([(i,), (i + 1,)], [maker.draw(0, (j,)) for j in (i, i + 1)]) for i in (0, 2)]


def test_a_recorded_teacher_plays_one_recording_and_gives_what_the_teacher_gives(
    target, monkeypatch
):
    recorded = []

    def record(function, inputs):
        recorded.append([tensor.shape for tensor in inputs])
        return function

    monkeypatch.setattr(hidden_cache, "cuda_graph", record)
    head = tiny_head(target, block_size=5)
    teacher = RecordedTeacher(target, head.taps, (2, 48))
    for batch in [*batches(target), *batches(target)]:
        for found, expected in zip(
            teacher(batch), OnlineTeacher(target, head.taps)(batch), strict=True
        ):
            assert torch.equal(found, expected)
    assert recorded == [[(2, 48)] * 3]
    other = RecordedTeacher(target, head.taps, (2, 47))
    other(batches(target)[0])
    assert len(recorded) == 1


def test_a_teacher_that_cannot_be_recorded_runs_as_it_is(target, monkeypatch, capsys):
    def refuse(function, inputs):
        raise RuntimeError("called a synchronizing operation")

    monkeypatch.setattr(hidden_cache, "cuda_graph", refuse)
    head = tiny_head(target, block_size=5)
    teacher = RecordedTeacher(target, head.taps, (2, 48))
    for batch in batches(target):
        assert torch.equal(teacher(batch)[1], OnlineTeacher(target, head.taps)(batch)[1])
    assert capsys.readouterr().err.count("is not recorded: called a synchronizing operation") == 1


def test_only_short_passes_on_a_gpu_are_recorded(target, monkeypatch):
    assert not RecordedTeacher.pays(target, 1)
    monkeypatch.setattr(target, "device", GPU)
    weights = sum(p.numel() for p in target.model.base_model.parameters())
    assert RecordedTeacher.pays(target, int(0.4e13 / weights))
    assert not RecordedTeacher.pays(target, int(1.1e13 / weights))


class Graph:
    """A recording as CUDA plays it: the kernels again, over the memory of the first time."""

    kernels = None

    def replay(self):
        self.kernels()


@pytest.fixture
def graphs(monkeypatch):
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *a, **k: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[0])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    return modes


def test_what_a_graph_gives_outlives_its_next_replay(graphs):
    memory = torch.zeros(2), torch.zeros(2)

    def function(one, other):
        def kernels():
            torch.add(one, other, out=memory[0])
            torch.mul(one, other, out=memory[1])

        kernels()
        Graph.kernels = staticmethod(kernels)
        return memory

    first, second = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    play = cuda_graph(function, tuple(first))
    found = play(*first), play(*second)
    for given, (total, product) in zip((first, second), found, strict=True):
        assert torch.equal(total, given.sum(0)) and torch.equal(product, given.prod(0))
    assert graphs == ["default", "error", "default"]


def test_an_operation_that_waits_is_found_before_anything_is_recorded(graphs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph", None)

    def function(tensor):
        if graphs[-1] == "error":
            raise RuntimeError("called a synchronizing operation")

    with pytest.raises(RuntimeError, match="synchronizing"):
        cuda_graph(function, (torch.zeros(1),))
    assert graphs[-1] == "default"
