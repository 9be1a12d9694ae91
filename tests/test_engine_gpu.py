"""On a GPU the engine gives the reference loop's tokens: graphs, bf16, batches, rounds ahead."""

import pytest
import torch

from jetspec.decode import decode
from jetspec.drafters import HeadDrafter, LookupDrafter
from jetspec.engine.engine import Engine
from jetspec.evaluation.methods import Request
from jetspec.evaluation.output_check import first_difference, gap_in_ulps
from jetspec.sampling import SamplingParams
from jetspec.targets.fp8 import to_fp8
from jetspec.targets.target import Target
from jetspec.trees.config import TreeConfig
from tests.tiny import tiny_head, tiny_model, tiny_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CHAIN = TreeConfig(builder="chain", depth=7, budget=7, width=4)
TREE = TreeConfig(builder="best_first", depth=7, budget=40, width=8)
GREEDY = SamplingParams()
MODES = {
    "plain": (None, CHAIN, 0),
    "lookup": ("lookup", CHAIN, 0),
    "chain": ("causal", CHAIN, 0),
    "chain with edges": ("causal", CHAIN, 4),
    "tree": ("causal", TREE, 0),
    "tree with edges": ("causal", TREE, 4),
    "tree, bidirectional": ("bidirectional", TREE, 0),
}


def prompts(count: int, longest: int = 40) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    lengths = [1 + (7 * i) % longest for i in range(count)]
    return [torch.randint(3, 64, (n,), generator=generator).tolist() for n in lengths]


def target_of(arch: str = "qwen3", dtype: torch.dtype = torch.float32, **shape) -> Target:
    shape = {"hidden_size": 64, "num_layers": 2} | shape
    model = tiny_model(arch, **shape).to("cuda", dtype)
    return Target(model, tiny_tokenizer(), "tiny", "none")


def head_of(target: Target, mask: str | None, rank: int):
    if mask is None:
        return None
    if mask == "lookup":
        return LookupDrafter(max_ngram=2, depth=6)
    head = tiny_head(target, mask, edge_rank=rank)
    return head.to(target.dtype)


def reference(target, head, tree, given, limit, sampling=GREEDY):
    drafter = head
    if head and not isinstance(head, LookupDrafter):
        drafter = HeadDrafter(head, target, width=tree.width, depth=tree.depth)
    return decode(
        target, given, drafter=drafter, tree=tree, max_new_tokens=limit, sampling=sampling,
        stop_token_ids=(),
    ).generations  # fmt: skip


def answers(engine: Engine, given, limit, **options):
    done = engine.decode(given, max_new_tokens=limit, stop_token_ids=(), **options).generations
    assert engine.cache.free_pages == engine.cache.pages
    return done


@pytest.mark.parametrize("mode", MODES)
def test_fp32_tokens_equal_the_references_at_every_batch(mode) -> None:
    mask, tree, rank = MODES[mode]
    target = target_of()
    head = head_of(target, mask, rank)
    given = prompts(20)
    theirs = [g.tokens for g in reference(target, head, tree, given, 40)]
    for slots in (1, 3, 16):
        engine = Engine(target, head, tree=tree, slots=slots, max_rows=256)
        ours = [g.tokens for g in answers(engine, given[: 4 if slots == 1 else 20], 40)]
        assert ours == theirs[: len(ours)]


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_lookup_has_the_reference_drafters_rounds_at_every_batch(temperature) -> None:
    """Prompts that repeat themselves, and enough of them that every slot is filled again."""
    target = target_of()
    sampling = SamplingParams(temperature=temperature, seed=3)
    lookup = head_of(target, "lookup", 0)
    given = [prompt * 3 for prompt in prompts(20)]
    theirs = reference(target, lookup, CHAIN, given, 60, sampling)
    for slots in (1, 3, 16):
        engine = Engine(target, lookup, slots=slots, max_rows=256, sampling=sampling)
        ours = answers(engine, given[: 4 if slots == 1 else 20], 60)
        assert ours == theirs[: len(ours)]
    assert {0, 6} <= {count for g in theirs for count in g.accepted}


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3_moe"])
def test_other_architectures_in_fp32(arch) -> None:
    target = target_of(arch, hidden_size=128)
    head = head_of(target, "causal", 0)
    ours = answers(Engine(target, head, tree=TREE, slots=3, max_rows=256), prompts(5), 40)
    theirs = reference(target, head, TREE, prompts(5), 40)
    assert [g.tokens for g in ours] == [g.tokens for g in theirs]


def test_eight_bit_weights_in_fp32() -> None:
    target = target_of(hidden_size=128)
    to_fp8(target.model, "tiny")
    head = head_of(target, "causal", 0)
    ours = answers(Engine(target, head, tree=TREE, slots=3, max_rows=256), prompts(5), 40)
    theirs = reference(target, head, TREE, prompts(5), 40)
    assert [g.tokens for g in ours] == [g.tokens for g in theirs]


def test_long_prompts_are_read_in_chunks() -> None:
    target = target_of(num_layers=1)
    given = [p * 40 for p in prompts(3)] + prompts(2)
    head = head_of(target, "causal", 0)
    ours = answers(Engine(target, head, tree=TREE, slots=4, max_rows=2048), given, 24)
    assert [g.tokens for g in ours] == [
        g.tokens for g in reference(target, None, CHAIN, given, 24)
    ]  # fmt: skip


def test_sampled_tokens_equal_the_references() -> None:
    target = target_of()
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=3)
    head = head_of(target, "causal", 4)
    engine = Engine(target, head, tree=TREE, slots=3, max_rows=256, sampling=sampling)
    ours = answers(engine, prompts(6), 40)
    theirs = reference(target, None, CHAIN, prompts(6), 40, sampling)
    assert [g.tokens for g in ours] == [g.tokens for g in theirs]


def test_graphs_and_rounds_under_way_change_no_token() -> None:
    target = target_of()
    head = head_of(target, "causal", 0)
    found = []
    for graphs, ahead in ((False, 0), (True, 0), (True, 1), (True, 2)):
        engine = Engine(
            target, head, tree=TREE, slots=3, max_rows=256, graphs=graphs, ahead=ahead
        )  # fmt: skip
        done = answers(engine, prompts(8), 40)
        found.append([(g.tokens, g.rounds, g.finish) for g in done])
    assert found[0] == found[1] == found[2] == found[3]


@pytest.mark.parametrize("mode", ["tree with edges", "lookup"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompts_and_rounds_are_enqueued_without_waiting_for_the_device(temperature, mode) -> None:
    mask, tree, rank = MODES[mode]
    target = target_of()
    sampling = SamplingParams(temperature=temperature, seed=3)
    head = head_of(target, mask, rank)
    engine = Engine(target, head, tree=tree, slots=3, max_rows=256, sampling=sampling)
    expected = answers(engine, prompts(8), 40)  # compiles, captures

    def unwaiting(call):
        def checked(*arguments):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return call(*arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return checked

    for name in ("_admit", "_fly", "_release"):
        setattr(engine, name, unwaiting(getattr(engine, name)))
    assert answers(engine, prompts(8), 40) == expected


def test_budgets_of_single_requests_change_no_token() -> None:
    target = target_of()
    head = head_of(target, "causal", 0)
    for tree in (CHAIN, TREE):
        engine = Engine(target, head, tree=tree, slots=4, max_rows=256)
        ours = answers(engine, prompts(6), 30, budgets=[1, 2, 5, 7, 40, 3])
        theirs = reference(target, None, CHAIN, prompts(6), 30)
        assert [g.tokens for g in ours] == [g.tokens for g in theirs]
        assert max(ours[0].accepted) <= 1 and max(ours[1].accepted) <= 2


@pytest.mark.parametrize("mode", ["plain", "lookup", "chain", "tree"])
def test_bf16_differs_at_near_ties_only(mode) -> None:
    mask, tree, rank = MODES[mode]
    target = target_of(dtype=torch.bfloat16, hidden_size=512)
    head = head_of(target, mask, rank)
    given = prompts(20)
    theirs = [g.tokens for g in reference(target, None, CHAIN, given, 40)]
    for slots in (1, 16):
        engine = Engine(target, head, tree=tree, slots=slots, max_rows=256)
        ours = [g.tokens for g in answers(engine, given[: 4 if slots == 1 else 20], 40)]
        for prompt, a, b in zip(given, theirs, ours, strict=False):
            at = first_difference(a, b)
            if at is not None:
                pair = (a[at], b[at])
                assert gap_in_ulps(target, Request(prompt, "r"), a[:at], pair, GREEDY) <= 8


def test_exact_mode_gives_equal_tokens_plainly_and_with_trees_at_every_batch() -> None:
    target = target_of(dtype=torch.bfloat16, hidden_size=512)
    given, plain = prompts(8), None
    for mode in ("plain", "lookup", "chain", "tree"):
        mask, tree, rank = MODES[mode]
        head = head_of(target, mask, rank)
        for slots in (1, 3, 16):
            engine = Engine(target, head, tree=tree, slots=slots, max_rows=256, exact=True)
            found = [g.tokens for g in answers(engine, given, 60)]
            plain = plain or found
            assert found == plain, (mode, slots)


def test_ten_thousand_forced_rounds_leak_no_page_and_leave_neighbours_alone() -> None:
    """Slots 1 to 3 commit paths of random lengths, slot 0, the longest prompt's, what plain
    decoding gives."""
    target = target_of()
    head = head_of(target, "causal", 0)
    engine = Engine(target, head, tree=TREE, slots=4, max_rows=2048, forced=True)
    forced = engine.state.forced
    assert forced is not None
    launch, rounds = engine.launch, []

    def random_paths() -> None:
        forced.random_(1, 9)
        forced[0] = 1
        rounds.append(1)
        launch()

    engine.launch = random_paths
    given = prompts(4)[::-1]
    assert len(given[0]) == max(map(len, given))
    plain = reference(target, None, CHAIN, given[:1], 1000)[0].tokens
    while len(rounds) < 10_000:
        # The first prompt needs a round a token; the others finish early and leave idle slots.
        done = answers(engine, given, 1000)
        assert done[0].tokens == plain
        assert all(len(g.tokens) == 1000 for g in done)
        assert len({kept for g in done[1:] for kept in g.rounds}) > 2
