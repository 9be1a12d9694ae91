"""Sampling settings and rules, from the run file down to the tokens and their records."""

import functools

import pytest
import torch

from jetspec.config import RunConfig, parse_config
from jetspec.decode import decode
from jetspec.errors import JetspecError
from jetspec.evaluation.bench import run_group
from jetspec.evaluation.cells import Cell, cells
from jetspec.evaluation.config import EvaluationConfig
from jetspec.evaluation.methods import Request
from jetspec.evaluation.output_check import check_distribution, gap_in_ulps
from jetspec.generation.config import RegenerationConfig
from jetspec.generation.conversation import TokenPrompt
from jetspec.generation.plan import sampling_facts
from jetspec.generation.transformers_backend import complete
from jetspec.prompts import Prompt
from jetspec.sampling import SamplingParams
from tests.tiny import tiny_head, tiny_target

SHAPED = {"min_p": 0.02, "repetition_penalty": 1.3, "logit_bias": {7: 1.5, 9: -100.0}, "top_k": 40}


@functools.cache
def models():
    target = tiny_target("qwen3")
    return target, tiny_head(target)


def records(config, temperature, builder="best_first"):
    target, head = models()
    prompts = [
        Prompt(
            id=str(i), slice="chat", source="test", messages=({"role": "user", "content": text},)
        )
        for i, text in enumerate(("say hello", "why rain?"))
    ]
    group = [
        Cell(method, tree, budget, 1, "chat", temperature)
        for method, tree, budget in (
            ("plain", None, 0),
            ("hf_eager", None, 0),
            ("lookup", "chain", 4),
            ("chain", "chain", 5),
            ("tree", builder, 6),
        )
    ]
    return run_group(group, target, head, prompts, config)


def settings(**values):
    common = {"max_new_tokens": 9, "warmup_prompts": 0, "bootstrap_samples": 100, "width": 8}
    return parse_config({"evaluation": common | values}).evaluation


def test_every_method_and_the_baseline_obey_bias_and_penalty_when_greedy():
    shaped = records(settings(**SHAPED), 0.0)
    assert all(r["status"] == "ok" and r["output_check"]["passed"] for r in shaped)
    plain = records(settings(), 0.0)[0]
    assert shaped[0]["settings"]["logit_bias"] == {"7": 1.5, "9": -100.0}
    assert "logit_bias" not in plain["settings"]
    outputs = [decode_with(SHAPED), decode_with({})]
    assert outputs[0] != outputs[1] and 9 not in outputs[0]


def decode_with(values):
    params = EvaluationConfig.model_validate(values).sampling_params(0.0, 0)
    return (
        decode(models()[0], [[5, 6, 7]], sampling=params, max_new_tokens=12).generations[0].tokens
    )


def test_sampled_cells_of_every_method_are_plain_decodings_text_token_by_token():
    found = records(settings(temperatures=[0.9], rule="sample_and_match", **SHAPED), 0.9)
    checks = [record["output_check"] for record in found if record["method"] != "hf_eager"]
    assert all(check["passed"] and check["rule"] == "identical" for check in checks)
    assert all(record["status"] == "ok" for record in found)


def test_residual_cells_are_checked_as_draws_and_not_as_the_same_text():
    config = settings(temperatures=[1.5], rule="residual", builders=["static"], **SHAPED)
    found = {record["method"]: record for record in records(config, 1.5, builder="static")}
    for method in ("lookup", "chain", "tree"):
        check = found[method]["output_check"]
        assert found[method]["status"] == "ok" and check["passed"], check
        assert abs(check["z"]) < 4 and "drawn" in check["rule"]
        assert found[method]["speedup"]["vs_plain"]["value"] is not None
    assert found["plain"]["output_check"]["rule"] == "identical"


def test_text_that_is_likelier_than_sampling_makes_it_fails_the_check_of_draws():
    target, _ = models()
    params = SamplingParams(temperature=2.5)
    requests = {str(i): Request([5 + i, 6, 7], str(i)) for i in range(6)}
    prompts = [request.input_ids for request in requests.values()]

    def outputs(sampling):
        result = decode(target, prompts, sampling=sampling, max_new_tokens=30, stop_token_ids=())
        return {str(i): g.tokens for i, g in enumerate(result.generations)}

    assert check_distribution(target, requests, outputs(params), params)["passed"]
    for other in (SamplingParams(temperature=1.2), SamplingParams(2.5, top_k=8)):
        check = check_distribution(target, requests, outputs(other), params)
        assert not check["passed"] and check["z"] > 4


def test_near_ties_are_judged_after_bias_and_penalty():
    target, _ = models()
    params = SamplingParams(repetition_penalty=2.0, logit_bias=((11, 50.0),))
    request = Request([5, 6, 7], "p")
    assert gap_in_ulps(target, request, [], (11, 11), params) == 0
    assert gap_in_ulps(target, request, [], (11, 12), params) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_regeneration_obeys_the_settings_in_every_slot_of_a_batch(temperature):
    target, _ = models()
    config = RegenerationConfig(temperature=temperature, seed=4, **SHAPED)
    params = config.sampling_params(config.temperature, config.seed)
    prompts = [TokenPrompt([3 + i, 20, 4 + i, 33][: 1 + i % 4], 1000 + i) for i in range(7)]
    alone, together = (
        complete(target, prompts, sampling=params, max_new_tokens=14, batch_size=size)
        for size in (1, 3)
    )
    assert [c.tokens for c in alone] == [c.tokens for c in together]
    if not temperature:
        expected = decode(target, [p.ids for p in prompts], sampling=params, max_new_tokens=14)
        assert [c.tokens for c in together] == [g.tokens for g in expected.generations]
    assert all(9 not in c.tokens for c in together)


def test_settings_that_nobody_set_are_in_no_key():
    older = {"max_new_tokens", "temperature", "top_p", "seed", "turns", "enable_thinking"}
    assert set(sampling_facts(RunConfig())) == older
    dumped = EvaluationConfig().model_dump(mode="json")
    assert not {"min_p", "repetition_penalty", "logit_bias", "rule", "widths"} & set(dumped)
    chosen = parse_config({"regeneration": {"top_k": 20, "logit_bias": {"5": -1.5}}})
    facts = sampling_facts(chosen)
    assert set(facts) == older | {"top_k", "logit_bias"}
    assert chosen.regeneration.chosen_sampling() == {"top_k": 20, "logit_bias": {5: -1.5}}
    again = parse_config({"evaluation": settings(**SHAPED, widths=[4]).model_dump(mode="json")})
    assert again.evaluation == settings(**SHAPED, widths=[4])


def test_a_chain_may_go_deeper_than_the_head_was_trained():
    lengths = {
        depth: [
            cell.budget
            for cell in cells(settings(budgets=[32], depth=depth), ["chat"], head_depth=7)
            if cell.method == "chain"
        ]
        for depth in (None, 4, 20)
    }
    assert lengths == {None: [7], 4: [4], 20: [20]}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rule": "residual", "temperatures": [1.0]}, "evaluation.rule"),
        ({"rule": "residual", "builders": ["static"]}, "evaluation.rule"),
        ({"rule": "greedy", "temperatures": [0.0, 1.0]}, "evaluation.rule"),
        ({"rule": "typical"}, "evaluation.rule"),
        ({"rank_rates": [0.1, 0.5]}, "evaluation.rank_rates"),
        ({"widths": [0]}, "evaluation.widths.0"),
        ({"logit_bias": {"-3": 1.0}}, "evaluation.logit_bias.-3.[key]"),
        ({"min_p": 2.0}, "evaluation.min_p"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_together_are_one_line_errors(change, field):
    with pytest.raises(JetspecError) as caught:
        parse_config({"evaluation": change})
    assert caught.value.field == field and "\n" not in str(caught.value)


def test_a_static_tree_is_measured_like_any_other():
    config = settings(builders=["static"], rank_rates=[0.5, 0.3, 0.1], widths=[2, 2])
    tree = records(config, 0.0, builder="static")[-1]
    assert tree["status"] == "ok" and tree["output_check"]["passed"]
    assert torch.tensor(tree["tau"]) >= 1
