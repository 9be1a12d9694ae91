"""The check of the engine against the reference loop counts what it says."""

import dataclasses

import pytest
import torch

from tests.test_kernels_setup import interpreted
from tests.tiny import tiny_head, tiny_target

interpreted("kernels.tree_attention")  # before the engine imports the kernels

from jetspec.engine.benchmarks import near_ties  # noqa: E402
from jetspec.evaluation.methods import Request  # noqa: E402
from jetspec.evaluation.output_check import gap_in_ulps  # noqa: E402
from jetspec.sampling import SamplingParams  # noqa: E402

PROMPT = [5, 9]


@pytest.fixture(scope="module")
def model():
    return tiny_target("llama", hidden_size=64, num_layers=1)


def rows_of(model, ulps, sampling=SamplingParams()):
    head = tiny_head(model, block_size=4, num_layers=1, num_taps=1)
    options = {"batches": [1], "budgets": [], "depth": 2, "kernels": True, "page_size": 16}
    return list(near_ties.check(model, head, [PROMPT], 2, ulps=ulps, sampling=sampling, **options))


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.0, seed=3)])
def test_an_engine_that_writes_the_reference_loops_tokens_is_equal(model, sampling) -> None:
    rows = rows_of(model, 2.0, sampling)
    assert [row["configuration"] for row in rows] == ["plain, batch 1", "chain of 2, batch 1"]
    assert all((r["equal"], r["near_ties"], r["errors"], r["gaps"]) == (1, 0, 0, []) for r in rows)


def test_a_first_difference_is_a_near_tie_up_to_the_bound_and_an_error_beyond(
    model, monkeypatch
) -> None:
    true = near_ties.decode(model, [PROMPT], max_new_tokens=2, stop_token_ids=())
    tokens = true.generations[0].tokens
    other = [tokens[0], (tokens[1] + 1) % model.vocab_size]
    wrong = dataclasses.replace(true.generations[0], tokens=other)
    altered = dataclasses.replace(true, generations=[wrong])
    monkeypatch.setattr(near_ties, "decode", lambda *prompts, **settings: altered)
    pair = tokens[1], other[1]
    gap = gap_in_ulps(model, Request(PROMPT, ""), tokens[:1], pair, SamplingParams())
    assert gap > 0
    for ulps, counted in ((gap, (0, 1, 0)), (0.99 * gap, (0, 0, 1))):
        for row in rows_of(model, ulps):
            assert (row["equal"], row["near_ties"], row["errors"]) == counted
            assert row["gaps"] == [gap]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU gets")
def test_without_a_gpu_the_check_says_so(capsys) -> None:
    assert near_ties.main(["embedded", "head", "bundled"]) == 2
    assert capsys.readouterr().err.startswith("device: none")
