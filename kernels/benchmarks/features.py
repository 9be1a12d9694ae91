"""The bitwise mode's attention, eight-bit weights, path scores, experts and prompt lookup: checks
and times."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kernels import reference
from kernels.benchmarks.attention import Problem
from kernels.benchmarks.inputs import random_edges
from kernels.benchmarks.timing import cold_copies, relative_error, time_us
from kernels.edges import best_chain, edge_scores
from kernels.exact_attention import TAIL, exact_attention
from kernels.experts import first_product, list_pairs, route, second_product
from kernels.fp8_gemm import fp8_gemm
from kernels.lookup import look_up
from kernels.mlp import silu_mul
from kernels.small_gemm import small_gemm
from kernels.tree_build import build_best_first, list_ancestors

BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn


def _normal(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16) * scale


def _eight_bits(n: int, k: int) -> tuple[Tensor, Tensor]:
    exponents = torch.randint(-14, -9, (n,), device="cuda", dtype=torch.int8)
    return (torch.randn(n, k, device="cuda") * 90).clamp(-448, 448).to(E4M3), exponents


def _lattice(batch: int, rank: int = 256, vocab: int = 151936) -> tuple[Tensor, ...]:
    """Arguments of `edge_scores` for 15 slots of 32 candidates and a gate of 8 partial sums."""
    tokens = torch.randint(vocab, (batch, 15, 32), device="cuda")
    best = torch.randn(batch, 15, 32, device="cuda").sort(-1, descending=True).values
    lse = best.logsumexp(-1) + 0.1
    anchors = torch.randint(vocab, (batch,), device="cuda")
    tables = [_normal(vocab, rank, scale=rank**-0.25) for _ in range(2)]
    return tokens, best, lse, anchors, *tables, torch.randn(8, batch * 15, rank, device="cuda") / 3


def _mixture(experts: int, hidden: int, inner: int) -> tuple[Tensor, Tensor]:
    gate_up = _normal(experts, 2 * inner, hidden, scale=hidden**-0.5)
    return gate_up, _normal(experts, hidden, inner, scale=inner**-0.5)


def mixture(
    x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, choices: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(what every choice adds [C, T, d], experts, weights)."""
    ids, weights = route(logits, choices, normalise=True)
    pairs, counts = list_pairs(ids, len(down))
    both = first_product(x, gate_up, pairs, counts, weights)
    return second_product(silu_mul(both), down, pairs, counts, weights), ids, weights


def _texts(batch: int, tokens: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments of `look_up` for random texts."""
    history = torch.randint(vocab, (batch, tokens + 64), device="cuda", dtype=torch.int32)
    prefix = torch.full((batch,), tokens - 1, device="cuda", dtype=torch.int32)
    return history, prefix, torch.full((batch,), 15, device="cuda")


def checks() -> Iterator[tuple[str, float, float]]:
    """(what, error, allowed)."""
    values, exponents = _eight_bits(1024, 4096)
    written = values.to(BF16) * torch.exp2(exponents.float()).to(BF16)[:, None]
    x = _normal(200, 4096)
    for m in (1, 16, 33, 77, 200):
        ours = fp8_gemm(x[:m].contiguous(), values, exponents, parts=2)
        error = relative_error(ours.sum(0), reference.fp8_gemm(x[:m], values, exponents))
        yield f"eight-bit product, {m} rows", error, 1e-2
        same = small_gemm(x[:m].contiguous(), written, parts=2)
        yield f"eight-bit product bits, {m} rows", float((ours - same).abs().max()), 0.0
    lattice = _lattice(3)
    scores = edge_scores(*lattice, gate="sigmoid")
    expected = reference.edge_scores(*lattice, gate="sigmoid")
    yield "edge scores", float((scores - expected).abs().max()), 0.1
    chains = best_chain(lattice[0], scores) != reference.best_chain(lattice[0], scores)
    yield "best chains", float(chains.sum()), 0.0
    wrong = 0
    for tokens, vocab in ((1, 9), (700, 2), (5000, 20), (32768, 151936), (32768, 40)):
        texts = _texts(16, tokens, vocab)
        texts[1].sub_(torch.arange(16, device="cuda")).clamp_(min=0)
        pair = (f(*texts, ngram=3, depth=15) for f in (look_up, reference.look_up))
        wrong += sum(not torch.equal(a, b) for a, b in zip(*pair, strict=True))
    yield "prompt lookup", wrong, 0.0
    gate_up, down = _mixture(16, 256, 128)
    x, logits = _normal(129, 256), _normal(129, 16)
    found, ids, weights = mixture(x, logits, gate_up, down, 4)
    theirs = reference.experts(x.cpu(), gate_up.cpu(), down.cpu(), ids.cpu(), weights.cpu())
    yield "experts", relative_error(found.cpu().sum(0), theirs.sum(0)), 2e-2
    for rows in (1, 17, 64):
        part, _, _ = mixture(x[:rows], logits[:rows], gate_up, down, 4)
        yield f"expert bits, {rows} rows", float((part - found[:, :rows]).abs().max()), 0.0


def exact_rows() -> Iterator[dict[str, object]]:
    """`exact_attention` beside `tree_attention`, a layer of Qwen3-8B, batch 1."""
    for nodes in (1, 64, 128, 256):
        for context in (1024, 8192, 32768):
            problem = Problem(1, nodes, context)
            tokens, edges = random_edges(1, 15, 32, path=True)
            tree = build_best_first(tokens, edges, tokens[:, 0, 0], max(nodes - 1, 1))
            parents, depths, counts = tree.parents, tree.depths, tree.sizes.int()
            if nodes == 1:
                parents, depths, counts = parents[:, :1], depths[:, :1], counts.clamp(max=1)
            ancestors = list_ancestors(parents.contiguous(), counts.long(), TAIL)
            prefix, table = problem.cache.prefix, problem.cache.table
            places = (prefix[:, None] + depths).flatten().int()
            calls = [
                partial(
                    exact_attention, problem.q, keys, values, table, prefix, counts, places,
                    ancestors, max_context=context + nodes,
                )
                for keys, values in problem.cache.layers
            ]  # fmt: skip
            yield {
                "nodes": nodes,
                "context": context,
                "us": time_us(calls),
                "tree_attention_us": time_us(problem.calls(None)),
            }


def fp8_rows() -> Iterator[dict[str, object]]:
    """One gate-up weight of Qwen3-8B in eight bits and in bf16."""
    n, k = 24576, 4096
    weights = [_eight_bits(n, k) for _ in range(cold_copies(n * k))]
    wide = [_normal(n, k) for _ in range(cold_copies(2 * n * k))]
    for m in (1, 16, 64, 128):
        x = _normal(m, k)
        yield {
            "m": m,
            "us": time_us([partial(fp8_gemm, x, *pair) for pair in weights]),
            "bf16_us": time_us([partial(small_gemm, x, w) for w in wide]),
            "floor_us": n * k / 4.28e6,
        }


def edge_rows() -> Iterator[dict[str, object]]:
    """Path scores of 15 slots of 32 candidates, and the likeliest chain."""
    for batch in (1, 16):
        lattice = _lattice(batch)
        scores = partial(edge_scores, *lattice, gate="sigmoid")
        chain = partial(best_chain, lattice[0], scores())
        yield {"batch": batch, "us": time_us([scores] * 4), "chain_us": time_us([chain] * 4)}


def lookup_rows() -> Iterator[dict[str, object]]:
    """15 tokens copied from behind the last of the longest matches of up to three."""
    for batch in (1, 16):
        for tokens in (1024, 8192, 32768):
            texts = [_texts(batch, tokens, 8) for _ in range(4)]
            yield {
                "batch": batch,
                "tokens": tokens,
                "us": time_us([partial(look_up, *text, ngram=3, depth=15) for text in texts]),
                "floor_us": batch * tokens * 4 / 4.28e6,
            }


def expert_rows() -> Iterator[dict[str, object]]:
    """A layer of Qwen3-30B-A3B's experts: 128, 8 a token, without the router's product."""
    gate_up, down = _mixture(128, 2048, 768)
    for m in (1, 17, 65, 129, 1024):
        x, logits = _normal(m, 2048), _normal(m, 128)
        reached = len(route(logits, 8, normalise=True)[0].unique())
        yield {
            "m": m,
            "us": time_us([partial(mixture, x, logits, gate_up, down, 8)] * 4),
            "floor_us": reached * 3 * 768 * 2048 * 2 / 4.28e6,
        }
