"""Several producers of path scores in one training over one frozen head."""

from types import SimpleNamespace

import pytest
import torch

from jetspec.ablation import study, together, workers
from jetspec.ablation.config import AblationConfig
from jetspec.ablation.study import run_ablation
from jetspec.ablation.together import groups
from jetspec.config import parse_config
from jetspec.errors import JetspecError
from jetspec.heads.doctor import training_record
from jetspec.heads.registry import load_head, save_head
from jetspec.storage import join, read_json, read_manifest, write_manifest
from jetspec.training import together as training
from jetspec.training.loop import Stop
from jetspec.training.stage import distil_head
from jetspec.training.step import first_pass
from jetspec.training.together import distil_heads_together, shared_shape
from tests.answers import greedy_samples, save_target, write_samples
from tests.tiny import tiny_head, tiny_target
from tests.workspace import Workspace, run_settings

MEMBERS = {
    "markov": {"edge_rank": 2},
    "fast": {"edge_rank": 2, "path_learning_rate": 2e-2},
    "lattice": {"edge_rank": 2, "edges": "lattice", "edge_width": 32, "edge_layers": 1},
    "exact": {"edge_rank": 2, "edge_normaliser": "vocabulary"},
    "own": {"rescore": "own", "rescore_nodes": 16},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A target, its answers, and a head without path scores, all on disk."""
    root = tmp_path_factory.mktemp("together")
    target = tiny_target("llama", spread=0.08)
    save_target(target, root / "target")
    samples = write_samples(
        greedy_samples(target, count=16, tokens=12, stop_token_ids=()), str(root / "samples")
    )
    start = save_start(target, root / "start")
    return SimpleNamespace(root=root, target=target, samples=samples, start=start)


def save_start(target, directory, **settings):
    head = tiny_head(target, **({"block_size": 5, "num_layers": 1} | settings))
    record = training_record(target, enable_thinking=False)
    save_head(
        head, str(directory), target_fingerprint=target.fingerprint, training=record
    )  # fmt: skip
    write_manifest(str(directory), kind="head", config_hash="start")
    return str(directory)


def runs_of(root, storage, names, **changes):
    def run(path_learning_rate=None, **head):
        settings = {
            "anchors": 8, "sequence_length": 32, "batch_size": 4, "micro_batch_size": 2,
            "epochs": 2, "learning_rate": 5e-3, "clip_norm": 0.05, "log_every": 1,
            "heldout_fraction": 0.2, "checkpoint_every": 2, "estimate_every": 4,
            "loss": {"edge_candidates": 8}, "freeze_backbone": True,
            "path_learning_rate": path_learning_rate, **changes,
        }  # fmt: skip
        head = {"num_layers": 1, "block_size": 5, "num_taps": 2, **head}
        return parse_config(run_settings(root, training=settings, head=head)).model_copy(
            update={"storage": str(root / storage)}
        )

    return {name: run(**MEMBERS[name]) for name in names}


def weights(stage):
    return load_head(stage.uri).state_dict()


def curve(stage, exact=False):
    """A head's reported metrics without the rates."""
    rates = ("tokens_per_second", "slots_per_second", "steps_per_second")
    entries = read_json(join(stage.uri, "training.json"))["curve"]
    return [
        {k: v if exact else pytest.approx(v, rel=1e-4) for k, v in entry.items() if k not in rates}
        for entry in entries
    ]


def test_members_trained_together_are_those_trained_alone(world, monkeypatch) -> None:
    passes = []

    def counted(*args, **options):
        passes.append(first_pass(*args, **options))
        return passes[-1]

    monkeypatch.setattr(training, "first_pass", counted)
    runs = runs_of(world.root, "one", MEMBERS)
    made = distil_heads_together(runs, world.samples, warm_start=world.start)
    steps = made["own"].facts["steps"]
    assert len(passes) == 2 * steps  # by micro batch, whatever the number of members
    assert not any(first.hidden.requires_grad or first.found.loss.requires_grad for first in passes)
    start = load_head(world.start).state_dict()
    for name, run in runs_of(world.root, "each", MEMBERS).items():
        alone = distil_head(run, world.samples, warm_start=world.start)
        assert alone.key == made[name].key and alone.uri != made[name].uri
        found, expected = weights(made[name]), weights(alone)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-6)
            assert key not in start or torch.equal(found[key], start[key])
        assert curve(made[name]) == curve(alone, exact=True)
        facts = made[name].facts
        assert set(facts["trained_with"]) == {m.key for n, m in made.items() if n != name}
        assert facts["seconds"] == pytest.approx(facts["together_seconds"] / 5, abs=1e-3)
        assert facts["tau_estimate"] == pytest.approx(alone.facts["tau_estimate"])
        assert distil_head(runs[name], world.samples, warm_start=world.start).reused
    assert not list((world.root / "one" / "checkpoints").glob("*"))


@pytest.mark.parametrize(("how", "first"), [(KeyboardInterrupt, 5), (Stop, 6)])
def test_a_group_that_was_cut_goes_on_with_those_that_are_missing(world, how, first) -> None:
    names = ("markov", "fast", "own")
    whole = distil_heads_together(
        runs_of(world.root, f"whole{first}", names), world.samples, warm_start=world.start
    )
    runs, seen = runs_of(world.root, f"cut{first}", names), []

    def cut(step, metrics):
        if step == 5:
            raise how

    with pytest.raises(how):
        distil_heads_together(runs, world.samples, warm_start=world.start, report=cut)
    distil_head(runs["fast"], world.samples, warm_start=world.start)  # made alone meanwhile
    made = distil_heads_together(
        runs, world.samples, warm_start=world.start,
        report=lambda step, metrics: seen.append((step, metrics)),
    )  # fmt: skip
    assert seen[0][0] == first, "it began again instead of resuming"
    assert {"edge_loss/markov", "edge_loss/own"} == {k for k in seen[0][1] if "/" in k}
    for name in ("markov", "own"):
        expected = weights(whole[name])
        assert all(torch.equal(tensor, expected[k]) for k, tensor in weights(made[name]).items())
        assert curve(made[name], exact=True) == curve(whole[name], exact=True)


def test_a_member_that_diverges_is_named_and_the_others_go_on(world, monkeypatch) -> None:
    monkeypatch.setitem(MEMBERS, "wild", {"edge_rank": 2, "path_learning_rate": 1e30})
    monkeypatch.setitem(MEMBERS, "wilder", {"edge_rank": 2, "path_learning_rate": 1e31})
    monkeypatch.setitem(MEMBERS, "bare", {})
    names = ("wild", "markov", "bare", "fast")
    made = distil_heads_together(
        runs_of(world.root, "lost", names), world.samples, warm_start=world.start
    )
    assert "training.loss" in str(made["wild"]) and "not finite" in str(made["wild"])
    assert "no path scores of its own" in str(made["bare"])
    for name in ("markov", "fast"):
        run = runs_of(world.root, "each", [name])[name]
        expected = weights(distil_head(run, world.samples, warm_start=world.start))
        for key, tensor in weights(made[name]).items():
            torch.testing.assert_close(tensor, expected[key], rtol=1e-4, atol=1e-6)
    with pytest.raises(JetspecError, match="not finite"):
        distil_heads_together(
            runs_of(world.root, "lost", ("wild", "wilder")), world.samples, warm_start=world.start
        )


def test_one_that_is_missing_alone_trains_alone(world, monkeypatch) -> None:
    def refuse(*args):
        raise AssertionError("trained together")

    runs = runs_of(world.root, "few", ("markov", "fast"))
    made = distil_head(runs["markov"], world.samples, warm_start=world.start)
    monkeypatch.setattr(training, "_train", refuse)
    both = distil_heads_together(runs, world.samples, warm_start=world.start)
    assert both["markov"].key == made.key and "trained_with" not in both["fast"].facts


def test_what_differs_in_more_than_its_path_scores_is_no_member(world) -> None:
    shape = shared_shape(runs_of(world.root, "x", ["markov"])["markov"])
    assert all(shared_shape(run) == shape for run in runs_of(world.root, "x", MEMBERS).values())
    for changes in ({"seed": 1}, {"learning_rate": 1e-3}, {"loss": {"gamma": 2}}):
        (other,) = runs_of(world.root, "x", ["fast"], **changes).values()
        assert shared_shape(other) not in (None, shape)
    free = runs_of(world.root, "x", ["fast"], freeze_backbone=False)
    assert shared_shape(free["fast"]) is None
    mixed = runs_of(world.root, "x", ["markov"]) | free
    with pytest.raises(JetspecError, match="fast: differs .* train it alone"):
        distil_heads_together(mixed, world.samples, warm_start=world.start)
    heads = [tiny_head(world.target, seed=seed, edge_rank=2) for seed in (0, 1)]
    with pytest.raises(JetspecError, match="b: fc: its frozen weights are not the others'"):
        training.share_backbone(*heads, "b")


class PoolInThisProcess:
    """Tasks are done when answers are asked for."""

    def __init__(self, size: int) -> None:
        self.size, self.running = size, {}

    @property
    def idle(self) -> bool:
        return len(self.running) < self.size

    def ask(self, name, task, *arguments) -> None:
        self.running[name] = (task, arguments)

    def answers(self, stop_at=None):
        name = next(iter(self.running))
        task, arguments = self.running.pop(name)
        try:
            return [(name, task(*arguments))]
        except Exception as error:
            return [(name, error)]

    def close(self) -> None:
        pass


VARIANTS = {
    "slot": {"set": {"head.edge_rank": 0, "training.freeze_backbone": False}},
    "markov": {"start": "slot", "seeds": [0, 1]},
    "fast": {"start": "slot", "set": {"training.path_learning_rate": 2e-2}},
    "wild": {"start": "slot", "set": {"training.path_learning_rate": 1e30}},
    "own": {"start": "slot", "set": {"head.edge_rank": 0, "head.rescore": "own"}},
}


def plan_in(root, storage) -> AblationConfig:
    base = run_settings(
        root,
        head={"edge_rank": 2},
        training={"freeze_backbone": True, "learning_rate": 5e-3, "epochs": 3},
    )
    base |= {"storage": str(root / storage)}
    side = {"method": "tree", "builder": "best_first", "budget": 4}
    rows = {name: {"variant": name, **side} for name in VARIANTS}
    tables = [{"title": "t", "rows": rows}]
    return AblationConfig.model_validate(
        {"base": base, "measure": "replay", "variants": VARIANTS, "tables": tables}
    )


def found_of(result):
    return read_json(join(result.uri, "findings.json"))


def rounds(result):
    """(prompt, tokens, rounds) of every row of the report."""
    return {
        name: [(row["prompt_id"], row["tokens"], row["rounds"]) for row in rows]
        for name, rows in found_of(result)["per_prompt"].items()
    }


def test_a_study_trains_its_groups_together_and_finds_the_same(tmp_path, monkeypatch) -> None:
    Workspace.create(tmp_path)
    alone, one_by_one, jobs = (plan_in(tmp_path, name) for name in ("alone", "one", "jobs"))
    (group,) = set(groups(jobs, jobs.runs()).values())
    assert group.names == ("markov.seed0", "fast", "wild", "own")
    calls, train = [], together.distil_heads_together

    def counted(runs, *args, **options):
        calls.append(sorted(runs))
        return train(runs, *args, **options)

    monkeypatch.setattr(together, "distil_heads_together", counted)
    monkeypatch.setattr(workers, "_pool", PoolInThisProcess)

    def make(name, run, start):
        samples = study.make_samples(alone, name, run)
        return study.make_member(alone, name, run, start, samples)

    expected = run_ablation(alone, make)
    assert not calls
    told: list[str] = []
    for plan, options in ((one_by_one, {}), (jobs, {"jobs": 2})):
        result = run_ablation(plan, say=told.append, **options)
        assert calls.pop() == sorted(group.names) and not calls
        assert rounds(result) == rounds(expected)
        assert list(result.facts["failed"]) == ["wild"]
        assert "not finite" in result.facts["failed"]["wild"]
        facts = read_manifest(found_of(result)["variants"]["own"]["head_uri"], kind="head")
        assert len(facts["trained_with"]) == 3
        again = run_ablation(plan, only=["fast", "own"], **options)
        assert not calls and "wild" in again.facts["failed"]
    assert sum(f"{group.title}, done" in line for line in told) == 1


def test_a_group_that_dies_leaves_each_to_train_alone(tmp_path, monkeypatch) -> None:
    Workspace.create(tmp_path)
    plan = plan_in(tmp_path, "runs")

    def die(*args, **options):
        raise MemoryError("no memory")

    monkeypatch.setattr(together, "distil_heads_together", die)
    told: list[str] = []
    result = run_ablation(plan, say=told.append, only=["fast", "own"])
    assert any("failed: no memory; each is trained alone" in line for line in told)
    assert "fast" not in result.facts["failed"] and "own" not in result.facts["failed"]
