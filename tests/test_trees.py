"""Tree builders against brute force, and the record they fill."""

import heapq
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec.trees.build import BUILDERS, build_tree
from jetspec.trees.config import TreeConfig
from jetspec.trees.draft import Draft
from jetspec.trees.scores import fit_calibration, order_edges
from jetspec.trees.tree import Tree
from tests.tiny import random_draft


def brute_force(draft: Draft, row: int, config: TreeConfig) -> list[tuple[int, ...]]:
    """The best `budget` candidate paths by (score, depth, path of ranks): no pruning, no heap."""
    edges = order_edges(draft.edge_scores, config, draft.confidence)[row]
    paths = []
    for depth in range(1, draft.depth + 1):
        for ranks in itertools.product(range(draft.width), repeat=depth):
            score, parent = torch.tensor(0.0), 0
            for slot, rank in enumerate(ranks):
                score, parent = score + edges[slot, parent, rank], rank
            if score > -torch.inf:
                paths.append((-float(score), depth, ranks))
    return sorted(ranks for _, _, ranks in sorted(paths)[: config.budget])


def path_of_each(tree: Tree, draft: Draft, row: int) -> list[tuple[int, ...]]:
    """The path of ranks of every node of one tree, the root's being empty."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, int(tree.sizes[row])):
        above = paths[int(tree.parents[row, node])]
        slot = draft.tokens[row, len(above)].tolist()
        paths.append((*above, slot.index(int(tree.tokens[row, node]))))
    return paths


def tree_paths(tree: Tree, draft: Draft, row: int) -> list[tuple[int, ...]]:
    """Every draft node of one tree as its path of ranks."""
    return sorted(path_of_each(tree, draft, row)[1:])


drafts = st.builds(
    random_draft,
    seed=st.integers(0, 10_000),
    batch=st.integers(1, 3),
    depth=st.integers(1, 4),
    width=st.integers(1, 4),
    path=st.booleans(),
    coarse=st.booleans(),
)
scores = st.sampled_from(["cumulative", "entropy", "hybrid", "survival"])


def with_gaps(draft: Draft, share: float, seed: int) -> Draft:
    """The draft without some of its edges: candidates that do not exist, whole rows of them too."""
    generator = torch.Generator().manual_seed(seed)
    missing = torch.rand(draft.edge_scores.shape, generator=generator) < share
    return Draft(draft.tokens, draft.edge_scores.masked_fill(missing, -torch.inf))


gappy_drafts = st.builds(with_gaps, drafts, st.sampled_from([0, 0.3, 0.8]), st.integers(0, 999))


@settings(max_examples=60, deadline=None)
@given(gappy_drafts, st.integers(1, 40), scores, st.booleans())
def test_best_first_is_the_brute_force_best_prefix_closed_set(draft, budget, score, confident):
    config = TreeConfig(builder="best_first", budget=budget, score=score, calibration=(0.6, 1.8))
    if confident:
        confidence = draft.edge_scores.exp().mean(-1)
        draft = Draft(draft.tokens, draft.edge_scores, confidence)
    tree = build_tree(draft, torch.arange(draft.tokens.shape[0]), config)
    tree.validate()
    for row in range(draft.tokens.shape[0]):
        assert tree_paths(tree, draft, row) == brute_force(draft, row, config)


@settings(max_examples=60, deadline=None)
@given(gappy_drafts, st.integers(1, 40))
def test_best_first_is_never_worse_than_algorithm1(draft, budget):
    anchors = torch.zeros(draft.tokens.shape[0], dtype=torch.long)
    exact = build_tree(draft, anchors, TreeConfig(builder="best_first", budget=budget))
    printed = build_tree(draft, anchors, TreeConfig(builder="algorithm1", budget=budget))
    assert torch.all(exact.surrogate() >= printed.surrogate() - 1e-5)


@settings(max_examples=60, deadline=None)
@given(gappy_drafts, st.integers(1, 40), st.sampled_from(sorted(BUILDERS)), scores)
def test_every_builder_gives_a_valid_tree_within_budget(draft, budget, builder, score):
    config = TreeConfig(builder=builder, budget=budget, score=score)
    anchors = torch.arange(100, 100 + draft.tokens.shape[0])
    tree = build_tree(draft, anchors, config)
    tree.validate()
    assert torch.equal(tree.tokens[:, 0], anchors)
    assert int(tree.sizes.max()) <= budget + 1
    for row in range(len(anchors)):
        size, mass = int(tree.sizes[row]), 0.0
        for node, path in enumerate(path_of_each(tree, draft, row)):
            total, parent = 0.0, 0
            for slot, rank in enumerate(path):
                total, parent = total + float(draft.edge_scores[row, slot, parent, rank]), rank
            assert tree.scores[row, node].item() == pytest.approx(total, abs=1e-4)
            mass += math.exp(total) if path else 0.0
        assert tree.surrogate()[row].item() == pytest.approx(mass, rel=1e-4)
        assert torch.all(tree.scores[row, size:] == -torch.inf)
        assert not tree.depths[row, size:].any()


def test_padding_of_a_smaller_tree_in_the_batch_counts_for_nothing():
    edges = torch.tensor([0.5, 0.25]).log().expand(2, 2, 2, 2).clone()
    edges[0, 0, 0, 1] = edges[0, 1] = -torch.inf
    draft = Draft(torch.arange(4).view(1, 2, 2).expand(2, -1, -1), edges)
    for builder in BUILDERS:
        tree = build_tree(draft, torch.tensor([7, 8]), TreeConfig(builder=builder, budget=6))
        assert int(tree.sizes[0]) == 2 < int(tree.sizes[1])
        assert tree.surrogate()[0].item() == pytest.approx(0.5)
        assert torch.all(tree.scores[0, 2:] == -torch.inf)


def test_best_first_beats_algorithm1_where_a_popped_nodes_children_are_unlikely():
    log_q = torch.tensor([[[0.9, 0.05, 0.05]] * 3]).log()
    draft = Draft.from_slot_scores(torch.arange(9).view(1, 3, 3), log_q)
    anchor = torch.zeros(1, dtype=torch.long)
    exact = build_tree(draft, anchor, TreeConfig(builder="best_first", budget=3))
    printed = build_tree(draft, anchor, TreeConfig(builder="algorithm1", budget=3))
    assert exact.surrogate().item() == pytest.approx(0.9 + 0.81 + 0.729)
    assert printed.surrogate().item() == pytest.approx(1.0)


def test_algorithm1_adds_all_children_of_the_best_node_until_the_budget_is_spent():
    log_q = torch.tensor([[[0.6, 0.3], [0.7, 0.2], [0.8, 0.1]]]).log()
    draft = Draft.from_slot_scores(torch.arange(6).view(1, 3, 2), log_q)
    config = TreeConfig(builder="algorithm1", budget=5)
    tree = build_tree(draft, torch.tensor([9]), config)
    # root -> both children; 0.6 -> both children; 0.42 -> the one child that still fits
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1, 3]]
    assert tree.tokens.tolist() == [[9, 0, 1, 2, 3, 4]]


def test_chain_follows_the_likeliest_child_of_its_own_parent():
    edges = torch.full((1, 2, 2, 2), -5.0)
    edges[0, 0, 0] = torch.tensor([-0.1, -2.0])
    edges[0, 1, 0] = torch.tensor([-3.0, -0.2])  # after rank 0 the second candidate is right
    draft = Draft(torch.tensor([[[10, 11], [20, 21]]]), edges)
    tree = build_tree(draft, torch.tensor([1]), TreeConfig(builder="chain", budget=8))
    assert tree.tokens.tolist() == [[1, 10, 21]]
    assert tree.scores[0].tolist() == pytest.approx([0.0, -0.1, -0.3])


def test_path_scores_move_nodes_that_slot_scores_would_keep():
    edges = torch.tensor([[[[0.6, 0.4], [0.6, 0.4]], [[0.5, 0.5], [0.01, 0.99]]]]).log()
    draft = Draft(torch.tensor([[[10, 11], [20, 21]]]), edges)
    tree = build_tree(draft, torch.tensor([1]), TreeConfig(budget=3))
    # 0.6, 0.4 and then 0.4 * 0.99, which beats both children of rank 0 (0.3 each)
    assert tree.tokens.tolist() == [[1, 10, 11, 21]]
    assert tree.parents.tolist() == [[-1, 0, 0, 2]]


@pytest.mark.parametrize("builder", sorted(BUILDERS))
def test_missing_candidates_become_padding(builder):
    log_q = torch.zeros(2, 3, 1)
    log_q[0, 1:] = -torch.inf
    log_q[1] = -torch.inf
    draft = Draft.from_slot_scores(torch.ones(2, 3, 1, dtype=torch.long), log_q)
    tree = build_tree(draft, torch.tensor([7, 8]), TreeConfig(builder=builder, budget=4))
    tree.validate()
    assert tree.sizes.tolist() == [2, 1]
    assert tree.valid().tolist() == [[True, True], [True, False]]


def test_ancestor_mask_shows_the_path_and_nothing_else():
    tree = Tree(
        tokens=torch.tensor([[1, 2, 3, 4, 0]]),
        parents=torch.tensor([[-1, 0, 0, 2, -1]]),
        depths=torch.tensor([[0, 1, 1, 2, 0]]),
        scores=torch.zeros(1, 5),
        sizes=torch.tensor([4]),
    )
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [0, 0, 0, 0, 1]]
    assert tree.ancestor_mask()[0].long().tolist() == expected
    assert tree.valid().tolist() == [[True, True, True, True, False]]


def test_plain_decodings_tree_is_the_anchor_alone():
    tree = Tree.root_only(torch.tensor([5, 9, 4]))
    tree.validate()
    assert tree.tokens.tolist() == [[5], [9], [4]] and tree.sizes.tolist() == [1, 1, 1]
    assert tree.valid().tolist() == tree.ancestor_mask()[:, 0].tolist() == [[True]] * 3
    assert tree.surrogate().tolist() == [0, 0, 0] and tree.proposal is None


@pytest.mark.parametrize("score", ["cumulative", "entropy", "hybrid", "survival"])
def test_edge_terms_never_lift_a_child_above_its_parent(score):
    edges = torch.randn(2, 3, 4, 4) - 0.5  # unnormalised: some above 0
    terms = order_edges(edges, TreeConfig(score=score, alpha=2.0, calibration=(0.5, 2.0)))
    assert torch.all(terms <= 0)


def term(edges: list[list[list[float]]], slot: int, parent: int, child: int, config, confidence):
    """One edge's term of the configured score, from the formulas in the order they are told in."""
    row = [min(value, 0.0) for value in edges[slot][parent]]
    log_q = row[child]
    if log_q == -math.inf:
        return -math.inf
    if config.score == "cumulative":
        return log_q
    if config.score == "survival":
        q, depth = math.exp(log_q), min(slot, len(config.calibration) - 1)
        odds = (q / (1 - q)) ** (1 / config.calibration[depth]) if q < 1 else math.inf
        survives = odds / (1 + odds) if odds < math.inf else 1.0
        return math.log(survives) + math.log(confidence[slot][parent])
    masses = [math.exp(value) for value in row]
    masses.append(max(0.0, 1 - sum(masses)))
    entropy = -sum(mass * math.log(mass) for mass in masses if mass > 0)
    return -entropy if config.score == "entropy" else log_q - config.alpha * entropy


@pytest.mark.parametrize("score", ["cumulative", "entropy", "hybrid", "survival"])
@pytest.mark.parametrize("mass", [0.4, 1.0, 1.6])
def test_every_score_is_its_formula_edge_by_edge(score, mass):
    """Rows whose candidates leave mass to other tokens, hold all of it, or are not normalised."""
    generator = torch.Generator().manual_seed(4)
    edges = torch.randn(2, 3, 4, 4, generator=generator).log_softmax(-1) + math.log(mass)
    edges[0, 1, 2] = edges[1, 2, 0, 1] = -torch.inf
    edges[0, 0, 0], edges[0, 0, 0, 1:] = 0.2, -torch.inf
    confidence = torch.rand(2, 3, 4, generator=generator)
    config = TreeConfig(score=score, alpha=0.7, calibration=(0.5, 2.0))
    terms = order_edges(edges, config, confidence)
    for row, slot, parent, child in itertools.product(range(2), range(3), range(4), range(4)):
        expected = term(edges[row].tolist(), slot, parent, child, config, confidence[row].tolist())
        assert terms[row, slot, parent, child].item() == pytest.approx(expected, abs=1e-5)


def test_entropy_score_prefers_children_of_sure_parents():
    edges = torch.tensor([[[[0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5], [0.98, 0.02]]]]).log()
    draft = Draft(torch.tensor([[[10, 11], [20, 21]]]), edges)
    tree = build_tree(draft, torch.tensor([1]), TreeConfig(budget=3, score="entropy"))
    assert tree.tokens.tolist() == [[1, 10, 11, 20]]
    assert tree.parents.tolist() == [[-1, 0, 0, 2]]


def test_hybrid_with_alpha_0_is_cumulative():
    draft = random_draft(3, 2, 3, 4, path=True, coarse=False)
    anchors = torch.zeros(2, dtype=torch.long)
    plain = build_tree(draft, anchors, TreeConfig(budget=12))
    hybrid = build_tree(draft, anchors, TreeConfig(budget=12, score="hybrid", alpha=0.0))
    assert torch.equal(plain.tokens, hybrid.tokens)


def test_entropy_of_a_slot_counts_the_mass_outside_its_candidates():
    edges = torch.tensor([0.5, 0.25]).log().expand(1, 1, 2, 2)
    terms = order_edges(edges, TreeConfig(score="entropy"))
    assert terms[0, 0, 0, 0].item() == pytest.approx(0.5 * math.log(0.5) + 0.5 * math.log(0.25))


def test_slot_logits_are_normalised_over_the_whole_vocabulary():
    logits = torch.randn(2, 3, 20)
    draft = Draft.from_slot_logits(logits, width=4)
    expected = logits.log_softmax(-1).gather(-1, draft.tokens)
    assert torch.allclose(draft.edge_scores[:, :, 2], expected, atol=1e-6)
    assert torch.equal(draft.tokens[..., 0], logits.argmax(-1))


def test_width_and_depth_limit_the_tree():
    draft = random_draft(0, 1, 4, 4, path=True, coarse=False)
    config = TreeConfig(budget=100, width=2, depth=3)
    tree = build_tree(draft, torch.tensor([0]), config)
    assert int(tree.depths.max()) == 3
    assert int(tree.sizes[0]) == 1 + 2 + 4 + 8


def heap_best_first(draft: Draft, budget: int) -> float:
    """The surrogate of the exact tree by lazy siblings: a heap that holds a node's next sibling
    and its first child."""
    edges = draft.edge_scores[0].double().tolist()
    heap, total = [(-edges[0][0][0], 0, 0, 0.0, 0)], 0.0
    for _ in range(budget):
        cost, depth, rank, above, parent = heapq.heappop(heap)
        total += math.exp(-cost)
        if rank + 1 < draft.width:
            term = edges[depth][parent][rank + 1]
            heapq.heappush(heap, (above - term, depth, rank + 1, above, parent))
        if depth + 1 < draft.depth:
            heapq.heappush(heap, (cost - edges[depth + 1][rank][0], depth + 1, 0, cost, rank))
    return total


@pytest.mark.parametrize("budget", [128, 1024])
def test_best_first_is_exact_at_large_budgets_and_real_depths(budget):
    logits = torch.randn(1, 15, 200, generator=torch.Generator().manual_seed(budget)) * 4
    draft = Draft.from_slot_logits(logits, width=32)
    anchor = torch.zeros(1, dtype=torch.long)
    tree = build_tree(draft, anchor, TreeConfig(budget=budget))
    tree.validate()
    assert tree.sizes.tolist() == [budget + 1]
    assert tree.surrogate().item() == pytest.approx(heap_best_first(draft, budget), rel=1e-5)
    printed = build_tree(draft, anchor, TreeConfig(builder="algorithm1", budget=budget))
    printed.validate()
    assert tree.surrogate() >= printed.surrogate()


@pytest.mark.parametrize("builder", ["algorithm1", "best_first", "static"])
def test_widths_cap_the_candidates_of_single_depths(builder):
    draft = random_draft(0, 2, 4, 4, path=True, coarse=False)
    rates = (0.3, 0.25, 0.23, 0.22)
    config = TreeConfig(builder=builder, budget=500, widths=(2, 1), width=3, rank_rates=rates)
    tree = build_tree(draft, torch.tensor([0, 0]), config)
    tree.validate()
    assert tree.sizes.tolist() == [1 + 2 + 2 + 6 + 18] * 2
    for row in range(2):
        ranks = [path[1] for path in tree_paths(tree, draft, row) if len(path) == 2]
        assert ranks == [0, 0]


def test_widths_of_all_slots_alike_are_width():
    draft = random_draft(1, 2, 3, 4, path=True, coarse=True)
    anchors = torch.zeros(2, dtype=torch.long)
    capped = build_tree(draft, anchors, TreeConfig(budget=12, widths=(2, 2, 2)))
    narrow = build_tree(draft, anchors, TreeConfig(budget=12, width=2))
    assert torch.equal(capped.tokens, narrow.tokens)
    assert torch.equal(capped.parents, narrow.parents)


@settings(max_examples=40, deadline=None)
@given(drafts, st.integers(1, 20), st.sampled_from([(0.6, 0.4), (0.5, 0.3, 0.15), (0.9,)]))
def test_static_trees_have_one_shape_and_a_nodes_best_children_in_order(draft, budget, rates):
    config = TreeConfig(builder="static", budget=budget, rank_rates=rates)
    tree = build_tree(draft, torch.zeros(draft.tokens.shape[0], dtype=torch.long), config)
    tree.validate()
    assert torch.equal(tree.parents, tree.parents[:1].expand_as(tree.parents))
    rates = rates[: draft.width]
    every = [
        (-math.prod(rates[r] for r in path), depth, path)
        for depth in range(1, draft.depth + 1)
        for path in itertools.product(range(len(rates)), repeat=depth)
    ]
    assert int(tree.sizes[0]) == 1 + min(budget, len(every))
    value = sum(sorted(cost for cost, _, _ in every)[:budget])
    for row in range(draft.tokens.shape[0]):
        products = 0.0
        for path in tree_paths(tree, draft, row):
            numbers, parent = [], 0
            for slot, rank in enumerate(path):
                edges = draft.edge_scores[row, slot, parent].tolist()
                better = sum((edge, -j) > (edges[rank], -rank) for j, edge in enumerate(edges))
                numbers, parent = [*numbers, better], rank
            products += math.prod(rates[number] for number in numbers)
        assert products == pytest.approx(-value, rel=1e-4)


@pytest.mark.parametrize("rates", [(0.2, 0.5), (0.6, 0.6), (0.0,), ()])
def test_rates_that_rise_or_pass_one_are_refused(rates):
    with pytest.raises(ValueError, match="rank_rates"):
        TreeConfig(rank_rates=rates)


def test_survival_without_calibration_or_confidence_is_cumulative():
    draft = random_draft(3, 2, 3, 4, path=True, coarse=False)
    anchors = torch.zeros(2, dtype=torch.long)
    trees = [
        build_tree(draft, anchors, TreeConfig(budget=9, score=s))
        for s in ("cumulative", "survival")
    ]
    assert torch.equal(trees[0].tokens, trees[1].tokens)


def test_survival_goes_where_the_drafter_is_confident():
    log_q = torch.tensor([[[0.5, 0.5], [0.6, 0.4]]]).log()
    edges = Draft.from_slot_scores(torch.tensor([[[10, 11], [20, 21]]]), log_q).edge_scores
    confidence = torch.tensor([[[0.9, 0.9], [0.1, 0.9]]])
    draft = Draft(torch.tensor([[[10, 11], [20, 21]]]), edges, confidence)
    tree = build_tree(draft, torch.tensor([1]), TreeConfig(budget=3, score="survival"))
    assert tree.tokens.tolist() == [[1, 10, 11, 20]]
    assert tree.parents.tolist() == [[-1, 0, 0, 2]]
    terms = order_edges(edges, TreeConfig(score="survival", calibration=(1.0, 2.0)), confidence)
    q = 1 / (1 + math.sqrt(0.4 / 0.6))  # sigmoid(logit(0.6) / 2)
    assert terms[0, 1, 0, 0].item() == pytest.approx(math.log(q) + math.log(0.1), abs=1e-5)


def test_calibration_finds_the_temperature_of_each_depth():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12_000, generator=generator) * 2
    depths = torch.tensor([1, 2, 4]).repeat(4000)
    true = torch.tensor([0.0, 0.5, 2.0, 0.0, 4.0])[depths]
    accepted = torch.rand(12_000, generator=generator) < torch.sigmoid(logits / true)
    found = fit_calibration(torch.nn.functional.logsigmoid(logits), accepted, depths)
    assert found[:2] == pytest.approx((0.5, 2.0), rel=0.2)
    assert found[2] == found[1]  # nothing was tested there
    assert found[3] == pytest.approx(4.0, rel=0.25)
    assert fit_calibration(torch.zeros(0), torch.zeros(0).bool(), torch.zeros(0).long()) == ()


def test_calibration_has_the_least_log_loss_of_all_temperatures():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(300, generator=generator, dtype=torch.double) * 2
    accepted = torch.rand(300, generator=generator) < torch.sigmoid(logits / 1.7)
    (found,) = fit_calibration(
        torch.nn.functional.logsigmoid(logits), accepted, torch.ones(300).long()
    )

    def loss(temperature):
        signed = torch.where(accepted, logits, -logits)
        return -torch.nn.functional.logsigmoid(signed / temperature).sum().item()

    best = min((0.1 * 100 ** (i / 5000) for i in range(5001)), key=loss)
    assert 1 < best < 3 and found == pytest.approx(best, rel=0.004)


def test_calibration_takes_what_rounding_lifts_above_certainty_for_certain():
    accepted, depths = torch.tensor([True, True, False, True]), torch.ones(4).long()
    found = [
        fit_calibration(torch.tensor([certain, -0.3, -0.7, -1.2]), accepted, depths)
        for certain in (0.0, 1e-6)
    ]
    assert found[0] == found[1]


def test_calibration_stays_within_its_bounds_and_begins_at_one():
    half = torch.tensor([True, False] * 4)
    hopeless = fit_calibration(torch.full((8,), 0.9).log(), half, torch.full((8,), 2))
    assert hopeless == pytest.approx((1.0, 10.0))
    depths = torch.tensor([1] * 8 + [3] * 8)
    gap = fit_calibration(torch.full((16,), 0.9).log(), torch.cat([half, half | True]), depths)
    assert gap == pytest.approx((10.0, 10.0, 0.1))
    sure = fit_calibration(torch.full((8,), 0.6).log(), half | True, torch.ones(8).long())
    assert sure == pytest.approx((0.1,))
    wider = fit_calibration(torch.full((8,), 0.9).log(), half, torch.ones(8).long(), largest=30.0)
    assert wider == pytest.approx((30.0,))


def test_edge_scores_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="edge_scores"):
        Draft(torch.zeros(1, 2, 3, dtype=torch.long), torch.zeros(1, 2, 3))


BARE = {"parents": torch.full((1, 3), -1), "depths": torch.zeros(1, 3, dtype=torch.long)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parents": torch.tensor([[-1, 2, 0]])}, "precedes its parent"),
        ({"depths": torch.tensor([[0, 2, 1]])}, "one below"),
        ({"tokens": torch.tensor([[1, 5, 5]])}, "same token"),
        ({"sizes": torch.tensor([4])}, "size 4"),
        ({"sizes": torch.tensor([0])}, "size 0"),
        ({"depths": torch.tensor([[1, 1, 1]])}, "not a root"),
        ({"parents": torch.tensor([[0, 0, 0]])}, "not a root"),
        ({"scores": torch.tensor([[-0.5, -1.0, -1.0]])}, "root's score"),
        ({"sizes": torch.tensor([2]), "depths": torch.tensor([[0, 1, 0]])}, "padding has a parent"),
        ({"sizes": torch.tensor([2]), "parents": torch.tensor([[-1, 0, -1]])}, "padding"),
        ({"sizes": torch.tensor([1]), **BARE, "scores": torch.zeros(1, 3)}, "padding"),
    ],
)
def test_validate_names_what_is_wrong(change, message):
    fields = {
        "tokens": torch.tensor([[1, 5, 6]]),
        "parents": torch.tensor([[-1, 0, 0]]),
        "depths": torch.tensor([[0, 1, 1]]),
        "scores": torch.zeros(1, 3),
        "sizes": torch.tensor([3]),
    }
    Tree(**fields).validate()
    with pytest.raises(ValueError, match=message):
        Tree(**{**fields, **change}).validate()
