import contextlib
import math
import multiprocessing
import os
import socket
from pathlib import Path

import pytest
import torch
import torch._dynamo.config as dynamo
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter

from jetspec.config import RunConfig, parse_config
from jetspec.errors import JetspecError
from jetspec.evaluation.replay import mean_tau, replay_tau
from jetspec.heads.doctor import check_head
from jetspec.heads.registry import load_head
from jetspec.samples import read_samples
from jetspec.storage import is_complete, read_json, read_manifest
from jetspec.targets.load import load_target
from jetspec.training import loop
from jetspec.training.compiled import compile_parts
from jetspec.training.config import LossConfig, TrainingConfig
from jetspec.training.hidden_cache import OnlineTeacher
from jetspec.training.loop import train
from jetspec.training.muon import ShardedMuon
from jetspec.training.optimizers import (
    clip_gradients,
    clipped_apart,
    learning_rate,
    make_optimizers,
    set_learning_rate,
)
from jetspec.training.stage import align_weights, distil_head, starting_head
from jetspec.training.step import Distiller
from jetspec.training.world import World
from tests.answers import greedy_samples, save_target, write_samples
from tests.tiny import tiny_head, tiny_target

BASE = {
    "anchors": 8, "sequence_length": 48, "batch_size": 6, "micro_batch_size": 2, "epochs": 4,
    "learning_rate": 3e-3, "log_every": 1, "estimate_every": 5, "checkpoint_every": 3,
    "heldout_fraction": 0.2, "loss": LossConfig(chunk_tokens=64),
}  # fmt: skip
RATES = ("tokens_per_second", "slots_per_second", "steps_per_second")


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama", spread=0.08)


@pytest.fixture(scope="module")
def samples(target):
    return greedy_samples(target, count=20, tokens=16, stop_token_ids=())


def settings(**changes):
    return TrainingConfig(**(BASE | changes))


def run(target, samples, directory, head=None, **options):
    config = options.pop("config", None) or settings()
    head = head or tiny_head(target, block_size=5, edge_rank=2)
    return train(config, head, target, samples, directory=str(directory), **options)


def comparable(curve):
    return [{key: value for key, value in entry.items() if key not in RATES} for entry in curve]


class Broken(Exception):
    pass


def break_at(step):
    def report(done, metrics):
        if done == step:
            raise Broken

    return report


def test_training_lowers_the_loss_and_raises_tau(target, samples, tmp_path):
    config = settings(epochs=30, checkpoint_every=100, estimate_every=60)
    result = run(target, samples, tmp_path, config=config)
    first, last = result.curve[0], result.curve[-1]
    assert last["loss"] < 0.8 * first["loss"]
    assert last["accuracy_1"] > first["accuracy_1"]
    assert result.steps == 60 and result.counts["samples"] == 16 and result.counts["heldout"] == 4


@pytest.mark.parametrize(
    ("hidden_states", "log_every", "optimizer"),
    [("online", 1, "adamw"), ("cache", 1, "adamw"), ("online", 4, "muon"), ("cache", 4, "adamw")],
)
def test_resumed_run_equals_an_unbroken_one(
    target, samples, tmp_path, hidden_states, log_every, optimizer
):
    config = settings(hidden_states=hidden_states, log_every=log_every, optimizer=optimizer)
    whole = run(target, samples, tmp_path / "whole", config=config)
    with pytest.raises(Broken):
        run(target, samples, tmp_path / "broken", config=config, report=break_at(5))
    seen = []
    resumed = run(
        target, samples, tmp_path / "broken", config=config, report=lambda s, m: seen.append(s)
    )
    assert seen[0] > 3, "it began again instead of resuming"
    assert comparable(resumed.curve) == comparable(whole.curve)
    for name, tensor in whole.head.state_dict().items():
        assert torch.equal(resumed.head.state_dict()[name], tensor), name


def test_a_report_that_stops_a_training_leaves_a_checkpoint_of_its_step(target, samples, tmp_path):
    def stop(step, metrics):
        if step == 5:
            raise loop.Stop

    config = settings(checkpoint_every=100)
    whole = run(target, samples, tmp_path / "whole", config=config)
    with pytest.raises(loop.Stop):
        run(target, samples, tmp_path / "cut", config=config, report=stop)
    seen = []
    resumed = run(
        target, samples, tmp_path / "cut", config=config, report=lambda s, m: seen.append(s)
    )
    assert seen[0] == 6 and comparable(resumed.curve) == comparable(whole.curve)
    for name, tensor in whole.head.state_dict().items():
        assert torch.equal(resumed.head.state_dict()[name], tensor), name
    last = settings(epochs=2)  # 4 steps: one that has them all is not cut any more

    def too_late(step, metrics):
        if step == 4:
            raise loop.Stop

    assert run(target, samples, tmp_path / "done", config=last, report=too_late).steps == 4


@dynamo.patch(recompile_limit=2)  # monkeypatch would delete torch's setting, not restore it
def test_heads_of_many_forms_in_one_process_are_all_compiled(target, samples, monkeypatch):
    counter = CompileCounter()
    compiled = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda module: compiled(module, backend=counter)
    )
    torch._dynamo.reset()
    corpus = loop.Corpus.from_samples(samples, 48)
    found = []
    for conv_rank in (0, 1, 2, 4):  # two places in each: the first layer's input has no gradient
        head = tiny_head(target, "bidirectional", block_size=5, conv_rank=conv_rank)
        compile_parts(head)
        maker = loop.BatchMaker(corpus, settings(), 5, fixed_shape=True)
        batch = maker.make([(0,)], [maker.draw(0, (0,))])
        Distiller(head, target, LossConfig())(batch, *OnlineTeacher(target, head.taps)(batch))
        found.append(counter.frame_count)
    assert found == [2, 4, 6, 8]


def optimized(target, **changes):
    head = tiny_head(target, block_size=5, edge_rank=2)
    module = torch.nn.ModuleDict({"head": head})
    return head, module, make_optimizers(
        settings(**changes), head, module, sharded=False, fused=False
    )  # fmt: skip


def test_muon_moves_the_backbones_matrices_and_adamw_the_rest(target):
    head, module, (adamw, muon) = optimized(target, optimizer="muon")
    moved = {id(p) for group in muon.param_groups for p in group["params"]}
    rest = {id(p) for group in adamw.param_groups for p in group["params"]}
    for name, parameter in head.named_parameters():
        turned = parameter.ndim == 2 and not name.startswith("edges.")
        assert (id(parameter) in moved, id(parameter) in rest) == (turned, not turned), name
    _, whole = make_optimizers(settings(optimizer="muon"), head, module, sharded=True, fused=False)
    assert type(muon) is torch.optim.Muon and type(whole) is ShardedMuon
    assert whole.param_groups == muon.param_groups, "one checkpoint serves both"


def test_path_scores_may_learn_at_a_rate_of_their_own(target):
    head, _, optimizers = optimized(target, learning_rate=1e-3, path_learning_rate=1e-4)
    set_learning_rate(optimizers, 5e-4)  # where the schedule stands at half its height
    rates = {id(p): g["lr"] for o in optimizers for g in o.param_groups for p in g["params"]}
    for name, parameter in head.named_parameters():
        expected = 5e-5 if name.startswith("edges.") else 5e-4
        assert rates[id(parameter)] == pytest.approx(expected), name


def test_large_gradients_of_path_scores_leave_the_backbones_alone(target):
    head, module, _ = optimized(target)
    for name, parameter in head.named_parameters():
        parameter.grad = torch.full_like(parameter, 1e3 if name.startswith("edges.") else 1e-4)
    own = torch.stack([p.grad.norm() for p in head.edges.parameters()]).norm()
    before = {n: p.grad.clone() for n, p in head.named_parameters() if "edges." not in n}
    norm = clip_gradients(clipped_apart(head, module), 1.0)
    assert all(torch.equal(p.grad, before[n]) for n, p in head.named_parameters() if n in before)
    clipped = torch.stack([p.grad.norm() for p in head.edges.parameters()]).norm()
    assert clipped == pytest.approx(1.0, rel=1e-4) and norm == pytest.approx(float(own), rel=1e-3)


def test_a_part_without_gradients_is_not_clipped(target, monkeypatch):
    head, module, _ = optimized(target)
    for parameter in head.edges.parameters():
        parameter.grad = torch.ones_like(parameter)
    clip, parts = torch.nn.utils.clip_grad_norm_, []
    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda p, n: (parts.append(len(p)), clip(p, n))[1]
    )
    clip_gradients(clipped_apart(head, module), 1.0)
    assert parts == [len(list(head.edges.parameters()))]


def test_what_shapes_a_head_leaves_out_cadence_and_settings_that_are_as_usual():
    usual = TrainingConfig().shaping()
    assert not {"optimizer", "path_learning_rate", "log_every", "checkpoint_every"} & set(usual)
    assert TrainingConfig(log_every=7, checkpoint_every=9, estimate_every=11).shaping() == usual
    assert TrainingConfig(optimizer="muon").shaping()["optimizer"] == "muon"
    assert TrainingConfig(path_learning_rate=1e-4).shaping()["path_learning_rate"] == 1e-4


def test_broken_checkpoint_is_passed_over(target, samples, tmp_path):
    whole = run(target, samples, tmp_path / "whole")
    with pytest.raises(Broken):
        run(target, samples, tmp_path / "broken", report=break_at(7))
    newest = tmp_path / "broken" / "step-000006"
    (newest / "model.safetensors").write_bytes(b"half")
    (tmp_path / "broken" / "step-000007").mkdir()
    seen = []
    resumed = run(target, samples, tmp_path / "broken", report=lambda s, m: seen.append(s))
    assert seen[0] == 4
    assert comparable(resumed.curve) == comparable(whole.curve)


def test_old_checkpoints_are_pruned_and_the_kept_ones_are_heads(target, samples, tmp_path):
    result = run(target, samples, tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-000006", "step-000008"]
    last = load_head(str(tmp_path / names[-1]))
    assert torch.equal(last.fc.weight, result.head.fc.weight)


def test_checkpoints_of_another_run_are_refused(target, samples, tmp_path):
    run(target, samples, tmp_path, config=settings(epochs=2))
    with pytest.raises(JetspecError, match="another run"):
        run(target, samples, tmp_path, config=settings(epochs=2, learning_rate=1e-3))


def test_cache_trains_like_the_online_teacher(target, samples, tmp_path):
    online = run(target, samples, tmp_path / "a", config=settings(hidden_states="online"))
    cached = run(target, samples, tmp_path / "b", config=settings(hidden_states="cache"))
    for one, other in zip(online.curve, cached.curve, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_cache_runs_the_teacher_once_a_sample(target, samples, tmp_path, monkeypatch):
    tokens = []
    original = type(target).forward

    def counting(self, input_ids, **options):
        tokens.append(int(options["mask"].any(-1).sum()))
        return original(self, input_ids, **options)

    monkeypatch.setattr(type(target), "forward", counting)
    run(target, samples, tmp_path, config=settings(hidden_states="cache"))
    assert sum(tokens) == sum(len(s.input_ids) for s in samples)


def test_cache_beyond_its_limit_is_refused_before_any_work(target, samples, tmp_path, monkeypatch):
    monkeypatch.setattr(type(target), "forward", None)
    config = settings(hidden_states="cache", cache_limit_gb=1e-6)
    with pytest.raises(JetspecError, match="more than training.cache_limit_gb 1e-06"):
        run(target, samples, tmp_path, config=config)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_loss_that_is_not_finite_stops_the_run_before_a_checkpoint(
    target, samples, tmp_path, monkeypatch, poison
):
    original, calls = loop.Distiller.forward, []

    def poisoned(self, *arguments):
        calls.append(1)
        loss, sums = original(self, *arguments)
        return (loss * poison, sums * poison) if len(calls) > 12 else (loss, sums)

    monkeypatch.setattr(loop.Distiller, "forward", poisoned)
    with pytest.raises(JetspecError, match="at step 5: not finite"):
        run(target, samples, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]


def test_tau_estimate_is_the_replay_of_held_out_samples(target, samples, tmp_path):
    result = run(target, samples, tmp_path)
    corpus = loop.Corpus.from_samples(samples, 48)
    _, heldout = corpus.split(0.2)
    replays = replay_tau(target, result.head, [samples[i] for i in heldout])
    assert result.tau_estimate == pytest.approx(mean_tau(replays))
    assert result.curve[-1]["tau_estimate"] == result.tau_estimate


def test_learning_rate_warms_up_and_falls_to_its_floor():
    config = settings(learning_rate=1.0, warmup_fraction=0.1, final_lr_fraction=0.2)
    rates = [learning_rate(config, step, 100) for step in range(101)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == 1.0 and rates[100] == pytest.approx(0.2)
    assert all(a > b for a, b in zip(rates[10:], rates[11:], strict=False))


def test_first_step_is_taken_with_the_summed_gradient_of_the_global_batch(
    target, samples, tmp_path
):
    """Micro batches only cut the work: any size gives the same curve."""
    curves = [
        run(target, samples, tmp_path / str(size), config=settings(micro_batch_size=size)).curve
        for size in (1, 4, 6)
    ]
    for curve in curves[1:]:
        losses = [[entry["loss"] for entry in c] for c in (curve, curves[0])]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


SPREAD = {
    "ddp": {"strategy": "ddp", "epochs": 3},
    "fsdp2": {"strategy": "fsdp2", "epochs": 3},
    "muon": {"strategy": "fsdp2", "epochs": 3, "optimizer": "muon"},
}
BEGUN = {"strategy": "fsdp2", "epochs": 5, "optimizer": "muon"}  # 10 steps: 3 by one, 3 by two


def _worker(rank, size, port, directory, queue):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    try:
        target = tiny_target("llama", spread=0.08)
        samples = greedy_samples(target, count=20, tokens=16, stop_token_ids=())
        world = World(rank, size, size)
        seen = []

        def report(step, metrics):
            seen.append(step)
            break_at(7)(step, metrics)

        begun = settings(**BEGUN)
        with contextlib.suppress(Broken):
            run(target, samples, directory / "begun", world=world, config=begun, report=report)
        queue.put(("begun", rank, seen))
        for name, spread in SPREAD.items():
            result = run(target, samples, directory / name, world=world, config=settings(**spread))
            weight = result.head.fc.weight.detach().tolist()
            queue.put((name, rank, comparable(result.curve), weight))
    finally:
        dist.destroy_process_group()


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def pair(target, samples, tmp_path_factory):
    """{(name, rank): (curve, a weight)} of runs on two workers, and where they were made.

    Of `begun`, whose first steps one process takes, the steps that two reported.
    """
    directory = tmp_path_factory.mktemp("pair")
    with pytest.raises(Broken):
        run(target, samples, directory / "begun", config=settings(**BEGUN), report=break_at(4))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # the processes share one import
    queue, port = context.Queue(), _free_port()
    workers = [
        context.Process(target=_worker, args=(rank, 2, port, directory, queue), daemon=True)
        for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    results = [queue.get(timeout=240) for _ in range(2 * len(SPREAD) + 2)]
    for worker in workers:
        worker.join(30)
    return {(name, rank): rest for name, rank, *rest in results}, directory


@pytest.mark.slow
@pytest.mark.parametrize("name", SPREAD)
def test_two_workers_take_the_steps_of_one(target, samples, tmp_path, pair, name):
    results, directory = pair
    one = run(target, samples, tmp_path, config=settings(**SPREAD[name]))
    curve, weight = results[name, 0]
    assert results[name, 1] == [curve, weight]
    for ours, theirs in zip(comparable(one.curve), curve, strict=True):
        assert theirs == pytest.approx(ours, rel=1e-3, abs=1e-6)
    torch.testing.assert_close(torch.tensor(weight), one.head.fc.weight, rtol=1e-2, atol=1e-4)
    names = sorted(path.name for path in (directory / name).iterdir())
    assert names == ["step-000003", "step-000006"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SPREAD)
def test_one_worker_takes_up_what_two_began(target, samples, pair, name):
    results, directory = pair
    config = settings(**SPREAD[name], workers=1)
    again = run(target, samples, directory / name, config=config)
    assert comparable(again.curve) == results[name, 0][0]
    weight = torch.tensor(results[name, 0][1])
    assert torch.equal(again.head.fc.weight, weight)


@pytest.mark.slow
def test_muon_begun_by_one_worker_and_gone_on_with_by_two_is_ended_by_one(
    target, samples, tmp_path, pair
):
    results, directory = pair
    assert results["begun", 0] == results["begun", 1] == [[4, 5, 6, 7]]
    whole = run(target, samples, tmp_path, config=settings(**BEGUN))
    seen = []
    ended = run(
        target, samples, directory / "begun", config=settings(**BEGUN),
        report=lambda step, metrics: seen.append(step),
    )  # fmt: skip
    assert seen == [7, 8, 9, 10], "two workers' checkpoint was not taken up"
    for ours, theirs in zip(comparable(whole.curve), comparable(ended.curve), strict=True):
        assert theirs == pytest.approx(ours, rel=1e-3, abs=1e-6)
    torch.testing.assert_close(ended.head.fc.weight, whole.head.fc.weight, rtol=1e-2, atol=1e-4)


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """A run on disk: a target directory and its samples."""
    root = tmp_path_factory.mktemp("stage")
    source = save_target(tiny_target("llama", spread=0.08), root / "target")
    target = load_target(RunConfig(target={"source": source}).target)
    made = greedy_samples(target, count=12, tokens=12, stop_token_ids=())
    write_samples(made, str(root / "samples"))
    raw = {
        "storage": str(root / "runs"),
        "target": {"source": source, "cache_dir": str(root / "cache")},
        "head": {"num_layers": 1, "block_size": 4, "num_taps": 2, "edge_rank": 2},
        "training": BASE | {"epochs": 5, "loss": BASE["loss"].model_dump()},
    }
    return raw, str(root / "samples"), target


def test_head_stage_writes_a_head_that_passes_the_doctor(stage, tmp_path):
    raw, samples_uri, target = stage
    config = parse_config(raw | {"storage": str(tmp_path)})
    result = distil_head(config, samples_uri)
    manifest = read_manifest(result.uri, kind="head")
    assert not result.reused
    assert set(manifest["files"]) == {
        "config.json", "model.safetensors", "edges.safetensors", "training.json"
    }  # fmt: skip
    assert manifest["target_fingerprint"] == target.fingerprint
    assert {"samples_key", "tau_estimate", "steps", "parameters"} <= manifest.keys()
    curve = read_json(result.uri + "/training.json")["curve"]
    assert [entry["step"] for entry in curve] == list(range(1, int(manifest["steps"]) + 1))
    failed = [f for f in check_head(result.uri, target, enable_thinking=False) if not f.ok]
    assert failed == []
    assert not any(Path(tmp_path, "checkpoints").glob("*/*"))


def test_weights_of_the_target_are_aligned_before_training(stage):
    raw, _, _ = stage
    target = load_target(parse_config(raw).target)
    before = [parameter.clone() for parameter in target.model.parameters()]
    align_weights(target)
    for parameter, value in zip(target.model.parameters(), before, strict=True):
        assert parameter.data_ptr() % 64 == 0 and torch.equal(parameter, value)


def test_finished_stage_is_reused(stage, tmp_path, monkeypatch):
    raw, samples_uri, _ = stage
    config = parse_config(raw | {"storage": str(tmp_path)})
    first = distil_head(config, samples_uri)
    monkeypatch.setattr("jetspec.training.stage.train", None)
    again = distil_head(config, samples_uri)
    assert again.reused and again.uri == first.uri and again.facts == first.facts
    spread = raw | {"storage": str(tmp_path), "training": raw["training"] | {"workers": 2}}
    assert distil_head(parse_config(spread), samples_uri).reused


def test_further_samples_join_and_name_another_head(stage, tmp_path):
    raw, samples_uri, target = stage
    more = greedy_samples(target, count=16, tokens=12, stop_token_ids=())[12:]
    added = write_samples(more, str(tmp_path / "more"))
    short = raw["training"] | {"max_steps": 1}
    keys, counts = [], []
    for extra in ([], [added]):
        training = short | {"more_samples": extra}
        config = parse_config(raw | {"storage": str(tmp_path), "training": training})
        result = distil_head(config, samples_uri)
        facts = read_manifest(result.uri, kind="head")
        keys.append(result.key)
        counts.append(facts["counts"]["samples"] + facts["counts"]["heldout"])
    assert keys[0] != keys[1] and counts == [12, 16]
    with pytest.raises(JetspecError, match="again; regenerate"):
        read_samples(samples_uri, samples_uri)


def test_stage_broken_off_looks_incomplete_and_resumes(stage, tmp_path):
    raw, samples_uri, _ = stage
    config = parse_config(raw | {"storage": str(tmp_path)})
    with pytest.raises(Broken):
        distil_head(config, samples_uri, report=break_at(4))
    assert not any(is_complete(str(path)) for path in tmp_path.glob("heads/*"))
    seen = []
    distil_head(config, samples_uri, report=lambda step, metrics: seen.append(step))
    assert seen[0] == 4


def test_warm_start_begins_where_the_other_head_ended(stage, tmp_path):
    raw, samples_uri, target = stage
    config = parse_config(raw | {"storage": str(tmp_path)})
    first = distil_head(config, samples_uri)
    head = starting_head(config.head, target, first.uri, 0)
    trained = load_head(first.uri).state_dict()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in head.state_dict().items())
    second = distil_head(config, samples_uri, warm_start=first.uri)
    assert second.key != first.key and second.facts["warm_start"] == first.uri
    assert second.facts["earlier_steps"] == first.facts["steps"]
    third = distil_head(
        config.model_copy(update={"name": "third"}), samples_uri, warm_start=second.uri
    )
    assert third.facts["earlier_steps"] == first.facts["steps"] + second.facts["steps"]
    spent = first.facts["worker_seconds"] + second.facts["worker_seconds"]
    assert third.facts["earlier_worker_seconds"] == spent


def test_warm_start_may_lack_path_scores_only(stage, tmp_path):
    raw, samples_uri, target = stage
    plain = raw | {"storage": str(tmp_path), "head": raw["head"] | {"edge_rank": 0}}
    first = distil_head(parse_config(plain), samples_uri)
    head = starting_head(parse_config(raw).head, target, first.uri, 0)
    assert head.edges is not None and not head.edges.child_proj.weight.any()
    for change, named in (({"block_size": 8}, "block_size"), ({"mask": "bidirectional"}, "mask")):
        other = parse_config(raw | {"head": raw["head"] | change})
        with pytest.raises(JetspecError, match=f"head.{named}"):
            starting_head(other.head, target, first.uri, 0)


def test_warm_start_for_another_target_is_refused(stage, tmp_path):
    raw, samples_uri, _ = stage
    config = parse_config(raw | {"storage": str(tmp_path)})
    first = distil_head(config, samples_uri)
    with pytest.raises(JetspecError, match="does not fit"):
        starting_head(config.head, tiny_target("llama", num_layers=4), first.uri, 0)


def test_word_champion_must_be_looked_up_first(stage):
    raw, samples_uri, _ = stage
    with pytest.raises(JetspecError, match="needs the registry"):
        distil_head(parse_config(raw), samples_uri, warm_start="champion")
