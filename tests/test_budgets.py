"""The serving table, and what a head costs."""

import random

import pytest

from jetspec.evaluation.budgets import budget_for, serving_document, serving_table, vllm_table
from jetspec.evaluation.costs import (
    break_even,
    hours,
    round_costs,
)
from tests.measured import failed, group, runner


def matrix(seconds, slices=("math",)):
    """Records where method (name, budget) at a batch size takes so many seconds a token."""
    records = []
    for batch_size in sorted({batch for _, batch in seconds}):
        for name in slices:
            runners = {
                method: runner(round_seconds=s)
                for (method, batch), s in seconds.items()
                if batch == batch_size
            }
            records += group(runners, slice_=name, batch_size=batch_size, count=batch_size)
    return records


def choices(table):
    return {row["batch_size"]: (row["method"], row["budget"]) for row in table}


def test_best_budget_falls_with_the_batch_and_ends_at_plain():
    table = serving_table(
        matrix(
            {
                (("plain", 0), 1): 0.10,
                (("tree", 64), 1): 0.05,
                (("tree", 16), 1): 0.06,
                (("plain", 0), 4): 0.10,
                (("tree", 64), 4): 0.09,
                (("tree", 16), 4): 0.07,
                (("plain", 0), 8): 0.10,
                (("tree", 64), 8): 0.30,
                (("tree", 16), 8): 0.13,
            }
        ),
        0.03,
    )
    assert choices(table) == {1: ("tree", 64), 4: ("tree", 16), 8: ("plain", 0)}
    assert [row["speedup_vs_plain"] for row in table] == pytest.approx([2.0, 1.4286, 1.0])
    speeds = [1 / 0.05, 4 / 0.07, 8 / 0.10]
    assert [row["tok_s"] for row in table] == pytest.approx(speeds, abs=0.001)


def test_nothing_faster_gives_budget_zero():
    table = serving_table(matrix({(("plain", 0), 1): 0.1, (("tree", 16), 1): 0.2}), 0.03)
    assert choices(table) == {1: ("plain", 0)}


@pytest.mark.parametrize(("hysteresis", "at_four"), [(0.0, 16), (0.03, 64)])
def test_hysteresis_keeps_the_neighbours_budget_unless_another_is_clearly_faster(
    hysteresis, at_four
):
    records = matrix(
        {
            (("plain", 0), 1): 0.10,
            (("tree", 64), 1): 0.050,
            (("tree", 16), 1): 0.060,
            (("plain", 0), 4): 0.10,
            (("tree", 64), 4): 0.0505,
            (("tree", 16), 4): 0.050,
        }
    )
    assert choices(serving_table(records, hysteresis))[4] == ("tree", at_four)


def test_a_gain_over_plain_within_the_hysteresis_is_not_worth_a_head():
    records = matrix({(("plain", 0), 1): 0.100, (("tree", 16), 1): 0.099})
    assert choices(serving_table(records, 0.03)) == {1: ("plain", 0)}
    assert choices(serving_table(records, 0.0)) == {1: ("tree", 16)}


def test_a_method_that_failed_on_one_slice_does_not_contend():
    records = matrix({(("plain", 0), 1): 0.1, (("tree", 64), 1): 0.02}, slices=("math", "code"))
    whole = choices(serving_table(records, 0.03))
    broken = [
        failed("tree", 64, "out of memory", "code")
        if (r["method"], r["slice"]) == ("tree", "code")
        else r
        for r in records
    ]
    assert whole == {1: ("tree", 64)}
    assert choices(serving_table(broken, 0.03)) == {1: ("plain", 0)}


def test_plain_decoding_says_which_slices_a_method_must_cover():
    """With nothing measured beside the two: a tree of the easy slice alone is no contender."""
    records = matrix({(("plain", 0), 1): 0.1, (("tree", 64), 1): 0.02}, slices=("math", "code"))
    kept = [
        r
        for r in records
        if r["method"] == "plain" or (r["method"], r["slice"]) == ("tree", "math")
    ]
    assert choices(serving_table(kept, 0.03)) == {1: ("plain", 0)}


def test_a_method_on_another_decoder_than_plain_decoding_does_not_contend():
    records = matrix({(("plain", 0), 1): 0.1, (("tree", 64), 1): 0.02})
    elsewhere = [{**r, "decoder": "engine"} if r["method"] == "tree" else r for r in records]
    assert choices(serving_table(elsewhere, 0.03)) == {1: ("plain", 0)}
    both = [{**r, "decoder": "engine"} for r in records]
    assert choices(serving_table(both, 0.03)) == {1: ("tree", 64)}


def test_a_method_whose_output_differs_does_not_contend():
    records = matrix({(("plain", 0), 1): 0.1, (("tree", 16), 1): 0.02})
    for record in records:
        if record["method"] == "tree":
            record["output_check"] = {**record["output_check"], "passed": False}
    assert choices(serving_table(records, 0.03)) == {1: ("plain", 0)}


def test_hugging_face_and_lookup_are_no_choice_of_a_head():
    records = group({("lookup", 10): runner(round_seconds=0.01)})
    assert choices(serving_table(records, 0.03)) == {1: ("plain", 0)}


def test_vllm_ranges_start_at_one_leave_no_gap_and_hold_chains_only():
    records = matrix(
        {
            (("plain", 0), 1): 0.10,
            (("chain", 15), 1): 0.05,
            (("chain", 7), 1): 0.06,
            (("tree", 64), 1): 0.01,
            (("plain", 0), 2): 0.10,
            (("chain", 15), 2): 0.05,
            (("chain", 7), 2): 0.06,
            (("plain", 0), 4): 0.10,
            (("chain", 15), 4): 0.20,
            (("chain", 7), 4): 0.07,
            (("plain", 0), 8): 0.10,
            (("chain", 15), 8): 0.20,
            (("chain", 7), 8): 0.08,
            (("plain", 0), 16): 0.10,
            (("chain", 15), 16): 0.40,
            (("chain", 7), 16): 0.20,
        }
    )
    assert vllm_table(records, 0.03) == [[1, 2, 15], [3, 8, 7], [9, 512, 0]]
    document = serving_document(records, 0.03)
    assert document["vllm"]["num_speculative_tokens_per_batch_size"][0] == [1, 2, 15]
    assert document["rows"][0]["method"] == "tree"


def test_vllm_ranges_are_well_formed_for_any_measurements():
    draw = random.Random(4)
    for _ in range(8):
        seconds = {}
        for batch in draw.sample([1, 2, 3, 4, 6, 8], draw.randint(1, 4)):
            for method in (("plain", 0), ("chain", 4), ("chain", 7)):
                seconds[method, batch] = draw.uniform(0.05, 0.15)
        ranges = vllm_table(matrix(seconds), 0.03)
        assert ranges[0][0] == 1 and ranges[-1][1] == 512
        for before, after in zip(ranges, ranges[1:], strict=False):
            assert before[1] + 1 == after[0] and before[2] != after[2]


def test_batches_between_measured_ones_take_the_larger_neighbours_budget():
    table = [{"batch_size": b, "budget": n} for b, n in ((1, 128), (4, 32), (16, 0))]
    assert [budget_for(table, b)["budget"] for b in (1, 2, 4, 5, 16, 99)] == [128, 32, 32, 0, 0, 0]
    assert budget_for([], 3)["budget"] == 0


def test_break_even_is_where_saved_time_repays_the_investment():
    result = break_even(2.0, plain_tok_s=100, method_tok_s=200)
    assert result.tokens == pytest.approx(2 * 3600 / 0.005)
    served = result.tokens
    assert served / 100 == pytest.approx(served / 200 + 2 * 3600)


def test_a_head_that_is_not_faster_never_pays_and_says_so():
    result = break_even(1.0, plain_tok_s=100, method_tok_s=90)
    assert result.tokens is None and "never" in result.reason


def test_round_cost_gives_the_tau_a_round_must_reach():
    records = group({("tree", 16): runner(tau=2.0, round_seconds=0.15)})
    (cost,) = round_costs(records)
    assert cost.needed_tau == pytest.approx(1.5)
    assert cost.draft_cost == pytest.approx(0.2 / 16 / 0.6)


def test_hours_of_a_stage_without_a_clock_are_unknown():
    assert hours({"worker_seconds": 7200}) == 2
    assert hours({}) is None
