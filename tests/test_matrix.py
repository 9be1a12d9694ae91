"""The matrix on disk: complete or resumable, cell by cell."""

import json
from pathlib import Path

import pytest

from jetspec.errors import JetspecError
from jetspec.evaluation import matrix
from jetspec.evaluation.bench import run_group as real_run_group
from jetspec.evaluation.cells import Group
from jetspec.evaluation.matrix import evaluate, make_plan, read_partial, read_records
from jetspec.storage import is_complete
from tests.tiny_run import tiny_run


@pytest.fixture
def run(tmp_path):
    return tiny_run(tmp_path)


def test_matrix_measures_every_cell_and_closes_with_a_manifest(run):
    config, head = run
    seen = []
    result = evaluate(config, head, lambda done, total, record: seen.append((done, total)))
    records = read_records(result.uri)
    assert seen == [(i, 10) for i in range(1, 11)]
    assert len(records) == 10 and not result.reused
    assert all(r["status"] == "ok" and r["output_check"]["passed"] for r in records)
    assert {r["slice"] for r in records} == {"math", "chat"}
    assert all(r["target_fingerprint"] == result.facts["target_fingerprint"] for r in records)
    summary = result.facts["summary"]
    assert (summary["cells"], summary["ok"], summary["output_checks"]["failed"]) == (10, 10, 0)
    assert summary["tau"]["budget"] == 4 and summary["tau"]["value"] >= 1
    table = json.loads((Path(result.uri) / "serving_table.json").read_text())
    assert table["rows"][0]["batch_size"] == 1
    assert "| tree 4 |" in (Path(result.uri) / "report.md").read_text()


def test_second_run_measures_nothing(run, monkeypatch):
    config, head = run
    first = evaluate(config, head)
    monkeypatch.setattr(matrix, "load_models", lambda *_: pytest.fail("loaded the models"))
    again = evaluate(config, head)
    assert again.reused and again.uri == first.uri and again.facts == first.facts


def test_a_cut_run_resumes_with_the_missing_cells_only(run, monkeypatch):
    config, head = run
    calls = []

    def cut(cells, *args, **kwargs):
        if calls:
            raise KeyboardInterrupt
        calls.append(cells)
        return real_run_group(cells, *args, **kwargs)

    monkeypatch.setattr(matrix, "run_group", cut)
    with pytest.raises(KeyboardInterrupt):
        evaluate(config, head)
    plan = make_plan(config, head)
    assert not is_complete(plan.uri) and len(read_partial(plan.uri)) == 5
    kept = {r["key"]: r for r in read_partial(plan.uri)}

    monkeypatch.setattr(matrix, "run_group", real_run_group)
    result = evaluate(config, head)
    records = read_records(result.uri)
    assert len(records) == 10
    assert {r["key"]: r for r in records if r["key"] in kept} == kept


def test_one_lost_cell_is_measured_alone_against_the_stored_baselines(run, monkeypatch):
    config, head = run
    result = evaluate(config, head)
    (Path(result.uri) / "manifest.json").unlink()
    tree = next(Path(result.uri).glob("cell-tree-*math*.json"))
    tree.write_text("{ cut")
    measured = []

    def noted(cells, *args, **kwargs):
        measured.extend(cells)
        return real_run_group(cells, *args, **kwargs)

    monkeypatch.setattr(matrix, "run_group", noted)
    evaluate(config, head)
    assert [(c.method, c.slice) for c in measured] == [("tree", "math")]
    record = json.loads(tree.read_text())
    assert record["output_check"]["passed"]
    assert record["speedup"]["vs_plain"]["same_run"] is False


def test_a_failed_cell_is_a_row_and_is_retried_on_request(run, monkeypatch):
    config, head = run

    def broken(cells, target, head, *args, **kwargs):
        return real_run_group(cells, target, None, *args, **kwargs)

    monkeypatch.setattr(matrix, "run_group", broken)
    result = evaluate(config, head)
    assert result.facts["summary"]["failed"] == 4
    rows = {r["method"]: r for r in read_records(result.uri)}
    assert "needs a draft head" in rows["tree"]["reason"] and rows["lookup"]["status"] == "ok"

    monkeypatch.setattr(matrix, "run_group", real_run_group)
    assert evaluate(config, head).reused
    mended = evaluate(config, head, retry_failed=True)
    assert not mended.reused and mended.facts["summary"]["failed"] == 0


def test_workers_do_not_change_what_is_measured_but_budgets_do(tmp_path):
    config, head = tiny_run(tmp_path)
    more = config.model_copy(
        update={"evaluation": config.evaluation.model_copy(update={"workers": 2})}
    )
    other = config.model_copy(
        update={"evaluation": config.evaluation.model_copy(update={"budgets": (5,)})}
    )
    keys = [make_plan(c, head).key for c in (config, more, other)]
    assert keys[0] == keys[1] != keys[2]


def test_head_of_another_target_is_refused_unless_asked_for(run):
    config, head = run
    manifest = Path(head) / "manifest.json"
    facts = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**facts, "target_fingerprint": "0" * 64}))
    with pytest.raises(JetspecError, match="distilled for target 000000000000"):
        evaluate(config, head)
    assert make_plan(config, head, other_target=True).cells


def test_incomplete_head_is_refused(run):
    config, head = run
    (Path(head) / "manifest.json").unlink()
    with pytest.raises(JetspecError, match="no manifest"):
        evaluate(config, head)


def test_methods_that_need_a_head_are_refused_without_one(tmp_path):
    config, _ = tiny_run(tmp_path)
    with pytest.raises(JetspecError, match="evaluation.methods"):
        evaluate(config, None)


def test_lookup_needs_no_head(tmp_path):
    config, _ = tiny_run(tmp_path, methods=["lookup"], slices=["math"])
    records = read_records(evaluate(config, None).uri)
    assert [r["method"] for r in records] == ["plain", "hf_eager", "lookup"]


def test_all_slices_mix_evenly_and_keep_their_own_tau(tmp_path):
    config, head = tiny_run(tmp_path, slices=["all"], prompts_per_slice=2, methods=["tree"])
    plan = make_plan(config, head)
    mixed = matrix.group_prompts(plan, Group("all", 1, 0.0), config.evaluation)
    assert [p.slice for p in mixed] == ["chat", "math", "chat", "math"]
    tree = read_records(evaluate(config, head).uri)[-1]
    assert {name: s["prompts"] for name, s in tree["by_slice"].items()} == {"chat": 2, "math": 2}


def test_a_limit_on_batches_gives_larger_batches_more_prompts(tmp_path):
    config, head = tiny_run(tmp_path, slices=["all"], max_batches=2, batch_sizes=[1, 2])
    plan = make_plan(config, head)
    counts = [
        len(matrix.group_prompts(plan, Group(name, batch_size, 0.0), config.evaluation))
        for name, batch_size in (("all", 1), ("all", 2), ("math", 1), ("math", 2))
    ]
    assert counts == [2, 4, 2, 3]


def test_read_only_output_is_one_clear_line_and_nothing_looks_complete(tmp_path):
    config, head = tiny_run(tmp_path)
    (tmp_path / "runs").write_text("a file where the directory should be")
    with pytest.raises(JetspecError, match="cannot be written"):
        evaluate(config, head)
