"""Prompt lookup in the engine: the reference drafter's rounds, in fp32, kernels interpreted."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from jetspec.decode import decode
from jetspec.drafters import LookupDrafter
from jetspec.errors import JetspecError
from jetspec.sampling import SamplingParams
from jetspec.trees.config import TreeConfig
from tests.test_kernels_setup import interpreted
from tests.tiny import tiny_tokenizer

interpreted("kernels.tree_attention")  # before the engine imports the kernels

from jetspec.engine.engine import Engine  # noqa: E402
from jetspec.targets.load import from_model  # noqa: E402
from kernels import tree_attention  # noqa: E402

LOOKUP = LookupDrafter(max_ngram=3, depth=4)
CHAIN = TreeConfig(builder="chain")
PROMPTS = [[5, 9, 11, 4], [20], [6, 7, 6, 7, 6, 7, 6], [4, 5, 6, 4, 5, 6, 4], [7, 8, 20, 21]]
WARM = SamplingParams(temperature=0.3, seed=3)


@pytest.fixture(autouse=True)
def one_split(monkeypatch) -> None:
    """Contexts this short have one; the interpreter would take its time over eight."""
    monkeypatch.setattr(tree_attention, "MERGE", 1)


def new_target():
    """One that repeats itself now and then, warm or not."""
    torch.manual_seed(6)
    config = LlamaConfig(
        vocab_size=24, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=16, initializer_range=0.4,
        max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    return from_model(LlamaForCausalLM(config).eval(), tiny_tokenizer(24), "one head")


@pytest.fixture(scope="module")
def target():
    return new_target()


def engine_for(target, lookup=LOOKUP, **options):
    options = {"slots": 3, "max_rows": 64, "page_size": 16, "kernels": True, **options}
    return Engine(target, lookup, **options)


def reference(target, prompts, limit, lookup=LOOKUP, sampling=SamplingParams(), **options):
    return decode(
        target, prompts, drafter=lookup, max_new_tokens=limit, sampling=sampling, **options
    ).generations


@pytest.mark.parametrize(
    ("slots", "ahead", "limit", "sampling", "prompts", "stops"),
    [
        (3, 1, 9, SamplingParams(), PROMPTS, (23, 18)),
        (3, 0, 7, WARM, PROMPTS[:4], ()),
        (1, 0, 6, SamplingParams(), PROMPTS[2:4], (23,)),
    ],
)
def test_rounds_and_tokens_are_the_reference_drafters(
    target, slots, ahead, limit, sampling, prompts, stops
) -> None:
    """More prompts than slots: a slot's next text must not be copied from its last one's. The
    longest text ends where its memory does."""
    margin = 5 + ahead * 5
    longest = max(map(len, prompts)) + limit
    engine = engine_for(
        target, slots=slots, ahead=ahead, sampling=sampling, max_rows=longest + margin
    )
    assert engine.rows_left == longest
    ours = engine.decode(prompts, max_new_tokens=limit, stop_token_ids=stops).generations
    options = {"sampling": sampling, "stop_token_ids": stops}
    assert ours == reference(target, prompts, limit, **options)
    plain = reference(target, prompts, limit, None, **options)
    assert [g.tokens for g in ours] == [g.tokens for g in plain]
    accepted = {count for g in ours for count in g.accepted}
    assert accepted >= {0, 4}
    assert {"stop", "length"} == {g.finish for g in ours} or not stops
    assert engine.cache.free_pages == engine.cache.pages


def test_a_round_that_finds_nothing_drafts_nothing() -> None:
    """What stands in its idle rows is token 0, which this target always writes."""
    zeros = new_target()
    with torch.no_grad():
        zeros.model.lm_head.weight.zero_()
    ours = engine_for(zeros, slots=1).decode([[20]], max_new_tokens=6).generations
    assert ours == reference(zeros, [[20]], 6)
    assert ours[0].tokens == [0] * 6 and ours[0].accepted[0] == 0 < ours[0].accepted[1]


def test_budgets_of_single_requests_cut_the_copies(target) -> None:
    engine = engine_for(target, slots=2)
    ours = engine.decode(PROMPTS[2:4], max_new_tokens=6, stop_token_ids=(), budgets=[1, 9])
    plain = reference(target, PROMPTS[2:4], 6, None, stop_token_ids=())
    assert [g.tokens for g in ours.generations] == [g.tokens for g in plain]
    assert max(ours.generations[0].accepted) == 1 < max(ours.generations[1].accepted)


def test_a_round_is_as_deep_as_drafter_tree_and_budget_allow(target) -> None:
    deep = LookupDrafter(depth=100)
    for tree, nodes in [
        (CHAIN, 65), (TreeConfig(builder="chain", budget=3), 4),
        (TreeConfig(builder="chain", depth=5), 6),
        (TreeConfig(builder="chain", budget=200, depth=120, score="entropy"), 101),
    ]:  # fmt: skip
        assert engine_for(target, deep, tree=tree, max_rows=256).round.nodes == nodes


def test_without_a_gpu_the_same_call_runs_the_reference_drafter(target) -> None:
    ours = Engine(target, LOOKUP, slots=3).decode(PROMPTS, max_new_tokens=12).generations
    assert ours == reference(target, PROMPTS, 12)
    assert max(count for g in ours for count in g.accepted) == 4


def test_lookup_that_the_engine_cannot_run_is_refused_in_one_line(target) -> None:
    with pytest.raises(JetspecError, match="tree.builder: best_first: .*chains"):
        engine_for(target, tree=TreeConfig(builder="best_first"))
    with pytest.raises(JetspecError, match="tree.depth: 32: .*at most 31 levels"):
        engine_for(target, LookupDrafter(depth=32), exact=True)
