"""The output check by itself: where a near tie ends, and what the check of draws adds up."""

import functools
import math

import pytest
import torch

from jetspec.evaluation.cells import Cell
from jetspec.evaluation.config import EvaluationConfig
from jetspec.evaluation.methods import Request
from jetspec.evaluation.output_check import check_distribution, check_outputs, gap_in_ulps
from jetspec.sampling import SamplingParams, request_keys, sample, uniform_noise
from tests.measured import FakeTarget
from tests.tiny import tiny_target

CELL = Cell("tree", "best_first", 16, 1, "math", 0.0)
TEXT = [7, 1, 9, 4]


def check(ours, plain=None, *, target=None, other_kernels=False, cell=CELL, **settings):
    """One output a prompt, `a`, `b`, ...; without `plain` every reference is `TEXT`."""
    plain = {name: TEXT for name in ours} if plain is None else plain
    requests = {name: Request([3, 5], name) for name in ours}
    config = EvaluationConfig().model_copy(update=settings)
    return check_outputs(
        target or FakeTarget(), requests, plain, ours, cell, config, other_kernels=other_kernels
    )


SWAPPED = {"a": [7, 2, 9, 4]}  # tokens 1 and 2 are tied within the target's gap


@pytest.mark.parametrize(
    ("dtype", "other_kernels", "settings", "passed"),
    [
        (torch.float32, False, {}, False),  # one decoder in fp32: every token must be equal
        (torch.float32, True, {}, True),
        (torch.bfloat16, False, {}, True),
        (torch.bfloat16, False, {"exact": True}, False),  # the engine's bitwise mode
        (torch.bfloat16, True, {"exact": True}, True),
    ],
)
def test_a_near_tie_passes_only_where_rounding_may_differ(dtype, other_kernels, settings, passed):
    found = check(SWAPPED, target=FakeTarget(dtype), other_kernels=other_kernels, **settings)
    assert (found["passed"], found["differing"], found["near_ties"]) == (passed, 1, 1)
    (difference,) = found["differences"]
    gap = difference.pop("ulps")
    assert difference == {"prompt_id": "a", "position": 1, "near_tie": True}
    assert 0 <= gap <= 512 and found["gaps"] == {str(math.ceil(gap)): 1}
    assert ("identical" in found["rule"]) is not passed


def test_hugging_face_is_another_decoder_whoever_calls():
    own = Cell("hf_eager", None, 0, 1, "math", 0.0)
    assert check(SWAPPED, cell=own)["passed"] and not check(SWAPPED)["passed"]


@pytest.mark.parametrize(
    ("dtype", "other_kernels", "ulps"),
    [(torch.bfloat16, False, 3.0), (torch.bfloat16, True, 3.0), (torch.float32, True, 512.0)],
)
def test_a_tie_ends_at_so_many_units_of_the_largest_logit(dtype, other_kernels, ulps):
    unit = 16 * torch.finfo(dtype).eps  # the best logit is 16
    for gap, near in ((ulps * unit, 1), ((ulps + 1) * unit, 0)):
        target = FakeTarget(dtype, gap=gap)
        found = check(SWAPPED, target=target, other_kernels=other_kernels, near_tie_ulps=3.0)
        assert (found["near_ties"], found["passed"]) == (near, bool(near))


def test_every_prompt_must_have_been_decoded_plainly_too():
    ours = {"a": TEXT, "b": TEXT}
    assert check(ours)["passed"]
    found = check(ours, {"a": TEXT, "c": TEXT})
    assert (found["passed"], found["compared"], found["differing"]) == (False, 1, 0)
    assert not check({})["passed"]


def test_one_error_among_near_ties_fails_and_the_five_widest_differences_are_shown():
    ours = {name: [7, 2, 9, 4] for name in "abcdef"} | {"g": [7, 30, 9, 4]}
    found = check(ours, target=FakeTarget(torch.bfloat16))
    assert (found["passed"], found["differing"], found["near_ties"]) == (False, 7, 6)
    assert len(found["differences"]) == 5
    assert found["differences"][0]["prompt_id"] == "g"
    assert sorted(found["gaps"].values()) == [1, 6]


def test_a_text_that_ends_early_is_no_near_tie_and_is_counted_as_ended():
    found = check({"a": TEXT[:2]}, target=FakeTarget(torch.bfloat16))
    assert (found["passed"], found["near_ties"], found["gaps"]) == (False, 0, {"ended": 1})


@functools.cache
def target():
    return tiny_target("qwen3", vocab_size=20, num_layers=1, spread=0.4)


def next_logits(text):
    ids = torch.tensor([text])
    places = torch.arange(len(text))[None]
    mask = torch.ones(1, len(text), len(text), dtype=torch.bool).tril()
    with torch.no_grad():
        hidden = target().forward(ids, position_ids=places, mask=mask).hidden
        return target().logits(hidden)[0, -1].double()


def penalised(logits, text, params):
    """Bias, then the penalty of the text's tokens, one token at a time."""
    values = logits.tolist()
    for token, bias in params.logit_bias:
        values[token] += bias
    for token in set(text):
        below = values[token] < 0
        values[token] *= params.repetition_penalty ** (1 if below else -1)
    return torch.tensor(values, dtype=torch.double)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_a_near_tie_is_measured_in_rounding_of_the_logits_at_any_temperature(temperature):
    """Above 0 a token wins by log p and its noise, where the logits' rounding is 1 / T as large."""
    params = SamplingParams(
        temperature, seed=5, repetition_penalty=1.4, logit_bias=((3, 0.8), (6, -0.5))
    )
    text, written = [5, 6, 7], [4, 6, 9]
    logits = penalised(next_logits(text + written), text + written, params)
    wins = logits
    if temperature:
        chance = uniform_noise(5, request_keys(["p"]), torch.tensor([6]), 20)[0]
        wins = (logits / temperature).log_softmax(-1) - torch.log(-torch.log(chance))
    best, other = wins.topk(2).indices.tolist()
    unit = 2.0 ** math.floor(
        math.log2(float(logits[[best, other, int(logits.argmax())]].abs().max()))
    )
    ulps = float(wins[best] - wins[other]) * (temperature or 1.0) / (unit * 2**-23)
    request = Request(text, "p")
    for pair in ((best, other), (other, best)):
        gap = gap_in_ulps(target(), request, written, pair, params)
        assert gap == pytest.approx(ulps, rel=0.01)
    third = int(wins.argmin())
    assert gap_in_ulps(target(), request, written, (best, third), params) > 1.01 * ulps


SETTINGS = [
    SamplingParams(1.3, seed=2),
    SamplingParams(0.9, top_k=6, repetition_penalty=1.5, logit_bias=((4, 1.0),), seed=2),
]


@pytest.mark.parametrize("params", SETTINGS, ids=["plain", "shaped"])
def test_z_is_the_sum_over_tokens_of_log_p_less_its_mean_in_standard_deviations(params):
    prompts = {"a": [5, 6, 7], "b": [9]}
    outputs, excess, variance = {}, 0.0, 0.0
    for name, prompt in prompts.items():
        written = []
        for _ in range(6):
            logits = penalised(next_logits(prompt + written), prompt + written, params)
            scaled = logits / params.temperature
            if params.top_k:
                scaled[scaled < scaled.topk(params.top_k).values[-1]] = -torch.inf
            p = scaled.softmax(-1)
            token = int(
                torch.multinomial(p, 1, generator=torch.Generator().manual_seed(len(written)))
            )
            surprise = p.log().nan_to_num(neginf=0.0)
            mean = float((p * surprise).sum())
            excess += float(surprise[token]) - mean
            variance += float((p * surprise**2).sum()) - mean**2
            written.append(token)
        outputs[name] = written
    requests = {name: Request(prompt, name) for name, prompt in prompts.items()}
    found = check_distribution(target(), requests, outputs, params)
    assert found["z"] == pytest.approx(excess / math.sqrt(variance), abs=0.002)
    assert found["passed"] and found["compared"] == 2


def test_tokens_that_the_filters_exclude_fail_the_check_of_draws():
    text = [5, 6, 7]
    params = SamplingParams(1.0, logit_bias=((12, -math.inf),))
    written: list[int] = []
    for place in range(20):
        logits, keys = next_logits(text + written).float()[None], request_keys(["a"])
        written.append(int(sample(logits, params, keys, torch.tensor([place]))))
    requests = {"a": Request(text, "a")}
    assert check_distribution(target(), requests, {"a": written}, params)["passed"]
    forbidden = {"a": [*written, 12]}
    found = check_distribution(target(), requests, forbidden, params)
    assert not found["passed"] and abs(found["z"]) < 4
    assert not check_distribution(target(), {}, {}, params)["passed"]


@pytest.mark.parametrize("likeliest", [True, False])
def test_the_check_of_draws_allows_four_standard_deviations_either_way(likeliest):
    """The best token always, or a poor one: every further one moves z the same way."""
    params, written, seen = SamplingParams(1.0), [], []
    requests = {"a": Request([5, 6, 7], "a")}
    for _ in range(40):
        logits = next_logits([5, 6, 7, *written])
        written.append(int(logits.argsort()[-1 if likeliest else 6]))
        found = check_distribution(target(), requests, {"a": list(written)}, params)
        assert found["passed"] is (abs(found["z"]) <= 4)
        assert (found["z"] > 0) is likeliest
        seen.append(abs(found["z"]))
    assert min(seen) < 4 and any(4 < z < 6 for z in seen)
