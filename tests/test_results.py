"""The page of results: every sentence and figure of it follows from records."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jetspec.cli import app
from jetspec.errors import JetspecError
from jetspec.evaluation import bench
from jetspec.evaluation.cells import Cell
from jetspec.evaluation.config import EvaluationConfig
from jetspec.results.cells import subjects, summary_cells
from jetspec.results.claims import claims, unanswered
from jetspec.results.compare import FAILS, HOLDS, OPEN, UNMEASURED, find, judge
from jetspec.results.cost import cost
from jetspec.results.goals import goals
from jetspec.results.inputs import Inputs, read_inputs
from jetspec.results.serving import serving
from jetspec.results.tables import cost_lines
from jetspec.results.write import write_results
from jetspec.storage import content_hash
from tests.measured import FakeTarget, prompts, runner

CONFIG = EvaluationConfig(max_new_tokens=40, warmup_prompts=0, bootstrap_samples=100)
FACTS = {
    "target_fingerprint": "f" * 64,
    "target_name": "toy",
    "head_uri": "runs/heads/abc",
    "head_hash": content_hash({"model.safetensors": 1}),
    "prompts_hash": "p",
    "evaluation_key": "run-1",
}
# Slot trees and chains commit less; a round of a larger tree takes longer, more so in a batch.
TAU = {("chain", 15): 3.0, ("tree", 16): 4.0, ("tree", 64): 5.0, ("tree", 128): 6.0}
COST = {("chain", 15): 0.12, ("tree", 16): 0.12, ("tree", 64): 0.14, ("tree", 128): 0.15}
BUDGETS = {"chain": "chain", "tree": "best_first"}


def fast(**shape):
    """Decoding by the engine, made up."""
    run = runner(**shape)
    return lambda requests, limit: replace(run(requests, limit), decoder="engine")


def measured(
    name: str, batch_size: int = 1, *, count: int = 8, temperature: float = 0.0, slot: float = 0.8,
    worse: float = 0.0, chosen=tuple(TAU), **facts,
) -> list[dict]:  # fmt: skip
    """Records of one group. slot: tau on slot scores over that on path scores; worse: seconds that
    a tree's node costs a round."""
    runners = {Cell("plain", None, 0, batch_size, name, temperature): fast()}
    for method, budget in chosen:
        for scores, share in (("slot", slot), ("path", 1.0)):
            cell = Cell(method, BUDGETS[method], budget, batch_size, name, temperature, scores)
            seconds = COST[method, budget] + (worse * budget if method == "tree" else 0)
            runners[cell] = fast(tau=TAU[method, budget] * share, round_seconds=seconds)
    return bench.run_group(
        list(runners), FakeTarget(), None, prompts(name, count), CONFIG, runners=runners,
        **{**FACTS, **facts},
    )  # fmt: skip


def replayed(records: list[dict], factor: float = 1.0) -> list[dict]:
    """The same cells as replay would write them."""
    return [
        {**r, "decoder": "replay", "batches": [], "tok_s_decode": None, "tok_s_total": None,
         "output_check": None, "tau": r["tau"] * factor, "evaluation_key": "replay-1",
         "per_prompt": [{**row, "tokens": row["tokens"] * factor} for row in r["per_prompt"]],
         "speedup": {base: {"value": None, "ci": None} for base in r["speedup"]}}
        for r in records if r["budget"]
    ]  # fmt: skip


@pytest.fixture(scope="module")
def records() -> list[dict]:
    return [
        *measured("gsm8k"), *measured("mt_bench", count=6), *measured("gsm8k", 4, worse=0.01),
        *measured("mt_bench", 4, worse=0.01),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def subject(records):
    return subjects(Inputs(records=records), {})[0]


def goal(subject, words: str, served=None):
    (found,) = [g for g in goals(subject, served) if words in g.name]
    return found


def claim(subject, words: str):
    (found,) = [c for c in claims(subject) if words in c.text]
    return found


def test_the_summary_has_a_row_a_cell_with_the_fields_that_readers_look_up(subject) -> None:
    rows = summary_cells(subject)
    assert len(rows) == len(subject.decoded) == 4 * 9
    wanted = {
        "target", "head", "set", "method", "builder", "scores", "budget", "batch", "temperature",
        "tau", "tau_ci", "tok_s", "speedup_graphed", "speedup_eager", "output_check", "prompts",
    }  # fmt: skip
    assert all(wanted <= row.keys() for row in rows)
    (row,) = find(rows, set="gsm8k", budget=128, scores="path", batch=1)
    assert (row["target"], row["head"], row["method"]) == ("toy", "abc", "tree")
    assert row["tau"] == pytest.approx(6, rel=0.1) and row["output_check"]["passed"]
    assert row["speedup_graphed"] == pytest.approx(0.1 * row["tau"] / 0.15, rel=0.01)
    assert row["speedup_eager"] is None and row["prompts"] == 8
    assert row["tok_s_ci"][0] - 0.01 <= row["tok_s"] <= row["tok_s_ci"][1] + 0.01


def test_goals_are_met_or_missed_by_how_much_or_not_measured(subject) -> None:
    missed = goal(subject, "tau on gsm8k, budget 128")
    assert missed.met is False and missed.margin == pytest.approx(6 / 8.5 - 1, abs=0.08)
    assert "missed, -" in missed.outcome
    assert goal(subject, "tau on mt_bench, budget 128").met is True
    assert goal(subject, "tau on humaneval, budget 128").outcome == "not measured"
    assert goal(subject, "speed-up on gsm8k").met is True, "3x at gsm8k: 0.1 * 6 / 0.15 is 4"
    assert goal(subject, "tree over path-scored chain on mt_bench").met is True
    assert goal(subject, "tau on gsm8k rises").outcome == "not measured", "256 was not measured"


def test_a_speed_up_over_the_reference_loop_meets_no_goal(records) -> None:
    slow = [{**r, "decoder": "reference"} for r in records]
    found = subjects(Inputs(records=slow), {})[0]
    assert goal(found, "speed-up on gsm8k").met is None
    assert goal(found, "tau on mt_bench, budget 128").met is True


def test_claims_follow_the_figures(subject) -> None:
    holds = claim(subject, "Path scores beat slot scores in trees")
    assert holds.verdict == HOLDS and "16 nodes: 1.30 [" in holds.evidence
    assert claim(subject, "Path scores beat slot scores in a chain").verdict == HOLDS
    assert claim(subject, "64 nodes on path scores").verdict == HOLDS
    assert claim(subject, "tau rises").verdict == HOLDS
    assert claim(subject, "prompt lookup").verdict == UNMEASURED
    assert claim(subject, "plain decoding's text").verdict == HOLDS
    speed = claim(subject, "fastest tree decodes faster")
    assert speed.verdict == HOLDS and speed.evidence.endswith("from batch 4 on it is not")
    assert "batch 1: 1.49 [" in speed.evidence


def test_chinese_sets_are_set_against_their_english_ones() -> None:
    low = measured("math_zh", chosen=[("tree", 16)], count=5)
    for record in low:
        for row in record["per_prompt"]:
            row["rounds"] *= 2
    both = [*measured("math", chosen=[("tree", 16)]), *low, *measured("code")]
    found = subjects(Inputs(records=both), {})[0]
    english = claim(found, "English text is accepted more")
    assert english.verdict == HOLDS and english.evidence.startswith("16 nodes: 2.0")
    assert claim(subjects(Inputs(records=measured("math")), {})[0], "English").verdict == UNMEASURED


def test_the_same_head_at_another_depth_is_a_variant_of_it_and_answers_the_question() -> None:
    whole = measured("gsm8k", chosen=[("tree", 16), ("tree", 64)])
    deep = [
        {**r, "settings": {**r["settings"], "depth": 31},
         "per_prompt": [{**row, "rounds": row["rounds"] * 0.9} for row in r["per_prompt"]]}
        for r in measured("gsm8k", chosen=[("tree", 16)])
    ]  # fmt: skip
    main, deeper = subjects(Inputs(records=[*whole, *deep]), {})
    assert (main.depth, deeper.depth) == (None, 31)
    (said,) = [c for c in claims(main, [deeper]) if "beyond the depth" in c.text]
    assert said.verdict == HOLDS and said.evidence == "depth 31, 16 nodes: 1.11 [1.11, 1.11]"
    assert "depth beyond the trained block" in unanswered([], [], claims(main))
    assert "depth beyond the trained block" not in unanswered([], [], [said])
    assert {row["depth"] for row in summary_cells(deeper)} == {31}


def test_what_the_figures_deny_does_not_hold_and_noise_is_not_decided() -> None:
    denied = subjects(Inputs(records=measured("gsm8k", slot=1.3)), {})[0]
    assert claim(denied, "Path scores beat slot scores in trees").verdict == FAILS
    same = subjects(Inputs(records=measured("gsm8k", slot=1.0)), {})[0]
    assert claim(same, "Path scores beat slot scores in trees").verdict == OPEN
    assert judge([]) == judge([None]) == UNMEASURED


def test_the_largest_run_of_a_cell_stands_and_replay_stands_beside_it() -> None:
    small, large = measured("gsm8k", count=3, evaluation_key="run-2"), measured("gsm8k", count=8)
    again = replayed(large)
    found = subjects(Inputs(records=[*small, *large, *again]), {})[0]
    rows = summary_cells(found)
    assert {row["prompts"] for row in rows} == {8} and len(rows) == 9
    assert {row["evaluation_key"] for row in rows} == {"run-1"}
    assert all(row["tau_replayed"] == row["tau"] for row in rows if row["budget"])
    assert claim(found, "is the tau of decoding").verdict == HOLDS
    off = subjects(Inputs(records=[*large, *replayed(large, factor=1.1)]), {})[0]
    assert claim(off, "is the tau of decoding").verdict == FAILS
    alone = subjects(Inputs(records=again), {})[0]
    assert {row["decoder"] for row in summary_cells(alone)} == {"replay"}
    assert goal(alone, "tau on gsm8k, budget 128").met is None, "a goal asks for decoded rounds"


def test_clocks_of_different_runs_are_not_set_against_each_other() -> None:
    trees = measured("gsm8k", chosen=[("tree", 16)], evaluation_key="run-2")
    chains = measured("gsm8k", chosen=[("chain", 15)])
    found = subjects(Inputs(records=[*trees, *chains]), {})[0]
    assert claim(found, "fastest tree decodes faster").verdict == UNMEASURED
    assert goal(found, "tree over path-scored chain").met is None


def test_the_serving_table_is_scored_by_speed_ups_over_all_loads(subject) -> None:
    found = serving(subject.one_run(), hysteresis=0.0)
    assert [load.batch_size for load in found.loads] == [1, 4]
    assert [load.choice[2] for load in found.loads] == [128, 15]
    assert found.worst_loss == 0 and all(load.loss == 0 for load in found.loads)
    plain = {batch: speeds["plain", None, 0, None] for batch, speeds in found.speeds.items()}
    by_hand = {
        choice: (found.speeds[1][choice] / plain[1] + found.speeds[4][choice] / plain[4]) / 2
        for choice in found.speeds[1]
    }
    assert found.fixed_scores == pytest.approx(by_hand)
    assert found.table_score > max(by_hand.values())
    assert ("tree", "best_first", 128, "slot") not in by_hand, "it serves with path scores"
    assert goal(subject, "against every single fixed", found).met is True
    assert goal(subject, "against the best fixed", found).met is True


def test_hysteresis_shows_as_a_loss(subject) -> None:
    kept = serving(subject.one_run(), hysteresis=9.0)
    assert {load.choice for load in kept.loads} == {("plain", None, 0, None)}
    assert kept.worst_loss > 0.5 and goal(subject, "against the best fixed", kept).met is False


def test_a_choice_that_was_luck_loses_where_it_was_not_made() -> None:
    """The chain is quick on even batches only, the tree on odd ones only."""

    def moody(parity: int, tau: float):
        calls: list[int] = []

        def run(requests, limit):
            calls.append(len(calls) % 2)
            return fast(tau=tau, round_seconds=0.1 if calls[-1] == parity else 0.2)(requests, limit)

        return run

    cells = {
        Cell("plain", None, 0, 1, "gsm8k", 0.0): fast(),
        Cell("hf_eager", None, 0, 1, "gsm8k", 0.0): runner(),
        Cell("chain", "chain", 15, 1, "gsm8k", 0.0, "path"): moody(0, 3.0),
        Cell("tree", "best_first", 16, 1, "gsm8k", 0.0, "path"): moody(1, 3.0),
    }
    once = CONFIG.model_copy(update={"method_batches": {"hf_eager": 1}})
    made = bench.run_group(
        list(cells), FakeTarget(), None, prompts("gsm8k", 6), once, runners=cells, **FACTS
    )
    found = serving(made, hysteresis=0.0)
    assert found.worst_loss == 0 and found.held_out[0] == pytest.approx(0.5, abs=0.1)
    assert serving(measured("gsm8k", count=1), hysteresis=0.0).held_out is None


def manifests() -> tuple[dict, dict]:
    samples = {
        "kind": "samples", "uri": "elsewhere/samples/s1", "tokens": 10_000_000,
        "tokens_per_second": 50_000.0, "worker_seconds": 200.0, "hash": content_hash({"shard": 1}),
    }  # fmt: skip
    head = {
        "kind": "head", "uri": "runs/heads/abc", "hash": FACTS["head_hash"], "target": "toy",
        "samples_key": samples["hash"], "worker_seconds": 700.0, "steps": 10,
        "parameters": 5, "curve": [{"step": 5, "tau_estimate": 2.0},
                                   {"step": 10, "tau_estimate": 2.5, "tokens_per_second": 7.0}],
    }  # fmt: skip
    return samples, head


def test_break_even_is_the_hours_over_what_a_token_saves(records) -> None:
    samples, head = manifests()
    inputs = Inputs(records=records, heads=[{**head, "hash": "other"}, head], samples=[samples])
    found = subjects(inputs, {})[0]
    served = serving(found.one_run(), hysteresis=0.0)
    spent = cost(found, inputs, served)
    assert spent.hours == pytest.approx(900 / 3600)
    load, row = served.loads[0], spent.loads[0]
    saved = 1 / load.plain_tok_s - 1 / load.tok_s
    assert row["tokens"] == pytest.approx(900 / saved)
    assert row["hours_of_serving"] == pytest.approx(row["tokens"] / load.tok_s / 3600)
    assert spent.as_json()["training"]["tokens_per_second"] == 7.0
    elsewhere = replace(inputs, heads=[{**head, "gpu_hours": 0.2}])
    assert cost(found, elsewhere, served).loads == [], "the records come from a CPU"
    unknown = cost(found, Inputs(records=records), served)
    assert unknown.hours is None and unknown.loads == []


def test_a_head_costs_what_its_starts_and_all_its_samples_did(records) -> None:
    samples, head = manifests()
    more = {**samples, "hash": "more", "tokens": 2_000_000, "worker_seconds": 50.0}
    grown = {**head, "warm_start": "runs/heads/old", "more_samples_keys": ["more"]}
    whole = {**grown, "earlier_steps": 30, "earlier_worker_seconds": 250.0}
    inputs = Inputs(records=records, heads=[whole], samples=[samples, more])
    found = subjects(inputs, {})[0]
    spent = cost(found, inputs, None)
    assert spent.hours == pytest.approx((200 + 50 + 700 + 250) / 3600)
    assert spent.as_json()["regeneration"]["tokens"] == 12_000_000
    assert any("30 steps in 250" in line for line in cost_lines(spent))
    for lacking in (replace(inputs, heads=[grown]), replace(inputs, samples=[samples])):
        assert cost(found, lacking, None).hours is None


def laid_out(root: Path, records: list[dict]) -> Path:
    """A storage as runs leave it: a matrix that was cut, a finished replay, a head, samples."""
    samples, head = manifests()
    for name, kind, own in (
        ("evaluation/e1", None, records),
        ("replay/r1", "replay", replayed(records[:9])),
    ):
        directory = root / name
        directory.mkdir(parents=True)
        for record in own:
            (directory / f"cell-{record['key']}.json").write_text(json.dumps(record))
        if kind:
            (directory / "manifest.json").write_text(json.dumps({"kind": kind, "files": {}}))
    (root / "evaluation/e1/turns/t").mkdir(parents=True)
    (root / "evaluation/e1/turns/t/cell-no.json").write_text("{")
    for name, facts, file in (
        ("heads/abc", head, "model.safetensors"),
        ("samples/s1", samples, "shard"),
    ):
        (root / name).mkdir(parents=True)
        own = {k: v for k, v in facts.items() if k not in ("uri", "hash", "curve")}
        own["files"] = {file: 1}
        (root / name / "manifest.json").write_text(json.dumps(own))
    training = {"curve": head["curve"], "environment": {"command": "__main__.py train run.yaml"}}
    (root / "heads/abc/training.json").write_text(json.dumps(training))
    found = {
        "variants": {}, "per_prompt": {},
        "tables": [{"title": "Loss", "claims": [{
            "claim": "forward KL beats hard labels", "verdict": "holds", "ratio": 1.1,
            "ci": [1.05, 1.15], "slice": None, "better": "a", "than": "b", "prompts": 9,
            "by_seed": [], "reason": None, "paper": None}]}],
    }  # fmt: skip
    (root / "ablations/a1").mkdir(parents=True)
    (root / "ablations/a1/findings.json").write_text(json.dumps(found))
    return root


def test_a_storage_becomes_a_page_a_summary_and_records_that_make_the_page_again(
    tmp_path, records
) -> None:
    storage, out = laid_out(tmp_path / "runs", records), tmp_path / "page"
    facts = write_results(str(out), [str(storage)], names={"toy": "Toy 0.5B", "abc": "our head"})
    text = (out / "README.md").read_text()
    assert "# Results: Toy 0.5B" in text and "`our head`" in text
    for words in (
        "| tree path | 128 |", "| AR, our engine, graphed | - |",
        "python -m jetspec train run.yaml", "- **Holds**: Path scores beat slot scores in trees",
        "**Holds**: forward KL beats hard labels",
        "sets without a decoded cell: math500, aime25, humaneval, mbpp", "0.250 hours",
        "700 worker-seconds",
        "tokens to break even =", "temperatures without a decoded cell: 1.0",
        "open question: depth beyond the trained block",
    ):  # fmt: skip
        assert words in text, words
    assert "open question: forward KL" not in text
    for plot in facts["plots"]:
        assert f"({plot})" in text and (out / plot).stat().st_size < 200_000
    summary = json.loads((out / "summary.json").read_text())
    assert len(summary["cells"]) == facts["cells"] == 36
    assert summary["commands"] and summary["versions"] and summary["seeds"] == [0]
    assert summary["cost"]["gpu_hours"] == 0.25 and summary["hardware"]
    again = tmp_path / "again"
    names = {"toy": "Toy 0.5B", "abc": "our head"}
    write_results(str(again), [str(out / "records.jsonl")], names=names)
    assert (again / "README.md").read_text() == text
    assert json.loads((again / "summary.json").read_text()) == summary


def test_withheld_and_failed_cells_are_named_on_the_page(tmp_path) -> None:
    good = measured("gsm8k")
    wrong = {**good[-1], "output_check": {**good[-1]["output_check"], "passed": False,
             "differing": 2}}  # fmt: skip
    cell = Cell("tree", "best_first", 256, 1, "gsm8k", 0.0, "path")
    from jetspec.evaluation.record import failed_record

    broken = failed_record(cell, "out_of_memory", "cuda: out of memory", **FACTS)
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in [*good[:-1], wrong, broken]))
    write_results(str(tmp_path / "out"), [str(path)])
    text = (tmp_path / "out" / "README.md").read_text()
    assert "tree 128 path on gsm8k, batch 1, temperature 0: 2 of 8 outputs differ" in text
    assert "tree 256 path on gsm8k, batch 1, temperature 0: cuda: out of memory" in text
    assert "**Does not hold**: Every decoded cell gives plain decoding's text" in text


def test_questions_without_a_decided_claim_stay_open() -> None:
    def table(text: str, verdict: str) -> dict:
        return {"tables": [{"claims": [{"claim": text, "verdict": verdict}]}]}

    assert "regenerated against corpus text" in unanswered([], [])
    undecided = table("regenerated text beats corpus text", "not decided here")
    assert "regenerated against corpus text" in unanswered([undecided], [])
    decided = table("regenerated text beats corpus text", "does not hold")
    assert "regenerated against corpus text" not in unanswered([decided], [])
    assert "Chinese against English" not in unanswered([], ["math_zh"])


@pytest.mark.parametrize(
    ("content", "match"),
    [(None, "not found"), ("{}", "holds no records"), ("dir", "no record of an evaluation")],
)
def test_inputs_without_records_are_one_line(tmp_path, content, match) -> None:
    path = tmp_path / "x.json"
    if content == "dir":
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    with pytest.raises(JetspecError, match=match) as refused:
        read_inputs([str(path)])
    assert "\n" not in str(refused.value)


def test_the_command_writes_the_page_and_refuses_a_wrong_name(tmp_path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in measured("gsm8k", count=3)))
    run = CliRunner().invoke(
        app, ["results", str(path), "--out", str(tmp_path / "o"), "--name", "toy=T", "--json"]
    )
    assert run.exit_code == 0 and json.loads(run.stdout)["cells"] == 9
    assert "# Results: T" in (tmp_path / "o" / "README.md").read_text()
    wrong = CliRunner().invoke(app, ["results", str(path), "--name", "toy"])
    assert wrong.exit_code == 2 and "--name: toy" in wrong.output


def test_loads_are_compared_on_the_sets_that_all_of_them_have() -> None:
    whole = [*measured("gsm8k"), *measured("mt_bench"), *measured("gsm8k", 4)]
    found = serving(whole, hysteresis=0.0)
    assert (found.sets, found.left_out) == (("gsm8k",), ())
    assert set(found.speeds) == {1, 4}
    mixed = serving([*whole, *measured("all", 16)], hysteresis=0.0)
    assert (mixed.sets, mixed.left_out) == (("gsm8k",), (16,))
