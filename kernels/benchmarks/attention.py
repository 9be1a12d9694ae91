"""Tree attention of one layer against torch SDPA under a dense mask and flex attention."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels import reference
from kernels.benchmarks.inputs import Paged, paged, random_bits
from kernels.benchmarks.timing import cold_copies, relative_error, time_us
from kernels.merge_splits import Workspace
from kernels.tree_attention import Plan, plan_for, splits_for, splits_needed, tree_attention

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SHAPES = [(1, 128), (1, 1), (1, 16), (1, 64), (1, 256), (16, 1), (16, 16), (16, 33)]
CONTEXTS = [1024, 8192, 32768]
BARS_US = {
    (1, 128, 1024): 12.0, (1, 128, 8192): 60.0, (1, 128, 32768): 210.0,
    (1, 1, 8192): 14.0, (1, 1, 32768): 40.0,
}  # fmt: skip
MAX_PAGES = 1024
PAGE = 64


class Problem:
    """Inputs of one cell, with enough layers to rotate through."""

    def __init__(self, batch: int, nodes: int, context: int, page: int = PAGE) -> None:
        self.batch, self.nodes, self.context = batch, nodes, context
        row_bytes = batch * (context + nodes) * KV_HEADS * HEAD_DIM * 4
        self.cache: Paged = paged(
            batch, context, nodes, layers=cold_copies(row_bytes), page=page, max_pages=MAX_PAGES
        )
        self.bits, self.counts = random_bits(batch, nodes)
        self.q = torch.randn(batch, nodes, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.q)
        # Multiplications of scores and values, and the bytes of KV: the two floors.
        self.flop = 4 * batch * nodes * HEADS * HEAD_DIM * context
        self.kv_bytes = row_bytes

    def calls(
        self, plan: Plan | None, split: int | None = None, max_splits: int | None = None
    ) -> list[Callable[[], Tensor]]:
        group, programs = HEADS // KV_HEADS, KV_HEADS * self.batch
        plan = plan or plan_for(self.nodes, group, programs, PAGE)
        usual = splits_for(plan.tiles(self.nodes * group)[0] * programs, plan.even)
        split, max_splits = split or usual[0], max_splits or usual[1]
        splits = splits_needed(self.nodes, self.context + self.nodes, split, max_splits, plan.even)
        rows = self.batch * self.nodes * HEADS
        named: dict[str, Any] = {
            "max_context": self.context + self.nodes,
            "plan": plan,
            "split": split,
            "max_splits": max_splits,
            "workspace": Workspace.allocate(splits, rows, HEAD_DIM, self.q.device),
            "out": self.out,
        }
        rest = (self.cache.table, self.cache.prefix, self.counts, self.bits)
        return [
            partial(tree_attention, self.q, keys, values, *rest, **named)
            for keys, values in self.cache.layers
        ]

    def error(
        self, plan: Plan | None = None, split: int | None = None, max_splits: int | None = None
    ) -> float:
        self.out.fill_(float("nan"))
        self.calls(plan, split, max_splits)[0]()
        keys, values = self.cache.layers[0]
        expected = reference.tree_attention(
            self.q, keys, values, self.cache.table, self.cache.prefix, self.counts, self.bits
        )
        return relative_error(self.out, expected)

    def dense(self) -> tuple[Tensor, list[tuple[Tensor, Tensor]], Tensor]:
        """(q, contiguous keys and values of each layer, bool mask [B, 1, N, S]) for the peers."""
        total = self.context + self.nodes
        layers = []
        for keys, values in self.cache.layers:
            k, v = (
                torch.stack([reference.gather_pages(c, t, total) for t in self.cache.table])
                .transpose(1, 2)
                .contiguous()
                for c in (keys, values)
            )
            layers.append((k, v))
        tree = reference.unpack_ancestors(self.bits, self.nodes)
        seen = tree.new_ones(self.batch, self.nodes, self.context)
        return self.q.transpose(1, 2), layers, torch.cat([seen, tree], -1)[:, None]


def sdpa_us(problem: Problem) -> float:
    q, layers, mask = problem.dense()
    attend = partial(scaled_dot_product_attention, q, attn_mask=mask, enable_gqa=True)
    return time_us([partial(attend, key=key, value=value) for key, value in layers])


def flex_us(problem: Problem) -> float:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, layers, dense = problem.dense()
    allowed = dense[:, 0]
    mask = create_block_mask(
        lambda b, h, i, j: allowed[b, i, j], problem.batch, None, problem.nodes,
        problem.context + problem.nodes, device="cuda",
    )  # fmt: skip
    attend = partial(
        torch.compile(flex_attention, dynamic=False), q, block_mask=mask, enable_gqa=True
    )
    return time_us([partial(attend, key=key, value=value) for key, value in layers])


def rows(
    peers: bool,
    plan: Callable[[int], Plan | None] = lambda nodes: None,
    split: int | None = None,
    max_splits: int | None = None,
    page: int = PAGE,
) -> Iterator[dict[str, object]]:
    """One record a cell: microseconds a layer, the error, the floors, the peers."""
    for batch, nodes in SHAPES:
        for context in CONTEXTS:
            if batch * context > 16 * 8192:
                continue
            problem = Problem(batch, nodes, context, page)
            launch = (plan(nodes), split, max_splits)
            record: dict[str, object] = {
                "batch": batch,
                "nodes": nodes,
                "context": context,
                "error": problem.error(*launch),
                "us": time_us(problem.calls(*launch)),
                "bar_us": BARS_US.get((batch, nodes, context)),
                "floor_us": max(problem.flop / 790e6, problem.kv_bytes / 4.28e6),
            }
            if peers and nodes <= 128 and batch == 1:
                record["sdpa_us"] = sdpa_us(problem)
                if (nodes, context) == (128, 8192):  # a minute of compilation a shape
                    record["flex_us"] = flex_us(problem)
            yield record
