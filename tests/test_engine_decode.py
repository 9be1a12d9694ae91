"""The engine gives the reference loop's tokens: every mode, in fp32, kernels interpreted."""

import pytest
import torch

from jetspec.decode import decode
from jetspec.drafters import HeadDrafter
from jetspec.errors import JetspecError
from jetspec.sampling import SamplingParams
from jetspec.trees.config import TreeConfig
from tests.test_kernels_setup import interpreted
from tests.tiny import tiny_head, tiny_target

interpreted("kernels.tree_attention")  # before the engine imports the kernels

from jetspec.engine.engine import Engine  # noqa: E402
from kernels import tree_attention  # noqa: E402

GREEDY = SamplingParams()
PROMPTS = [[5, 9, 11, 4], [7, 8, 30, 31, 32, 33, 12], [20]]
CHAIN = TreeConfig(builder="chain", depth=3, budget=3, width=4)
TREE = TreeConfig(builder="best_first", depth=3, budget=5, width=3)


@pytest.fixture(autouse=True)
def one_split(monkeypatch) -> None:
    """Contexts this short have one; the interpreter would take its time over eight."""
    monkeypatch.setattr(tree_attention, "MERGE", 1)


def target(arch: str):
    return tiny_target(arch, hidden_size=64, num_layers=1)


def engine_for(model, head, tree=CHAIN, **options):
    options = {"slots": 2, "max_rows": 64, "page_size": 16, "kernels": True, **options}
    return Engine(model, head, tree=tree, **options)


def reference(model, head, tree, limit, sampling=GREEDY):
    drafter = HeadDrafter(head, model, width=tree.width, depth=tree.depth) if head else None
    return decode(
        model, PROMPTS, drafter=drafter, tree=tree, max_new_tokens=limit, sampling=sampling
    ).generations


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_plain_decoding_equals_the_reference_with_more_prompts_than_slots(arch) -> None:
    model = target(arch)
    engine = engine_for(model, None)
    ours = engine.decode(PROMPTS, max_new_tokens=5).generations
    theirs = reference(model, None, CHAIN, 5)
    assert [g.tokens for g in ours] == [g.tokens for g in theirs]
    assert engine.cache.free_pages == engine.cache.pages


def test_prompts_that_wait_for_a_group_are_answered_all_the_same(monkeypatch) -> None:
    model = target("llama")
    asked = [*PROMPTS, [9, 8], [3, 4, 5]]
    plain = decode(model, asked, max_new_tokens=2).generations
    read = []
    monkeypatch.setattr("jetspec.engine.engine.ADMITTED_SHARE", 1)
    engine = engine_for(model, None, slots=3)
    admit = engine._admit
    monkeypatch.setattr(
        engine, "_admit", lambda group, job: (read.append(len(group)), admit(group, job))
    )
    grouped = engine.decode(asked, max_new_tokens=2).generations
    assert [g.tokens for g in grouped] == [g.tokens for g in plain]
    assert read == [3, 2], "the fourth prompt did not wait for the fifth"


@pytest.mark.parametrize(
    ("tree", "mask", "rank"),
    [
        (TREE, "causal", 4),
        pytest.param(CHAIN, "causal", 4, marks=pytest.mark.slow),
        pytest.param(CHAIN, "causal", 0, marks=pytest.mark.slow),
        pytest.param(TREE, "causal", 0, marks=pytest.mark.slow),
        pytest.param(CHAIN, "bidirectional", 0, marks=pytest.mark.slow),
        pytest.param(TREE, "bidirectional", 0, marks=pytest.mark.slow),
    ],
)
def test_drafted_decoding_equals_the_reference_round_by_round(tree, mask, rank) -> None:
    model = target("qwen3")
    head = tiny_head(model, mask, block_size=4, edge_rank=rank)
    ours = engine_for(model, head, tree).decode(PROMPTS[:2], max_new_tokens=4).generations
    assert ours == reference(model, head, tree, 4)[:2]


def test_rounds_under_way_and_budgets_of_requests_change_no_token() -> None:
    """More prompts than slots, rounds enqueued unseen, and pages for one sequence at a time."""
    model = target("llama")
    head = tiny_head(model, block_size=4)
    engine = engine_for(model, head, CHAIN, ahead=1, pages=2)
    ours = engine.decode(PROMPTS[:2], max_new_tokens=2, budgets=[3, 1]).generations
    theirs = reference(model, None, CHAIN, 2)[:2]
    assert [g.tokens for g in ours] == [g.tokens for g in theirs]
    assert max(ours[1].accepted) <= 1
    assert engine.cache.free_pages == engine.cache.pages


def test_sampling_draws_the_references_tokens() -> None:
    model = target("llama")
    sampling = SamplingParams(temperature=1.0, seed=3)
    head = tiny_head(model, block_size=4)
    engine = engine_for(model, head, TREE, sampling=sampling)
    ours = engine.decode(PROMPTS[:2], max_new_tokens=4).generations
    theirs = reference(model, head, TREE, 4, sampling)[:2]
    assert [g.tokens for g in ours] == [g.tokens for g in theirs]


def test_exact_mode_equals_the_reference_in_fp32() -> None:
    model = tiny_target("llama", hidden_size=128, num_layers=1)
    ours = engine_for(model, None, exact=True).decode(PROMPTS[2:], max_new_tokens=3).generations
    assert ours[0].tokens == reference(model, None, CHAIN, 3)[2].tokens


def test_forced_paths_leak_no_page_and_leave_neighbours_alone() -> None:
    """Random path lengths through the real commit path; a plain neighbour keeps its tokens."""
    model = target("llama")
    head = tiny_head(model, block_size=4)
    engine = engine_for(model, head, CHAIN, forced=True)
    assert engine.state.forced is not None
    # The longer prompt has slot 0: the other takes whatever was drafted, it only its own tokens.
    assert len(PROMPTS[1]) > len(PROMPTS[0])
    engine.state.forced[1] = 3
    ours = engine.decode(PROMPTS[:2], max_new_tokens=6).generations
    assert ours[1].tokens == reference(model, None, CHAIN, 6)[1].tokens
    assert ours[0].rounds[0] == 3
    assert engine.cache.free_pages == engine.cache.pages


def test_without_a_gpu_the_same_calls_run_the_reference_loop() -> None:
    model = target("llama")
    head = tiny_head(model, block_size=4)
    engine = Engine(model, head, tree=TREE)
    ours = engine.decode(PROMPTS, max_new_tokens=6).generations
    assert [g.tokens for g in ours] == [g.tokens for g in reference(model, head, TREE, 6)]


def test_what_the_engine_cannot_run_is_refused_in_one_line() -> None:
    other = target("llama")
    other.config.model_type = "phi3"
    with pytest.raises(JetspecError, match="phi3"):
        engine_for(other, None)
    biased = target("llama")
    biased.model.model.layers[0].self_attn.o_proj.bias = torch.nn.Parameter(torch.ones(64))
    with pytest.raises(JetspecError, match=r"bias of self_attn\.o_proj"):
        engine_for(biased, None)
    engine = engine_for(target("llama"), None)
    with pytest.raises(JetspecError, match="raise max_rows"):
        engine.decode([[5] * 60], max_new_tokens=10)
    with pytest.raises(JetspecError, match="budgets: 1"):
        engine.decode(PROMPTS, max_new_tokens=2, budgets=[3])
    with pytest.raises(JetspecError, match="prompts: none"):
        engine.decode([], max_new_tokens=2)
    with pytest.raises(JetspecError, match="algorithm1"):
        engine_for(target("llama"), None, TreeConfig(builder="algorithm1"))
