"""The noise, and the distribution it draws from."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from jetspec.errors import JetspecError
from jetspec.sampling import (
    SamplingParams,
    Stream,
    gumbel_noise,
    request_keys,
    sample,
    seen_tokens,
    target_distribution,
    uniform_noise,
)


def test_noise_is_a_function_of_its_key_and_not_of_the_batch():
    keys, positions = request_keys([0, 1, "a"]), torch.tensor([5, 5, 900])
    together = gumbel_noise(3, keys, positions, 50)
    for row in range(3):
        alone = gumbel_noise(3, keys[row : row + 1], positions[row : row + 1], 50)
        assert torch.equal(alone[0], together[row])


def test_noise_stays_the_same_from_version_to_version():
    """Kept samples name the seed and not the noise; here it is by the bits that it is made of."""
    keys, positions = request_keys([7, "a"]), torch.tensor([3, 2**20])
    noise = [uniform_noise(2**40 + 5, keys, positions, 3, stream) for stream in Stream]
    bits = [(values * 2.0**32 - 0.5).long().tolist() for values in noise]
    assert bits == [
        [[3932655993, 743559431, 1927966463], [2333873792, 2911321627, 681078028]],
        [[2870804014, 3795973856, 3308047369], [329655654, 2549210899, 3435735670]],
        [[3299017562, 2399674343, 1480297037], [36334041, 3668776977, 1547616473]],
    ]
    assert [int(stream) for stream in Stream] == [0, 1, 2]


@pytest.mark.parametrize("change", ["seed", "request", "position"])
def test_noise_of_another_key_is_independent(change):
    size = 4000
    seeds, requests, positions = (1, 1), (0, 0), (7, 7)
    if change == "seed":
        seeds = (1, 2)
    elif change == "request":
        requests = (0, 1)
    else:
        positions = (7, 8)
    first, second = (
        gumbel_noise(seeds[i], request_keys([requests[i]]), torch.tensor([positions[i]]), size)[0]
        for i in range(2)
    )
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.06
    assert not torch.equal(first.sort().values, second.sort().values)


def test_large_seeds_differ_beyond_32_bits():
    keys, position = request_keys([0]), torch.tensor([0])
    assert not torch.equal(
        gumbel_noise(1, keys, position, 8), gumbel_noise(1 + 2**32, keys, position, 8)
    )


def test_noise_is_standard_gumbel_along_tokens_positions_and_requests():
    along_tokens = gumbel_noise(0, request_keys([0]), torch.tensor([3]), 20_000).flatten()
    along_positions = gumbel_noise(0, request_keys([0]).expand(20_000), torch.arange(20_000), 3)[
        :, 2
    ]
    along_requests = gumbel_noise(
        0, request_keys(range(20_000)), torch.zeros(20_000, dtype=torch.long), 3
    )[:, 0]
    for noise in (along_tokens, along_positions, along_requests):
        assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > 1e-3


def test_request_ids_of_any_kind_get_their_own_key():
    keys = request_keys([1, "1", 2, "two"])
    assert len(set(keys.tolist())) == 4
    assert torch.equal(request_keys(["two"]), keys[3:])


def reference_distribution(logits: list[float], params: SamplingParams) -> list[float]:
    """Temperature, then top-k, then top-p, one token at a time in float64."""
    scaled = torch.tensor(logits, dtype=torch.float64) / params.temperature
    p = scaled.softmax(-1).tolist()
    order = sorted(range(len(p)), key=lambda token: -p[token])
    if params.top_k:
        order = order[: params.top_k]
    total = sum(p[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        if mass >= params.top_p * total:
            break
        kept.append(token)
        mass += p[token]
    return [p[token] / mass if token in kept else 0.0 for token in range(len(p))]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(-500, 500), min_size=2, max_size=12, unique=True),
    st.floats(0.3, 2.0),
    st.sampled_from([0.33, 0.61, 0.87, 1.0]),
    st.integers(0, 12),
)
def test_target_distribution_is_the_one_token_at_a_time_reference(cents, temperature, top_p, top_k):
    logits = [value / 100 for value in cents]
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k)
    p = target_distribution(torch.tensor(logits), params).exp()
    expected = torch.tensor(reference_distribution(logits, params), dtype=torch.float)
    # Where the cumulative mass sits within rounding of top_p, either side is right.
    if torch.equal(p > 0, expected > 0):
        assert torch.allclose(p, expected, atol=1e-5)
    else:
        edge = (p > 0) ^ (expected > 0)
        assert edge.sum() == 1


def test_top_p_1_keeps_what_lies_beyond_the_precision_of_the_sum():
    p = target_distribution(torch.tensor([40.0, 1.0, 0.0]), SamplingParams(1.0)).exp()
    assert torch.all(p > 0)


def test_top_p_stops_at_the_token_that_reaches_it():
    p = target_distribution(torch.tensor([9.0, 9.0, 0.0, 0.0]), SamplingParams(1.0, top_k=2)).exp()
    half = target_distribution(p.log(), SamplingParams(1.0, top_p=0.5)).exp()
    assert p.tolist() == [0.5, 0.5, 0.0, 0.0] and half.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_top_p_always_leaves_the_best_token():
    p = target_distribution(torch.tensor([3.0, 1.0, 0.0]), SamplingParams(1.0, top_p=1e-6)).exp()
    assert p.tolist() == [1.0, 0.0, 0.0]


def test_temperature_0_is_the_argmax():
    logits = torch.randn(5, 9)
    keys = request_keys(range(5))
    tokens = sample(logits, SamplingParams(), keys, torch.zeros(5, dtype=torch.long))
    assert torch.equal(tokens, logits.argmax(-1))


def test_samples_follow_the_filtered_distribution():
    logits = torch.tensor([2.0, 1.5, 1.0, 0.0, -1.0])
    params = SamplingParams(temperature=0.8, top_p=0.95, top_k=4, seed=5)
    draws = 20_000
    tokens = sample(
        logits.expand(draws, -1), params, request_keys(range(draws)), torch.full((draws,), 11)
    )
    p = target_distribution(logits, params).exp()
    counts = torch.bincount(tokens, minlength=5)
    assert torch.all(counts[p == 0] == 0)
    kept = p > 0
    expected = p[kept].double() / p[kept].double().sum() * draws
    assert stats.chisquare(counts[kept].numpy(), expected.numpy()).pvalue > 1e-3


def transformers_distribution(logits, params, text) -> torch.Tensor:
    """log p [V] as `generate` of transformers makes it, processor by processor."""
    processors = []
    if params.logit_bias:
        bias = {(token,): value for token, value in params.logit_bias}
        processors.append(SequenceBiasLogitsProcessor(bias))
    processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    processors += [TopPLogitsWarper(params.top_p), MinPLogitsWarper(params.min_p)]
    return LogitsProcessorList(processors)(text[None], logits[None])[0].log_softmax(-1)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 10_000),
    st.floats(0.3, 2.0),
    st.sampled_from([0.33, 0.61, 0.87, 1.0]),
    st.integers(0, 9),
    st.sampled_from([0.0, 0.03, 0.3, 1.0]),
    st.sampled_from([0.7, 1.0, 1.3, 4.0]),
    st.sampled_from([(), ((2, 1.5),), ((0, -2.0), (7, 0.5))]),
)
def test_all_settings_together_are_transformers(
    seed, temperature, top_p, top_k, min_p, penalty, bias
):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(9, generator=generator) * 2
    text = torch.randint(9, (4,), generator=generator)
    params = SamplingParams(
        temperature, top_p, top_k, min_p=min_p, repetition_penalty=penalty, logit_bias=bias
    )
    seen = seen_tokens(params, [text.tolist()], 9, "cpu")
    log_p = target_distribution(logits[None], params, seen)[0]
    expected = transformers_distribution(logits, params, text)
    assert torch.allclose(log_p.exp(), expected.exp(), atol=1e-5)


def test_a_forbidden_token_is_never_drawn_and_bias_and_penalty_count_when_greedy():
    logits = torch.tensor([[3.0, 2.5, 2.0, -1.0]])
    keys, place = request_keys([0]), torch.tensor([0])
    banned = SamplingParams(logit_bias=((0, float("-inf")),))
    assert sample(logits, banned, keys, place).tolist() == [1]
    assert target_distribution(logits, SamplingParams(1.0, logit_bias=((0, float("-inf")),)))[
        0, 0
    ] == float("-inf")
    penalised = SamplingParams(repetition_penalty=2.0)
    seen = seen_tokens(penalised, [[0, 1]], 4, "cpu")
    assert sample(logits, penalised, keys, place, seen).tolist() == [2]


def test_a_penalty_without_the_text_is_refused():
    with pytest.raises(ValueError, match="seen so far"):
        target_distribution(torch.zeros(1, 4), SamplingParams(1.0, repetition_penalty=1.1))


def test_streams_of_one_key_are_independent():
    keys, place = request_keys([0]), torch.tensor([3])
    streams = torch.cat([uniform_noise(1, keys, place, 4000, stream) for stream in Stream])
    apart = torch.corrcoef(streams) - torch.eye(len(Stream))
    assert apart.abs().max() < 0.06
    assert stats.kstest(streams.flatten().numpy(), "uniform").pvalue > 1e-3


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"logit_bias": ((-1, 1.0),)},
        {"logit_bias": ((1, float("inf")),)},
        {"logit_bias": ((1, 1.0), (1, 2.0))},
    ],
    ids=str,
)
def test_parameters_out_of_range_are_one_line_errors(bad):
    with pytest.raises(JetspecError) as caught:
        SamplingParams(**bad)
    assert next(iter(bad)) in str(caught.value) and "\n" not in str(caught.value)
