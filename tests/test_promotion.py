"""Gates: each refuses for its own reason, in words, and none passes for want of figures."""

import re

import pytest

from jetspec.promotion import PromotionConfig, compared_cells, gates
from tests.measured import failed, group, runner

CONFIG = PromotionConfig(budget=16, bootstrap_samples=400)
DOCTOR = [{"ok": True, "check": "rope", "detail": "equal"}]


def head(tau=2.0, *, slices=("math", "code"), seconds=0.1, **facts):
    return [
        record
        for name in slices
        for record in group(
            {("tree", 16): runner(tau=tau, round_seconds=seconds)}, slice_=name, **facts
        )
    ]


def reason(verdict, gate):
    return next(r for r in verdict.reasons if r.gate == gate)


def on_gpu(records):
    return [{**record, "device": "cuda:0"} for record in records]


def test_first_head_above_one_is_promoted():
    verdict = gates(head(2.0), None, DOCTOR, CONFIG)
    assert verdict.promote, verdict.reasons
    assert "there is no champion" in reason(verdict, "tau").detail


def test_first_head_whose_interval_reaches_one_is_refused():
    verdict = gates(head(1.0), None, DOCTOR, CONFIG)
    assert not verdict.promote
    assert not reason(verdict, "tau").passed


def few_or_many(few, many):
    """tau by prompt: `few` on every third one, `many` on the others."""
    return lambda name: few if int(name[-1]) % 3 == 0 else many


@pytest.mark.parametrize("gate", ["tau", "tau over the champion", "speed"])
def test_a_gain_whose_interval_reaches_below_one_is_refused(gate):
    """The figure lies above 1 and so does its upper bound: the lower bound alone decides."""
    if gate == "speed":
        ours, champion = on_gpu(head(few_or_many(5.0, 1.2), seconds=0.15)), None
    elif gate == "tau":
        lucky = group({("tree", 16): runner(tau=lambda name: 3.0 if name[-1] == "0" else 1.0)})
        ours, champion = lucky, None
    else:
        ours, champion = head(few_or_many(4.0, 2.0)), head(few_or_many(2.0, 2.1))
    detail = reason(gates(ours, champion, DOCTOR, CONFIG), gate.split()[0])
    value, low, high = map(
        float, re.search(r"([\d.]+) \[([\d.]+), ([\d.]+)\]", detail.detail).groups()
    )
    assert low <= 1 < value < high
    assert not detail.passed


def test_one_prompt_has_no_interval_and_promotes_nothing():
    verdict = gates(group({("tree", 16): runner(tau=3.0)}, count=1), None, DOCTOR, CONFIG)
    assert [r.gate for r in verdict.reasons if not r.passed] == ["tau"]
    assert "one prompt: no interval" in reason(verdict, "tau").detail


def test_better_head_replaces_the_champion_on_the_shared_prompts():
    verdict = gates(head(2.4), head(2.0), DOCTOR, CONFIG)
    assert verdict.promote, verdict.reasons
    assert "12 shared prompts" in reason(verdict, "tau").detail


def test_equal_head_does_not_replace_the_champion():
    verdict = gates(head(2.0), head(2.0), DOCTOR, CONFIG)
    assert [r.gate for r in verdict.reasons if not r.passed] == ["tau"]


def test_pairing_sees_a_small_gain_that_two_separate_intervals_would_miss():
    # Prompts differ a lot, the new head is better on each of them.
    hard = lambda name: 1.2 + 0.9 * int(name[-1])  # noqa: E731
    harder = lambda name: 1.12 * hard(name)  # noqa: E731
    ours, theirs = head(harder), head(hard)
    verdict = gates(ours, theirs, DOCTOR, CONFIG)
    alone = gates(theirs, None, DOCTOR, CONFIG)
    assert reason(verdict, "tau").passed
    low, high = (r for r in [theirs[2]["tau_ci"]][0])
    assert low < ours[2]["tau"] < high
    assert reason(alone, "tau").passed


def test_a_slice_that_lost_too_much_blocks_a_better_average():
    ours = head(4.0, slices=("math",)) + head(1.5, slices=("code",))
    verdict = gates(ours, head(2.0), DOCTOR, CONFIG)
    assert not reason(verdict, "slices").passed
    assert "code" in reason(verdict, "slices").detail
    lenient = CONFIG.model_copy(update={"max_slice_loss": 0.3})
    assert reason(gates(ours, head(2.0), DOCTOR, lenient), "slices").passed


def test_a_slice_may_lose_just_as_much_as_is_allowed():
    half = CONFIG.model_copy(update={"max_slice_loss": 0.5})
    ours, theirs = (head(tau, slices=("code",)) for tau in (1.0, 2.0))
    for records, tokens in ((ours, 10), (theirs, 20)):
        for row in (row for record in records for row in record["per_prompt"]):
            row["tokens"], row["rounds"] = tokens, 10
    detail = reason(gates(ours, theirs, DOCTOR, half), "slices")
    assert "code at 0.500" in detail.detail and detail.passed


def test_a_slice_of_answers_without_a_round_is_no_worse():
    ours, theirs = head(2.4), head(2.0)
    for record in (*ours, *theirs):
        if record["slice"] == "code":
            for row in record["per_prompt"]:
                row["tokens"] = row["rounds"] = 0
    assert reason(gates(ours, theirs, DOCTOR, CONFIG), "slices").passed


def test_champion_of_another_target_is_set_aside_and_said_so():
    theirs = head(9.0, target_fingerprint="a" * 64)
    verdict = gates(head(2.0), theirs, DOCTOR, CONFIG)
    assert verdict.promote
    detail = reason(verdict, "tau").detail
    assert "aaaaaaaaaaaa" in detail and "says nothing here" in detail


def test_champion_on_no_shared_prompt_is_not_beaten_by_default():
    verdict = gates(head(4.0), head(2.0, slices=("chat",)), DOCTOR, CONFIG)
    assert not verdict.promote
    for gate in ("tau", "slices"):
        assert not reason(verdict, gate).passed
        assert "not measured on any of the same prompts" in reason(verdict, gate).detail


def test_lossy_cell_at_any_budget_blocks():
    records = head(2.0)
    wrong = group({("tree", 64): runner(tau=3.0, answer=lambda r, n: [9, 4] * (n // 2))})
    verdict = gates(records + [r for r in wrong if r["method"] == "tree"], None, DOCTOR, CONFIG)
    assert [r.gate for r in verdict.reasons if not r.passed] == ["lossless"]
    assert "tree 64" in reason(verdict, "lossless").detail
    assert "6 of 6 outputs differ" in reason(verdict, "lossless").detail


def test_cells_without_an_output_check_do_not_count_as_lossless():
    records = [{**r, "output_check": None} for r in head(2.0)]
    assert not reason(gates(records, None, DOCTOR, CONFIG), "lossless").passed


def test_lookup_alone_proves_nothing_about_the_head():
    verdict = gates(group({("lookup", 10): runner(tau=2.0)}), None, DOCTOR, CONFIG)
    assert not reason(verdict, "lossless").passed


def test_out_of_memory_at_another_budget_does_not_block():
    verdict = gates([*head(2.0), failed("tree", 256, "no memory")], None, DOCTOR, CONFIG)
    assert verdict.promote


def test_out_of_memory_at_the_judged_budget_blocks_with_its_reason():
    records = [*head(2.0, slices=("code",)), failed("tree", 16, "no memory")]
    verdict = gates(records, None, DOCTOR, CONFIG)
    assert not reason(verdict, "measured").passed
    assert "no memory" in reason(verdict, "measured").detail


def test_no_records_promote_nothing():
    verdict = gates([], None, [], CONFIG)
    assert not verdict.promote
    assert {r.gate for r in verdict.reasons if not r.passed} >= {"measured", "lossless", "doctor"}


def test_a_failed_doctor_check_blocks_and_is_quoted():
    findings = [*DOCTOR, {"ok": False, "check": "mask token", "detail": "is the end token"}]
    verdict = gates(head(2.0), None, findings, CONFIG)
    assert not verdict.promote
    assert "mask token: is the end token" in reason(verdict, "doctor").detail


def test_speed_is_asked_only_of_a_gpu():
    slow = head(2.0, seconds=0.5)
    assert reason(gates(slow, None, DOCTOR, CONFIG), "speed").passed
    verdict = gates(on_gpu(slow), None, DOCTOR, CONFIG)
    assert not reason(verdict, "speed").passed
    assert reason(gates(on_gpu(head(2.0)), None, DOCTOR, CONFIG), "speed").passed


def test_a_withheld_speedup_on_a_gpu_blocks():
    records = on_gpu(head(2.0))
    for record in records:
        if record["method"] == "tree":
            figure = {"value": None, "ci": None, "reason": "plain failed: no kernel"}
            record["speedup"] = {"vs_plain": figure, "vs_hf_eager": figure}
    verdict = gates(records, None, DOCTOR, CONFIG)
    assert not reason(verdict, "speed").passed
    assert "no kernel" in reason(verdict, "speed").detail


@pytest.mark.parametrize("field", ["budget", "batch_size"])
def test_only_the_configured_cells_are_judged(field):
    other = CONFIG.model_copy(update={field: 8})
    measured = reason(gates(head(2.0), None, DOCTOR, other), "measured")
    assert not measured.passed and "no cell with best_first trees" in measured.detail


@pytest.mark.parametrize(
    "bad",
    [
        {"budget": 0},
        {"batch_size": 0},
        {"max_slice_loss": 1.0},
        {"max_slice_loss": -0.1},
        {"hysteresis": -0.1},
        {"bootstrap_samples": 99},
    ],
    ids=str,
)
def test_gates_that_could_not_refuse_are_no_configuration(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        PromotionConfig(**bad)


def test_warm_failed_and_other_cells_are_not_compared():
    cold = head(2.0)
    shape = {("tree", 16): runner(tau=9.0), ("tree", 64): runner(tau=9.0)}
    warm = group({("tree", 16): runner(tau=9.0)}, slice_="math", temperature=1.0)
    others = [*group(shape, slice_="chat")[3:], *warm, failed("tree", 16, "no memory", "poems")]
    chain = [{**r, "method": "chain"} for r in group(shape, slice_="chain")[2:3]]
    mine = [r for r in cold if r["method"] == "tree"]
    assert compared_cells([*others, *cold, *chain], CONFIG) == mine
    assert reason(gates([*cold, *warm], None, DOCTOR, CONFIG), "tau") == reason(
        gates(cold, None, DOCTOR, CONFIG), "tau"
    )


def test_verdict_is_plain_json():
    verdict = gates(head(2.0), None, DOCTOR, CONFIG).as_json()
    assert verdict["promote"] is True
    assert {r["gate"] for r in verdict["reasons"]} == {
        "measured",
        "lossless",
        "doctor",
        "tau",
        "slices",
        "speed",
    }
