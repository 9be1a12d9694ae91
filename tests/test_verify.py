"""Acceptance: the greedy rule against brute force, the sampling rule against the target."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jetspec.decode
import jetspec.verify
from jetspec.sampling import SamplingParams, request_keys, sample, seen_tokens
from jetspec.trees.build import build_tree
from jetspec.trees.config import TreeConfig
from jetspec.trees.draft import Draft
from jetspec.trees.tree import Tree
from jetspec.verify import Acceptance, verify_greedy, verify_sampled, walk
from tests.chi_square import BIASED, LOSSLESS, decoded_p_value
from tests.tiny import random_draft, tiny_target


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from(["chain", "algorithm1", "best_first"]),
    st.integers(1, 20),
    st.floats(0, 1),
)
def test_greedy_acceptance_is_the_brute_force_walk(seed, builder, budget, agreement):
    draft = random_draft(seed, batch=3, depth=4, width=3, path=True, coarse=False)
    tree = build_tree(draft, torch.arange(3), TreeConfig(builder=builder, budget=budget))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*tree.tokens.shape, 50, generator=generator)
    for row, node in itertools.product(range(3), range(1, tree.tokens.shape[1])):
        # Lift some children to the top of their parent's logits, so that walks go on.
        if torch.rand((), generator=generator) < agreement and tree.parents[row, node] >= 0:
            logits[row, tree.parents[row, node], tree.tokens[row, node]] += 10
    acceptance = verify_greedy(tree, logits)
    for row in range(3):
        node, path = 0, [0]
        while True:
            token = int(logits[row, node].argmax())
            children = [
                child
                for child in range(1, int(tree.sizes[row]))
                if int(tree.parents[row, child]) == node and int(tree.tokens[row, child]) == token
            ]
            if not children:
                break
            (node,) = children
            path.append(node)
        length = int(acceptance.lengths[row])
        assert acceptance.path[row, :length].tolist() == path
        assert acceptance.path[row, length:].tolist() == [-1] * (acceptance.path.shape[1] - length)
        assert int(acceptance.bonus[row]) == token


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.8]), st.sampled_from([1.0, 2.5]))
def test_every_draw_is_plain_samplings_after_the_path_to_its_node(seed, temperature, penalty):
    """By the noise of the token's own position, the text before it and no other being penalised."""
    draft = random_draft(seed, batch=4, depth=4, width=3, path=True, coarse=False)
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(50, (n,), generator=generator).tolist() for n in (1, 3, 6, 9)]
    tree = build_tree(draft, torch.tensor([text[-1] for text in texts]), TreeConfig(budget=20))
    logits = torch.randn(*tree.tokens.shape, 50, generator=generator)
    for row, node in itertools.product(range(4), range(1, tree.tokens.shape[1])):
        logits[row, tree.parents[row, node], tree.tokens[row, node]] += 3
        logits[row, node, tree.tokens[row, node]] += 4  # what a penalty must bring down again
    params = SamplingParams(temperature, seed=7, repetition_penalty=penalty)
    keys, seen = request_keys(range(4)), seen_tokens(params, texts, 50, "cpu")
    before = None if seen is None else seen.clone()
    positions = torch.tensor([[len(text) - 1] for text in texts]) + tree.depths
    if temperature:
        found = verify_sampled(tree, logits, params, positions, keys, seen)
    else:
        found = verify_greedy(tree, logits, params, seen)
    assert before is None or torch.equal(seen, before)
    for row, text in enumerate(texts):
        node, path, written = 0, [0], list(text)
        while True:
            token = int(
                sample(
                    logits[row, node][None], params, keys[row : row + 1],
                    torch.tensor([len(written)]), seen_tokens(params, [written], 50, "cpu"),
                )
            )  # fmt: skip
            below = ((tree.parents[row] == node) & (tree.tokens[row] == token)).nonzero()
            if not len(below):
                break
            node = int(below[0])
            path.append(node)
            written.append(token)
        assert int(found.bonus[row]) == token and int(found.lengths[row]) == len(path)
        assert found.path[row, : len(path)].tolist() == path


def test_padding_is_never_accepted():
    tree = Tree(
        tokens=torch.tensor([[7, 0], [7, 3]]),
        parents=torch.tensor([[-1, -1], [-1, 0]]),
        depths=torch.tensor([[0, 0], [0, 1]]),
        scores=torch.zeros(2, 2),
        sizes=torch.tensor([1, 2]),
    )
    logits = torch.zeros(2, 2, 5)
    logits[:, 0, 0] = 1  # the padding token of row 0
    acceptance = verify_greedy(tree, logits)
    assert acceptance.lengths.tolist() == [1, 1]
    assert acceptance.bonus.tolist() == [0, 0]


# The target of the chi-square tests: 6 tokens, and a fixed draft for the two next slots.
VOCAB = 6
PROMPT = [3, 5, 4]
DRAWS = 12_000


class FixedDrafter:
    """The same two candidates in both slots, for every sequence."""

    taps = ()

    def begin(self, batch, target):
        pass

    def observe(self, taps, positions, valid, tokens):
        pass

    def keep_sequences(self, rows):
        pass

    def propose(self, anchors, histories):
        tokens = torch.tensor([[2, 4], [5, 0]]).expand(len(anchors), -1, -1)
        log_q = torch.tensor([[0.6, 0.3], [0.5, 0.4]]).log().expand(len(anchors), -1, -1)
        return Draft.from_slot_scores(tokens, log_q)


def chi_square(target, tree, params, **settings):
    """The p-value of seeded requests against the target's own distribution."""
    drafter = FixedDrafter() if tree else None
    return decoded_p_value(target, PROMPT, params, DRAWS, drafter=drafter, tree=tree, **settings)


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama", seed=3, vocab_size=VOCAB, hidden_size=16, num_layers=1, spread=0.4)


TREES = {
    "plain": None,
    "chain": TreeConfig(builder="chain", budget=2),
    "best_first": TreeConfig(builder="best_first", budget=5),
    "algorithm1": TreeConfig(builder="algorithm1", budget=5),
    "static": TreeConfig(builder="static", budget=5, rank_rates=(0.5, 0.4)),
}


@pytest.mark.parametrize("tree", TREES)
def test_sampled_tokens_are_distributed_as_the_targets(target, tree):
    assert chi_square(target, TREES[tree], SamplingParams(temperature=1.0)) > LOSSLESS


EVERY_SETTING = SamplingParams(
    temperature=0.9,
    top_p=0.95,
    top_k=5,
    min_p=0.05,
    repetition_penalty=1.6,
    logit_bias=((1, 1.5), (4, -0.7)),
    seed=9,
)
RULES = [("sample_and_match", "best_first"), ("residual", "static"), ("residual", "chain")]


@pytest.mark.parametrize(("rule", "tree"), RULES)
def test_every_rule_follows_every_setting_at_once(target, rule, tree):
    assert chi_square(target, TREES[tree], EVERY_SETTING, rule=rule) > LOSSLESS


@pytest.mark.parametrize("rule", ["sample_and_match", "residual"])
def test_a_penalty_that_forgets_the_branch_fails_the_same_test(target, rule, monkeypatch):
    def forgets(branch, nodes):
        return branch._seen

    monkeypatch.setattr(jetspec.verify._Branch, "down", forgets)
    params = SamplingParams(temperature=1.0, repetition_penalty=3.0, logit_bias=((2, 3.0),))
    assert chi_square(target, TREES["static"], params, rule=rule) < BIASED


def resample_without_residual(tree, logits, params, positions, keys, seen) -> Acceptance:
    """Wrong on purpose: a draw that no child carries is thrown away and drawn anew."""
    rows = torch.arange(len(logits))

    def draw(nodes):
        after = positions[rows, nodes] + 1
        first = sample(logits[rows, nodes], params, keys, after)
        other = SamplingParams(params.temperature, params.top_p, params.top_k, params.seed + 1)
        second = sample(logits[rows, nodes], other, keys, after)
        is_child = ((tree.parents == nodes[:, None]) & (tree.tokens == first[:, None])).any(1)
        return torch.where(is_child, first, second)

    return walk(tree, draw)


@pytest.mark.parametrize("tree", ["chain", "best_first"])
def test_a_biased_rule_fails_the_same_chi_square_test(target, tree, monkeypatch):
    monkeypatch.setattr(jetspec.decode, "verify_sampled", resample_without_residual)
    assert chi_square(target, TREES[tree], SamplingParams(temperature=1.0)) < BIASED


def test_a_childs_acceptance_has_the_targets_probability():
    draws = 20_000
    logits = torch.tensor([1.0, 0.5, 0.0, -0.5]).expand(draws, 3, -1)
    tree = Tree(
        tokens=torch.tensor([[3, 0, 2]]).expand(draws, -1),
        parents=torch.tensor([[-1, 0, 0]]).expand(draws, -1),
        depths=torch.tensor([[0, 1, 1]]).expand(draws, -1),
        scores=torch.zeros(draws, 3),
        sizes=torch.full((draws,), 3),
    )
    positions = 10 + tree.depths
    params = SamplingParams(temperature=1.0)
    acceptance = verify_sampled(tree, logits, params, positions, request_keys(range(draws)))
    p = logits[0, 0].softmax(-1)
    rate = (acceptance.lengths == 2).double().mean().item()
    assert rate == pytest.approx(float(p[0] + p[2]), abs=0.015)
