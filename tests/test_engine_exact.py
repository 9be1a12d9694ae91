"""The bitwise mode: plain, chain and tree decoding give equal bits, whatever shares the batch."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from jetspec.errors import JetspecError
from jetspec.sampling import SamplingParams, gumbel_noise, sample, target_distribution
from jetspec.trees.config import TreeConfig
from tests.test_kernels_exact import random_tree
from tests.test_kernels_setup import interpreted
from tests.tiny import tiny_head, tiny_target, tiny_tokenizer

interpreted("kernels.tree_attention")  # before the engine imports the kernels

from jetspec.engine import prefill  # noqa: E402
from jetspec.engine.benchmarks import exact_tokens, near_ties  # noqa: E402
from jetspec.engine.engine import Engine  # noqa: E402
from jetspec.targets.load import from_model  # noqa: E402
from kernels import exact_attention, small_gemm  # noqa: E402
from kernels.tree_build import BuiltTree  # noqa: E402

STARTS = (44, 3, 31)  # a sequence: its rows in the cache when decoding starts
TOKENS = 5
# On the card every plan sums in one order; the interpreter's sums follow the step.
PLAN = small_gemm.GemmPlan(tokens=16, outputs=64, step=32, warps=4, stages=2)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, initializer_range=0.25,
        tie_word_embeddings=False,
    )  # fmt: skip
    tiny = LlamaForCausalLM(config).eval().to(torch.bfloat16)
    return from_model(tiny, tiny_tokenizer(), "tiny")


@pytest.fixture(scope="module")
def one_step():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_gemm, "gemm_plan", lambda *shape: PLAN)
        patch.setattr(exact_attention, "MERGE", 2)
        yield


def engine_amid(model, starts, tree):
    """An engine in the middle of sequences: a sequence has the same rows in any slot and page."""
    head = None
    if tree is not None:
        head = tiny_head(model, block_size=8, num_layers=1, num_taps=1).to(torch.bfloat16)
    engine = Engine(
        model, head, tree=tree or TreeConfig(builder="chain"), slots=len(starts), max_rows=128,
        page_size=16, kernels=True, exact=True,
    )  # fmt: skip
    cache, state = engine.cache, engine.state
    for slot in range(len(starts)):
        cache.resize(slot, 128)
    cache.upload()
    for slot, prefix in enumerate(starts):
        generator = torch.Generator().manual_seed(prefix)
        for row in range(prefix):
            page = int(cache.table[slot, row // 16])
            values = torch.randn(cache.kv[:, :, 0, :, 0].shape, generator=generator)
            cache.kv[:, :, page, :, row % 16] = values.to(torch.bfloat16)
        state.prefix[slot], state.anchors[slot] = prefix, 5 + prefix
    state.active.fill_(1)
    if engine.round.head is not None:
        engine.round.head.extend = lambda *context: None  # drafts are planted
    return engine


def planted(engine, starts, truths):
    """A draft that holds a part of the true answer on the deepest branch of a random tree."""
    nodes, begin = engine.round.nodes, engine.state.prefix
    generator = torch.Generator().manual_seed(int(begin.sum()))
    rows = []
    for slot, (start, truth) in enumerate(zip(starts, truths, strict=True)):
        parents, depths = torch.arange(nodes) - 1, torch.arange(nodes)
        if engine.tree.builder != "chain":
            parents, depths = random_tree(int(begin[slot]), nodes, 4)
        tokens = torch.randint(3, 64, (nodes,), generator=generator)
        here = int(depths.argmax())
        while here > 0:
            at = int(begin[slot] - start + depths[here]) - 1
            if at < len(truth) and depths[here] < 3:
                tokens[here] = truth[at]
            here = int(parents[here])
        tokens[0] = engine.state.anchors[slot]
        rows.append((tokens, parents, depths))
    tokens, parents, depths = (torch.stack(part) for part in zip(*rows, strict=True))
    sizes = torch.full((len(rows),), nodes)
    return BuiltTree(tokens, parents, depths, torch.zeros(tokens.shape), sizes)


@torch.no_grad()
def decoded(model, starts, rounds, tree=None, truths=None):
    """(committed tokens, the logits' bits behind each, most tokens of a round) of each slot."""
    engine = engine_amid(model, starts, tree)
    best, held = engine.model.best, []

    def watched(hidden, *rest, **options):
        held.append(engine.model.logits(hidden))
        return best(hidden, *rest, **options)

    engine.model.best = watched
    tokens = [[] for _ in starts]
    rows = [[] for _ in starts]
    longest = [0] * len(starts)
    for _ in range(rounds):
        step = engine.round
        tree_ = step.draft_and_build() if truths is None else planted(engine, starts, truths)
        following, taps = step.verify(tree_)
        path, lengths, bonus = step.accept(tree_, following)
        step.commit(tree_, taps, path, lengths, bonus)
        seen = held.pop().view(*tree_.tokens.shape, -1).view(torch.int16)
        for slot, length in enumerate(lengths.tolist()):
            tokens[slot] += engine.state.out[slot, 1 : 1 + length].tolist()
            rows[slot] += seen[slot, path[slot, :length]].unbind(0)
            longest[slot] = max(longest[slot], length)
    return [(tokens[slot], torch.stack(rows[slot]), longest[slot]) for slot in range(len(starts))]


@pytest.fixture(scope="module")
def alone(model, one_step):
    return [decoded(model, [start], TOKENS)[0] for start in STARTS]


CHAIN = TreeConfig(builder="chain", depth=4, budget=4)
SHAPES = {  # tree, batch, rounds
    "plain, batch 3": (None, 3, 2),
    "chain, batch 1": (CHAIN, 1, 2),
    "chain, batch 3": (CHAIN, 3, 2),
    "tree of 4, batch 3": (TreeConfig(builder="best_first", depth=4, budget=4), 3, 2),
    "tree of 16, batch 3": (TreeConfig(builder="best_first", depth=4, budget=16), 3, 1),
    "tree of 64, batch 1": (TreeConfig(builder="best_first", depth=4, budget=64), 1, 1),
}
QUICK = ("chain, batch 1", "tree of 4, batch 3")


@pytest.mark.parametrize(
    "shape", [pytest.param(s, marks=() if s in QUICK else pytest.mark.slow) for s in SHAPES]
)
def test_tokens_and_logits_have_the_bits_of_plain_decoding(model, alone, shape) -> None:
    tree, batch, rounds = SHAPES[shape]
    truths = [tokens for tokens, _, _ in alone[:batch]]
    found = decoded(model, STARTS[:batch], rounds, tree, truths if tree else None)
    for (tokens, bits, longest), (true_tokens, true_bits, _) in zip(found, alone, strict=False):
        known = min(len(tokens), TOKENS)
        assert tokens[:known] == true_tokens[:known]
        assert torch.equal(bits[:known], true_bits[:known])
        assert tree is None or longest > 1  # branches were committed


@torch.no_grad()
def read(model, prompts, chunk, patch):
    """(keys and values [layers, 2, KV heads, rows, head_dim], last hidden state) of each prompt."""
    patch.setattr(prefill, "PREFILL_CHUNK", chunk)
    engine = Engine(
        model, slots=len(prompts), max_rows=64, page_size=16, kernels=True, exact=True
    )  # fmt: skip
    for slot in range(len(prompts)):
        engine.cache.resize(slot, 64)
    engine.cache.upload()
    lengths, table = torch.tensor([len(p) for p in prompts]), engine.cache.table
    hidden = prefill.read_prompts(engine.round, engine.cache, prompts, lengths, table)
    return [
        (engine.cache.kv[:, :, pages.long()].transpose(2, 3).flatten(3, 4)[:, :, :, :length], last)
        for pages, length, last in zip(table, lengths.tolist(), hidden, strict=True)
    ]


def test_a_prompt_has_its_bits_in_every_group_and_every_chunk(model, one_step, monkeypatch) -> None:
    """Chunks of one token are plain decoding."""
    monkeypatch.setattr(exact_attention, "TAIL", 16)  # shorter prompts reach beyond it
    prompts = [[3 + 7 * place % 61 for place in range(length)] for length in (19, 5)]
    alone = [read(model, [prompt], 512, monkeypatch)[0] for prompt in prompts]
    for chunk in (1, 16):
        together = read(model, prompts, chunk, monkeypatch)
        for one, found in zip(alone, together, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, found, strict=True)), chunk


def test_what_the_bitwise_mode_cannot_draft_or_sum_is_refused() -> None:
    options = {"slots": 1, "max_rows": 64, "page_size": 16, "kernels": True, "exact": True}
    with pytest.raises(JetspecError, match="engine.exact: True"):
        Engine(tiny_target("llama", hidden_size=40, num_layers=1), None, **options)
    model = tiny_target("llama", hidden_size=128, num_layers=1)
    deep = TreeConfig(builder="best_first", depth=40, budget=8)
    with pytest.raises(JetspecError, match="at most 31 levels"):
        Engine(model, tiny_head(model), tree=deep, **options)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.0, top_p=0.9, seed=3)])
def test_the_check_compares_every_configuration_with_plain_decoding_alone(
    monkeypatch, sampling
) -> None:
    used = []

    class Watched(Engine):
        def __init__(self, *models, **settings):
            used.append(settings["sampling"])
            super().__init__(*models, **settings)

    monkeypatch.setattr(exact_tokens, "Engine", Watched)
    model = tiny_target("llama", hidden_size=64, num_layers=1)
    head = tiny_head(model, block_size=4, num_layers=1, num_taps=1)
    options = {"batches": [1], "budgets": [3], "depth": 2, "kernels": True, "page_size": 16}
    rows = list(exact_tokens.check(model, head, [[5, 9]], 2, sampling=sampling, **options))
    names = [row["configuration"] for row in rows]
    assert names == ["plain, batch 1", "chain of 2, batch 1", "tree of 3, batch 1"]
    assert all(row["tokens"] == 2 and not row["differing_prompts"] for row in rows)
    assert used == [sampling] * 3


@pytest.mark.parametrize("program", [exact_tokens, near_ties])
def test_a_record_says_how_its_tokens_were_drawn(program, monkeypatch, tmp_path) -> None:
    model, given = tiny_target("llama", hidden_size=64, num_layers=1), {}

    def check(*what, **settings):
        given.update(settings)
        yield {
            "configuration": "plain", "prompts": 1, "differing_prompts": 0, "differences": [],
            "tokens_per_round": 1.0, "seconds": 0.0, "equal": 1, "near_ties": 0, "errors": 0,
            "gaps": [],
        }  # fmt: skip

    monkeypatch.setattr(program, "opened", lambda args: (model, None, [[5]]))
    monkeypatch.setattr(program, "check", check)
    monkeypatch.setattr("kernels.benchmarks.timing.environment", dict)
    path = tmp_path / "record.json"
    options = ["--temperature", "0.7", "--top-p", "0.9", "--seed", "4", "--json", str(path)]
    assert program.main(["target", "head", "bundled", *options]) == 0
    record = json.loads(path.read_text())
    assert {name: record[name] for name in ("temperature", "top_p", "seed")} == {
        "temperature": 0.7, "top_p": 0.9, "seed": 4,
    }  # fmt: skip
    assert given["sampling"] == SamplingParams(0.7, top_p=0.9, seed=4)


def test_a_draw_sums_no_fractions(monkeypatch) -> None:
    """On a card their order follows the number of rows, and a row's address where 4 does not
    divide the vocabulary."""
    params = SamplingParams(0.8, top_k=40, top_p=0.9, min_p=0.01)
    logits = torch.randn(3, 51, generator=torch.Generator().manual_seed(0))
    keys, places = torch.arange(3), torch.full((3,), 7)
    expected = target_distribution(logits, params).double() + gumbel_noise(0, keys, places, 51)
    for name in ("cumsum", "sum", "softmax", "log_softmax", "logsumexp"):
        run = getattr(torch.Tensor, name)

        def of_whole_numbers(tensor, *rest, _run=run, **options):
            assert not tensor.is_floating_point()
            return _run(tensor, *rest, **options)

        monkeypatch.setattr(torch.Tensor, name, of_whole_numbers)
    assert torch.equal(sample(logits, params, keys, places), expected.argmax(-1))


def test_the_first_difference_of_each_answer_is_found() -> None:
    found = exact_tokens.differences([[1, 2, 3], [4], [5]], [[1, 9, 3], [4], [5, 6]])
    assert [vars(d) for d in found] == [
        {"prompt": 0, "place": 1, "plain": 2, "found": 9},
        {"prompt": 2, "place": 1, "plain": None, "found": 6},
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU gets")
def test_without_a_gpu_the_check_says_so(capsys) -> None:
    assert exact_tokens.main(["embedded", "head", "bundled"]) == 2
    assert capsys.readouterr().err.startswith("device: none")
