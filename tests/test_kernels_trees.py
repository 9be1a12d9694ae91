"""Tree building, acceptance and compaction against their references, in the interpreter."""

import heapq
import itertools

import pytest
import torch

from tests.test_kernels_setup import interpreted

reference = interpreted("kernels.reference")
tree_build = interpreted("kernels.tree_build")
commit = interpreted("kernels.commit")


def draft(seed: int, batch: int, depth: int, width: int, path: bool, ties: bool):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, depth, width if path else 1, width, generator=generator) * 3
    edges = logits.log_softmax(-1)
    if ties:
        edges = (edges * 2).round() / 2
    if seed % 4 == 1:
        edges = edges.masked_fill(torch.rand(edges.shape, generator=generator) < 0.3, -torch.inf)
    tokens = torch.stack(
        [torch.randperm(50, generator=generator)[:width] for _ in range(batch * depth)]
    ).view(batch, depth, width)
    return tokens, edges.expand(batch, depth, width, width), torch.arange(batch) + 100


def heap_best_first(tokens, edges, anchor: int, budget: int):
    """One tree by popping a heap, as {(path of ranks)}: an independent way to the same set."""
    depth, width = tokens.shape
    edges = edges.float().clamp(max=0)

    def children(path, score):
        if len(path) == depth:
            return
        row = torch.tensor(score) + edges[len(path), path[-1] if path else 0]
        for rank, value in enumerate(row.tolist()):
            if value > -torch.inf:
                yield (-value, len(path) + 1, path + (rank,))

    heap = list(children((), 0.0))
    heapq.heapify(heap)
    taken = set()
    while heap and len(taken) < budget:
        cost, _, path = heapq.heappop(heap)
        taken.add(path)
        for child in children(path, -cost):
            heapq.heappush(heap, child)
    return taken


def rank_paths(built, tokens) -> set[tuple[int, ...]]:
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, int(built.sizes[0])):
        slot = tokens[0, int(built.depths[0, node]) - 1].tolist()
        rank = slot.index(int(built.tokens[0, node]))
        paths[node] = paths[int(built.parents[0, node])] + (rank,)
    return set(paths.values()) - {()}


SHAPES = [(1, 1, 1), (2, 4, 9), (5, 3, 12), (3, 8, 20), (6, 5, 7)]  # depth, width, budget


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["path", "slot", "path with ties", "slot with ties"])
@pytest.mark.parametrize(
    "seeds", [[0], pytest.param([1, 2, 3, 4], marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_built_trees_bits_and_acceptance_equal_the_reference(shape, kind, seeds) -> None:
    """With the slow case: 20 shapes and kinds x 5 seeds x 10 trees = 1,000 random trees."""
    depth, width, budget = shape
    for seed in seeds:
        tokens, edges, anchors = draft(seed, 10, depth, width, "path" in kind, "ties" in kind)
        built = tree_build.build_best_first(tokens, edges, anchors, budget)
        expected = reference.build_best_first(tokens, edges, anchors, budget)
        fields = (built.tokens, built.parents, built.depths, built.scores, built.sizes)
        for ours, theirs in zip(fields, expected, strict=True):
            assert torch.equal(ours, theirs)
        bits = tree_build.pack_ancestors(built.parents, built.sizes, depth)
        assert torch.equal(bits, reference.pack_ancestors(built.parents, built.sizes, depth))

        following = likely_next(built, seed)
        args = (built.tokens, built.parents, built.sizes, following, depth)
        forced = torch.randint(1, depth + 2, (10,))
        for lengths in (None, forced):
            ours = commit.accept_greedy(*args, lengths)
            theirs = reference.accept_greedy(*args, lengths)
            for a, b in zip(ours, theirs, strict=True):
                assert torch.equal(a, b)


def likely_next(built, seed: int) -> torch.Tensor:
    """Target tokens that mostly agree with some child, so that paths of all lengths occur."""
    generator = torch.Generator().manual_seed(seed)
    following = torch.randint(0, 50, built.tokens.shape, generator=generator)
    for row in range(built.tokens.shape[0]):
        for node in range(1, int(built.sizes[row])):
            if torch.rand((), generator=generator) < 0.7:
                following[row, built.parents[row, node]] = built.tokens[row, node]
    return following


@pytest.mark.parametrize("seed", range(40))
def test_without_ties_a_heap_finds_the_same_nodes(seed) -> None:
    depth, width, budget = SHAPES[seed % len(SHAPES)]
    tokens, edges, anchors = draft(seed, 1, depth, width, path=True, ties=False)
    built = tree_build.build_best_first(tokens, edges, anchors, budget)
    assert rank_paths(built, tokens) == heap_best_first(tokens[0], edges[0], 100, budget)


def test_the_librarys_builder_gives_the_same_trees() -> None:
    trees = pytest.importorskip("jetspec.trees.build")
    from jetspec.trees.config import TreeConfig
    from jetspec.trees.draft import Draft

    for seed in range(6):
        tokens, edges, anchors = draft(seed, 4, 5, 6, path=True, ties=seed % 2 == 0)
        theirs = trees.build_tree(Draft(tokens, edges), anchors, TreeConfig(budget=14))
        ours = tree_build.build_best_first(tokens, edges, anchors, 14)
        widest = int(ours.sizes.max())
        assert torch.equal(ours.sizes, theirs.sizes)
        assert torch.equal(ours.parents[:, :widest], theirs.parents)
        assert torch.equal(ours.tokens[:, :widest], theirs.tokens)
        assert torch.equal(ours.scores[:, :widest], theirs.scores)


def test_the_librarys_mask_and_acceptance_are_the_kernels() -> None:
    trees = pytest.importorskip("jetspec.trees.tree")
    from jetspec.verify import verify_greedy

    lengths = set()
    for seed in range(3):
        tokens, edges, anchors = draft(seed, 8, 4, 5, path=True, ties=False)
        built = tree_build.build_best_first(tokens, edges, anchors, 11)
        fields = (built.tokens, built.parents, built.depths, built.scores, built.sizes)
        tree = trees.Tree(*fields)
        tree.validate()
        bits = tree_build.pack_ancestors(built.parents, built.sizes, 4)
        mask = reference.unpack_ancestors(bits, 12)
        assert torch.equal(mask, tree.ancestor_mask() & tree.valid()[..., None])
        following = likely_next(built, seed)
        logits = torch.nn.functional.one_hot(following, 150).float()
        ours = verify_greedy(tree, logits)
        path, count, bonus = commit.accept_greedy(
            built.tokens, built.parents, built.sizes, following, 4
        )
        assert torch.equal(count, ours.lengths) and torch.equal(bonus, ours.bonus)
        assert torch.equal(path[:, : ours.path.shape[1]], ours.path)
        assert (path[:, ours.path.shape[1] :] == -1).all()
        lengths |= set(count.tolist())
    assert lengths >= {1, 2, 3, 4}


def test_ancestors_of_large_trees_are_packed_over_words_and_listed_over_rows() -> None:
    """Three words of bits, rows of several programs, trees of several sizes in one batch."""
    generator = torch.Generator().manual_seed(0)
    nodes, sizes = 71, torch.tensor([71, 1, 40, 66])
    parents = torch.full((4, nodes), -1)
    paths: dict[tuple[int, int], list[int]] = {}
    for row, size in enumerate(sizes.tolist()):
        for node in range(size):
            above = (
                int(torch.randint(max(0, node - 4), node, (1,), generator=generator))
                if node
                else -1
            )
            parents[row, node] = above
            paths[row, node] = [node, *paths.get((row, above), [])]
    deepest = max(map(len, paths.values())) - 1
    assert deepest > 20
    bits = reference.unpack_ancestors(tree_build.pack_ancestors(parents, sizes, deepest), nodes)
    listed = tree_build.list_ancestors(parents, sizes, deepest + 3)
    few = tree_build.list_ancestors(parents, sizes, 5)
    for row, node in itertools.product(range(4), range(nodes)):
        path = paths.get((row, node), [])
        assert bits[row, node].nonzero()[:, 0].tolist() == path[::-1]
        assert listed[row, node].tolist() == path + [-1] * (deepest + 3 - len(path))
        assert few[row, node].tolist() == (path + [-1] * 5)[:5]


def test_a_selection_with_neighbouring_floats_takes_exactly_the_budget() -> None:
    """Scores one rounding step apart: the threshold search must not stop beside its goal."""
    step = torch.tensor(-1.0)
    scores = [step]
    for _ in range(30):
        scores.append(torch.nextafter(scores[-1], torch.tensor(-2.0)))
    edges = torch.stack(scores)[torch.randperm(31, generator=torch.Generator().manual_seed(3))]
    edges = edges.expand(1, 1, 31, 31)
    tokens = torch.arange(31).view(1, 1, 31)
    for budget in (1, 2, 3, 7, 16, 30, 31):
        ours = tree_build.build_best_first(tokens, edges, torch.tensor([9]), budget)
        expected = reference.build_best_first(tokens, edges, torch.tensor([9]), budget)
        assert torch.equal(ours.tokens, expected[0])
        assert int(ours.sizes) == budget + 1


def test_limits_are_refused() -> None:
    tokens, edges, anchors = draft(0, 1, 2, 3, True, False)
    for budget in (0, 1025):
        with pytest.raises(ValueError, match=f"budget {budget}"):
            tree_build.build_best_first(tokens, edges, anchors, budget)
    for depth, width in ((2, 33), (65, 3)):
        tokens, edges, anchors = draft(0, 1, depth, width, True, False)
        with pytest.raises(ValueError, match=f"width {width}, depth {depth}"):
            tree_build.build_best_first(tokens, edges, anchors, 4)


@pytest.mark.parametrize(
    "seeds", [range(6), pytest.param(range(6, 125), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_compaction_equals_the_reference_and_touches_nothing_else(seeds) -> None:
    """With the slow case: 125 batches of 8 = 1,000 random sequences, in 2 layers of one head."""
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        batch, page, max_path = 8, 4, 1 + seed % 6
        kv = torch.randn(2, 2, batch * 9, 1, page, 16, generator=generator)
        table = torch.randperm(batch * 9, generator=generator).view(batch, 9).int()
        prefix = torch.randint(0, 12, (batch,), generator=generator).int()
        lengths = torch.randint(1, max_path + 1, (batch,), generator=generator)
        steps = [torch.randperm(18, generator=generator)[: max_path - 1] for _ in range(batch)]
        path = torch.stack(steps).sort(1).values + 1
        path = torch.cat([torch.zeros(batch, 1, dtype=torch.long), path], 1)
        path = path.masked_fill(torch.arange(max_path) >= lengths[:, None], -1)
        expected = reference.compact_kv(kv, table, prefix, path, lengths)
        commit.compact_kv(kv, table, prefix, path, lengths)
        assert torch.equal(kv, expected)


def test_a_tree_with_a_limit_of_its_own_is_the_smaller_trees() -> None:
    tokens, edges, anchors = draft(3, 3, 4, 4, True, False)
    limits = torch.tensor([2, 9, 5])
    built = tree_build.build_best_first(tokens, edges, anchors, 9, limits)
    assert built.sizes.tolist() == [3, 10, 6]
    for row, limit in enumerate(limits.tolist()):
        alone = tree_build.build_best_first(
            tokens[row : row + 1], edges[row : row + 1], anchors[row : row + 1], limit
        )
        size = limit + 1
        for ours, theirs in (
            (built.tokens, alone.tokens), (built.parents, alone.parents),
            (built.depths, alone.depths), (built.scores, alone.scores),
        ):  # fmt: skip
            assert torch.equal(ours[row, :size], theirs[0])
        assert (built.parents[row, size:] == -1).all()


def test_a_round_is_counted_and_the_next_one_starts_at_its_bonus() -> None:
    tokens = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]])
    path = torch.tensor([[0, 2, 3], [0, -1, -1], [0, 1, -1]])
    lengths, bonus = torch.tensor([3, 1, 0]), torch.tensor([91, 92, 93])  # the third is idle
    table = torch.tensor([[5, 1], [2, 2], [0, 0]], dtype=torch.int32)
    prefix = torch.tensor([6, 1, 0], dtype=torch.int32)
    anchors, ids = torch.tensor([1, 2, 3]), torch.full((3, 4), 7)
    out = torch.zeros(3, 4, dtype=torch.long)
    positions, rows, picked = commit.advance(
        tokens, path, lengths, bonus, table, 8, prefix, anchors, ids, out
    )
    assert out[0].tolist() == [3, 12, 13, 91]
    assert out[1, :2].tolist() == [1, 92] and out[2, 0] == 0
    assert positions.view(3, 3).tolist() == [[6, 7, 8], [1, 2, 3], [0, 1, 2]]
    assert rows.view(3, 3).tolist() == [[46, 47, 8], [17, -1, -1], [-1, -1, -1]]
    assert picked.view(3, 3)[0].tolist() == [0, 2, 3] and int(picked.view(3, 3)[1, 0]) == 4
    assert prefix.tolist() == [9, 2, 0]
    assert anchors.tolist() == [91, 92, 3]
    assert ids[:, 0].tolist() == [91, 92, 7] and (ids[:, 1:] == 7).all()


def test_an_idle_sequence_accepts_nothing() -> None:
    tokens, parents = torch.tensor([[4, 5]] * 2), torch.tensor([[-1, 0]] * 2)
    active = torch.tensor([0, 1], dtype=torch.int32)
    following = torch.tensor([[5, 6]] * 2)
    sizes = torch.tensor([2, 2])
    _, lengths, _ = commit.accept_greedy(tokens, parents, sizes, following, 1, None, active)
    assert lengths.tolist() == [0, 2]
