"""On a GPU a row's bits are its own: as compiled code gives them, which no interpreter shows."""

import pytest
import torch
from torch import Tensor

from jetspec.engine.model import rope_table
from jetspec.sampling import SamplingParams, allowed_logits, gumbel_noise, request_keys
from kernels.exact_attention import TAIL, exact_attention
from kernels.exact_products import exact_product
from kernels.mlp import silu_mul
from kernels.norms import add_rms_norm
from kernels.rope import qkv_to_cache
from kernels.tree_build import list_ancestors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PAGE, PAGES = 64, 40
SHAPES = [(14, 2, 64), (32, 8, 128), (9, 3, 64)]  # heads, KV heads, head_dim


def normal(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to("cuda", torch.bfloat16)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("nodes", [16, 65, 256])
def test_a_chains_rows_have_the_bits_of_rows_decoded_one_by_one(heads, nodes) -> None:
    """Wherever its rows begin in a tile: it then takes other loops over the same tiles."""
    queries, kv_heads, head_dim = heads
    keys, values = (normal(seed, PAGES, kv_heads, PAGE, head_dim) for seed in (1, 2))
    table = torch.arange(PAGES, device="cuda", dtype=torch.int32)[None]
    q = normal(3, 1, nodes, queries, head_dim)
    for prefix in (0, 5, 60, 77, 500, 1021, 2000):
        order = prefix + torch.arange(nodes, device="cuda", dtype=torch.int32)
        whole = exact_attention(
            q, keys, values, table, ints(prefix), ints(nodes), order, None, max_context=PAGE * PAGES
        )
        for row in range(0, nodes, max(1, nodes // 16)):
            place = order[row : row + 1].contiguous()
            alone = exact_attention(
                q[:, row : row + 1].contiguous(), keys, values, table, place, ints(1), place, None,
                max_context=PAGE * PAGES,
            )  # fmt: skip
            assert torch.equal(alone[0, 0], whole[0, row]), (prefix, row)


@pytest.mark.parametrize("heads", SHAPES)
def test_a_trees_first_branch_has_the_bits_of_a_chain(heads) -> None:
    """Nodes 0..11 are a path; 60 others, which hang on it, lie behind."""
    queries, kv_heads, head_dim = heads
    path, nodes = 12, 72
    parents = torch.arange(-1, nodes - 1)
    parents[path:] = torch.arange(nodes - path) % path
    depths = torch.arange(nodes)
    depths[path:] = depths[parents[path:]] + 1
    keys, values = (normal(seed, PAGES, kv_heads, PAGE, head_dim) for seed in (1, 2))
    table = torch.arange(PAGES, device="cuda", dtype=torch.int32)[None]
    q = normal(3, 1, nodes, queries, head_dim)
    listed = list_ancestors(parents[None].cuda(), torch.tensor([nodes], device="cuda"), TAIL)
    for prefix in (0, 58, 777):
        found = [
            exact_attention(
                q[:, :count].contiguous(), keys, values, table, ints(prefix), ints(count),
                (prefix + depths[:count]).int().cuda(), ancestors, max_context=PAGE * PAGES,
            )
            for count, ancestors in ((nodes, listed), (path, None))
        ]  # fmt: skip
        assert torch.equal(found[0][:, :path], found[1]), prefix


@pytest.mark.parametrize("rows", [3, 16, 33, 64, 200, 256])
@pytest.mark.parametrize(
    ("width", "inner", "heads"), [(896, 4864, SHAPES[0]), (4096, 12288, SHAPES[1])]
)
def test_a_rows_steps_through_a_layer_have_the_bits_of_the_row_alone(
    rows, width, inner, heads
) -> None:
    queries, kv_heads, head_dim = heads
    columns = (queries + 2 * kv_heads) * head_dim
    weights = [normal(seed, *shape) / 30 for seed, shape in enumerate(
        [(columns, width), (2 * inner, width), (width, inner)]
    )]  # fmt: skip
    bias, norm = normal(4, columns), normal(5, width)
    table = rope_table(torch.rand(head_dim // 2).cuda(), 1.0, 4096)
    x = normal(6, rows, width)
    places = torch.arange(rows, device="cuda", dtype=torch.int32) + 37

    def through(x: Tensor, places: Tensor) -> list[Tensor]:
        keys, values = (normal(7, 8, kv_heads, PAGE, head_dim) for _ in range(2))
        normed, _ = add_rms_norm(x, x, norm, 1e-6)
        q = qkv_to_cache(
            exact_product(normed, weights[0]), keys, values, table, places, places, heads=queries,
            bias=bias,
        )  # fmt: skip
        gated = silu_mul(exact_product(normed, weights[1]), dtype=x.dtype)
        after, residual = add_rms_norm(exact_product(gated, weights[2]), x, norm, 1e-6)
        at = places.long()
        cached = [cache[at // PAGE, :, at % PAGE] for cache in (keys, values)]
        return [q, *cached, after, residual]

    whole = through(x, places)
    for row in range(0, rows, max(1, rows // 8)):
        alone = through(x[row : row + 1].contiguous(), places[row : row + 1].contiguous())
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, whole, strict=True)), row


@pytest.mark.parametrize("vocab", [50257, 151936])
@pytest.mark.parametrize("params", [SamplingParams(1.0), SamplingParams(0.7, 0.9, 50, min_p=0.01)])
def test_a_draws_scores_have_the_bits_of_the_row_alone(vocab, params) -> None:
    """A row of an odd vocabulary begins at another address within 16 bytes than its neighbour."""
    rows = 40
    logits, keys = normal(8, rows, vocab).float(), request_keys(range(rows), "cuda")
    places = torch.arange(rows, device="cuda")
    noise = gumbel_noise(3, keys, places, vocab)
    allowed = allowed_logits(logits, params)
    for row in (0, 1, 18, 39):
        one = slice(row, row + 1)
        alone = logits[one].clone()
        assert torch.equal(gumbel_noise(3, keys[one], places[one], vocab)[0], noise[row])
        assert torch.equal(allowed_logits(alone, params)[0], allowed[row])
