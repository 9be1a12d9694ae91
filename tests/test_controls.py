"""The two controls of path scores: weights that cannot see the parent, and an exact normaliser."""

import pytest
import torch

from jetspec.config import parse_config
from jetspec.engine.model import EngineHead
from jetspec.errors import JetspecError
from jetspec.heads.edges import Places
from jetspec.heads.registry import load_head, save_head
from jetspec.training.blocks import plan_chunks
from jetspec.training.config import LossConfig
from jetspec.training.exact_edges import exact_edge_loss
from tests.answers import greedy_samples
from tests.test_paths import context, drafted, gradients, stirred
from tests.tiny import tiny_head, tiny_target

EXACT = {"edge_rank": 4, "edge_normaliser": "vocabulary"}


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3", spread=0.08)


def weights_of(head) -> int:
    return sum(p.numel() for p in head.parameters())


@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
def test_the_control_has_as_many_weights_and_equal_rows(target, mask):
    control = stirred(tiny_head(target, mask, edges="context", edge_rank=4))
    markov = stirred(tiny_head(target, mask, edge_rank=4))
    assert weights_of(control) == weights_of(markov)
    draft, bare = drafted(target, control), drafted(target, control).without_edges()
    assert torch.equal(draft.edge_scores, draft.edge_scores[:, :, :1].expand_as(draft.edge_scores))
    moved = (draft.edge_scores - bare.edge_scores).abs().amax((2, 3))
    assert (moved > 0.01).all()  # it does score, slot by slot
    rows = drafted(target, markov).edge_scores
    assert not torch.allclose(rows[:, 1:], rows[:, 1:, :1].expand_as(rows[:, 1:]))


def test_a_wider_mlp_matches_the_weights_by_settings_alone(target):
    path = tiny_head(target, num_layers=2, edge_rank=6)
    wider = tiny_head(target, num_layers=2, intermediate_size=path.config.intermediate_size + 3)
    assert weights_of(path) == weights_of(wider)


@pytest.mark.parametrize("name", ["markov", "selector", "context"])
def test_the_exact_normaliser_is_a_softmax_over_the_whole_vocabulary(target, name):
    head = stirred(tiny_head(target, edges=name, **EXACT))
    seen = []
    cache, anchors = context(target, head)

    def logits(hidden):
        seen.append((hidden, target.logits(hidden)))
        return seen[-1][1]

    draft = head.draft(cache, anchors, target.embed, logits, 5)
    hidden, slots = seen[0]
    every = torch.arange(target.vocab_size).expand(2, head.depth, -1)
    whole = slots.gather(2, every).log_softmax(-1)
    parents, children = head.edges.factors(every, whole, anchors, hidden, target.embed)
    scores = (slots[:, :, None] + parents @ children.transpose(2, 3)).log_softmax(-1)
    for b in range(2):
        for t in range(head.depth):
            for i, parent in enumerate(draft.tokens[b, t - 1] if t else draft.tokens[b, 0]):
                expected = scores[b, t, parent if t else 0, draft.tokens[b, t]]
                torch.testing.assert_close(
                    draft.edge_scores[b, t, i], expected, rtol=1e-4, atol=1e-4
                )
    mass = draft.edge_scores.exp().sum(-1)
    assert (mass < 1).all() and float(mass.std()) > 0  # what a branch leaves to other tokens


@pytest.mark.parametrize(
    ("kind", "edge_rows"),
    [("forward_kl", "projected"), ("hard_labels", "projected"), ("total_variation", "projected"),
     ("forward_kl", "learned")],
)  # fmt: skip
def test_the_exact_loss_and_its_gradients_are_those_of_full_logits(target, kind, edge_rows):
    torch.manual_seed(0)
    edges = stirred(tiny_head(target, edge_rows=edge_rows, **EXACT)).edges
    slots, positions = 11, 4
    shared = torch.sort(torch.randint(positions, (slots,))).values
    shared = torch.unique(shared, return_inverse=True)[1]
    hidden, teacher = torch.randn(slots, 32), torch.randn(1, positions, 32)
    labels, parents = torch.randint(64, (2, slots))
    weights = torch.rand(slots)
    batch = type("Batch", (), {})()
    batch.shared, batch.teachers = shared, torch.arange(int(shared.max()) + 1)
    batch.chunks = plan_chunks(shared.numpy(), 3)
    nothing = torch.zeros(slots).long()
    places = Places(torch.arange(slots), nothing, parents, labels, (slots, 1))
    config = LossConfig(kind=kind)
    loss = exact_edge_loss(edges, hidden, teacher, batch, places, weights, target, config)
    loss.backward()
    found = [p.grad.clone() for p in edges.parameters()]
    edges.zero_grad()

    table = edges.child_proj.table(target.embed, target.vocab_size)
    rows = edges.behind(parents, hidden, target.embed)
    student = target.logits(hidden) + rows @ table.T
    log_p = target.logits(teacher[0])[shared].log_softmax(-1)
    log_q = student.log_softmax(-1)
    formula = {
        "forward_kl": (log_p.exp() * (log_p - log_q)).sum(-1),
        "hard_labels": -log_q.gather(1, labels[:, None])[:, 0],
        "total_variation": 0.5 * (log_q.exp() - log_p.exp()).abs().sum(-1),
    }
    expected = (formula[kind] * weights).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    for gradient, parameter in zip(found, edges.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-5)


def test_exact_path_scores_never_bend_the_head(target):
    samples = greedy_samples(target, count=4, tokens=14, stop_token_ids=())
    head = stirred(tiny_head(target, block_size=5, **EXACT))
    plain = tiny_head(target, block_size=5)
    plain.load_state_dict(head.state_dict(), strict=False)
    expected, _ = gradients(target, plain, samples)
    found, sums = gradients(target, head, samples)
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-5, atol=1e-7)
    assert all(found[key].any() for key in found.keys() - expected.keys()) and sums[1] > 0


@pytest.mark.parametrize("more", [EXACT, {"edges": "context", "edge_rank": 4}])
def test_controls_survive_their_files(target, tmp_path, more):
    head = stirred(tiny_head(target, **more))
    save_head(head, str(tmp_path), target_fingerprint=target.fingerprint)
    loaded = load_head(str(tmp_path))
    assert loaded.config == head.config
    ours, theirs = drafted(target, head), drafted(target, loaded)
    torch.testing.assert_close(ours.edge_scores, theirs.edge_scores)


def test_a_normaliser_that_nothing_can_give_is_refused(target):
    for head in ({"edge_rank": 0}, {"edges": "lattice", "edge_rank": 4}):
        with pytest.raises(JetspecError, match="edge_normaliser: vocabulary: needs"):
            parse_config({"head": {**head, "edge_normaliser": "vocabulary"}})
    with pytest.raises(JetspecError, match="reference loop"):
        EngineHead(tiny_head(target, **EXACT), max_rows=8, products=None)


def test_the_default_normaliser_is_in_no_key():
    one, other = (parse_config({"head": h}).head for h in ({"edge_rank": 4}, EXACT))
    assert "edge_normaliser" not in one.model_dump() and "edge_normaliser" in other.model_dump()
