"""Top-k, the matrix product and the fusions against their references, in the interpreter."""

import pytest
import torch

from tests.test_kernels_setup import interpreted

reference = interpreted("kernels.reference")
topk = interpreted("kernels.topk")
norms = interpreted("kernels.norms")
mlp = interpreted("kernels.mlp")
rope = interpreted("kernels.rope")
gemm = interpreted("kernels.small_gemm")
place = interpreted("kernels.place")


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return bool((ours.float() - theirs.float()).abs().max() <= tolerance)


@pytest.mark.parametrize(("vocab", "width"), [(40, 1), (20, 20), (500, 8), (301, 16), (256, 3)])
def test_topk_takes_the_lower_id_of_equal_logits(vocab, width) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(3, vocab, generator=generator).mul(3).round()  # many ties
    logits[1, ::7] = -torch.inf
    logits[2, 0] = -0.0
    values, tokens, lse = topk.topk_logsumexp(logits, width, chunk=64)
    expected = reference.topk_logsumexp(logits, width)
    assert torch.equal(values, expected[0])
    assert torch.equal(tokens, expected[1])
    assert close(lse, expected[2])


def test_topk_reads_strided_rows() -> None:
    wide = torch.randn(4, 500)
    _, tokens, _ = topk.topk_logsumexp(wide[:, :400], 5, chunk=64)
    assert torch.equal(tokens, wide[:, :400].topk(5).indices)


@pytest.mark.parametrize("parts", [None, 3])
@pytest.mark.parametrize("residual", [True, False])
def test_add_rms_norm(parts, residual) -> None:
    x = torch.randn(5, 48) if parts is None else torch.randn(parts, 5, 48)
    skip = torch.randn(5, 48) if residual else None
    weight = torch.randn(48)
    ours = norms.add_rms_norm(x, skip, weight, 1e-6)
    theirs = reference.add_rms_norm(x, skip, weight, 1e-6)
    assert all(close(a, b) for a, b in zip(ours, theirs, strict=True))


def test_silu_mul_sums_parts_first() -> None:
    x = torch.randn(2, 3, 2 * 1100)
    assert close(mlp.silu_mul(x), reference.silu_mul(x))
    assert close(mlp.silu_mul(x[0]), reference.silu_mul(x[0]))


@pytest.mark.parametrize("kind", ["llama", "qwen2 bias", "qwen3 norms", "parts"])
def test_qkv_to_cache_writes_rotated_keys_and_skips_negative_rows(kind) -> None:
    heads, kv_heads, dim, rows = 6, 2, 16, 5
    shape = (rows, (heads + 2 * kv_heads) * dim)
    qkv = torch.randn(3, *shape) if kind == "parts" else torch.randn(shape)
    options = {}
    if kind == "qwen2 bias":
        options["bias"] = torch.randn(shape[1])
    if kind == "qwen3 norms":
        options["q_norm"], options["k_norm"] = torch.randn(2, dim)
    table, positions = torch.randn(50, dim), torch.tensor([4, 0, 49, 7, 7])
    cache_rows = torch.tensor([0, -1, 17, 31, 8])
    ours = torch.randn(2, 4, kv_heads, 8, dim)
    theirs = ours.clone()
    args = (table, positions, cache_rows)
    q = rope.qkv_to_cache(qkv, *ours, *args, heads=heads, **options)
    expected = reference.qkv_to_cache(qkv, *theirs, *args, heads=heads, **options)
    assert close(q, expected)
    assert close(ours, theirs)
    assert (ours != theirs).sum() == 0 or close(ours, theirs)


@pytest.mark.parametrize("m", [1, 5, 16, 40])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("descriptors", [False, True])
def test_small_gemm(m, parts, descriptors) -> None:
    x, w = torch.randn(m, 128), torch.randn(70, 128)
    plan = gemm.GemmPlan(16, 32, 32, 4, 2, descriptors)
    out = gemm.small_gemm(x, w, parts=parts, plan=plan)
    assert out.shape == ((m, 70) if parts == 1 else (parts, m, 70))
    total = out if parts == 1 else out.sum(0)
    assert close(total, reference.small_gemm(x, w), 5e-5)


def test_the_cuts_of_k_follow_the_weight_and_fill_the_card() -> None:
    assert gemm.parts_for(151936, 4096) == 1
    assert gemm.parts_for(4096, 12288) == 4
    for n, k in [(4096, 4096), (6144, 4096), (896, 4864), (1152, 896)]:
        assert k % (gemm.parts_for(n, k) * 128) == 0


def test_a_k_that_the_plan_does_not_divide_takes_smaller_steps() -> None:
    x, w = torch.randn(3, 48), torch.randn(8, 48)
    assert close(gemm.small_gemm(x, w, parts=1), reference.small_gemm(x, w), 5e-5)


def test_small_gemm_refuses_a_k_it_cannot_cut() -> None:
    with pytest.raises(ValueError, match="K 100"):
        gemm.small_gemm(torch.randn(2, 100), torch.randn(8, 100), parts=1)


def test_rows_are_placed_behind_each_prefix() -> None:
    prefix = torch.tensor([5, 0, 13], dtype=torch.int32)
    active = torch.tensor([1, 0, 1], dtype=torch.int32)
    table = torch.tensor([[7, 2, 0], [1, 1, 1], [4, 9, 3]], dtype=torch.int32)
    depths = torch.tensor([[0, 1, 1, 2]] * 3)
    sizes = torch.tensor([4, 3, 2])
    positions, rows, counts = place.place_rows(prefix, active, table, 8, 4, depths, sizes)
    assert counts.tolist() == [4, 0, 2]
    assert positions.view(3, 4).tolist()[0] == [5, 6, 6, 7]
    # Rows that are not in use stand nowhere: behind a prefix they might lie beyond any table.
    assert positions.view(3, 4).tolist()[1:] == [[0, 0, 0, 0], [13, 14, 0, 0]]
    # Row 5 of the first sequence: page 7, offset 5; row 13 of the third: page 9, offset 5.
    assert rows.tolist() == [61, 62, 63, 16, -1, -1, -1, -1, 77, 78, -1, -1]
    plain = place.place_rows(prefix, active, table, 8, 2)
    assert plain[0].tolist() == [5, 6, 0, 0, 13, 14] and plain[2].tolist() == [2, 0, 2]


def test_context_goes_to_every_layers_cache_as_one_layer_would_write_it() -> None:
    layers, kv_heads, dim, rows = 3, 2, 16, 4
    both = torch.randn(rows, layers * 2 * kv_heads * dim)
    norms, table = torch.randn(layers, dim), torch.randn(50, dim)
    positions, cache_rows = torch.tensor([4, 0, 49, 7]), torch.tensor([0, -1, 17, 31])
    ours = torch.randn(layers, 2, 4, kv_heads, 8, dim)
    theirs = ours.clone()
    rope.context_to_caches(both, ours, table, positions, cache_rows, k_norms=norms)
    for index, part in enumerate(both.view(rows, layers, -1).unbind(1)):
        reference.qkv_to_cache(
            part, *theirs[index], table, positions, cache_rows, heads=0, q_norm=norms[index],
            k_norm=norms[index],
        )  # fmt: skip
    assert close(ours, theirs)
    assert not torch.equal(ours[:, 0, 2], torch.zeros_like(ours[:, 0, 2]))


def test_a_wide_type_gets_narrower_steps() -> None:
    assert gemm.gemm_plan(1, 4096, 4).step * 4 == gemm.gemm_plan(1, 4096).step * 2


def test_rows_of_several_tensors_stand_side_by_side() -> None:
    sources = [torch.randn(6, 20), torch.randn(6, 20)]
    index = torch.tensor([5, 0, 0, 3])
    expected = torch.cat([source[index] for source in sources], 1)
    assert torch.equal(place.gather_rows(sources, index), expected)


class Launches:
    """Stands in for a kernel and keeps the grids it was asked for."""

    def __init__(self) -> None:
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *args, **options: None


def test_rows_lie_along_the_one_axis_of_a_launch_that_holds_more_than_65535(monkeypatch) -> None:
    """A batch of 64 trees, or a mixture's pairs of token and expert, has more."""
    rows, launches = 70_000, Launches()
    places = [
        (mlp, "_silu_mul"), (norms, "_add_rms_norm"), (place, "_gather"),
        (rope, "_qkv_to_cache"), (rope, "_context_to_caches"),
        (topk, "_chunk_max"), (topk, "_chunk_best"), (topk, "_merge_best"),
    ]  # fmt: skip
    for module, name in places:
        monkeypatch.setattr(module, name, launches)
    one = torch.zeros(1).expand
    cache, where = torch.zeros(1, 1, 8, 4), one(rows)
    mlp.silu_mul(one(rows, 4))
    norms.add_rms_norm(one(rows, 4), None, torch.zeros(4), 1e-6)
    place.gather_rows([one(9, 4)], torch.zeros(rows, dtype=torch.long))
    rope.qkv_to_cache(one(rows, 12), cache, cache, where, where, where, heads=1)
    rope.context_to_caches(one(rows, 8), cache[None, None], where, where, where, k_norms=None)
    topk.topk_logsumexp(torch.zeros(1, 4).expand(rows, 4), 2)
    assert len(launches.grids) == len(places)
    assert all(grid[0] == rows and max(grid[1:], default=1) < 65536 for grid in launches.grids)
