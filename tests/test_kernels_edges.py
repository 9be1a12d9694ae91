"""Path scores at the candidates and the likeliest chain, in the interpreter."""

import pytest
import torch

from tests.test_kernels_setup import interpreted

reference = interpreted("kernels.reference")
kernel = interpreted("kernels.edges")

from jetspec.engine.edges import EdgeTables  # noqa: E402
from jetspec.heads.edges import ContextEdges, MarkovEdges, SelectorEdges  # noqa: E402


def lattice(seed: int, batch: int, slots: int, width: int, vocab: int = 50):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.stack(
        [torch.randperm(vocab, generator=generator)[:width] for _ in range(batch * slots)]
    ).view(batch, slots, width)
    best = torch.randn(batch, slots, width, generator=generator).sort(-1, descending=True).values
    lse = best.logsumexp(-1) + torch.rand(batch, slots, generator=generator)
    return tokens, best, lse, torch.randint(vocab, (batch,), generator=generator)


@pytest.mark.parametrize(
    ("gate", "parts", "width", "rank", "dtype"),
    [
        ("none", 0, 3, 4, torch.float32), ("sigmoid", 0, 20, 70, torch.float32),
        ("linear", 3, 32, 64, torch.float32), ("sigmoid", 2, 5, 70, torch.bfloat16),
    ],
)  # fmt: skip
def test_edge_scores_equal_the_reference(gate, parts, width, rank, dtype) -> None:
    tokens, best, lse, anchors = lattice(rank, 2, 3, width)
    parents, children = torch.randn(2, 50, rank).div(rank**0.25).to(dtype)
    gates = None
    if gate != "none":
        gates = torch.randn(*(parts,) * (parts > 0), 6, rank)
    args = (tokens, best, lse, anchors, parents, children, gates)
    ours = kernel.edge_scores(*args, gate=gate)
    tolerance = 2e-5 if dtype == torch.float32 else 0.05  # the interpreter rounds halves up
    assert (ours - reference.edge_scores(*args, gate=gate)).abs().max() < tolerance
    assert ours.max() <= 0
    # A parent's children keep the mass that they have under the slot.
    mass = (best - lse[..., None]).logsumexp(-1)[..., None]
    assert (ours.logsumexp(-1) - mass).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["plain", "gated", "selector", "learned", "learned selector"])
def test_tables_score_as_the_producer_does(kind) -> None:
    torch.manual_seed(1)
    edges = {
        "plain": MarkovEdges(24, 6, gate=False),
        "gated": MarkovEdges(24, 6, gate=True),
        "selector": SelectorEdges(24, 6),
        "learned": MarkovEdges(24, 6, gate=True, vocab_size=50),
        "learned selector": SelectorEdges(24, 6, vocab_size=50),
    }[kind]
    embedding, hidden = torch.randn(50, 24), torch.randn(2, 3, 24)
    tokens, best, lse, anchors = lattice(3, 2, 3, 4)
    tables = EdgeTables.of(edges, embedding)
    assert tables is not None
    gates = None if tables.weight is None else hidden.flatten(0, 1) @ tables.weight.T
    with torch.no_grad():
        ours = tables.scores(tokens, best, lse, anchors, gates)
        log_q = best - lse[..., None]
        theirs = edges.edge_scores(tokens, log_q, anchors, hidden, lambda t: embedding[t])
    assert (ours - theirs).abs().max() < 2e-5
    own = tables.children.data_ptr() == edges.child_proj.weight.data_ptr()
    assert own is kind.startswith("learned")  # learned rows are not copied


def test_producers_whose_factors_need_more_than_a_token_have_no_tables() -> None:
    assert EdgeTables.of(ContextEdges(8, 2, gate=True), torch.randn(9, 8)) is None
    assert EdgeTables.of(None, torch.randn(9, 8)) is None


def test_the_best_chain_follows_each_winner_and_takes_the_lower_rank_of_equals() -> None:
    tokens, *_ = lattice(4, 5, 6, 7)
    edges = torch.randn(5, 6, 7, 7).mul(1.5).round()  # full of ties
    assert torch.equal(kernel.best_chain(tokens, edges), reference.best_chain(tokens, edges))
