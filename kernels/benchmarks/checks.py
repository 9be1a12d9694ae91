"""Every kernel against its reference on the card, and the bits that must not depend on shapes."""

import traceback
from collections.abc import Iterator

import torch

from kernels import reference
from kernels.benchmarks import features
from kernels.benchmarks.attention import Problem
from kernels.benchmarks.inputs import random_edges
from kernels.commit import accept_greedy, compact_kv
from kernels.exact_attention import TAIL, exact_attention
from kernels.norms import add_rms_norm
from kernels.small_gemm import GemmPlan, small_gemm
from kernels.topk import topk_logsumexp
from kernels.tree_attention import Plan
from kernels.tree_build import build_best_first, list_ancestors, pack_ancestors

BF16 = torch.bfloat16


def attention_checks() -> Iterator[tuple[str, float, float]]:
    """(what, error, allowed)."""
    for batch, nodes, context in [(1, 1, 1000), (3, 17, 700), (1, 129, 2100), (2, 600, 333)]:
        problem = Problem(batch, nodes, context)
        problem.cache.prefix.sub_(torch.arange(batch, device="cuda", dtype=torch.int32) * 77)
        yield f"attention {batch}x{nodes} after {context}", problem.error(), 1e-2


def tree_bits(context: int, nodes: int = 129) -> float:
    """Largest difference between the nodes of a tree and the same rows committed, one by one.

    Every node is attended again behind a prefix that ends with its path, alone and under other
    launch shapes.
    """
    problem = Problem(1, nodes, context)
    keys, values = problem.cache.layers[0]
    table, prefix, q = problem.cache.table, problem.cache.prefix, problem.q
    tokens, edges = random_edges(1, 15, 32, path=True)
    tree = build_best_first(tokens, edges, tokens[:, 0, 0], nodes - 1)
    ancestors = list_ancestors(tree.parents, tree.sizes, TAIL)
    places = (prefix[:, None] + tree.depths).flatten().int()
    counts = tree.sizes.int()
    whole = exact_attention(
        q, keys, values, table, prefix, counts, places, ancestors, max_context=context + nodes
    )
    paths = ancestors[0].tolist()
    one, worst = torch.ones_like(counts), 0.0
    for node in range(0, int(tree.sizes), 7):
        path = [step for step in reversed(paths[node]) if step >= 0]
        kv = torch.stack([keys, values])[None]
        steps = torch.tensor([path], device="cuda")
        compact_kv(kv, table, prefix, steps, torch.tensor([len(path)], device="cuda"))
        place = prefix + len(path) - 1
        for plan in (None, Plan(64, 64, 4, 2), Plan(128, 64, 8, 3, True)):
            alone = exact_attention(
                q[:, node : node + 1].contiguous(), kv[0, 0], kv[0, 1], table, place, one, place,
                None, max_context=context + 64, plan=plan,
            )  # fmt: skip
            worst = max(worst, float((alone[0, 0].float() - whole[0, node].float()).abs().max()))
    return worst


def bit_checks() -> Iterator[tuple[str, float, float]]:
    """Largest difference between launches that must agree bit for bit."""
    for context in (20, 3000, 9000):
        yield f"attention bits, trees after {context}", tree_bits(context), 0.0
    w = torch.randn(1024, 4096, device="cuda", dtype=BF16)
    x = torch.randn(200, 4096, device="cuda", dtype=BF16)
    base = small_gemm(x, w, parts=2)
    launches = [
        (1, GemmPlan(16, 64, 128, 4, 4)),
        (16, GemmPlan(16, 128, 64, 4, 5)),
        (33, GemmPlan(64, 128, 128, 4, 3)),
        (64, GemmPlan(64, 64, 64, 4, 5)),
        (77, GemmPlan(128, 128, 64, 8, 4, True)),
        (128, GemmPlan(128, 256, 64, 8, 3)),
    ]
    for m, launch in launches:
        out = small_gemm(x[:m].contiguous(), w, parts=2, plan=launch)
        yield f"product bits, {m} rows, {launch}", float((out - base[:, :m]).abs().max()), 0.0


def exact_checks() -> Iterator[tuple[str, float, float]]:
    """Integer results: the number of cases that differ from the reference."""
    logits = torch.randn(9, 151936, device="cuda").mul(4).round().to(BF16)
    ours, theirs = topk_logsumexp(logits, 32), reference.topk_logsumexp(logits, 32)
    differing = sum(int((a != b).sum()) for a, b in zip(ours[:2], theirs[:2], strict=True))
    yield "top-k with ties", differing, 0
    yield "log-sum-exp", float((ours[2] - theirs[2]).abs().max()), 1e-3
    wrong = 0
    for depth, width, budget in [
        (4, 8, 20),
        (15, 32, 128),
        (7, 32, 1024),
        (40, 5, 256),
        (15, 32, 16),
    ]:
        tokens, edges = random_edges(4, depth, width, path=True)
        edges = (edges * 2).round() / 2  # many equal scores
        anchors = torch.arange(4, device="cuda")
        tree = build_best_first(tokens, edges, anchors, budget)
        expected = reference.build_best_first(tokens.cpu(), edges.cpu(), anchors.cpu(), budget)
        built = (tree.tokens, tree.parents, tree.depths, tree.scores, tree.sizes)
        wrong += sum(not torch.equal(a.cpu(), b) for a, b in zip(built, expected, strict=True))
        parents, sizes = tree.parents.cpu(), tree.sizes.cpu()
        bits = pack_ancestors(tree.parents, tree.sizes, depth).cpu()
        wrong += not torch.equal(bits, reference.pack_ancestors(parents, sizes, depth))
        following = tree.tokens.roll(-3, 1)
        walked = accept_greedy(tree.tokens, tree.parents, tree.sizes, following, depth)
        wanted = reference.accept_greedy(tree.tokens.cpu(), parents, sizes, following.cpu(), depth)
        wrong += sum(not torch.equal(a.cpu(), b) for a, b in zip(walked, wanted, strict=True))
    yield "trees, bits and acceptance with ties", wrong, 0
    kv = torch.randn(5, 2, 24, 8, 64, 128, device="cuda", dtype=BF16)
    table = torch.randperm(24, device="cuda").view(3, 8).int()
    prefix = torch.tensor([120, 64, 311], device="cuda", dtype=torch.int32)
    path = torch.arange(16, device="cuda").mul(torch.tensor([[1], [3], [8]], device="cuda"))
    lengths = torch.tensor([16, 16, 9], device="cuda")
    expected_kv = reference.compact_kv(kv, table, prefix, path, lengths)
    compact_kv(kv, table, prefix, path, lengths)
    yield "compaction", float((kv != expected_kv).sum()), 0
    x, residual = torch.randn(2, 7, 4096, device="cuda", dtype=BF16)
    weight = torch.randn(4096, device="cuda", dtype=BF16)
    pair = zip(
        add_rms_norm(x, residual, weight, 1e-6),
        reference.add_rms_norm(x, residual, weight, 1e-6),
        strict=True,
    )
    yield "norm", max(float((a.float() - b.float()).abs().max()) for a, b in pair), 0.07


def run() -> list[dict[str, object]]:
    """All checks; each record says what was compared, the error, and whether it passed."""
    out = []
    for check in (attention_checks, exact_checks, bit_checks, features.checks):
        try:
            for what, error, allowed in check():
                out.append({"check": what, "error": error, "passed": bool(error <= allowed)})
        except Exception:  # the tables still run; the command fails
            out.append({"check": check.__name__, "error": traceback.format_exc(), "passed": False})
    return out
