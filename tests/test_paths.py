"""Path conditioning: edge producers, the convolution in the block, and the second pass."""

import pytest
import torch

from jetspec.config import parse_config
from jetspec.decode import decode
from jetspec.errors import JetspecError
from jetspec.evaluation.replay import mean_tau, replay_tau
from jetspec.heads.config import HeadConfig
from jetspec.heads.doctor import slot_logits_both_ways
from jetspec.heads.edges import EdgeProducer, Places
from jetspec.heads.exports import export_head
from jetspec.heads.layers import BlockConvolution, block_shift, parent_rows
from jetspec.heads.producers import EDGES
from jetspec.heads.registry import load_head, save_head
from jetspec.training.blocks import attention_mask
from jetspec.training.config import LossConfig, TrainingConfig
from jetspec.training.corpus import BatchMaker, Corpus
from jetspec.training.hidden_cache import OnlineTeacher
from jetspec.training.loop import train
from jetspec.training.stage import distil_head, starting_head
from jetspec.training.step import Distiller
from jetspec.trees.build import build_tree
from jetspec.trees.config import TreeConfig
from tests.answers import greedy_samples
from tests.tiny import tiny_head, tiny_target

PRODUCERS = {
    "markov": {"edges": "markov", "edge_rank": 4},
    "selector": {"edges": "selector", "edge_rank": 4},
    "lattice": {"edges": "lattice", "edge_rank": 4, "edge_width": 32, "edge_layers": 1},
    "context": {"edges": "context", "edge_rank": 4},
    "learned markov": {"edges": "markov", "edge_rank": 4, "edge_rows": "learned"},
    "learned selector": {"edges": "selector", "edge_rank": 4, "edge_rows": "learned"},
    "learned context": {"edges": "context", "edge_rank": 4, "edge_rows": "learned"},
}
SECOND = {
    "shared": {"rescore": "shared", "rescore_nodes": 40},
    "own": {"rescore": "own", "rescore_nodes": 40},
}
CONV = {"conv_rank": 3}
EVERY = {
    **PRODUCERS,
    **SECOND,
    "conv": CONV,
    "conv and selector": CONV | PRODUCERS["selector"],
    "conv and shared": CONV | SECOND["shared"],
    "lattice and own": PRODUCERS["lattice"] | SECOND["own"],
}


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3", spread=0.08)


@pytest.fixture(scope="module")
def samples(target):
    return greedy_samples(target, count=10, tokens=14, stop_token_ids=())


def stirred(head, std=0.3):
    """The head with everything that starts at zero set at random."""
    torch.manual_seed(1)
    for module in head.modules():
        if isinstance(module, BlockConvolution):
            torch.nn.init.normal_(module.up_proj.weight, std=std)
            torch.nn.init.normal_(module.taps, std=std)
    for part in (head.edges, head.rescorer):
        for parameter in part.parameters() if part is not None else ():
            torch.nn.init.normal_(parameter, std=std)
    return head


def context(target, head, rows=2, length=6):
    """A cache of random states, and anchors."""
    generator = torch.Generator().manual_seed(0)
    taps = torch.randn(rows, length, len(head.taps) * target.hidden_size, generator=generator)
    cache = head.new_cache(rows)
    positions = torch.arange(length).expand(rows, -1)
    head.extend(cache, taps, positions, torch.ones(rows, length, dtype=torch.bool))
    return cache, torch.arange(7, 7 + 2 * rows, 2)


def drafted(target, head, width=5, depth=None):
    cache, anchors = context(target, head)
    return head.draft(cache, anchors, target.embed, target.logits, width, depth)


def lattice(batch=2, depth=4, width=5, size=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.stack(
        [torch.randperm(64, generator=generator)[:width] for _ in range(batch * depth)]
    ).view(batch, depth, width)
    log_q = torch.randn(batch, depth, width + 2, generator=generator).log_softmax(-1)[..., :width]
    hidden = torch.randn(batch, depth, size, generator=generator)
    return tokens, log_q.sort(descending=True).values, torch.tensor([7, 9])[:batch], hidden


def producer(name):
    config = HeadConfig(**PRODUCERS[name])
    edges = EDGES[config.producer].of(config, 32, 64)
    torch.manual_seed(0)
    for parameter in edges.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return edges


@pytest.mark.parametrize("name", [name for name in EVERY if "shared" not in name])
def test_untrained_parts_leave_slot_scores_alone(target, name):
    head = tiny_head(target, **EVERY[name])
    plain = tiny_head(target)
    plain.load_state_dict(head.state_dict(), strict=False)
    config = TreeConfig(budget=20, width=5)
    anchors = context(target, head)[1]
    ours, slot = (build_tree(drafted(target, h), anchors, config) for h in (head, plain))
    assert torch.equal(ours.tokens, slot.tokens) and torch.equal(ours.parents, slot.parents)
    torch.testing.assert_close(ours.scores, slot.scores)


@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
@pytest.mark.parametrize("name", PRODUCERS)
def test_edges_are_the_products_of_their_factors_over_the_candidates(target, name, mask):
    head = stirred(tiny_head(target, mask, **PRODUCERS[name]))
    draft = drafted(target, head)
    edges, head.edges = head.edges, None
    slot = drafted(target, head)
    assert torch.equal(draft.tokens, slot.tokens)
    tokens, log_q, anchors, hidden = lattice()
    parents, children = edges.factors(tokens, log_q, anchors, hidden, target.embed)
    scores = edges.edge_scores(tokens, log_q, anchors, hidden, target.embed)
    moved = 0.0
    for b in range(2):
        for t in range(4):
            for i in range(5):
                bias = torch.stack([parents[b, t, i] @ children[b, t, j] for j in range(5)])
                expected = (log_q[b, t] + bias).log_softmax(-1) + log_q[b, t].logsumexp(-1)
                torch.testing.assert_close(scores[b, t, i], expected, rtol=1e-4, atol=1e-4)
                moved = max(moved, float((expected - log_q[b, t]).abs().max().detach()))
    assert moved > 0.05 and scores.max() <= 0
    assert torch.equal(scores[:, 0, :1].expand(-1, 5, -1), scores[:, 0])  # the anchor's row


def test_selector_scores_are_its_formula(target):
    edges = producer("selector")
    tokens, log_q, anchors, hidden = lattice()
    parents, children = edges.factors(tokens, log_q, anchors, hidden, target.embed)

    def unit(token):
        row = target.embed(token)
        return row / (row.pow(2).mean() + torch.finfo(torch.float32).eps).sqrt()

    for t in range(4):
        parent = anchors[0] if t == 0 else tokens[0, t - 1, 2]
        a, h = edges.parent_proj(unit(parent)), edges.gate_proj(hidden[0, t])
        torch.testing.assert_close(parents[0, t, 2], a * h, rtol=1e-4, atol=1e-5)
        b = edges.child_proj(unit(tokens[0, t, 3]))
        torch.testing.assert_close(children[0, t, 3], b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PRODUCERS)
def test_factors_see_their_own_and_earlier_slots_only(target, name):
    edges = producer(name)
    tokens, log_q, anchors, hidden = lattice()
    whole = edges.edge_scores(tokens, log_q, anchors, hidden, target.embed)
    cut = edges.edge_scores(tokens[:, :2], log_q[:, :2], anchors, hidden[:, :2], target.embed)
    torch.testing.assert_close(whole[:, :2], cut, rtol=1e-4, atol=1e-5)
    alone = edges.edge_scores(tokens[1:], log_q[1:], anchors[1:], hidden[1:], target.embed)
    torch.testing.assert_close(whole[1:], alone, rtol=1e-4, atol=1e-5)


def test_lattice_knows_what_else_the_slots_offer_but_not_their_order(target):
    edges = producer("lattice")
    tokens, log_q, anchors, hidden = lattice()
    base = edges.edge_scores(tokens, log_q, anchors, hidden, target.embed)
    order = torch.tensor([3, 1, 4, 0, 2])
    tokens[:, 1], log_q[:, 1] = tokens[:, 1, order], log_q[:, 1, order]
    shuffled = edges.edge_scores(tokens, log_q, anchors, hidden, target.embed)
    torch.testing.assert_close(shuffled[:, 1], base[:, 1][..., order], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(shuffled[:, 2], base[:, 2][:, order], rtol=1e-4, atol=1e-5)
    tokens[:, 0, 4] = (tokens[:, 0, 4] + 1) % 64
    offered = edges.edge_scores(tokens, log_q, anchors, hidden, target.embed)
    assert not torch.allclose(offered[:, 1, 0], shuffled[:, 1, 0])


@pytest.mark.parametrize("width", [5, 12])  # with 12 candidates every token is projected
@pytest.mark.parametrize("name", PRODUCERS)
def test_teacher_forcing_scores_the_row_of_the_true_parent(target, name, width):
    edges = producer(name)
    tokens, log_q, anchors, hidden = lattice(depth=4, width=width)
    labels = tokens[:, :, 3]  # the true token is the fourth candidate of every slot
    parents, children = edges.factors(tokens, log_q, anchors, hidden, target.embed)
    bias = parents @ children.transpose(2, 3)
    kept = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()  # an answer ends inside its block
    order = torch.tensor([4, 0, 3, 5, 1, 2])
    block, depth = (index[order] for index in kept.nonzero().unbind(1))
    before = torch.cat([anchors[:, None], labels[:, :-1]], dim=1)
    shape = 12, 4  # ten blocks that carry no slot
    places = Places(block + 10, depth, before[block, depth], labels[block, depth], shape)
    forced = edges.teacher_forced(
        tokens[block, depth], log_q[block, depth], hidden[block, depth], places, target.embed,
        target.vocab_size,
    )  # fmt: skip
    expected = torch.stack([bias[b, d, 3] for b, d in zip(block, depth, strict=True)])
    torch.testing.assert_close(forced(slice(0, 6)), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(forced(slice(2, 4)), expected[2:4], rtol=1e-4, atol=1e-5)
    general = EdgeProducer.teacher_forced(
        edges, tokens[block, depth], log_q[block, depth], hidden[block, depth], places,
        target.embed, target.vocab_size,
    )  # fmt: skip
    torch.testing.assert_close(general(slice(0, 6)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["lattice", "markov"])
def test_gradients_are_the_same_through_a_table_of_all_tokens(target, name):
    edges = producer(name)
    tokens, log_q, _, hidden = lattice(width=12)
    tokens, log_q, hidden = (x.flatten(0, 1) for x in (tokens, log_q, hidden))
    slots = torch.arange(8)
    places = Places(slots // 4, slots % 4, tokens[:, 1].roll(1), tokens[:, 1], (2, 4))
    found = []
    for vocab_size in (64, 10**6):
        edges.zero_grad()
        scores = edges.teacher_forced(tokens, log_q, hidden, places, target.embed, vocab_size)
        (scores(slice(0, 8)) * log_q).sum().backward()
        found.append([parameter.grad.clone() for parameter in edges.parameters()])
    for one, other in zip(*found, strict=True):
        assert one.any()
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def gradients(target, head, samples, weight=1.0):
    corpus = Corpus.from_samples(samples, 64)
    config = TrainingConfig(anchors=6, sequence_length=64)
    maker = BatchMaker(corpus, config, head.config.block_size, fixed_shape=False)
    rows = [(0,), (1,)]
    batch = maker.make(rows, [maker.draw(0, row) for row in rows])
    head.zero_grad()
    loss, sums = Distiller(head, target, LossConfig(chunk_tokens=20, edge_weight=weight))(
        batch, *OnlineTeacher(target, head.taps)(batch)
    )
    loss.backward()
    return {name: p.grad for name, p in head.named_parameters()}, sums


@pytest.mark.parametrize("name", [*PRODUCERS, "own", "lattice and own"])
def test_path_scores_never_bend_the_head_they_correct(target, samples, name):
    head = stirred(tiny_head(target, block_size=5, **EVERY[name]))
    plain = tiny_head(target, block_size=5)
    plain.load_state_dict(head.state_dict(), strict=False)
    expected, _ = gradients(target, plain, samples)
    found, sums = gradients(target, head, samples)
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-5, atol=1e-7)
    assert all(found[key].any() for key in found.keys() - expected.keys())
    assert sums[1] > 0


def test_shared_second_pass_trains_the_head_itself(target, samples):
    head = tiny_head(target, block_size=5, **SECOND["shared"])
    plain = tiny_head(target, block_size=5)
    assert head.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(head.state_dict())
    slot, _ = gradients(target, plain, samples)
    both, _ = gradients(target, head, samples)
    twice, _ = gradients(target, head, samples, weight=2.0)
    for key in slot:
        added = both[key] - slot[key]
        assert added.any()
        torch.testing.assert_close(twice[key] - slot[key], 2 * added, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("format", ["saved", "jetspec", "speculators", "dspark"])
def test_parts_round_trip(target, tmp_path, name, format):
    head = stirred(tiny_head(target, **EVERY[name]))
    if format == "saved":
        save_head(head, str(tmp_path), target_fingerprint=target.fingerprint)
    elif format != "jetspec" and "conv" in name:
        with pytest.raises(JetspecError, match=r"conv_rank: 3: other readers"):
            export_head(head, str(tmp_path), target, format=format, dtype="fp32")
        return
    else:
        export_head(head, str(tmp_path), target, format=format, dtype="fp32")
    loaded = load_head(str(tmp_path))
    assert loaded.config == head.config
    state = loaded.state_dict()
    assert state.keys() == head.state_dict().keys()
    assert all(torch.equal(state[key], tensor) for key, tensor in head.state_dict().items())


def test_reader_of_format_a_without_the_convolution_meets_another_architecture(target, tmp_path):
    from jetspec.storage import read_json

    for rank, name in ((0, "DFlashDraftModel"), (3, "JetSpecConvDraftModel")):
        directory = str(tmp_path / name)
        save_head(tiny_head(target, conv_rank=rank), directory, target_fingerprint="x")
        assert read_json(directory + "/config.json")["architectures"] == [name]


@pytest.mark.parametrize(
    ("name", "builder"),
    [*((name, builder) for name in EVERY for builder in ("chain", "best_first")),
     ("selector", "algorithm1"), ("own", "algorithm1")],
)  # fmt: skip
def test_decoding_is_lossless_and_replay_counts_its_rounds(target, samples, name, builder):
    head = stirred(tiny_head(target, block_size=5, **EVERY[name]))
    chosen = samples[:2]
    starts = [sample.loss_mask.index(1) for sample in chosen]
    prompts = [s.input_ids[:start] for s, start in zip(chosen, starts, strict=True)]
    tree = TreeConfig(builder=builder, budget=12, width=6)
    result = decode(
        target, prompts, drafter=head.drafter(target, width=6), tree=tree, max_new_tokens=14,
        stop_token_ids=(),
    )  # fmt: skip
    for ours, truth, start in zip(result.generations, chosen, starts, strict=True):
        assert ours.tokens == truth.input_ids[start:]
    replays = replay_tau(target, head, chosen, tree)
    assert [r.rounds for r in replays] == [len(g.rounds) for g in result.generations]


@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
def test_convolution_drafts_as_it_was_trained(target, mask):
    head = stirred(tiny_head(target, mask, **CONV))
    trained, found, _ = slot_logits_both_ways(head, target)
    torch.testing.assert_close(trained, found, rtol=1e-4, atol=1e-4)
    plain = tiny_head(target, mask)
    plain.load_state_dict(head.state_dict(), strict=False)
    assert not torch.allclose(slot_logits_both_ways(plain, target)[0], trained, atol=1e-2)


def test_convolution_mixes_the_slot_before_and_no_other_block():
    conv = BlockConvolution(6, 2)
    conv.reset()
    x = torch.randn(1, 6, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(conv(x, block_shift(3)), x)
    torch.nn.init.normal_(conv.up_proj.weight)
    torch.nn.init.normal_(conv.taps)
    mixed = conv(x, block_shift(3))
    for row in range(6):
        taps = conv.up_proj(torch.nn.functional.silu(conv.down_proj(x[0, row]))) + conv.taps
        before = torch.zeros(6) if row % 3 == 0 else x[0, row - 1]
        expected = x[0, row] + taps[:6] * x[0, row] + taps[6:] * before
        torch.testing.assert_close(mixed[0, row], expected)
    chain = torch.tensor([[-1, 0, 1, -1, 3, 4]])
    assert torch.equal(conv(x, parent_rows(chain)), mixed)


@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
@pytest.mark.parametrize("name", ["shared", "own", "conv and shared", "lattice and own"])
def test_second_pass_scores_each_node_by_its_own_path_as_in_training(target, name, mask):
    """Brute force: every path of the tree alone, as a training block of true tokens."""
    head = stirred(tiny_head(target, mask, block_size=5, **EVERY[name]))
    length = 6
    generator = torch.Generator().manual_seed(0)
    taps = torch.randn(2, length, len(head.taps) * target.hidden_size, generator=generator)
    cache, anchors = context(target, head)
    tree = head.draft(cache, anchors, target.embed, target.logits, 2)
    tree.validate()
    assert tree.sizes.tolist() == [31, 31] and int(tree.depths.max()) == 4
    places, positions = torch.tensor([[length]]), torch.arange(length)[None]
    slot_positions = torch.arange(length, length + 5)[None]
    fused = head.fuse(taps)
    for row in range(2):
        batch = Blocks(places, torch.zeros_like(places), length, 5)
        ids = torch.full((1, 5), head.mask_token_id)
        ids[0, 0] = anchors[row]
        arguments = fused[row : row + 1], positions
        hidden = head(
            *arguments, target.embed(ids), slot_positions, batch.mask(causal=mask == "causal")
        )
        for node in range(1, int(tree.sizes[row]), 3):
            path, above = [], node
            while above >= 0:
                path.insert(0, int(tree.tokens[row, above]))
                above = int(tree.parents[row, above])
            padded = torch.tensor([path + [0] * (5 - len(path))])
            states = head.true_hidden(
                *arguments, target.embed(padded), slot_positions, batch.mask(causal=True), hidden
            )
            log_q = target.logits(states[0]).log_softmax(-1)
            expected = sum(float(log_q[k, path[k + 1]]) for k in range(len(path) - 1))
            assert float(tree.scores[row, node]) == pytest.approx(expected, rel=1e-3, abs=1e-3)


class Blocks:
    """What `attention_mask` reads of a batch."""

    def __init__(self, anchors, starts, length, block_size):
        self.anchors, self.starts, self.block_size = anchors, starts, block_size
        self.input_ids = torch.zeros(1, length, dtype=torch.long)

    def mask(self, *, causal):
        return attention_mask(self, causal=causal)


def test_second_pass_depends_on_the_whole_branch(target):
    head = stirred(tiny_head(target, **SECOND["own"]))
    tree = drafted(target, head, width=4)
    # Nodes with the same token and the same parent's token, but other grandparents.
    found = {}
    for node in range(1, int(tree.sizes[0])):
        parent = int(tree.parents[0, node])
        if tree.depths[0, node] < 2:
            continue
        key = (int(tree.depths[0, node]), int(tree.tokens[0, parent]), int(tree.tokens[0, node]))
        found.setdefault(key, []).append(float(tree.scores[0, node] - tree.scores[0, parent]))
    pairs = [terms for terms in found.values() if len(terms) > 1]
    assert pairs and all(max(terms) - min(terms) > 1e-4 for terms in pairs)


def settings(**changes):
    return TrainingConfig(
        **{
            "anchors": 32, "sequence_length": 32, "batch_size": 8, "micro_batch_size": 8,
            "epochs": 6, "learning_rate": 5e-3, "log_every": 1, "heldout_fraction": 0.2,
            "checkpoint_every": 3, "estimate_every": 100,
            "loss": LossConfig(edge_candidates=8), **changes,
        }
    )  # fmt: skip


@pytest.mark.parametrize("name", [*PRODUCERS, "own"])
def test_path_scores_train_on_a_frozen_head(target, samples, tmp_path, name):
    head = tiny_head(target, block_size=5, **EVERY[name])
    before = {key: tensor.clone() for key, tensor in head.state_dict().items()}
    result = train(
        settings(freeze_backbone=True), head, target, samples, directory=str(tmp_path / "a")
    )
    assert result.curve[-1]["edge_loss"] < result.curve[0]["edge_loss"]
    assert result.curve[-1]["loss"] == pytest.approx(result.curve[0]["loss"], rel=1e-4)
    for key, tensor in result.head.state_dict().items():
        path = key.startswith(("edges.", "rescorer."))
        assert torch.equal(tensor, before[key]) is not path, key
    assert mean_tau(replay_tau(target, result.head, samples, TreeConfig(budget=8))) >= 1
    again = train(
        settings(freeze_backbone=True), head, target, samples, directory=str(tmp_path / "a")
    )  # its last checkpoint
    assert again.steps == result.steps and again.curve == result.curve


def test_freezing_a_head_without_path_scores_is_refused(target, samples, tmp_path):
    for name, part in (("slot", {}), ("shared", SECOND["shared"])):
        head = tiny_head(target, block_size=5, **part)
        with pytest.raises(JetspecError, match="no path scores of its own"):
            train(
                settings(freeze_backbone=True), head, target, samples,
                directory=str(tmp_path / name),
            )  # fmt: skip
    with pytest.raises(JetspecError, match=r"set training\.warm_start"):
        distil_head(parse_config({"training": {"freeze_backbone": True}}), "nowhere")


@pytest.mark.parametrize("name", EVERY)
def test_parts_may_be_added_to_a_head_that_lacks_them(target, tmp_path, name):
    start = tiny_head(target)
    save_head(start, str(tmp_path), target_fingerprint=target.fingerprint)
    head = tiny_head(target, seed=1, **EVERY[name])
    added = starting_head(head.config, target, str(tmp_path), seed=1)
    expected = head.state_dict() | start.state_dict()
    assert all(torch.equal(tensor, expected[k]) for k, tensor in added.state_dict().items())


def test_another_producer_begins_fresh_on_the_same_head(target, tmp_path):
    start = stirred(tiny_head(target, **PRODUCERS["markov"]))
    save_head(start, str(tmp_path), target_fingerprint=target.fingerprint)
    fresh = tiny_head(target, seed=1, **PRODUCERS["selector"])
    head = starting_head(fresh.config, target, str(tmp_path), seed=1)
    for key, tensor in head.state_dict().items():
        source = fresh if key.startswith("edges.") else start
        assert torch.equal(tensor, source.state_dict()[key])
    wider = tiny_head(target, edge_rank=8).config
    with pytest.raises(JetspecError, match=r"head\.edge_rank: 8: .* has 4"):
        starting_head(wider, target, str(tmp_path), seed=1)


def test_settings_of_older_heads_keep_their_keys_and_their_meaning():
    plain = HeadConfig(edge_rank=128)
    assert plain.producer == "markov" and HeadConfig().producer is None
    new = {"kind", "edges", "edge_rows", "edge_layers", "edge_width", "conv_rank", "rescore"}
    assert not new & plain.model_dump().keys()
    assert HeadConfig(edges="markov", edge_rank=128) == plain
    assert HeadConfig(edges="none") == HeadConfig()
    assert "freeze_backbone" not in TrainingConfig().shaping()
    assert TrainingConfig(freeze_backbone=True).shaping()["freeze_backbone"] is True


@pytest.mark.parametrize(
    ("head", "mend"),
    [({"edges": "bigram", "edge_rank": 2}, "choose from none, markov, selector, lattice"),
     ({"edges": "selector"}, "must be 1 or more for selector"),
     ({"edges": "none", "edge_rank": 2}, "must be 0 where edges is none"),
     ({"edge_rows": "learned"}, "learned: needs edges of tokens: markov, selector, context"),
     ({"edges": "lattice", "edge_rank": 2, "edge_rows": "learned"}, "learned: needs edges of")],
)  # fmt: skip
def test_edges_that_contradict_their_rank_are_refused(head, mend):
    with pytest.raises(JetspecError, match=mend):
        parse_config({"head": head})
