import pytest
import torch
import torch.nn.functional as F

from jetspec.config import parse_config
from jetspec.errors import JetspecError
from jetspec.heads.edges import MarkovEdges, Places
from jetspec.training.blocks import plan_chunks
from jetspec.training.config import LossConfig
from jetspec.training.losses import Candidates, distil, edge_loss, top_k

KINDS = ("forward_kl", "reverse_kl", "total_variation", "hard_labels")
DSPARK = {"hard_labels": 0.1, "total_variation": 0.9}
EVERYTHING = {kind: 0.2 + 0.3 * index for index, kind in enumerate(KINDS)}


def problem(seed=0, slots=13, positions=6, size=8, vocabulary=20):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shared = torch.randint(positions, (slots,), generator=generator).sort().values
    shared = torch.unique(shared, return_inverse=True)[1]
    return {
        "hidden": normal(slots + 4, size).float(),
        "teacher": normal(positions + 3, size).float(),
        "weight": normal(vocabulary, size).float(),
        "slots": torch.randperm(slots + 4, generator=generator)[:slots],
        "teachers": torch.randperm(positions + 3, generator=generator)[: int(shared.max()) + 1],
        "shared": shared,
        "labels": torch.randint(vocabulary, (slots,), generator=generator),
        "weights": torch.rand(slots, generator=generator),
    }


def run(p, config, project=None, **options):
    hidden = p["hidden"].clone().requires_grad_()
    project = project or (lambda h: h @ p["weight"].T)
    chunks = plan_chunks(p["shared"].numpy(), config.chunk_tokens)
    result = distil(
        hidden, p["teacher"], p["slots"], p["teachers"], p["shared"], chunks, p["labels"],
        p["weights"], project, config, **options,
    )  # fmt: skip
    result.loss.backward()
    return result, hidden.grad


def direct(p, config):
    """The same loss, written as the formula over full logits."""
    hidden = p["hidden"].double().requires_grad_()
    t = config.temperature
    z_q = hidden[p["slots"]] @ p["weight"].double().T
    z_p = p["teacher"].double()[p["teachers"][p["shared"]]] @ p["weight"].double().T
    log_q, log_p = (z_q / t).log_softmax(-1), (z_p / t).log_softmax(-1)
    kinds = config.kind if isinstance(config.kind, dict) else {config.kind: 1.0}
    formulas = {
        "forward_kl": t**2 * (log_p.exp() * (log_p - log_q)).sum(-1),
        "reverse_kl": t**2 * (log_q.exp() * (log_q - log_p)).sum(-1),
        "total_variation": t**2 * 0.5 * (log_q.exp() - log_p.exp()).abs().sum(-1),
        "hard_labels": F.cross_entropy(z_q, p["labels"], reduction="none"),
    }
    rows = sum(share * formulas[kind] for kind, share in kinds.items())
    loss = (rows * p["weights"]).sum()
    loss.backward()
    hits = (z_q.argmax(-1) == z_p.argmax(-1)).float()
    return loss, hidden.grad, hits


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("kind", [*KINDS, DSPARK, EVERYTHING], ids=str)
def test_chunked_loss_equals_the_direct_one(kind, temperature):
    config = LossConfig(kind=kind, temperature=temperature, chunk_tokens=4)
    for seed in range(3):
        p = problem(seed)
        result, gradient = run(p, config)
        loss, expected, hits = direct(p, config)
        torch.testing.assert_close(result.loss.double(), loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(result.hits, hits)


@pytest.mark.parametrize("kind", [*KINDS, EVERYTHING], ids=str)
def test_chunk_size_does_not_change_the_loss(kind):
    p = problem()
    results = [run(p, LossConfig(kind=kind, chunk_tokens=size)) for size in (1, 5, 100)]
    for result, gradient in results[1:]:
        torch.testing.assert_close(result.loss, results[0][0].loss)
        torch.testing.assert_close(gradient, results[0][1])


def test_no_more_than_a_chunk_of_vocabulary_rows_exists_at_a_time():
    p, seen = problem(slots=40), []

    def project(hidden):
        seen.append(len(hidden))
        return hidden @ p["weight"].T

    run(p, LossConfig(chunk_tokens=8), project, with_candidates=True)
    assert max(seen) <= 8 and len(seen) == 2 * 5


def test_teacher_is_computed_once_for_slots_that_share_it():
    p, taught = problem(slots=30, positions=3), []
    p["teacher"] = p["teacher"] + 100  # tells teacher rows from slots

    def project(hidden):
        taught.append(len(hidden) if float(hidden.detach().mean()) > 50 else 0)
        return hidden @ p["weight"].T

    run(p, LossConfig(chunk_tokens=100), project)
    assert sum(taught) == len(p["teachers"]) <= 3


@pytest.mark.parametrize("kind", KINDS)
def test_batch_without_slots_gives_zero_gradients(kind):
    p = problem()
    for name in ("slots", "teachers", "shared", "labels", "weights"):
        p[name] = p[name][:0]
    result, gradient = run(p, LossConfig(kind=kind), with_candidates=True)
    assert float(result.loss.detach()) == 0 and not gradient.any()
    assert result.hits.shape == (0,)
    width = LossConfig().edge_candidates
    shapes = [tuple(field.shape) for field in result.candidates]
    assert shapes == [(0, width), (0, width), (0, width), (0,)]


@pytest.mark.parametrize("chunk", [2, 7])
def test_true_token_is_always_among_the_candidates(chunk):
    p = problem(slots=40, positions=30)
    result, _ = run(p, LossConfig(edge_candidates=3, chunk_tokens=chunk), with_candidates=True)
    tokens, log_q, log_p, inserted = result.candidates
    assert tokens.shape == (40, 3)
    assert (tokens == p["labels"][:, None]).any(-1).all()
    z_q = p["hidden"][p["slots"]] @ p["weight"].T
    z_p = p["teacher"][p["teachers"][p["shared"]]] @ p["weight"].T
    torch.testing.assert_close(log_q, z_q.log_softmax(-1).gather(1, tokens))
    torch.testing.assert_close(log_p, z_p.log_softmax(-1).gather(1, tokens))
    best = z_q.topk(3, dim=-1).indices
    kept = (best == p["labels"][:, None]).any(-1)
    assert kept.any() and not kept.all() and torch.equal(inserted, ~kept)
    assert torch.equal(tokens[kept], best[kept]) and torch.equal(tokens[:, :2], best[:, :2])


@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("kind", ["forward_kl", "hard_labels", DSPARK], ids=str)
def test_edge_loss_equals_the_direct_one_and_leaves_the_head_alone(kind, gate, table):
    p, vocabulary, size = problem(vocabulary=20), 20, 8
    config = LossConfig(kind=kind, edge_candidates=4, chunk_tokens=1)
    result, _ = run(p, config, with_candidates=True)
    torch.manual_seed(1)
    edges = MarkovEdges(size, 3, gate=gate)
    for parameter in edges.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    embedding = torch.randn(vocabulary, size)
    parents = torch.randint(vocabulary, p["labels"].shape)
    hidden = p["hidden"][p["slots"]].requires_grad_()
    loss = edge_loss(
        edges, result.candidates, hidden.detach(),
        Places(torch.arange(13), torch.zeros(13).long(), parents, p["labels"], (13, 1)),
        p["weights"],
        lambda ids: embedding[ids], vocabulary if table else 10**6, config,
    )  # fmt: skip
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in edges.parameters()]
    edges.zero_grad()

    tokens, log_q, log_p, inserted = result.candidates
    assert inserted.any() and not inserted.all()
    unit = embedding / embedding.pow(2).mean(-1, keepdim=True).sqrt()
    factors = unit[parents] @ edges.parent_proj.weight.T
    if gate:
        factors = factors * 2 * torch.sigmoid(hidden.detach() @ edges.gate_proj.weight.T)
    children = unit[tokens] @ edges.child_proj.weight.T
    log_s = (log_q + (factors[:, None] * children).sum(-1)).log_softmax(-1)
    target = log_p.softmax(-1)
    formulas = {
        "hard_labels": -log_s[tokens == p["labels"][:, None]],
        "total_variation": 0.5 * (log_s.exp() - target).abs().sum(-1),
        "forward_kl": (target * (target.log() - log_s)).sum(-1),
    }
    shares = kind if isinstance(kind, dict) else {kind: 1.0}
    rows = sum(share * formulas[name] for name, share in shares.items())
    expected = (rows * p["weights"])[~inserted].sum()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    for gradient, parameter in zip(gradients, edges.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-5)
    assert hidden.grad is None


def test_a_token_that_slots_often_miss_is_scored_by_its_share_where_they_offer_it():
    """Token 2 follows half the time, whether a slot offers it (its first two) or not."""
    tokens = torch.tensor([[0, 2], [0, 2], [0, 1], [0, 2]])  # the last had token 1 in its place
    labels, inserted = torch.tensor([0, 2, 0, 2]), torch.tensor([False, False, False, True])
    log_q = torch.tensor([[0.7, 0.3], [0.7, 0.3], [0.7, 0.3], [0.9, 0.1]]).log()
    log_p = torch.where(tokens == labels[:, None], 0.0, -20.0)
    candidates = Candidates(tokens, log_q, log_p, inserted)
    nothing = torch.zeros(4).long()
    torch.manual_seed(0)
    edges = MarkovEdges(1, 2, gate=False, vocab_size=3)
    optimizer = torch.optim.AdamW(edges.parameters(), lr=0.05, weight_decay=0.0)
    for _ in range(150):
        optimizer.zero_grad()
        edge_loss(
            edges, candidates, torch.zeros(4, 1),
            Places(torch.arange(4), nothing, nothing, labels, (4, 1)), torch.ones(4),
            lambda ids: ids[..., None].float(), 3, LossConfig(),
        ).backward()  # fmt: skip
        optimizer.step()
    parent, children = edges.parent_proj.weight[0], edges.child_proj.weight[tokens[0]]
    found = (log_q[0] + children @ parent).softmax(-1)
    assert found[1].item() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("size", [5, 128, 130, 1000])
def test_grouped_top_k_is_top_k(size):
    values = torch.randn(6, size, generator=torch.Generator().manual_seed(size))
    values[0, size // 2] = float("-inf")
    for count in (1, 4, 5):
        best, places = top_k(values, count, group=16)
        expected = values.topk(count, dim=-1)
        assert torch.equal(best, expected.values) and torch.equal(places, expected.indices)


@pytest.mark.parametrize(
    "kind", ["jensen_shannon", {}, {"forward_kl": 0.0}, {"forward_kl": 1.0, "mse": 1.0}], ids=str
)
def test_an_unknown_kind_or_an_empty_share_is_refused(kind):
    with pytest.raises(JetspecError) as caught:
        parse_config({"training": {"loss": {"kind": kind}}})
    assert "training.loss.kind" in str(caught.value) and "\n" not in str(caught.value)


def test_a_mixture_of_one_kind_is_that_kind():
    p = problem()
    alone, mixed = (run(p, LossConfig(kind=k)) for k in ("reverse_kl", {"reverse_kl": 1.0}))
    assert torch.equal(alone[1], mixed[1]) and torch.equal(alone[0].loss, mixed[0].loss)
