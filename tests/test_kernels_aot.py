"""Every kernel compiles for sm_90 at a served model's shapes, on a machine without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import dataclasses
import json
import traceback

import torch
from kernels import (
    aot, commit, distillation, edge_products, edges, exact_attention, experts, fp8_gemm, launch,
    lookup, mlp, norms, place, ranks, rope, small_gemm, topk, tree_attention, tree_build,
)

launch._hopper = lambda: True  # compiled as on the card, placed early

BF16 = torch.bfloat16


def bf16(*shape):
    return torch.empty(shape, dtype=BF16)


def longs(*shape):
    return torch.zeros(shape, dtype=torch.long)


def attention(nodes, head_dim, causal, descriptors, **variant):
    plan = tree_attention.plan_for(nodes, 4, 16, 64)
    plan = dataclasses.replace(plan, descriptors=descriptors, **variant)
    kv = bf16(4, 8, 64, head_dim)
    ints = torch.zeros(2, dtype=torch.int32)
    bits = None if causal else torch.zeros(2, nodes, -(-nodes // 32), dtype=torch.int32)
    tree_attention.tree_attention(
        bf16(2, nodes, 32, head_dim), kv, kv, ints.view(2, 1), ints, ints, bits,
        max_context=8192, plan=plan,
    )


def attention_all():
    attention(1, 128, True, False)
    attention(1, 64, True, False)
    attention(129, 128, False, False)
    attention(129, 64, False, False)
    attention(129, 128, False, True)
    attention(129, 128, False, True, across=16, joined=True, even=True)
    attention(1, 128, True, False, rows=0, across=16, joined=True)


def exact_all():
    ints = torch.zeros(2, dtype=torch.int32)
    for nodes, head_dim in ((1, 64), (129, 128)):
        kv = bf16(4, 8, 64, head_dim)
        exact_attention.exact_attention(
            bf16(2, nodes, 32, head_dim), kv, kv, ints.view(2, 1), ints, ints,
            torch.zeros(2 * nodes, dtype=torch.int32),
            torch.zeros(2, nodes, 32, dtype=torch.int32), max_context=8192,
        )
    tree_build.list_ancestors(longs(2, 129), longs(2), 32)


def edges_all():
    floats = torch.empty(2, 15, 32), torch.empty(2, 15)
    tables = bf16(151936, 256), bf16(151936, 256)
    scores = edges.edge_scores(
        longs(2, 15, 32), *floats, longs(2), *tables, torch.empty(4, 30, 256), gate="sigmoid"
    )
    edges.edge_scores(longs(2, 15, 32), *floats, longs(2), *tables)
    edges.best_chain(longs(2, 15, 32), scores)


def gemm_all():
    for m in (1, 64, 129):
        small_gemm.small_gemm(bf16(m, 4096), bf16(6144, 4096))
    plan = small_gemm.GemmPlan(16, 128, 64, 4, 4, True)
    small_gemm.small_gemm(bf16(16, 4096), bf16(6144, 4096), plan=plan)


def experts_all():
    for tokens in (1, 8192):
        ids, weights = experts.route(
            torch.empty(8, tokens, 128), 8, normalise=True, like=bf16(1, 1)
        )
        pairs, counts = experts.list_pairs(ids, 128)
        given = pairs, counts, weights
        experts.first_product(bf16(tokens, 2048), bf16(1, 1).expand(128, 1536, 2048), *given)
        experts.second_product(bf16(tokens * 8, 768), bf16(1, 1).expand(128, 2048, 768), *given)


def fp8_all():
    for m in (1, 128):
        values = torch.empty(6144, 4096, dtype=torch.float8_e4m3fn)
        fp8_gemm.fp8_gemm(bf16(m, 4096), values, torch.empty(6144, dtype=torch.int8))


def tree_all():
    for batch, depth, budget in ((1, 15, 128), (16, 15, 16)):
        edges = torch.empty(batch, depth, 1, 32).expand(-1, -1, 32, -1)
        tree_build.build_best_first(longs(batch, depth, 32), edges, longs(batch), budget)
    tree_build.pack_ancestors(longs(2, 129), longs(2), 15)


def commit_all():
    args = longs(2, 129), longs(2, 129), longs(2), longs(2, 129), 15
    path, lengths, _ = commit.accept_greedy(*args)
    commit.accept_greedy(*args, longs(2))
    ints = torch.zeros(2, dtype=torch.int32)
    commit.compact_kv(bf16(2, 2, 4, 8, 64, 128), ints.view(2, 1), ints, path, lengths)
    commit.advance(
        longs(2, 129), path, lengths, longs(2), ints.view(2, 1), 64, ints, longs(2), longs(2, 16),
        longs(2, 17),
    )
    commit.advance(
        longs(2, 11), longs(2, 11), lengths, longs(2), ints.view(2, 1), 64, ints, longs(2),
        longs(2, 1), longs(2, 12), ints.expand(2, 2).contiguous(),
    )
    place.place_rows(ints, ints, ints.view(2, 1), 64, 129, longs(2, 129), longs(2))
    place.place_rows(ints, ints, ints.view(2, 1), 64, 16)
    place.gather_rows([bf16(9, 4096)] * 2, longs(3))


def lookup_all():
    for rows, ngram, depth in ((4096, 3, 10), (32768, 1, 1), (300, 5, 15)):
        history = torch.zeros(2, rows, dtype=torch.int32)
        ints = torch.zeros(2, dtype=torch.int32)
        lookup.look_up(history, ints, longs(2), ngram=ngram, depth=depth)


def topk_all():
    topk.topk_logsumexp(bf16(2, 151936), 1)
    topk.topk_logsumexp(bf16(2, 151936), 32)
    for width in (1, 32):
        found = torch.empty(16, width), longs(16, width), torch.empty(16)
        ranks.pack_best(*found, 75968, sums=width > 1)
        ranks.merge_packed(longs(2, 16, width + 1), sums=width > 1)


def fusion_all():
    norms.add_rms_norm(torch.empty(4, 2, 4096), bf16(2, 4096), bf16(4096), 1e-6)
    norms.add_rms_norm(bf16(2, 129, 4096), bf16(129, 4096), bf16(4096), 1e-6)  # shares of 2 ranks
    mlp.silu_mul(bf16(2, 24576))
    for m, parts in ((1, (2,)), (16, ())):
        kv = bf16(4, 8, 64, 128)
        ints = torch.zeros(m, dtype=torch.int32)
        qkv = torch.empty(*parts, m, 6144)
        rope.qkv_to_cache(
            qkv, kv, kv, torch.empty(64, 128), ints, ints, heads=32, q_norm=bf16(128),
            k_norm=bf16(128),
        )
    rope.context_to_caches(
        bf16(2, 10240), bf16(5, 2, 4, 8, 64, 128), torch.empty(64, 128), longs(2), longs(2),
        k_norms=bf16(5, 128),
    )


def edge_products_all():
    parents, table = bf16(64, 256).requires_grad_(), bf16(151936, 256).requires_grad_()
    edge_products.edge_products(parents, table, longs(64, 32)).sum().backward()


def distillation_all():
    given = bf16(64, 151936), bf16(16, 151936), longs(64), longs(64), torch.empty(64)
    distillation.slot_losses(*given, (("forward_kl", 1.0),), 1.0)
    mixture = (("reverse_kl", 0.5), ("total_variation", 0.3), ("hard_labels", 0.2))
    distillation.slot_losses(*given, mixture, 2.0)


CASES = {
    "experts": (experts_all, (experts, "_route", "_list_pairs", "_expert_product")),
    "fp8": (fp8_all, (fp8_gemm, "_fp8_product")),
    "edges": (edges_all, (edges, "_edge_scores", "_best_chain")),
    "exact": (
        exact_all, (exact_attention, "_attend_committed", "_finish"),
        (tree_build, "_list_ancestors"),
    ),
    "attention": (attention_all, (tree_attention, "_attend", "_merge")),
    "gemm": (gemm_all, (small_gemm, "_product")),
    "trees": (tree_all, (tree_build, "_build", "_pack_ancestors")),
    "commit": (
        commit_all, (commit, "_accept", "_compact", "_advance"), (place, "_place", "_gather"),
    ),
    "lookup": (lookup_all, (lookup, "_look_up")),
    "topk": (
        topk_all, (topk, "_chunk_max", "_chunk_best", "_merge_best"),
        (ranks, "_pack_best", "_merge_packed"),
    ),
    "edge_products": (edge_products_all, (edge_products, "_forward", "_backward")),
    "distillation": (distillation_all, (distillation, "_teacher", "_student")),
    "fusions": (
        fusion_all, (norms, "_add_rms_norm"), (mlp, "_silu_mul"),
        (rope, "_qkv_to_cache", "_context_to_caches"),
    ),
}


# [[kernel, whether it is for Hopper, whether it has Hopper's matrix instruction, whether products
# and sums may be fused], ...]
def compile_case(case, *kernels):
    places = [(module, name) for module, *names in kernels for name in names]
    recorders = [aot.Recorder(getattr(module, name)) for module, name in places]
    for (module, name), recorder in zip(places, recorders):
        setattr(module, name, recorder)
    try:
        case()
    finally:
        for (module, name), recorder in zip(places, recorders):
            setattr(module, name, recorder.kernel)
    found = []
    for recorder in recorders:
        assert recorder.compiled, recorder.kernel
        for compiled in recorder.compiled:
            assert compiled.asm["cubin"], recorder.kernel
            ptx = compiled.asm["ptx"]
            fused = compiled.metadata.enable_fp_fusion or "fma.rn" in ptx
            name = recorder.kernel.__name__
            found.append([name, ".target sm_90a" in ptx, "wgmma" in ptx, fused])
    return found


found = {}
for name, (case, *kernels) in CASES.items():
    try:
        found[name] = compile_case(case, *kernels)
    except Exception:
        found[name] = traceback.format_exc()
print(json.dumps(found))
"""


KERNELS = [
    "attention", "commit", "distillation", "edge_products", "edges", "exact", "experts", "fp8",
    "fusions", "gemm", "lookup", "topk", "trees",
]  # fmt: skip
BITWISE_KERNELS = (
    "_add_rms_norm", "_attend_committed", "_finish", "_qkv_to_cache", "_silu_mul",
)  # fmt: skip
MATRIX_KERNELS = ("_attend", "_attend_committed", "_expert_product", "_fp8_product", "_product")


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """By case: its kernels, or what went wrong; from one process without the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True, text=True, cwd=Path(__file__).resolve().parents[1], env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("kernel", KERNELS)
def test_compiles_for_hopper(compiled, kernel) -> None:
    found = compiled[kernel]
    assert not isinstance(found, str), found[-3000:]
    assert found and all(hopper for _, hopper, _, _ in found)
    # The matrix kernels use Hopper's own matrix instruction, whatever the number of rows: another
    # instruction would sum in another order.
    assert all(wgmma for name, _, wgmma, _ in found if name in MATRIX_KERNELS)


def test_no_kernel_of_the_bitwise_mode_leaves_rounding_to_the_compiler(compiled) -> None:
    """Which products and sums become one instruction differs between a kernel's own loops."""
    fused = {name: fused for found in compiled.values() for name, _, _, fused in found}
    assert {name: fused[name] for name in BITWISE_KERNELS} == dict.fromkeys(BITWISE_KERNELS, False)
    assert fused["_attend"]
