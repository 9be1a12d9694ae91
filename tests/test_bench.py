"""One cell: what its record says, what it withholds, and what a failure leaves behind."""

import json
import sys

import pytest
import torch

from jetspec.decode import decode
from jetspec.errors import JetspecError
from jetspec.evaluation.bench import describe_failure, make_batches, run_cell
from jetspec.evaluation.cells import Cell
from jetspec.evaluation.config import EvaluationConfig
from jetspec.evaluation.methods import Request
from jetspec.evaluation.output_check import first_difference, gap_in_ulps, unit_in_last_place
from jetspec.evaluation.record import acceptance_by_depth
from jetspec.records import environment
from jetspec.sampling import SamplingParams
from tests import measured
from tests.measured import FakeTarget, by_method, group, runner, text
from tests.tiny import tiny_head, tiny_target

SETTINGS = EvaluationConfig(
    max_new_tokens=12, warmup_prompts=1, warmup_tokens=2, bootstrap_samples=200, width=4
)


def changed(position):
    """Decoding whose text leaves the plain one at `position`: token 2 where plain says 1."""

    def answer(request, limit, token=2):
        return [*text(request, limit)[:position], token, *text(request, limit)[position + 1 :]]

    return answer


def test_tau_and_speedups_follow_from_rounds_and_seconds():
    records = by_method(group({("tree", 16): runner(tau=2.0, round_seconds=0.125)}))
    tree = records["tree"]
    # 23 tokens after the first in 12 rounds (the last is cut by the limit), 0.125 s each.
    assert tree["tau"] == pytest.approx(23 / 12, abs=1e-6)
    assert tree["tok_s_decode"] == pytest.approx(23 / (12 * 0.125))
    assert tree["tok_s_total"] == pytest.approx(24 / (12 * 0.125 + 0.05))
    assert tree["speedup"]["vs_plain"]["value"] == pytest.approx(2.3 / 1.5, abs=1e-3)
    assert tree["speedup"]["vs_hf_eager"]["value"] == pytest.approx(4.6 / 1.5, abs=1e-3)
    assert tree["speedup"]["vs_plain"]["ci"] == pytest.approx([2.3 / 1.5] * 2, abs=1e-3)
    assert tree["speedup"]["vs_plain"]["same_run"]
    assert records["plain"]["tau"] == 1
    assert records["plain"]["speedup"]["vs_plain"]["value"] == 1
    assert records["plain"]["speedup"]["vs_hf_eager"]["value"] == pytest.approx(2)


def test_time_shares_add_up_to_one_with_what_no_part_claims():
    share = by_method(group({("tree", 16): runner(tau=2.0)}))["tree"]["time_share"]
    assert sum(share.values()) == pytest.approx(1)
    assert share["other"] == pytest.approx(0.05)


def test_record_is_plain_json_and_names_its_circumstances():
    record = by_method(group({("tree", 16): runner(tau=2.0)}, prompts_hash="p"))["tree"]
    back = json.loads(json.dumps(record))
    assert back == record
    assert record["environment"]["versions"]["torch"]
    assert (record["prompts_hash"], record["settings"]["seed"], record["dtype"]) == (
        "p",
        0,
        "float32",
    )


def test_a_record_names_the_command_of_a_run_and_none_of_a_ray_worker(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/bin/jetspec", "evaluate", "run.yaml"])
    assert environment()["command"] == "jetspec evaluate run.yaml"
    monkeypatch.setattr(sys, "argv", ["/ray/default_worker.py", "--gcs-address=10.0.0.1:1"])
    assert environment()["command"] is None


def test_different_output_in_fp32_fails_the_check_and_withholds_the_speedup():
    records = by_method(group({("tree", 16): runner(tau=2.0, answer=changed(5))}))
    check = records["tree"]["output_check"]
    assert (check["passed"], check["compared"], check["differing"]) == (False, 6, 6)
    assert check["differences"][0]["position"] == 5
    for base in ("vs_plain", "vs_hf_eager"):
        figure = records["tree"]["speedup"][base]
        assert figure["value"] is None and "differs" in figure["reason"]
    assert records["tree"]["tau"] is not None


@pytest.mark.parametrize(("gap", "passed"), [(0.0, True), (0.5, True), (0.625, False)])
def test_in_bf16_a_difference_within_rounding_of_the_best_logit_is_a_near_tie(gap, passed):
    # bf16 numbers around 16 lie 0.125 apart: four units are 0.5.
    plain = runner(answer=lambda r, n: changed(5)(r, n, token=1))
    records = by_method(
        group(
            {("plain", 0): plain, ("tree", 16): runner(tau=2.0, answer=changed(5))},
            target=FakeTarget(torch.bfloat16, gap=gap),
        )
    )
    check = records["tree"]["output_check"]
    assert check["differing"] == 6
    assert check["near_ties"] == (6 if passed else 0)
    assert check["passed"] is passed


def test_in_bf16_a_token_that_is_no_contender_is_an_error():
    plain = runner(answer=lambda r, n: changed(5)(r, n, token=1))
    wild = runner(tau=2.0, answer=lambda r, n: changed(5)(r, n, token=30))
    records = by_method(
        group({("plain", 0): plain, ("tree", 16): wild}, target=FakeTarget(torch.bfloat16))
    )
    assert not records["tree"]["output_check"]["passed"]


def test_an_output_that_stops_early_is_a_difference_not_a_near_tie():
    short = runner(tau=2.0, answer=lambda r, n: text(r, n)[:6])
    records = by_method(group({("tree", 16): short}, target=FakeTarget(torch.bfloat16)))
    check = records["tree"]["output_check"]
    assert (check["passed"], check["differing"], check["near_ties"]) == (False, 6, 0)


def test_a_baseline_whose_own_text_differs_gives_no_speedup():
    odd = runner(round_seconds=0.2, answer=lambda r, n: changed(3)(r, n, token=30))
    records = by_method(group({("hf_eager", 0): odd, ("tree", 16): runner(tau=2.0)}))
    assert records["tree"]["speedup"]["vs_hf_eager"]["value"] is None
    assert "own output" in records["tree"]["speedup"]["vs_hf_eager"]["reason"]
    assert records["tree"]["speedup"]["vs_plain"]["value"] is not None


def test_looping_outputs_are_split_from_the_tau_that_leaves_them_out():
    def answer(request, limit):
        return [5] * limit if request.request_id == "math-0" else text(request, limit)

    tau = lambda name: 8.0 if name == "math-0" else 2.0  # noqa: E731
    bases = {("plain", 0): runner(answer=answer), ("hf_eager", 0): runner(answer=answer)}
    tree = by_method(group({**bases, ("tree", 16): runner(tau=tau, answer=answer)}))["tree"]
    assert tree["looping"] == 1
    assert tree["tau_not_looping"] == pytest.approx(23 / 12, abs=1e-6) and tree["tau"] > 2
    assert [row["prompt_id"] for row in tree["per_prompt"] if row["looping"]] == ["math-0"]


def test_last_batch_is_filled_and_fillers_count_in_time_but_not_in_tau():
    records = by_method(group({("tree", 16): runner(tau=2.0)}, batch_size=4, count=6))
    tree = records["tree"]
    assert tree["prompts"] == len(tree["per_prompt"]) == 6
    assert [batch["decode_tokens"] for batch in tree["batches"]] == [4 * 23, 4 * 23]
    assert tree["tok_s_decode"] == pytest.approx(8 * 23 / (2 * 12 * 0.1))


def test_fewer_prompts_than_the_batch_repeat_until_it_is_full():
    (batch,) = make_batches(measured.prompts(count=3), FakeTarget(), 8)
    assert [item.filler for item in batch] == [False] * 3 + [True] * 5
    assert {item.prompt_id for item in batch} == {"math-0", "math-1", "math-2"}


def test_cells_take_turns_in_rotating_order():
    order = []

    def noted(name):
        inner = runner()
        return lambda requests, limit: order.append(name) or inner(requests, limit)

    group(
        {("plain", 0): noted("p"), ("hf_eager", 0): noted("h"), ("tree", 16): noted("t")}, count=3
    )
    assert order == list("pht" + "htp" + "tph")


def test_a_cell_out_of_memory_is_a_row_and_the_others_go_on():
    def full(requests, limit):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    records = group({("tree", 256): full, ("tree", 16): runner(tau=2.0)})
    rows = {(r["method"], r["budget"]): r for r in records}
    assert rows["tree", 256]["status"] == "out_of_memory"
    assert "20 GiB" in rows["tree", 256]["reason"]
    assert rows["tree", 256]["tau"] is None
    assert rows["tree", 16]["status"] == "ok"
    assert rows["tree", 16]["speedup"]["vs_plain"]["value"] > 1


def test_a_failing_baseline_withholds_speedups_with_its_reason():
    def broken(requests, limit):
        raise RuntimeError("no such kernel")

    tree = by_method(group({("plain", 0): broken, ("tree", 16): runner(tau=2.0)}))["tree"]
    assert tree["status"] == "ok" and tree["output_check"] is None
    assert "no such kernel" in tree["speedup"]["vs_plain"]["reason"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError(), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: ..."), "out_of_memory"),
        (ValueError("shapes"), "failed"),
        (JetspecError("head", "x", "does not fit"), "failed"),
    ],
)
def test_failures_are_told_apart(error, status):
    found, reason = describe_failure(error)
    assert found == status and reason and "\n" not in reason


def test_a_cell_alone_uses_stored_baselines_and_says_so():
    stored = by_method(group({}))
    cell = Cell("tree", "best_first", 16, 1, "math", 0.0)
    config = EvaluationConfig(max_new_tokens=24, warmup_prompts=0, bootstrap_samples=300)
    record = run_cell(
        cell,
        FakeTarget(),
        None,
        measured.prompts(),
        config,
        stored,
        runners={cell: runner(tau=2.0)},
    )
    assert record["output_check"]["passed"]
    assert record["speedup"]["vs_plain"]["value"] == pytest.approx(23 / 12, abs=1e-3)
    assert not record["speedup"]["vs_plain"]["same_run"]


def test_baselines_of_other_prompts_are_not_compared():
    stored = by_method(group({}, count=4))
    cell = Cell("tree", "best_first", 16, 1, "math", 0.0)
    config = EvaluationConfig(max_new_tokens=24, warmup_prompts=0, bootstrap_samples=300)
    record = run_cell(
        cell,
        FakeTarget(),
        None,
        measured.prompts(),
        config,
        stored,
        runners={cell: runner(tau=2.0)},
    )
    assert record["speedup"]["vs_plain"]["value"] is None
    assert not record["output_check"]["passed"]


def test_repeats_average_the_clock_and_keep_the_text():
    config = EvaluationConfig(max_new_tokens=24, warmup_prompts=0, bootstrap_samples=300, repeats=3)
    once, thrice = (
        by_method(group({("tree", 16): runner(tau=2.0)}, **more))["tree"]
        for more in ({}, {"config": config})
    )
    assert thrice["seconds"] == pytest.approx(once["seconds"])
    assert (thrice["rounds"], thrice["tokens"]) == (once["rounds"], once["tokens"])


def test_no_prompts_is_one_clear_line():
    with pytest.raises(JetspecError, match="prompts.eval"):
        make_batches([], FakeTarget(), 1)


def test_acceptance_by_depth_is_the_share_of_rounds_that_got_that_far():
    assert acceptance_by_depth([0, 1, 3, 3]) == [0.75, 0.5, 0.5]
    assert acceptance_by_depth([]) == []


def test_first_difference_sees_a_missing_tail():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2


def test_unit_in_last_place_is_the_gap_to_the_next_number():
    for value in (1.0, 17.3, -300.0):
        number = torch.tensor(abs(value), dtype=torch.bfloat16)
        following = (number.view(torch.int16) + 1).view(torch.bfloat16)
        gap = float(following.float() - number.float())
        assert unit_in_last_place(value, torch.bfloat16) == pytest.approx(gap)


@pytest.fixture(scope="module")
def real():
    target = tiny_target("qwen3")
    return target, tiny_head(target, mask_token_id=63)


def real_prompts(count=3):
    words = ("add 2 and 3", "name a colour", "why is the sky blue?")
    return [
        measured.FakePrompt(f"p{i}", "chat", ({"role": "user", "content": words[i]},))
        for i in range(count)
    ]


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_method_on_a_real_tiny_model_passes_its_output_check(real, batch_size, temperature):
    from jetspec.evaluation.bench import run_group
    from jetspec.evaluation.cells import cells

    target, head = real
    config = SETTINGS.model_copy(
        update={"budgets": (6,), "batch_sizes": (batch_size,), "temperatures": (temperature,)}
    )
    matrix = cells(config, ["chat"], head_depth=head.depth)
    records = by_method(run_group(matrix, target, head, real_prompts(), config))
    assert set(records) == {"plain", "hf_eager", "lookup", "chain", "tree"}
    for method, record in records.items():
        assert record["status"] == "ok", record["reason"]
        if method == "hf_eager" and temperature:
            assert record["output_check"] is None
        else:
            assert record["output_check"]["passed"], (method, record["output_check"])
        assert record["speedup"]["vs_hf_eager"]["value"] > 0
        assert record["tau"] >= 1


def test_the_models_own_generation_defaults_do_not_change_the_baseline(real):
    target, _ = real
    before = target.model.generation_config
    target.model.generation_config.repetition_penalty = 5.0
    try:
        cell = Cell("hf_eager", None, 0, 1, "chat", 0.0)
        plain = Cell("plain", None, 0, 1, "chat", 0.0)
        stored = {"plain": run_cell(plain, target, None, real_prompts(), SETTINGS)}
        record = run_cell(cell, target, None, real_prompts(), SETTINGS, stored)
        assert record["output_check"]["passed"]
        assert target.model.generation_config is before
    finally:
        target.model.generation_config.repetition_penalty = 1.0


def test_above_temperature_zero_near_ties_are_judged_with_the_noise_that_chose(real):
    target, _ = real
    request = Request([5, 6, 7], "p0")
    params = SamplingParams(temperature=0.7, seed=3)
    drawn = decode(
        target, [request.input_ids], sampling=params, max_new_tokens=6, request_ids=["p0"]
    )
    tokens = drawn.generations[0].tokens
    prefix, chosen = tokens[:3], tokens[3]
    other = (chosen + 1) % target.vocab_size
    assert gap_in_ulps(target, request, prefix, (chosen, chosen), params) == 0
    assert gap_in_ulps(target, request, prefix, (chosen, other), params) > 0


def test_a_head_method_without_a_head_is_a_row_with_its_reason(real):
    cell = Cell("chain", "chain", 4, 1, "chat", 0.0)
    record = run_cell(cell, real[0], None, real_prompts(), SETTINGS)
    assert record["status"] == "failed" and "needs a draft head" in record["reason"]
