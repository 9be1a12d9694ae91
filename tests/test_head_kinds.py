"""Every kind of head goes the whole way: run file, training stage, directory, matrix."""

import pytest

from jetspec.evaluation.matrix import evaluate, head_depth, read_records
from jetspec.heads.registry import load_head
from jetspec.targets.load import load_target
from jetspec.training.stage import distil_head
from tests.answers import greedy_samples, write_samples
from tests.tiny_run import tiny_run

KINDS = {
    "eagle3": {"kind": "eagle3", "block_size": 4, "num_taps": 2, "beam": 3},
    "dspark": {"kind": "dspark", "block_size": 3, "num_layers": 1, "num_taps": 2, "markov_rank": 4},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_trained_saved_and_measured_without_loss(kind, tmp_path):
    config, _ = tiny_run(tmp_path, methods=["chain", "tree"], budgets=[6], slices=["math"])
    raw = config.model_dump(mode="json")
    raw["head"] = KINDS[kind]
    raw["training"] = {
        "anchors": 8, "sequence_length": 40, "batch_size": 4, "epochs": 2, "estimate_samples": 4,
    }  # fmt: skip
    config = type(config).model_validate(raw)
    target = load_target(config.target)
    samples = write_samples(greedy_samples(target, count=8, tokens=12), str(tmp_path / "samples"))
    head = distil_head(config, samples)
    assert load_head(head.uri).config.kind == kind
    assert head_depth(head.uri) == load_head(head.uri).depth == 3
    assert distil_head(config, samples).reused

    records = read_records(evaluate(config, head.uri).uri)
    cells = [(r["method"], r["budget"]) for r in records]
    assert cells == [("plain", 0), ("hf_eager", 0), ("chain", 3), ("tree", 6)]
    assert all(r["status"] == "ok" and r["output_check"]["passed"] for r in records)
