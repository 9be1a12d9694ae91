"""The loop with every sampling setting, with drawn trees, and deeper than a head was trained."""

import functools

import pytest
import torch

from jetspec.decode import decode
from jetspec.drafters import HeadDrafter, LookupDrafter
from jetspec.errors import JetspecError
from jetspec.sampling import SamplingParams
from jetspec.trees.config import TreeConfig
from tests.test_decode import NEW, PROMPTS, answers, config_of, hf_greedy, target_of
from tests.tiny import NoisyOracle, tiny_head


@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
def test_slots_beyond_the_trained_block_leave_a_causal_heads_earlier_slots_alone(mask):
    target = target_of("qwen3")
    head = tiny_head(target, mask)
    cache = head.new_cache(1)
    taps = torch.randn(1, 6, len(head.taps) * target.hidden_size)
    positions = torch.arange(6)[None]
    head.extend(cache, taps, positions, positions >= 0)
    drafts = [
        head.draft(cache, torch.tensor([5]), target.embed, target.logits, 4, depth)
        for depth in (head.depth, 2 * head.depth)
    ]
    trained, deeper = (draft.edge_scores[:, : head.depth] for draft in drafts)
    assert drafts[1].depth == 2 * head.depth
    assert torch.allclose(trained, deeper, atol=1e-4) == (mask == "causal")


PENALISED = SamplingParams(repetition_penalty=1.7, logit_bias=((9, 0.8), (3, float("-inf"))))


@functools.cache
def hf_penalised(row):
    """As `hf_greedy`, with the bias and the penalty of `PENALISED`."""
    prompt = torch.tensor([PROMPTS[row]])
    output = target_of("qwen3").model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        repetition_penalty=PENALISED.repetition_penalty,
        sequence_bias={(token,): bias for token, bias in PENALISED.logit_bias},
        max_new_tokens=NEW,
        eos_token_id=-1,
        pad_token_id=2,
    )
    return output[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("method", ["plain", "lookup", "chain", "best_first", "path"])
def test_bias_and_penalty_give_transformers_greedy_text_on_every_tree(method):
    expected = [hf_penalised(row) for row in range(3)]
    assert expected != [hf_greedy("qwen3", row) for row in range(3)]
    drafters = {"plain": None, "lookup": LookupDrafter()}
    oracle = NoisyOracle(PROMPTS[:3], expected, 64, path=method == "path")
    result = decode(
        target_of("qwen3"),
        PROMPTS[:3],
        drafter=drafters.get(method, oracle),
        tree=config_of(method, 32),
        sampling=PENALISED,
        max_new_tokens=NEW,
        stop_token_ids=(),
    )
    assert answers(result) == expected


def test_a_residual_text_depends_on_seed_and_request_and_not_on_its_company():
    target = target_of("llama")
    head = tiny_head(target)

    def run(rows, seed=3):
        params = SamplingParams(temperature=4.0, repetition_penalty=1.2, seed=seed)
        result = decode(
            target,
            [PROMPTS[row] for row in rows],
            drafter=HeadDrafter(head, target, width=32),
            tree=TreeConfig(builder="static", budget=12, rank_rates=(0.4, 0.3, 0.2)),
            sampling=params,
            rule="residual",
            request_ids=[str(row) for row in rows],
            max_new_tokens=10,
            stop_token_ids=(),
        )
        assert sum(sum(generation.accepted) for generation in result.generations) > 0
        return answers(result)

    together = run([0, 2, 3])
    assert run([2])[0] == together[1]
    assert run([2], seed=4)[0] != together[1]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rule": "residual", "tree": TreeConfig()}, "rule"),
        ({"rule": "greedy"}, "rule"),
        ({"sampling": SamplingParams(1.0, logit_bias=((64, 1.0),))}, "logit_bias"),
    ],
)
def test_sampling_settings_that_do_not_fit_are_one_line_errors(change, field):
    call = {"sampling": SamplingParams(temperature=1.0), "max_new_tokens": 4, **change}
    with pytest.raises(JetspecError) as caught:
        decode(target_of("llama"), PROMPTS[:1], drafter=LookupDrafter(), **call)
    assert caught.value.field == field and "\n" not in str(caught.value)
