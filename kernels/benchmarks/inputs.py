"""Random inputs in the shapes of a served model (Qwen3-8B unless said)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.tree_build import build_best_first, pack_ancestors


@dataclass(frozen=True)
class Paged:
    """Paged caches of several layers with one page table.

    layers: (keys, values), each [pages, kv_heads, page, dim]; table int32 [B, max_pages].
    """

    layers: list[tuple[Tensor, Tensor]]
    table: Tensor
    prefix: Tensor


def paged(
    batch: int, prefix: int, extra: int, *, layers: int, page: int, max_pages: int,
    kv_heads: int = 8, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16,
) -> Paged:  # fmt: skip
    """Caches that hold `prefix` + `extra` rows a sequence, in shuffled pages."""
    used = -(-(prefix + extra) // page)
    shape = (batch * used, kv_heads, page, head_dim)
    table = torch.zeros(batch, max_pages, dtype=torch.int32, device="cuda")
    table[:, :used] = torch.randperm(batch * used, device="cuda").view(batch, used)
    caches = [
        (
            torch.randn(shape, device="cuda", dtype=dtype),
            torch.randn(shape, device="cuda", dtype=dtype),
        )
        for _ in range(layers)
    ]
    return Paged(caches, table, torch.full((batch,), prefix, dtype=torch.int32, device="cuda"))


def random_edges(batch: int, depth: int, width: int, path: bool) -> tuple[Tensor, Tensor]:
    """(tokens [B, D, K], edge scores [B, D, K, K]) with sorted, peaked slot distributions."""
    generator = torch.Generator("cuda").manual_seed(batch + depth + width)
    shape = (batch, depth, width, width) if path else (batch, depth, 1, width)
    logits = torch.randn(shape, device="cuda", generator=generator) * 3
    edges = logits.log_softmax(-1).sort(-1, descending=True).values
    tokens = torch.arange(batch * depth * width, device="cuda").view(batch, depth, width)
    return tokens, edges.expand(batch, depth, width, width)


def random_bits(batch: int, nodes: int, depth: int = 15) -> tuple[Tensor, Tensor]:
    """(ancestor bits, node counts int32 [B]) of best-first trees of `nodes` rows with the root."""
    if nodes == 1:
        ones = torch.ones(batch, dtype=torch.int32, device="cuda")
        return ones.view(batch, 1, 1), ones
    tokens, edges = random_edges(batch, depth, 32, path=True)
    anchors = torch.zeros(batch, dtype=torch.long, device="cuda")
    tree = build_best_first(tokens, edges, anchors, nodes - 1)
    return pack_ancestors(tree.parents, tree.sizes, depth), tree.sizes.int()
