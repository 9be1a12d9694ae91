"""The round's other kernels: top-k, tree building, acceptance, compaction and the fusions."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from kernels.benchmarks.inputs import random_edges
from kernels.benchmarks.timing import cold_copies, time_us
from kernels.commit import accept_greedy, compact_kv
from kernels.mlp import silu_mul
from kernels.norms import add_rms_norm
from kernels.rope import qkv_to_cache
from kernels.topk import topk_logsumexp
from kernels.tree_build import build_best_first, pack_ancestors

VOCAB = 151936


def _torch_topk(logits: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    values, tokens = logits.topk(width, -1)
    return values, tokens, logits.float().logsumexp(-1)


def topk_rows(peers: bool) -> Iterator[dict[str, object]]:
    """Logits [rows, 151936] bf16 to the best `width` and the log-sum-exp."""
    for count, width in [(1, 1), (16, 32), (128, 1), (256, 32)]:
        copies = cold_copies(count * VOCAB * 2)
        logits = [
            torch.randn(count, VOCAB, device="cuda", dtype=torch.bfloat16) for _ in range(copies)
        ]
        record: dict[str, object] = {
            "rows": count,
            "width": width,
            "us": time_us([partial(topk_logsumexp, x, width) for x in logits]),
            "floor_us": count * VOCAB * 2 / 4.28e6,
        }
        if peers:
            record["torch_us"] = time_us([partial(_torch_topk, x, width) for x in logits])
        yield record


def tree_rows(peers: bool) -> Iterator[dict[str, object]]:
    """Best-first trees from path scores, and their packed ancestor bits."""
    del peers  # no library builds these trees on a GPU
    for batch in (1, 16, 64):
        for depth, budget in [(15, 16), (15, 64), (15, 128), (15, 256), (15, 1024), (63, 256)]:
            tokens, edges = random_edges(batch, depth, 32, path=True)
            anchors = torch.zeros(batch, dtype=torch.long, device="cuda")
            build = partial(build_best_first, tokens, edges, anchors, budget)
            tree = build()
            pack = partial(pack_ancestors, tree.parents, tree.sizes, depth)
            yield {
                "batch": batch,
                "depth": depth,
                "budget": budget,
                "us": time_us([build] * 4),
                "pack_us": time_us([pack] * 4),
            }


def compaction_rows(peers: bool) -> Iterator[dict[str, object]]:
    """Acceptance, and moving a full path of 15 rows in 36 layers; the peer indexes each layer."""
    for batch in (1, 16):
        tokens, edges = random_edges(batch, 15, 32, path=True)
        anchors = torch.zeros(batch, dtype=torch.long, device="cuda")
        tree = build_best_first(tokens, edges, anchors, 128)
        forced = torch.full((batch,), 16, device="cuda")
        accept = partial(
            accept_greedy, tree.tokens, tree.parents, tree.sizes, tree.tokens, 15, forced
        )
        path = torch.arange(16, device="cuda").expand(batch, -1).contiguous() * 8
        lengths = torch.full((batch,), 16, device="cuda")
        kv = torch.randn(36, 2, batch * 20, 8, 64, 128, device="cuda", dtype=torch.bfloat16)
        table = torch.randperm(batch * 20, device="cuda").view(batch, 20).int()
        prefix = torch.full((batch,), 1000, dtype=torch.int32, device="cuda")
        compact = partial(compact_kv, kv, table, prefix, path, lengths)
        record: dict[str, object] = {
            "batch": batch,
            "accept_us": time_us([accept] * 4),
            "us": time_us([compact] * 4),
        }
        if peers:
            rows = [x.transpose(1, 2).reshape(-1, 8, 128) for layer in kv for x in layer]
            total = batch * 20 * 64
            source = (prefix[:, None] + path).flatten().long() % total
            places = prefix[:, None] + torch.arange(16, device="cuda")
            peer = partial(_copy_rows, rows, source, places.flatten().long() % total)
            record["torch_per_layer_us"] = time_us([peer])
        yield record


def _copy_rows(layers: list[Tensor], source: Tensor, target: Tensor) -> None:
    for rows in layers:
        rows.index_copy_(0, target, rows[source])


def fusion_rows(peers: bool) -> Iterator[dict[str, object]]:
    """Residual + norm, q/k-norm + RoPE + cache write, and the gate, at Qwen3-8B's sizes."""
    del peers  # what they replace is several launches of torch each
    for m in (1, 16, 128):
        x, residual = torch.randn(2, m, 4096, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
        parts = torch.randn(4, m, 4096, device="cuda")
        qkv = torch.randn(m, 6144, device="cuda", dtype=torch.bfloat16)
        gate_up = torch.randn(m, 24576, device="cuda", dtype=torch.bfloat16)
        keys, values = torch.randn(2, 32, 8, 64, 128, device="cuda", dtype=torch.bfloat16)
        table = torch.randn(4096, 128, device="cuda")
        at = torch.arange(m, device="cuda", dtype=torch.int32)
        norm = torch.randn(128, device="cuda", dtype=torch.bfloat16)
        to_cache = partial(qkv_to_cache, heads=32, q_norm=norm, k_norm=norm)
        calls: dict[str, Callable[[], object]] = {
            "add_rms_norm_us": partial(add_rms_norm, x, residual, weight, 1e-6),
            "add_rms_norm_4_parts_us": partial(add_rms_norm, parts, residual, weight, 1e-6),
            "qkv_to_cache_us": partial(to_cache, qkv, keys, values, table, at, at),
            "silu_mul_us": partial(silu_mul, gate_up),
        }
        record: dict[str, object] = {"m": m}
        for name, call in calls.items():
            record[name] = time_us([call] * 8)
        yield record
