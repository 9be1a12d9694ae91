"""Ablations: variants by a line each, verdicts that follow the intervals, and the whole flow."""

import contextlib
import json
import random
from pathlib import Path

import pytest
import yaml

from flows import ablations as flow
from flows import tracking
from flows.presets import preset_names, preset_path
from jetspec import storage
from jetspec.ablation.claims import Outcome, judge
from jetspec.ablation.config import is_ablation, load_ablation, side_label
from jetspec.ablation.report import findings, markdown, sentence, table_rows
from jetspec.ablation.study import run_ablation
from jetspec.cli import app as library
from jetspec.config import parse_config
from jetspec.errors import JetspecError
from jetspec.evaluation.cells import cells
from jetspec.evaluation.matrix import evaluate
from jetspec.generation.corpus_text import corpus_samples
from jetspec.generation.regenerate import prepare, regenerate
from jetspec.heads.shipped import SHIPPED, head_directory
from jetspec.samples import read_samples
from jetspec.stages import StageResult
from jetspec.training.stage import distil_head
from tests.measured import group, runner
from tests.workspace import Workspace, invoke, one_line, run_settings

CELL = {"variant": "", "method": "tree", "builder": "best_first", "budget": 16}


def settings(**changes):
    """An ablation of two variants and one claim, as plain values."""
    return {
        "base": {"name": "tiny", "evaluation": {"bootstrap_samples": 300}},
        "cell": CELL,
        "variants": {"a": {}, "b": {"set": {"training.loss.kind": "reverse_kl"}}},
        "tables": [
            {
                "title": "Loss",
                "rows": {"forward": {"variant": "a"}, "reverse": {"variant": "b"}},
                "claims": [
                    {
                        "text": "a beats b",
                        "better": {"variant": "a"},
                        "than": {"variant": "b"},
                        "paper": "2x",
                    }
                ],
            }
        ],
        **changes,
    }


def write(path: Path, **changes) -> str:
    file = path / "ablation.yaml"
    file.write_text(yaml.safe_dump(settings(**changes), sort_keys=False))
    return str(file)


def file_of(path: Path, **changes) -> Path:
    return Path(write(path, **changes))


def outcome(tau, seed=0, slices=("math",), count=12):
    """A variant whose taus scatter around `tau` from prompt to prompt."""

    def by_prompt(request_id: str) -> float:
        return tau * random.Random(f"{seed}{request_id}").uniform(0.8, 1.25)

    records = []
    for name in slices:
        records += group(
            {("tree", 16): runner(by_prompt), ("chain", 4): runner(1.5)}, slice_=name, count=count
        )
    return Outcome(records, {"head_uri": f"runs/heads/{seed}", "steps": 5, "tau_estimate": tau})


TRAINED_WHOLE = ("ablations", "ablations-gpu")
SHIPPED_FILES = (*TRAINED_WHOLE, "path-scores-gpu", "recipes-gpu")


@pytest.mark.parametrize("name", SHIPPED_FILES)
def test_every_side_of_a_shipped_ablation_is_a_cell_of_its_runs(name) -> None:
    plan = load_ablation(preset_path(name))
    for side in map(plan.fill, plan.sides()):
        for member, run in members_of(plan, side.variant):
            assert (side.method, side.builder, side.budget) in cells_of(run), (member, side)
            assert side.scores is None or side.scores in (run.evaluation.scores or ())


@pytest.mark.parametrize("name", TRAINED_WHOLE)
def test_shipped_ablations_change_what_they_say(name) -> None:
    plan = load_ablation(preset_path(name))
    runs = {member: run for v in plan.variants for member, run in members_of(plan, v)}
    assert runs["hard-labels"].training.loss.kind == "hard_labels"
    assert all(run.head.mask == "bidirectional" for _, run in members_of(plan, "bidirectional"))
    assert members_of(plan, "causal")[0][1] == plan.base_run()
    same = [m for m, run in runs.items() if run == plan.base_run()]
    assert same in (["causal"], ["causal.seed0", "corpus"])


def test_the_study_of_path_scores_trains_nothing_but_them() -> None:
    runs = load_ablation(preset_path("path-scores-gpu")).runs()
    assert all(run.training.freeze_backbone for run in runs.values())
    backbones = {(r.head.mask, r.head.num_layers, r.head.conv_rank) for r in runs.values()}
    assert len(backbones) == 1


def test_recipes_see_equally_many_rows_of_one_head() -> None:
    runs = load_ablation(preset_path("recipes-gpu")).runs()
    rows = {run.training.max_steps * run.training.batch_size for run in runs.values()}
    assert len(rows) == 1 and len({run.head for run in runs.values()}) == 1
    recipes = [
        (r.training.optimizer, r.training.batch_size, r.training.learning_rate)
        for r in runs.values()
    ]
    assert len(set(recipes)) == len(recipes)


def members_of(plan, variant):
    runs = plan.runs()
    return [(member, runs[member]) for member in plan.members(variant).values()]


def cells_of(run):
    """(method, builder, budget) of a run's matrix; a DSpark head drafts from its anchor too."""
    depth = run.head.block_size - (run.head.kind != "dspark")
    made = cells(run.evaluation, ["math"], head_depth=depth)
    return {(cell.method, cell.builder, cell.budget) for cell in made}


def test_the_shipped_ablations_are_known_by_name() -> None:
    assert tuple(n for n in preset_names() if is_ablation(preset_path(n))) == SHIPPED_FILES


def test_a_side_means_the_default_cell_where_it_says_nothing(tmp_path) -> None:
    plan = load_ablation(file_of(tmp_path))
    side = plan.tables[0].rows["forward"]
    assert side_label(plan.fill(side)) == "tree 16"
    chain = side.model_copy(update={"method": "chain", "budget": 7})
    assert side_label(plan.fill(chain)) == "chain 7" and plan.fill(chain).builder == "chain"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"variants": {"a": {"set": {"training.los.kind": "x"}}, "b": {}}}, "variants.a: training"),
        ({"variants": {"a": {"set": {"head.mask": "both"}}, "b": {}}}, "variants.a: head.mask"),
        ({"variants": {"a": {}}}, "no variant is called 'b'"),
        ({"variants": {"a": {"start": "b"}, "b": {}}}, "not made before"),
        ({"variants": {"a": {"sets": {}}, "b": {}}}, "unknown key"),
        ({"base": None}, "base, variants and tables"),
    ],
)
def test_mistakes_in_the_file_are_one_line_that_names_the_place(tmp_path, changes, told) -> None:
    with pytest.raises(JetspecError) as error:
        load_ablation(file_of(tmp_path, **changes)).runs()
    assert told in str(error.value) and "\n" not in str(error.value)


def test_settings_of_the_command_line_reach_every_variant(tmp_path) -> None:
    plan = load_ablation(file_of(tmp_path), ("training.epochs=3",))
    assert [run.training.epochs for run in plan.runs().values()] == [3, 3]
    with pytest.raises(JetspecError, match="section.key=value"):
        load_ablation(file_of(tmp_path), ("epochs",))


def test_verdicts_follow_the_paired_interval(tmp_path) -> None:
    plan = load_ablation(file_of(tmp_path))
    (claim,) = plan.tables[0].claims
    better, worse, same = outcome(3.0), outcome(2.0), outcome(3.0, seed=1)
    holds = judge(claim, {"a": better, "b": worse}, plan)
    assert holds["verdict"] == "holds" and holds["ci"][0] > 1 and holds["prompts"] == 12
    assert judge(claim, {"a": worse, "b": better}, plan)["verdict"] == "does not hold"
    open_ = judge(claim, {"a": better, "b": same}, plan)
    assert open_["verdict"] == "not decided here" and open_["ci"][0] < 1 < open_["ci"][1]
    strict = claim.model_copy(update={"factor": 2.0})
    assert judge(strict, {"a": better, "b": worse}, plan)["verdict"] == "does not hold"


def test_a_failed_variant_decides_nothing_and_is_named(tmp_path) -> None:
    plan = load_ablation(file_of(tmp_path))
    outcomes = {"a": outcome(3.0), "b": Outcome((), {}, failure="no memory")}
    found = findings(plan, outcomes)
    (claim,) = found["tables"][0]["claims"]
    assert claim["verdict"] == "not decided here" and "b (tree 16)" in claim["reason"]
    text = markdown(plan, found, {"versions": {}, "gpus": [], "cpus": 2})
    assert "not made: no memory" in text and "reverse (not made)" in text
    assert "**Not measured here**: a beats b." in text


def test_a_claim_about_a_slice_looks_at_that_slice_alone(tmp_path) -> None:
    plan = load_ablation(file_of(tmp_path))
    claim = plan.tables[0].claims[0].model_copy(update={"slice": "chat"})
    mixed = {"a": outcome(3.0, slices=("math", "chat")), "b": outcome(2.0, slices=("math",))}
    verdict = judge(claim, mixed, plan)
    assert verdict["verdict"] == "not decided here" and verdict["prompts"] == 0
    mixed["b"] = outcome(2.0, slices=("math", "chat"))
    assert judge(claim, mixed, plan)["prompts"] == 12


def test_tables_hold_speedup_and_tau_by_slice_and_over_all(tmp_path) -> None:
    plan = load_ablation(file_of(tmp_path))
    outcomes = {name: outcome(tau, slices=("math", "chat")) for name, tau in (("a", 3), ("b", 2))}
    forward, reverse = table_rows(plan.tables[0], outcomes, plan)
    assert list(forward["cells"]) == ["chat", "math", "all"]
    every = [r for r in outcomes["a"].records if r["method"] == "tree"]
    tokens, rounds = (sum(r[name] for r in every) for name in ("tokens", "rounds"))
    assert forward["cells"]["all"]["tau"] == pytest.approx(tokens / rounds, abs=1e-4)
    math = next(r for r in every if r["slice"] == "math")
    assert forward["cells"]["math"]["speedup"] == math["speedup"]["vs_plain"]["value"]
    assert forward["cells"]["all"]["speedup"] > reverse["cells"]["all"]["speedup"] > 1
    found = findings(plan, outcomes)
    text = markdown(plan, found, {"versions": {"torch": "2"}, "gpus": [], "cpus": 2})
    assert "| method | cell | chat | math | all |" in text
    assert f"- {sentence(found['tables'][0]['claims'][0])}" in text
    assert "**Holds**: a beats b" in text and "the paper: 2x" in text
    assert len(found["per_prompt"]["a (tree 16)"]) == 24


def corpus_file(root: Path) -> str:
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in (("add 2 and 3", "five"), ("say hello", "hello there " * 9))
    ]
    rows.append({"messages": [{"role": "user", "content": "why rain?"}]})
    path = root / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_corpus_text_trains_on_the_answers_that_came_along(tmp_path) -> None:
    workspace = Workspace.create(tmp_path)
    raw = run_settings(tmp_path, prompts={"train": [{"source": corpus_file(tmp_path)}]})
    config = parse_config(raw)
    made = corpus_samples(config)
    assert made.facts["accounting"] == {
        "in": 3, "ok": 1, "truncated": 1, "looping": 0, "failed": 0, "skipped": 1,
    }  # fmt: skip
    assert corpus_samples(config).reused
    first, second = read_samples(made.uri)
    assert [sum(s.loss_mask) for s in (first, second)] == [5, 24]  # "five" and its end; the limit
    assert first.messages[-1]["content"] == "five" and first.input_ids[-1] == 1
    assert second.status == "truncated"
    with pytest.raises(JetspecError, match="no answers"):
        corpus_samples(parse_config(run_settings(workspace.root)))


@pytest.fixture
def without_orchestrator(monkeypatch) -> None:
    """The flow's stages as the library has them: no Prefect server, no Ray."""

    def samples(run, parent):
        regenerate(run)
        return StageResult("samples", prepare(run).uri, "", False)

    def head(run, parent, made, start):
        return distil_head(run, made.uri, warm_start=start)

    monkeypatch.setattr(flow.cluster, "connect", lambda config: contextlib.nullcontext())
    monkeypatch.setattr(flow, "regenerate", samples)
    monkeypatch.setattr(flow, "distil", head)
    monkeypatch.setattr(flow, "evaluate", lambda run, parent, uri, made: evaluate(run, uri))
    monkeypatch.setattr(flow, "bring_along", flow.bring_along.fn)


def test_two_variants_become_a_report_under_one_run(tmp_path, without_orchestrator) -> None:
    Workspace.create(tmp_path)
    base = run_settings(tmp_path)
    variants = {
        "a": {},
        "b": {"set": {"training.loss.kind": "reverse_kl"}, "start": "a"},
        "broken": {"text": "corpus"},
    }
    file = write(tmp_path, base=base, cell={**CELL, "budget": 4}, variants=variants)
    result = flow.ablations.fn(file)
    assert [claim["verdict"] for claim in result["claims"]]
    assert list(result["failed"]) == ["broken"] and "no answers" in result["failed"]["broken"]
    report = (Path(result["uri"]) / "report.md").read_text()
    assert "| a | nothing |" in report and "starts from a" in report
    found = storage.read_json(storage.join(result["uri"], "findings.json"))
    assert found["variants"]["a"]["samples_uri"] == found["variants"]["b"]["samples_uri"]
    assert found["variants"]["a"]["head_uri"] != found["variants"]["b"]["head_uri"]
    client = tracking.connect(parse_config(base))
    runs = {
        run.data.tags["mlflow.runName"]: run
        for run in client.search_runs([tracking.experiment_id(client, parse_config(base))])
    }
    assert runs["a"].data.tags["mlflow.parentRunId"] == result["run_id"]
    assert any(key.startswith("tau/") for key in runs["b"].data.metrics)
    assert runs["broken"].info.status == "FAILED"
    again = flow.ablations.fn(file)
    assert again["reused"] and again["uri"] == result["uri"]
    alone = invoke(library, "ablations", file, "--json")  # its own stages find it all there
    assert json.loads(alone.stdout)["uri"] == result["uri"]


def test_a_replayed_study_sees_both_scores_of_one_head_and_the_library_finds_it(
    tmp_path, without_orchestrator, monkeypatch
) -> None:
    monkeypatch.setattr(flow, "replayed", flow.replayed.fn)
    Workspace.create(tmp_path)
    base = run_settings(tmp_path, head={"edge_rank": 2}, evaluation={"scores": ["slot", "path"]})
    side = {"variant": "a", "method": "tree", "builder": "best_first", "budget": 4}
    slot, path = ({**side, "scores": scores} for scores in ("slot", "path"))
    table = {
        "title": "Scores",
        "rows": {"slot": slot, "path": path},
        "ratios": {"path over slot": {"better": path, "than": slot}},
    }
    variants = {"a": {"seeds": [3]}, "b": {"set": {"head.mask": "bidirectional"}}}
    file = write(tmp_path, base=base, measure="replay", variants=variants, tables=[table])
    result = flow.ablations.fn(file)
    assert not result["failed"]
    found = storage.read_json(storage.join(result["uri"], "findings.json"))
    rows = found["per_prompt"]
    assert rows.keys() == {"a (tree 4 slot)", "a (tree 4 path)"}
    assert {row["seed"] for row in rows["a (tree 4 path)"]} == {3}
    assert found["tables"][0]["rows"][0]["cells"]["all"]["tau"] >= 1
    out = str(tmp_path / "out")
    alone = invoke(library, "ablations", file, "--out", out, "--only", "a,b", "--json")
    assert json.loads(alone.stdout)["uri"] == result["uri"]  # nothing was made again
    assert "| path over slot |" in (tmp_path / "out" / "report.md").read_text()
    assert "no variant" in one_line(invoke(library, "ablations", file, "--only", "c"))


def test_an_ablation_has_no_champion_to_follow(tmp_path) -> None:
    from flows.cli import app

    told = one_line(invoke(app, "run", write(tmp_path), "--only-if-target-changed"))
    assert "no champion" in told


def test_variants_start_from_the_runs_warm_start_unless_they_name_another(tmp_path) -> None:
    base = run_settings(tmp_path)
    base["training"] = {**base.get("training", {}), "warm_start": "shipped"}
    variants = {"a": {}, "b": {"start": "a"}, "c": {"set": {"training.warm_start": "runs/x"}}}
    plan = load_ablation(file_of(tmp_path, base=base, cell=CELL, variants=variants))
    started = {}

    def make(name, run, start) -> Outcome:
        started[name] = start
        return Outcome((), {"head_uri": f"head of {name}"})

    run_ablation(plan, make)
    assert started == {"a": head_directory(SHIPPED), "b": "head of a", "c": "runs/x"}
