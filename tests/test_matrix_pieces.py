"""A matrix in pieces: cut inside a group, checked against shared answers, one head scored twice."""

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from jetspec.decode import decode
from jetspec.drafters import HeadDrafter
from jetspec.errors import JetspecError
from jetspec.evaluation import bench
from jetspec.evaluation.budgets import serving_table
from jetspec.evaluation.cells import Cell, cells
from jetspec.evaluation.config import EvaluationConfig
from jetspec.evaluation.matrix import evaluate, make_plan, read_records
from jetspec.evaluation.methods import Decoded, Request
from jetspec.evaluation.report import markdown_table, pool_slices
from jetspec.evaluation.scoring import scored_head
from jetspec.evaluation.turns import Turns
from jetspec.trees.config import TreeConfig
from tests.measured import FakeTarget, prompts, runner, text
from tests.tiny import tiny_head, tiny_target
from tests.tiny_run import tiny_run

QUICK = {"max_new_tokens": 24, "warmup_prompts": 0, "bootstrap_samples": 100}

TEXTS = {
    "decoder": "reference",
    "outputs": {p.id: text(Request([7, 8, 9], p.id), 24) for p in prompts()},
}


def test_a_head_with_edges_drafts_as_if_it_had_none() -> None:
    target = tiny_target("llama", num_layers=1)
    head, plain = (tiny_head(target, num_layers=1, edge_rank=rank) for rank in (4, 0))
    with torch.no_grad():
        head.edges.child_proj.weight.fill_(0.5)
    bare = scored_head(head, "slot")
    drafts = []
    for drafting in (bare, plain, head):
        drafter = HeadDrafter(drafting, target, width=5)
        result = decode(
            target, [[5, 6, 7], [8, 9]], drafter=drafter, tree=TreeConfig(budget=9, width=5),
            max_new_tokens=12,
        )  # fmt: skip
        drafts.append([g.accepted for g in result.generations])
        assert drafting.scores_paths is (drafting is head)
    assert drafts[0] == drafts[1] and head.edges is not None
    assert scored_head(head, "path") is head and scored_head(head, None) is head
    assert scored_head(plain, "slot") is plain and scored_head(None, "slot") is None
    with pytest.raises(JetspecError, match="evaluation.scores: path"):
        scored_head(plain, "path")


def test_scores_are_cells_of_their_own_and_change_no_other_key() -> None:
    config = EvaluationConfig(methods=("chain", "tree", "lookup"), budgets=(8,))
    both = EvaluationConfig(
        methods=("chain", "tree", "lookup"), budgets=(8,), scores=("slot", "path")
    )
    plain, twice = (cells(c, ["math"], head_depth=7) for c in (config, both))
    labels = [cell.label for cell in twice]
    assert labels == [
        "plain", "hf_eager", "lookup 10", "chain 7 slot", "tree 8 slot", "chain 7 path",
        "tree 8 path",
    ]  # fmt: skip
    assert {c.key for c in plain} & {c.key for c in twice} == {c.key for c in twice[:3]}
    assert Cell("tree", "best_first", 16, 1, "math", 0.0).key == "tree-16-b1-math-t0-c2f97d64"
    assert "scores" not in plain[3].as_json() and twice[3].as_json()["scores"] == "slot"
    for name in ("scores", "reference_batch", "method_batches"):
        assert name not in config.model_dump(mode="json")


def scored_twice() -> list[dict]:
    config = EvaluationConfig(**QUICK)
    runners = {
        Cell("plain", None, 0, 1, "math", 0.0): runner(),
        Cell("tree", "best_first", 8, 1, "math", 0.0, "slot"): runner(tau=2),
        Cell("tree", "best_first", 8, 1, "math", 0.0, "path"): runner(tau=3),
    }
    return bench.run_group(list(runners), FakeTarget(), None, prompts(), config, runners=runners)


def test_tables_and_the_serving_table_keep_the_scores_apart() -> None:
    records = scored_twice()
    (row,) = serving_table(records, hysteresis=0.0)
    assert (row["budget"], row["scores"]) == (8, "path")
    pooled = {r.get("scores"): r["tau"] for r in pool_slices(records, samples=100, seed=0)}
    assert pooled["path"] > pooled["slot"] > pooled[None]
    table = markdown_table(records)
    assert "tree 8 slot" in table and "tree 8 path" in table


def test_the_gates_look_at_path_scores_where_both_were_measured() -> None:
    from jetspec.promotion import PromotionConfig, compared_cells

    config = PromotionConfig(budget=8, batch_size=1, builder="best_first")
    (cell,) = compared_cells(scored_twice(), config)
    assert cell["scores"] == "path"


def test_a_baseline_of_fewer_batches_is_compared_by_its_own_clock() -> None:
    """The tree accepts more from the third prompt on: all of its prompts count."""
    seen = []

    def plain(requests: list[Request], limit: int) -> Decoded:
        seen.append(requests[0].request_id)
        return runner()(requests, limit)

    config = EvaluationConfig(
        **QUICK, reference_batch=1, method_batches={"plain": 2, "hf_eager": 1}
    )
    rising = runner(tau=lambda name: 2.0 if name in ("math-0", "math-1") else 4.0)
    runners = {
        Cell("plain", None, 0, 1, "math", 0.0): plain,
        Cell("hf_eager", None, 0, 1, "math", 0.0): runner(),
        Cell("tree", "best_first", 8, 1, "math", 0.0): rising,
    }
    records = bench.run_group(
        list(runners), FakeTarget(), None, prompts(), config, runners=runners, reference=TEXTS
    )
    by_method = {r["method"]: r for r in records}
    tree = by_method["tree"]
    assert [by_method[m]["prompts"] for m in ("plain", "hf_eager", "tree")] == [2, 1, 6]
    assert seen == ["math-0", "math-1"] and tree["output_check"]["compared"] == 6
    for base in ("vs_plain", "vs_hf_eager"):
        figure = tree["speedup"][base]
        assert figure["value"] == pytest.approx(tree["tau"], rel=0.01), "plain is 1 a round"
        assert figure["ci"][0] < figure["value"] < figure["ci"][1]
    assert by_method["plain"]["speedup"]["vs_hf_eager"]["value"] == pytest.approx(1)
    (row,) = serving_table(records, hysteresis=0.0)
    assert row["speedup_vs_plain"] == pytest.approx(tree["tau"], rel=0.01)


def test_a_baseline_of_fewer_batches_needs_answers_to_all_prompts() -> None:
    with pytest.raises(ValidationError, match="set reference_batch"):
        EvaluationConfig(method_batches={"plain": 2})
    with pytest.raises(ValidationError, match="at least 1 batch of tree"):
        EvaluationConfig(method_batches={"tree": 0, "hf_eager": 0})


def test_no_batches_leave_hugging_face_out() -> None:
    config = EvaluationConfig(method_batches={"hf_eager": 0})
    assert "hf_eager" not in {c.method for c in cells(config, ["math"], head_depth=7)}


def test_every_cell_is_checked_against_the_shared_answers() -> None:
    """The plain cell too: its text is one of the outputs that must be right."""
    wrong = {**TEXTS["outputs"], "math-1": [3] * 24}
    config = EvaluationConfig(**QUICK, reference_batch=1, method_batches={"plain": 1})
    cell = Cell("tree", "best_first", 8, 1, "math", 0.0)
    plain = Cell("plain", None, 0, 1, "math", 0.0)
    runners = {plain: runner(), cell: runner(tau=2)}

    def measure(outputs: dict) -> list[dict]:
        return bench.run_group(
            list(runners), FakeTarget(), None, prompts(), config, runners=runners,
            reference={**TEXTS, "outputs": outputs},
        )  # fmt: skip

    first, second = measure(TEXTS["outputs"])
    assert first["output_check"]["compared"] == 1 and second["output_check"]["compared"] == 6
    assert first["output_check"]["passed"] and second["output_check"]["passed"]
    assert second["speedup"]["vs_plain"]["value"] and "outputs" not in first
    assert not measure(wrong)[1]["output_check"]["passed"]


def test_a_cut_group_goes_on_with_the_batch_that_was_missing(tmp_path) -> None:
    config = EvaluationConfig(**QUICK, repeats=2, reference_batch=1, method_batches={"plain": 2})
    calls: list[tuple[str, str]] = []

    def counted(method: str, stop_at: int | None, **shape):
        def run(requests, limit):
            if stop_at is not None and len(calls) >= stop_at:
                raise KeyboardInterrupt
            calls.append((method, requests[0].request_id))
            return runner(**shape)(requests, limit)

        return run

    plain = Cell("plain", None, 0, 2, "math", 0.0)
    tree = Cell("tree", "best_first", 8, 2, "math", 0.0)
    turns = Turns(str(tmp_path / "turns"))

    def measure(stop_at: int | None) -> list[dict]:
        runners = {plain: counted("plain", stop_at), tree: counted("tree", stop_at, tau=3)}
        return bench.run_group(
            list(runners), FakeTarget(), None, prompts(count=6), config, runners=runners,
            turns=turns, reference=TEXTS,
        )  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        measure(stop_at=7)  # in the fourth of six turns: two batches for plain, three for the tree
    assert len(list((tmp_path / "turns").iterdir())) == 3
    cut = measure(None)
    assert len(calls) == 7 + 1 + 1 + 2, "a turn that was kept was decoded again"
    calls.clear()
    turns.clear()
    assert not (tmp_path / "turns").exists()
    whole = measure(None)
    for ours, theirs in zip(cut, whole, strict=True):
        for name in ("tau", "tau_ci", "tokens", "batches", "output_check", "speedup"):
            assert ours[name] == theirs[name], name


def test_a_damaged_turn_is_taken_again(tmp_path) -> None:
    turns = Turns(str(tmp_path))
    (tmp_path / "turn-00000.json").write_text('{"tree": {"outputs": [')
    (tmp_path / "turn-00001.json").write_text('{"tree": {"other": 1}}')
    assert turns.read(0) == {} and turns.read(1) == {} and turns.read(2) == {}


def test_answers_are_decoded_once_for_all_matrices_of_a_run(tmp_path, monkeypatch) -> None:
    few = {"methods": ["tree"], "reference_batch": 2, "method_batches": {"hf_eager": 0, "plain": 1}}
    config, head = tiny_run(tmp_path, **few)
    records = read_records(evaluate(config, head).uri)
    (manifest,) = (tmp_path / "runs" / "answers").glob("*/manifest.json")
    facts = json.loads(manifest.read_text())
    assert facts["answers"] == 6 and facts["tokens"] > 6 and facts["seconds"] > 0
    assert {r["reference_uri"] for r in records} == {str(manifest.parent)}
    assert all(r["output_check"]["passed"] for r in records)
    trees = [r for r in records if r["method"] == "tree"]
    assert {r["output_check"]["compared"] for r in trees} == {3}
    assert {r["prompts"] for r in records if r["method"] == "plain"} == {1}
    monkeypatch.setattr("jetspec.evaluation.answers._decode", lambda *_: pytest.fail("decoded"))
    other = config.evaluation.model_copy(update={"budgets": (3,), "batch_sizes": (2,)})
    again = evaluate(config.model_copy(update={"evaluation": other}), head)
    assert all(r["output_check"]["passed"] for r in read_records(again.uri))


def test_a_matrix_leaves_no_turns_behind(tmp_path) -> None:
    config, head = tiny_run(tmp_path, methods=["tree"], prompts_per_slice=1)
    plan = make_plan(config, head)
    result = evaluate(config, head)
    assert not list(Path(result.uri).glob("turns/*")) and result.uri == plan.uri
