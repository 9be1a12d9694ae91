"""Tree attention over paged caches against the dense reference, in the interpreter."""

from dataclasses import replace

import pytest
import torch

from tests.test_kernels_setup import interpreted

reference = interpreted("kernels.reference")
attention = interpreted("kernels.tree_attention")
tree_build = interpreted("kernels.tree_build")
Plan = attention.Plan


def problem(
    seed: int, prefixes: list[int], nodes: int, *, heads: int, kv_heads: int, head_dim: int,
    page: int = 16, dtype: torch.dtype = torch.float32,
):  # fmt: skip
    """Random rows, caches in shuffled pages, and random trees of ragged sizes."""
    generator = torch.Generator().manual_seed(seed)
    batch = len(prefixes)
    pages = -(-(max(prefixes) + nodes) // page)
    table = torch.randperm(batch * pages, generator=generator).view(batch, pages).int()
    shape = (batch * pages, kv_heads, page, head_dim)
    keys, values = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    q = torch.randn(batch, nodes, heads, head_dim, generator=generator).to(dtype)
    sizes = torch.randint(1, nodes + 1, (batch,), generator=generator)
    sizes[0] = nodes
    parents = torch.full((batch, nodes), -1)
    for node in range(1, nodes):
        parents[:, node] = torch.randint(0, node, (batch,), generator=generator)
    bits = tree_build.pack_ancestors(parents, sizes, nodes)
    return q, keys, values, table, torch.tensor(prefixes).int(), sizes.int(), bits


def check(inputs, plan, *, causal=False, tolerance=2e-6, **options) -> torch.Tensor:
    q, keys, values, table, prefixes, counts, bits = inputs
    args = (keys, values, table, prefixes, counts, None if causal else bits)
    longest = int(prefixes.max()) + q.shape[1]
    out = attention.tree_attention(q, *args, max_context=longest, plan=plan, **options)
    expected = reference.tree_attention(q, *args)
    assert (out - expected).abs().max() < tolerance
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("prefixes", "nodes"),
    [([0], 1), ([37], 1), ([16], 5), ([0, 5, 50], 7), ([33], 40), ([31, 64], 33)],
    ids=["first token", "plain", "page edge", "ragged", "two words of bits", "bits across words"],
)
def test_equals_the_dense_reference(prefixes, nodes, causal) -> None:
    inputs = problem(0, prefixes, nodes, heads=4, kv_heads=2, head_dim=16)
    check(inputs, Plan(32, 16, 4, 2), causal=causal, split=16, max_splits=3)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, 64), (8, 2, 64), (6, 2, 64), (8, 1, 128)],
    ids=["no groups", "groups of 4", "groups of 3", "one KV head, head_dim 128"],
)  # fmt: skip
def test_head_layouts(heads, kv_heads, head_dim) -> None:
    inputs = problem(1, [21, 40], 6, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    check(inputs, Plan(16, 16, 4, 2), split=16, max_splits=2)


def test_pages_may_be_larger_than_tiles_and_half_precision_is_rounded_once() -> None:
    inputs = problem(2, [70], 9, heads=4, kv_heads=2, head_dim=16, page=64, dtype=torch.float16)
    check(inputs, Plan(32, 32, 4, 2), split=64, max_splits=2, tolerance=2e-3)


def test_rows_beyond_a_sequences_nodes_are_zero_and_never_read_uninitialised_memory() -> None:
    inputs = problem(3, [20, 9], 6, heads=2, kv_heads=1, head_dim=16)
    inputs[5][1] = 2
    space = attention.Workspace.allocate(4, 2 * 6 * 2, 16, torch.device("cpu"))
    for field in (space.out, space.top, space.total):
        field.fill_(float("nan"))
    out = torch.full_like(inputs[0], float("nan"))
    plan = Plan(16, 16, 4, 2)
    check(inputs, plan, split=16, max_splits=4, workspace=space, out=out)
    assert torch.equal(out[1, 2:], torch.zeros_like(out[1, 2:]))


@pytest.mark.parametrize("plan", [Plan(16, 16, 4, 2), Plan(64, 16, 4, 2), Plan(32, 16, 4, 2, True)])
def test_a_row_has_the_same_bits_whatever_shares_its_launch(plan) -> None:
    """Alone, in a batch, and with more nodes behind it."""
    inputs = problem(4, [55, 7, 30], 12, heads=4, kv_heads=2, head_dim=16)
    q, keys, values, table, prefixes, counts, bits = inputs
    counts[0] = 12
    options = {"split": 16, "max_splits": 2}
    base = attention.tree_attention(
        q, *inputs[1:], max_context=80, plan=Plan(32, 16, 4, 2), **options
    )
    alone = attention.tree_attention(
        q[:1, :3].contiguous(), keys, values, table[:1], prefixes[:1], counts[:1].clamp(max=3),
        bits[:1, :3].contiguous(), max_context=60, plan=plan, **options,
    )  # fmt: skip
    assert torch.equal(alone[0], base[0, :3])


def test_splits_double_with_the_context_and_cover_it() -> None:
    for context in (1, 256, 6144, 6145, 8192, 32768, 100000):
        for nodes in (1, 129, 1025):
            size = 256
            while size * 24 < context:
                size *= 2
            needed = -(-(context + nodes) // size)
            assert needed <= attention.splits_needed(nodes, context + nodes, 256, 24)


def test_unsupported_shapes_are_refused() -> None:
    inputs = problem(5, [3], 2, heads=2, kv_heads=1, head_dim=16)
    with pytest.raises(ValueError, match="tile 32 must divide page 16"):
        check(inputs, Plan(16, 32, 4, 2))


@pytest.mark.parametrize(
    ("nodes", "causal", "plan"),
    [
        (9, True, Plan(16, 16, 4, 2, across=16)),
        (17, False, Plan(16, 16, 4, 2, across=16, joined=True)),
        (5, True, Plan(16, 16, 4, 2, across=16, joined=True)),
        (3, False, Plan(0, 16, 4, 2, across=16, joined=True)),
        (11, False, Plan(0, 16, 4, 2, across=16)),
        (9, False, Plan(16, 16, 4, 2, across=16, joined=True, even=True)),
    ],
    ids=["beside a tile", "beside the last", "none left", "across alone", "two tiles", "even"],
)
def test_rows_across_and_merging_in_one_launch_equal_the_reference(nodes, causal, plan) -> None:
    """Trees behind several splits and behind no prefix, most of the second one's rows padding."""
    inputs = problem(6, [37, 0], nodes, heads=2, kv_heads=1, head_dim=16)
    inputs[5][1] = 1
    out = torch.full_like(inputs[0], float("nan"))
    check(inputs, plan, causal=causal, split=16, max_splits=3, out=out)
    assert torch.equal(out[1, 1:], torch.zeros_like(out[1, 1:]))
    if plan.joined:  # a launch leaves the counters as it found them
        assert not attention.counters(1, torch.device("cpu")).any()
        apart = replace(plan, joined=False)  # which writes one split's rows to the workspace too
        assert torch.equal(out, check(inputs, apart, causal=causal, split=16, max_splits=3))


def test_one_split_is_written_at_once_and_more_have_equal_shares() -> None:
    plan = Plan(16, 16, 4, 2, joined=True, even=True)
    inputs = problem(7, [37, 2], 3, heads=2, kv_heads=1, head_dim=16)
    space = attention.Workspace.allocate(3, 2 * 3 * 2, 16, torch.device("cpu"))
    space.total.fill_(-1.0)
    check(inputs, plan, split=16, max_splits=1, workspace=space)
    assert (space.total == -1).all()
    check(inputs, plan, split=16, max_splits=3, workspace=space)
    rows_used = (space.total.view(3, 2, 3, 2)[:, 0, 0, 0] >= 0).tolist()
    assert rows_used == [True, True, True] and (space.total.view(3, 2, 6)[:, 1] == -1).all()
    assert attention.splits_needed(9, 2048, 64, 4, even=True) == 4
    assert attention.splits_needed(9, 100, 64, 4, even=True) == 2


def test_a_launch_that_fills_the_card_has_as_many_equal_splits_as_run_at_once() -> None:
    few, full = attention.plan_for(17, 4, 8, 64), attention.plan_for(17, 4, 128, 64)
    assert (few.even, full.even, full.joined) == (False, True, True)
    for programs in (100, 128, 264, 4000):
        split, most = attention.splits_for(programs, even=True)
        assert split == 64 and most == max(1, 264 // programs)
    assert attention.splits_for(8, even=True) == (128, 33)


def test_tiles_of_rows() -> None:
    plan = Plan(64, 64, 4, 3, across=16)
    assert [plan.tiles(4 * n) for n in (1, 16, 17, 20, 21, 129)] == [
        (1, 0), (1, 0), (1, 16), (1, 16), (2, 0), (8, 16)
    ]  # fmt: skip
    assert Plan(64, 64, 4, 3).tiles(516) == (9, 0)
    assert Plan(0, 64, 4, 3, across=16).tiles(4) == (1, 16)
