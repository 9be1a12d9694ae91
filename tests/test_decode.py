"""The reference loop: lossless whatever is drafted, with right books about every round."""

import functools

import pytest
import torch

import jetspec.decode
from jetspec.decode import PHASES, Generation, decode
from jetspec.drafters import HeadDrafter, LookupDrafter
from jetspec.errors import JetspecError
from jetspec.sampling import SamplingParams
from jetspec.targets.load import from_model
from jetspec.trees.config import TreeConfig
from jetspec.trees.tree import Tree
from tests.tiny import (
    ARCHITECTURES,
    NoisyOracle,
    tiny_head,
    tiny_model,
    tiny_target,
    tiny_tokenizer,
)

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [3] * 9, [20, 4, 17, 33, 8, 9, 10]]
NEW = 20


@functools.cache
def target_of(arch):
    return tiny_target(arch)


@functools.cache
def hf_greedy(arch, row, stops=()):
    """transformers' own greedy answer to one prompt alone."""
    prompt = torch.tensor([PROMPTS[row]])
    output = target_of(arch).model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=NEW,
        eos_token_id=list(stops) or -1,
        pad_token_id=2,
    )
    return output[0, prompt.shape[1] :].tolist()


def answers(result):
    return [generation.tokens for generation in result.generations]


def drafter_of(method, arch, batch):
    if method == "lookup":
        return LookupDrafter()
    truth = [hf_greedy(arch, row) for row in range(batch)]
    return NoisyOracle(PROMPTS[:batch], truth, 64, path=method == "path")


def config_of(method, budget):
    builder = {"chain": "chain", "lookup": "chain", "algorithm1": "algorithm1"}
    return TreeConfig(builder=builder.get(method, "best_first"), budget=budget)


@pytest.mark.parametrize("batch", [1, 3, 4])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_plain_decoding_is_transformers_greedy(arch, batch):
    result = decode(target_of(arch), PROMPTS[:batch], max_new_tokens=NEW, stop_token_ids=())
    assert answers(result) == [hf_greedy(arch, row) for row in range(batch)]
    assert all(generation.rounds == [1] * (NEW - 1) for generation in result.generations)


@pytest.mark.parametrize("method", ["lookup", "chain", "algorithm1", "best_first", "path"])
@pytest.mark.parametrize("batch", [1, 3, 4])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_drafted_decoding_is_token_identical_to_greedy(arch, batch, method):
    stops = (hf_greedy(arch, 0)[9], hf_greedy(arch, batch - 1)[13])
    for budget, stop in ((1, ()), (16, ()), (64, ()), (256, ()), (64, stops)):
        result = decode(
            target_of(arch),
            PROMPTS[:batch],
            drafter=drafter_of(method, arch, batch),
            tree=config_of(method, budget),
            max_new_tokens=NEW,
            stop_token_ids=stop,
        )
        assert answers(result) == [hf_greedy(arch, row, stop) for row in range(batch)]
        for generation in result.generations:
            assert len(generation.tokens) == 1 + sum(generation.rounds)
            ended = generation.tokens[-1] in stop
            assert generation.finish == ("stop" if ended else "length")


def test_the_oracle_makes_rounds_that_accept_some_and_reject_some():
    result = decode(
        target_of("qwen3"),
        PROMPTS,
        drafter=drafter_of("best_first", "qwen3", 4),
        tree=TreeConfig(budget=64),
        max_new_tokens=NEW,
        stop_token_ids=(),
    )
    rounds = [count for generation in result.generations for count in generation.rounds]
    assert 1.5 < sum(rounds) / len(rounds) < 7
    assert len(set(rounds)) >= 4


def test_a_node_that_sees_its_sibling_breaks_the_output(monkeypatch):
    # The equality above must be able to fail: an ancestor mask that leaks is noticed.
    monkeypatch.setattr(Tree, "ancestor_mask", leaking_mask)
    result = decode(
        target_of("llama"),
        PROMPTS,
        drafter=drafter_of("best_first", "llama", 4),
        tree=TreeConfig(budget=16),
        max_new_tokens=8,
        stop_token_ids=(),
    )
    assert answers(result) != [hf_greedy("llama", row)[:8] for row in range(4)]


def leaking_mask(tree):
    nodes = tree.tokens.shape[1]
    return torch.ones(nodes, nodes).tril().bool().expand(len(tree.tokens), -1, -1)


@pytest.mark.parametrize("limit", [1, 2, 5, 9])
def test_the_limit_holds_inside_a_round(limit):
    truth = [hf_greedy("llama", row) for row in range(3)]
    result = decode(
        target_of("llama"),
        PROMPTS[:3],
        drafter=NoisyOracle(PROMPTS[:3], truth, 64, miss=0.0, sure=1.0),
        tree=TreeConfig(budget=64),
        max_new_tokens=limit,
        stop_token_ids=(),
    )
    assert answers(result) == [answer[:limit] for answer in truth]
    assert {generation.finish for generation in result.generations} == {"length"}


def test_tokens_after_a_stop_inside_a_round_are_dropped_and_not_counted():
    truth = [hf_greedy("llama", row) for row in range(2)]
    stop = truth[0][4]
    first = truth[0].index(stop)
    assert first > 1
    result = decode(
        target_of("llama"),
        PROMPTS[:2],
        drafter=NoisyOracle(PROMPTS[:2], truth, 64, miss=0.0, sure=1.0),
        tree=TreeConfig(builder="chain", budget=7),
        max_new_tokens=NEW,
        stop_token_ids=(stop,),
    )
    generation = result.generations[0]
    assert generation.tokens == truth[0][: first + 1]
    assert generation.rounds == [first]
    assert generation.accepted[0] >= first
    assert generation.finish == "stop"


def test_stop_tokens_default_to_the_targets_own():
    target = target_of("llama")
    stop = hf_greedy("llama", 1)[6]
    original = target.eos_token_ids
    target.eos_token_ids = frozenset({stop})
    try:
        result = decode(target, PROMPTS[:2], max_new_tokens=NEW)
    finally:
        target.eos_token_ids = original
    assert answers(result) == [hf_greedy("llama", row, (stop,)) for row in range(2)]


def test_the_first_token_can_end_the_answer():
    stop = hf_greedy("llama", 0)[0]
    result = decode(target_of("llama"), PROMPTS[:1], max_new_tokens=NEW, stop_token_ids=(stop,))
    (generation,) = result.generations
    assert (generation.tokens, generation.rounds, generation.finish) == ([stop], [], "stop")


def test_the_drafter_observes_every_verified_token_with_its_own_state():
    target = target_of("qwen3")
    truth = [hf_greedy("qwen3", row) for row in range(4)]
    stop = truth[1][8]
    oracle = NoisyOracle(PROMPTS, truth, 64, taps=(0, 2))
    result = decode(
        target,
        PROMPTS,
        drafter=oracle,
        tree=TreeConfig(budget=32),
        max_new_tokens=NEW,
        stop_token_ids=(stop,),
    )
    for row, generation in enumerate(result.generations):
        seen = oracle.observed[row]
        text = [*PROMPTS[row], *truth[row]]
        # Up to the anchor of the last round, whose own state no later round needed.
        assert len(seen) >= len(PROMPTS[row]) + sum(generation.rounds[:-1])
        assert [position for position, _, _ in seen] == list(range(len(seen)))
        assert [token for _, token, _ in seen] == text[: len(seen)]
        states = target.model(torch.tensor([text[: len(seen)]]), output_hidden_states=True)
        expected = torch.cat([states.hidden_states[layer + 1][0] for layer in (0, 2)], -1)
        assert torch.allclose(torch.stack([tap for _, _, tap in seen]), expected, atol=1e-3)


@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
def test_an_untrained_head_decodes_losslessly(mask):
    target = target_of("qwen3")
    drafter = HeadDrafter(tiny_head(target, mask), target, width=8)
    result = decode(
        target,
        PROMPTS,
        drafter=drafter,
        tree=TreeConfig(budget=64, width=8),
        max_new_tokens=NEW,
        stop_token_ids=(hf_greedy("qwen3", 2)[7],),
    )
    stops = (hf_greedy("qwen3", 2)[7],)
    assert answers(result) == [hf_greedy("qwen3", row, stops) for row in range(4)]


@pytest.mark.parametrize("depth", [3, 12])
def test_a_head_may_draft_shallower_or_deeper_than_its_block(depth):
    target = target_of("qwen3")
    drafter = HeadDrafter(tiny_head(target), target, width=4, depth=depth)
    result = decode(target, PROMPTS, drafter=drafter, max_new_tokens=NEW, stop_token_ids=())
    assert answers(result) == [hf_greedy("qwen3", row) for row in range(4)]


@pytest.mark.parametrize("method", ["lookup", "chain", "algorithm1", "best_first", "path"])
def test_sampled_tokens_do_not_depend_on_the_method(method):
    target = target_of("qwen3")
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=4)
    settings = {"sampling": params, "max_new_tokens": NEW, "stop_token_ids": ()}
    plain = answers(decode(target, PROMPTS, **settings))
    oracle = NoisyOracle(PROMPTS, plain, 64, path=method == "path")
    drafter = LookupDrafter() if method == "lookup" else oracle
    result = decode(target, PROMPTS, drafter=drafter, tree=config_of(method, 64), **settings)
    assert answers(result) == plain
    assert plain != answers(decode(target, PROMPTS, max_new_tokens=NEW, stop_token_ids=()))
    if method != "lookup":
        assert max(len(generation.rounds) for generation in result.generations) < NEW - 1


def test_sampled_tokens_depend_on_the_request_and_not_on_its_company():
    target = target_of("llama")
    params = SamplingParams(temperature=1.0, seed=1)
    settings = {"sampling": params, "max_new_tokens": 12, "stop_token_ids": ()}
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[0]]
    together = answers(decode(target, prompts, request_ids=["a", "b", "c"], **settings))
    alone = answers(decode(target, [PROMPTS[0]], request_ids=["c"], **settings))
    assert alone[0] == together[2]
    assert together[0] != together[2]
    other = SamplingParams(temperature=1.0, seed=2)
    reseeded = decode(target, [PROMPTS[0]], request_ids=["c"], **{**settings, "sampling": other})
    assert answers(reseeded) != alone


def test_the_cache_holds_verified_tokens_and_no_rejected_node(monkeypatch):
    lengths = []
    original = jetspec.decode.commit

    def recording(batch, *rest):
        original(batch, *rest)
        if batch.running:
            held = [len(sequel.history) - 1 for sequel in batch.running]
            assert batch.valid.sum(1).tolist() == held
            lengths.append((batch.cache.length, max(held)))

    monkeypatch.setattr(jetspec.decode, "commit", recording)
    decode(
        target_of("llama"),
        PROMPTS,
        drafter=drafter_of("best_first", "llama", 4),
        tree=TreeConfig(budget=64),
        max_new_tokens=NEW,
        stop_token_ids=(),
    )
    assert lengths
    # Rows are compacted to the longest sequence; the batch may have lost that one since.
    assert all(longest <= length < longest + 8 for length, longest in lengths)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("builder", ["chain", "algorithm1", "best_first"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_gpu_decodes_the_same_tokens(builder, temperature):
    model, tokenizer = tiny_model("qwen3").to("cuda"), tiny_tokenizer()
    target = from_model(model, tokenizer, "tiny-cuda")
    settings = {
        "sampling": SamplingParams(temperature=temperature, top_p=0.95, seed=2),
        "max_new_tokens": NEW,
        "stop_token_ids": (),
    }
    expected = answers(decode(target_of("qwen3"), PROMPTS, **settings))
    assert answers(decode(target, PROMPTS, **settings)) == expected
    drafters = [LookupDrafter(), HeadDrafter(tiny_head(target), target, width=8)]
    for drafter in drafters:
        tree = TreeConfig(builder=builder, budget=32)
        result = decode(target, PROMPTS, drafter=drafter, tree=tree, **settings)
        assert answers(result) == expected
        assert result.peak_bytes > 0


def test_timings_name_every_phase():
    result = decode(target_of("llama"), PROMPTS[:1], max_new_tokens=4, stop_token_ids=())
    assert tuple(result.seconds) == PHASES
    assert all(seconds > 0 for seconds in result.seconds.values())
    assert result.peak_bytes > 0


def test_acceptance_by_depth_counts_rounds():
    generation = Generation(accepted=[0, 2, 1, 2])
    assert generation.accepted_by_depth() == [4, 3, 2]
    assert Generation().accepted_by_depth() == [0]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompts": []}, "prompts"),
        ({"prompts": [[1], []]}, "prompts[1]"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"request_ids": [1, 2]}, "request_ids"),
    ],
)
def test_wrong_input_is_a_one_line_error(change, field):
    call = {"prompts": [[1, 2]], "max_new_tokens": 4, **change}
    with pytest.raises(JetspecError) as caught:
        decode(target_of("llama"), **call)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


def propose(history, **settings):
    draft = LookupDrafter(**settings).propose(torch.tensor([history[-1]]), [history])
    found = draft.edge_scores[0, :, 0, 0] > -torch.inf
    return draft.tokens[0, found, 0].tolist()


def test_lookup_copies_what_followed_the_longest_earlier_suffix():
    #          [1 2 3] 9 8      [2 3] 7          [1 2 3]
    history = [1, 2, 3, 9, 8, 5, 2, 3, 7, 4, 6, 1, 2, 3]
    assert propose(history, max_ngram=3, depth=2) == [9, 8]


def test_lookup_takes_the_most_recent_of_equally_long_matches():
    assert propose([4, 1, 5, 4, 2, 6, 4], max_ngram=2, depth=2) == [2, 6]


def test_lookup_that_reaches_the_end_goes_on_copying_itself():
    assert propose([7, 1, 2, 1, 2], max_ngram=3, depth=5) == [1, 2, 1, 2, 1]


def test_lookup_without_a_match_drafts_nothing():
    assert propose([1, 2, 3], max_ngram=3, depth=4) == []
    assert propose([1], max_ngram=3, depth=4) == []
