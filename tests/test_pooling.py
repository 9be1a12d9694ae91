"""Figures pooled over records: which rows count, how often, and on which clock."""

import pytest

from jetspec.evaluation.pooling import (
    as_served,
    paired_tau_ratio,
    pooled_tau,
    select,
    speedup,
    throughput,
)

DRAWS = {"samples": 200, "seed": 0}


def record(rows=(), batches=(), **fields):
    """`rows`: (prompt, tokens, rounds); `batches`: (tokens, seconds) decoded and in all."""
    names = ("decode_tokens", "decode_seconds", "total_tokens", "total_seconds")
    return {
        "per_prompt": [dict(zip(("prompt_id", "tokens", "rounds"), r, strict=True)) for r in rows],
        "batches": [dict(zip(names, batch, strict=True)) for batch in batches],
        **fields,
    }


def test_slot_scores_are_left_out_only_where_path_scores_were_measured():
    plain, slot, path = {"method": "plain"}, {"scores": "slot"}, {"scores": "path"}
    assert as_served([plain, slot, path]) == [plain, path]
    assert as_served([plain, slot]) == [plain, slot]
    assert as_served(iter([slot])) == [slot]


def test_records_are_selected_by_all_fields_at_once():
    found = [{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1}]
    assert select(found, a=1, b=2) == found[:1]
    assert select(found, b=None) == found[2:]


def test_a_prompt_in_two_cells_counts_once():
    slices = [record([("x", 30, 10), ("y", 10, 10)]), record([("x", 30, 10)])]
    estimate = pooled_tau([*slices, {"per_prompt": None}], **DRAWS)
    assert estimate.value == pytest.approx(40 / 20)


def test_taus_are_compared_on_the_prompts_of_both():
    ours = record([("x", 30, 10), ("y", 20, 10), ("only ours", 900, 1)])
    theirs = record([("only theirs", 1, 100), ("y", 10, 10), ("x", 10, 5)])
    estimate, shared = paired_tau_ratio([ours], [theirs], **DRAWS)
    assert shared == 2
    assert estimate.value == pytest.approx((50 / 20) / (20 / 15))
    assert estimate.ci == pytest.approx((1.5, 2.0))  # x alone, y alone


def test_a_speedup_has_the_clock_that_is_asked_for():
    ours = record(batches=[(40, 1.0, 44, 4.0), (40, 1.0, 44, 4.0)])
    base = record(batches=[(40, 4.0, 44, 8.0), (40, 4.0, 44, 8.0)])
    for clock, value in (("decode", 4.0), ("total", 2.0)):
        assert speedup([ours], [base], clock=clock, **DRAWS).value == pytest.approx(value)
    assert throughput([ours, base]) == pytest.approx(160 / 10)
    assert throughput([ours, base], "total") == pytest.approx(176 / 24)
    assert throughput([record()]) is None


def test_a_speedup_is_paired_where_both_decoded_the_same_batches():
    """Ours takes half of every batch's time; batches differ a lot."""
    seconds = (1.0, 9.0, 3.0)
    base = record(batches=[(40, s, 40, s) for s in seconds])
    ours = record(batches=[(40, s / 2, 40, s / 2) for s in seconds])
    assert speedup([ours], [base], clock="decode", **DRAWS).ci == pytest.approx((2.0, 2.0))
    fewer = {**base, "batches": base["batches"][:2]}
    apart = speedup([ours], [fewer], clock="decode", **DRAWS)
    assert apart.value == pytest.approx((120 / 6.5) / (80 / 10))
    assert apart.ci[0] < 2 < apart.ci[1]
