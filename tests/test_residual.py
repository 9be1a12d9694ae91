"""Drawn candidates and the residual rule, one round at a time and without a model."""

from dataclasses import replace

import pytest
import torch

from jetspec.errors import JetspecError
from jetspec.rules import resolve_rule
from jetspec.sampling import (
    SamplingParams,
    Stream,
    gumbel_noise,
    request_keys,
    sample,
    target_distribution,
    uniform_noise,
)
from jetspec.trees.build import build_tree
from jetspec.trees.config import TreeConfig
from jetspec.trees.draft import Draft
from jetspec.trees.drawn import Draws, draw_order
from jetspec.trees.tree import Tree
from jetspec.verify import verify_residual, walk
from tests.chi_square import BIASED, LOSSLESS, p_value

VOCAB, ROUNDS = 6, 6_000
# After token t the target writes by row t; the draft is wrong in every way it can be: it lacks
# token 5, adores token 0 and has no idea of token 3.
TARGET = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) * 1.3
DRAFT_LOGITS = torch.tensor([[3.0, 1.0, 0.5, -2.0, 1.5], [0.0, 1.0, 2.0, 0.3, -1.0]])
ANCHOR = 2
SHAPES = {
    "one": TreeConfig(builder="chain", budget=1),
    "chain": TreeConfig(builder="chain", budget=2),
    "siblings": TreeConfig(builder="static", budget=3, depth=1, rank_rates=(0.3, 0.3, 0.3)),
    "all": TreeConfig(builder="static", budget=30, rank_rates=(0.2,) * 5),
    "tree": TreeConfig(builder="static", budget=7, rank_rates=(0.5, 0.3, 0.1)),
}


def the_draft(rounds, form="slot"):
    """Two slots over tokens 0 to 4, the second one's rows equal (`slot`) or not (`path`); `tree` is
    all of `path` as a scored tree, as some heads draft it."""
    logits = DRAFT_LOGITS[:, None].expand(-1, 5, -1).clone()
    if form == "tree":
        whole = the_draft(1, "path")
        tree = build_tree(whole, torch.tensor([ANCHOR]), TreeConfig(budget=1000))
        fields = (tree.tokens, tree.parents, tree.depths, tree.scores, tree.sizes)
        return Tree(*(field.expand(rounds, *field.shape[1:]) for field in fields))
    if form == "path":
        logits[1] += torch.randn(5, 5, generator=torch.Generator().manual_seed(2))
    tokens = torch.arange(5).expand(rounds, 2, -1)
    return Draft(tokens, logits.log_softmax(-1).expand(rounds, -1, -1, -1))


def one_round(shape, params, *, rule=verify_residual, form="path", rounds=ROUNDS, first=0):
    """(tree, acceptance) of `rounds` requests that all stand at the same anchor."""
    keys, anchors = request_keys(range(first, first + rounds)), torch.full((rounds,), ANCHOR)
    draws = Draws(params.temperature, params.seed, keys, torch.full((rounds,), 10))
    tree = build_tree(the_draft(rounds, form), anchors, SHAPES[shape], draws)
    return tree, rule(tree, TARGET[tree.tokens], params, 10 + tree.depths, keys)


def committed(tree, acceptance):
    """long [B, 2], the first two tokens that a round commits; -1 where it commits one."""
    tokens = torch.full((len(tree.tokens), 4), -1)
    path = acceptance.path[:, 1:]
    tokens[:, : path.shape[1]] = tree.tokens.gather(1, path.clamp(min=0)).masked_fill(path < 0, -1)
    tokens.scatter_(1, acceptance.lengths[:, None] - 1, acceptance.bonus[:, None])
    return tokens[:, :2]


def round_p_value(shape, params, **settings):
    """Smallest p-value of token 1, and of token 2 given token 1, against the target."""
    p = (TARGET / params.temperature).softmax(-1).double()
    tokens = committed(*one_round(shape, params, **settings))
    values = [p_value(torch.bincount(tokens[:, 0], minlength=VOCAB), p[ANCHOR] * len(tokens))]
    for token in range(VOCAB):
        after = tokens[(tokens[:, 0] == token) & (tokens[:, 1] >= 0), 1]
        values.append(p_value(torch.bincount(after, minlength=VOCAB), p[token] * len(after)))
    return min(values)


@pytest.mark.parametrize("form", ["slot", "path", "tree"])
@pytest.mark.parametrize("temperature", [0.6, 1.7])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_round_commits_what_the_target_would_have_written(shape, temperature, form):
    assert round_p_value(shape, SamplingParams(temperature, seed=3), form=form) > LOSSLESS / 10


@pytest.mark.parametrize("form", ["path", "tree"])
def test_the_rule_is_its_words_row_by_row(form):
    """With a penalty, and the noise of the position that is decided: one request at a time."""
    params = SamplingParams(0.9, seed=3, repetition_penalty=1.8)
    keys, anchors = request_keys(range(150)), torch.full((150,), ANCHOR)
    draws = Draws(params.temperature, params.seed, keys, torch.full((150,), 10))
    tree = build_tree(the_draft(150, form), anchors, SHAPES["all"], draws)
    logits, seen = TARGET[tree.tokens], torch.zeros(150, VOCAB, dtype=torch.bool)
    seen[:, 1] = True
    found = verify_residual(tree, logits, params, 10 + tree.depths, keys, seen)
    for row in range(150):
        node, path, text = 0, [0], {1, ANCHOR}
        while True:
            depth, key = tree.depths[row, node], keys[row : row + 1]
            place = (10 + depth + 1)[None]
            now = torch.tensor([[token in text for token in range(VOCAB)]])
            p = target_distribution(logits[row, node][None], params, now)[0].double().exp()
            every = torch.zeros(150, dtype=torch.long)
            every[row] = node
            q = tree.proposal.distribution(every, tree.depths[torch.arange(150), every], VOCAB)[row]
            below = (tree.parents[row] == node).nonzero()[:, 0].tolist()
            chances = uniform_noise(3, key, place, 5, Stream.ACCEPTANCE)[0].tolist()
            for child, chance in zip(below, chances, strict=False):
                x = int(tree.tokens[row, child])
                if chance < p[x] / q[x]:
                    node, text = child, text | {x}
                    path.append(child)
                    break
                p = (p - q).clamp(min=0)
                p, q[x] = p / p.sum(), 0.0
                q = q / q.sum() if q.sum() > 0 else q
            else:
                noise = gumbel_noise(3, key, place, VOCAB)[0]
                assert int(found.bonus[row]) == int((p.log() + noise).argmax())
                break
        assert int(found.lengths[row]) == len(path)
        assert found.path[row, : len(path)].tolist() == path
    assert set(found.lengths.tolist()) == {1, 2, 3}


def faulty(fault):
    """The residual rule with one mistake in it."""

    def rule(tree, logits, params, positions, keys):
        rows = torch.arange(len(logits))

        def draw(nodes):
            p = (logits[rows, nodes] / params.temperature).softmax(-1).double()
            q = tree.proposal.distribution(nodes, tree.depths[rows, nodes], VOCAB)
            is_child = tree.parents == nodes[:, None]
            token = torch.full_like(nodes, -1)
            chance = uniform_noise(5, keys, positions[rows, nodes], VOCAB)
            for trial in range(int(is_child.sum(1).max())):
                here = is_child & (is_child.cumsum(1) == trial + 1)
                child, untried = here.long().argmax(1), here.any(1) & (token < 0)
                x = tree.tokens[rows, child]
                taken = untried & (chance[:, trial] * q[rows, x] < p[rows, x])
                token = torch.where(taken, x, token)
                failed = (untried & ~taken)[:, None]
                if fault != "p stays":
                    p = torch.where(failed, (p - q).clamp(min=0), p)
                    p = p / p.sum(-1, keepdim=True)
                if fault != "q stays":
                    q = torch.where(failed, q.scatter(1, x[:, None], 0), q)
                if fault not in ("q stays", "q is not brought to mass one"):
                    q = q / q.sum(-1, keepdim=True).clamp(min=1e-9)
            bonus = torch.multinomial(p, 1, generator=torch.Generator().manual_seed(0))[:, 0]
            return torch.where(token < 0, bonus, token)

        return walk(tree, draw)

    return rule


def test_the_rule_with_no_fault_in_it_passes():
    params = SamplingParams(temperature=1.0)
    assert round_p_value("siblings", params, rule=faulty("none")) > LOSSLESS


@pytest.mark.parametrize("fault", ["p stays", "q stays", "q is not brought to mass one"])
def test_a_faulty_residual_fails_the_same_test(fault):
    params = SamplingParams(temperature=1.0)
    assert round_p_value("siblings", params, rule=faulty(fault)) < BIASED


def test_candidates_that_are_ranked_instead_of_drawn_fail_the_same_test(monkeypatch):
    def ranked(draft, draws):
        log_q = draft.edge_scores.double()
        return log_q, log_q

    monkeypatch.setattr("jetspec.trees.build.draw_order", ranked)
    assert round_p_value("siblings", SamplingParams(temperature=1.0)) < BIASED


@pytest.mark.parametrize("form", ["path", "tree"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_drawn_tree_is_a_tree_of_the_shape_asked_for(shape, form):
    tree, _ = one_round(shape, SamplingParams(temperature=1.0), rounds=20, form=form)
    tree.validate()
    sizes = {"one": 2, "chain": 3, "siblings": 4, "all": 31, "tree": 8}
    assert tree.sizes.tolist() == [sizes[shape]] * 20


@pytest.mark.parametrize("form", ["slot", "tree"])
def test_siblings_are_drawn_from_q_without_replacement(form):
    tree, _ = one_round("siblings", SamplingParams(temperature=1.0), form=form)
    q = DRAFT_LOGITS[0].softmax(-1).double()
    first, second, third = tree.tokens[:, 1:].unbind(1)
    assert not ((first == second) | (first == third) | (second == third)).any()
    assert p_value(torch.bincount(first, minlength=5), q * ROUNDS) > LOSSLESS
    pairs = q[:, None] * q / (1 - q[:, None])
    pairs.fill_diagonal_(0)
    counts = torch.bincount(first * 5 + second, minlength=25)
    assert p_value(counts, pairs.flatten() * ROUNDS) > LOSSLESS


@pytest.mark.parametrize("form", ["slot", "tree"])
@pytest.mark.parametrize("other", ["position", "seed", "request"])
def test_draws_of_two_rounds_are_independent(form, other):
    """A request draws anew at every anchor, and no two requests or seeds draw alike."""
    keys, places = request_keys(range(2 * ROUNDS)), torch.full((ROUNDS,), 10)
    first = Draws(1.0, 3, keys[:ROUNDS], places)
    second = {
        "position": replace(first, positions=places + 1),
        "seed": replace(first, seed=4),
        "request": replace(first, keys=keys[ROUNDS:]),
    }[other]
    anchors, tokens = torch.full((ROUNDS,), ANCHOR), []
    for draws in (first, second):
        tree = build_tree(the_draft(ROUNDS, form), anchors, SHAPES["one"], draws)
        tokens.append(tree.tokens[:, 1])
    q = DRAFT_LOGITS[0].softmax(-1).double()
    counts = torch.bincount(tokens[0] * 5 + tokens[1], minlength=25)
    assert p_value(counts, (q[:, None] * q).flatten() * ROUNDS) > LOSSLESS


def test_candidates_are_drawn_by_the_noise_of_their_own_position():
    """So that no noise is used again where an earlier round has already looked at it."""
    keys = request_keys(range(3))

    def noise(place):
        draws = Draws(0.8, 3, keys, torch.full((3,), place))
        log_q, order = draw_order(the_draft(3, "path"), draws)
        return order - log_q

    here, next_one = noise(10), noise(11)
    assert torch.allclose(here[:, 1], next_one[:, 0])
    others = torch.cat([here[:, 0].flatten(), here[:, 1].flatten(), next_one[:, 1].flatten()])
    assert len(others.unique()) == len(others)


def test_what_does_not_exist_is_never_drawn_and_has_no_share_of_q():
    draft = the_draft(2000, "path")
    edges = draft.edge_scores.clone()
    edges[:, 0, :, 0] = edges[:, 1, 1, 2:] = edges[:, 1, 2] = -torch.inf
    draft, keys = Draft(draft.tokens, edges), request_keys(range(2000))
    draws = Draws(1.3, 3, keys, torch.full((2000,), 10))
    tree = build_tree(draft, torch.full((2000,), ANCHOR), SHAPES["tree"], draws)
    tree.validate()
    assert torch.isfinite(tree.scores[tree.valid()]).all()
    assert torch.all(tree.proposal.log_q[:, 1, 2] == -torch.inf), "a row without candidates"
    root = torch.zeros(2000, dtype=torch.long)
    q = tree.proposal.distribution(root, root, VOCAB)
    wanted = (edges[0, 0, 0].double() / 1.3).softmax(-1)
    assert torch.allclose(q[0], torch.cat([wanted, wanted.new_zeros(1)]))
    counts = torch.bincount(tree.tokens[:, 1], minlength=VOCAB)
    assert p_value(counts, q[0] * 2000) > LOSSLESS


@pytest.mark.parametrize("form", ["path", "tree"])
def test_a_single_candidate_is_accepted_as_often_as_p_and_q_overlap(form):
    """q is tempered as the target is: the overlap of 0.7 is neither that of 1.0 nor of 0.4."""
    for temperature in (0.4, 0.7, 1.0):
        tree, acceptance = one_round("one", SamplingParams(temperature, seed=8), form=form)
        p = (TARGET[ANCHOR] / temperature).softmax(-1)
        q = torch.cat([(DRAFT_LOGITS[0] / temperature).softmax(-1), torch.zeros(1)])
        rate = (acceptance.lengths == 2).double().mean().item()
        assert rate == pytest.approx(float(torch.minimum(p, q).sum()), abs=0.015)
        assert torch.all(tree.tokens[:, 1] < 5)


@pytest.mark.parametrize("shape", ["siblings", "all", "tree"])
def test_a_static_tree_is_the_same_from_slots_and_from_a_scored_tree(shape):
    anchors = torch.tensor([ANCHOR])
    trees = [build_tree(the_draft(1, form), anchors, SHAPES[shape]) for form in ("path", "tree")]
    assert torch.equal(trees[0].tokens, trees[1].tokens)
    assert torch.equal(trees[0].parents, trees[1].parents)
    assert torch.allclose(trees[0].scores, trees[1].scores, atol=1e-6)
    trees[1].validate()


def test_widths_of_single_depths_are_refused_for_a_scored_tree():
    config = TreeConfig(builder="static", widths=(2,))
    with pytest.raises(JetspecError, match="tree.widths"):
        build_tree(the_draft(1, "tree"), torch.tensor([ANCHOR]), config)


def test_more_siblings_are_accepted_more_often():
    params = SamplingParams(temperature=1.0)
    rates = [
        (one_round(shape, params)[1].lengths > 1).double().mean() for shape in ("one", "siblings")
    ]
    assert rates[1] > rates[0] + 0.1


def test_a_draft_that_is_the_target_is_always_accepted():
    rounds, keys = 500, request_keys(range(500))
    log_p = TARGET.log_softmax(-1)
    edges = torch.stack([log_p[ANCHOR].expand(VOCAB, -1), log_p])
    draft = Draft(torch.arange(VOCAB).expand(rounds, 2, -1), edges.expand(rounds, -1, -1, -1))
    draws = Draws(1.0, 0, keys, torch.zeros_like(keys))
    tree = build_tree(draft, torch.full((rounds,), ANCHOR), SHAPES["chain"], draws)
    acceptance = verify_residual(
        tree, TARGET[tree.tokens], SamplingParams(temperature=1.0), tree.depths, keys
    )
    assert torch.all(acceptance.lengths == 3)


def test_what_a_round_commits_depends_on_its_key_and_not_on_its_company():
    params = SamplingParams(temperature=1.0, seed=4)
    together = committed(*one_round("tree", params, rounds=40))
    alone = torch.cat([committed(*one_round("tree", params, rounds=1, first=i)) for i in range(40)])
    assert torch.equal(together, alone)
    reseeded = committed(*one_round("tree", SamplingParams(1.0, seed=5), rounds=40))
    assert not torch.equal(together, reseeded)


def test_without_a_candidate_the_bonus_is_plain_samplings():
    rounds, keys = 50, request_keys(range(50))
    draft = the_draft(rounds)
    nothing = Draft(draft.tokens, torch.full_like(draft.edge_scores, -torch.inf))
    params, anchors = SamplingParams(temperature=1.0), torch.full((rounds,), ANCHOR)
    places = torch.full_like(keys, 10)
    tree = build_tree(nothing, anchors, SHAPES["tree"], Draws(1.0, 0, keys, places))
    assert tree.sizes.tolist() == [1] * rounds
    acceptance = verify_residual(tree, TARGET[tree.tokens], params, 10 + tree.depths, keys)
    plain = sample(TARGET[anchors], params, keys, places + 1)
    assert torch.equal(acceptance.bonus, plain) and torch.all(acceptance.lengths == 1)


def test_what_the_filters_exclude_is_never_committed():
    params = SamplingParams(temperature=1.0, top_k=2, seed=6)
    tokens = committed(*one_round("tree", params))
    allowed = TARGET[ANCHOR].topk(2).indices
    assert torch.isin(tokens[:, 0], allowed).all()


@pytest.mark.parametrize(
    ("rule", "temperature", "builder", "expected"),
    [
        (None, 0.0, "best_first", "greedy"),
        (None, 0.7, "best_first", "sample_and_match"),
        ("greedy", 0.0, "static", "greedy"),
        ("residual", 0.7, "chain", "residual"),
        ("residual", 0.7, "static", "residual"),
        ("greedy", 0.7, "chain", "needs temperature 0"),
        ("sample_and_match", 0.0, "chain", "temperature above 0"),
        ("residual", 0.0, "chain", "temperature above 0"),
        ("residual", 0.7, "best_first", "choose chain or static"),
        ("residual", 0.7, "algorithm1", "choose chain or static"),
    ],
)
def test_a_rule_fits_its_temperature_and_its_builder_or_says_why_not(
    rule, temperature, builder, expected
):
    if " " not in expected:
        assert resolve_rule(rule, temperature, builder) == expected
        return
    with pytest.raises(JetspecError, match=expected) as caught:
        resolve_rule(rule, temperature, builder)
    assert caught.value.field == "rule" and "\n" not in str(caught.value)
