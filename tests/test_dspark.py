"""DSpark: an anchor that predicts, Markov rows, calibrated confidence, and what all heads do."""

import json

import pytest
import torch
import torch.nn.functional as F

from jetspec.config import parse_config
from jetspec.decode import decode
from jetspec.errors import JetspecError
from jetspec.evaluation.replay import mean_tau, replay_tau
from jetspec.heads.doctor import check_head, require_fit
from jetspec.heads.dspark import DSparkConfig, DSparkHead, survival_edges
from jetspec.heads.files import read_config, read_weights, write_tensors
from jetspec.heads.registry import load_head, new_head, save_head
from jetspec.training.blocks import plan_chunks
from jetspec.training.calibration import chain_rounds, fit_calibration
from jetspec.training.config import LossConfig, TrainingConfig
from jetspec.training.corpus import BatchMaker, Corpus
from jetspec.training.hidden_cache import OnlineTeacher
from jetspec.training.loop import train
from jetspec.trees.build import build_tree
from jetspec.trees.config import TreeConfig
from tests.answers import greedy_samples, sample
from tests.tiny import tiny_target

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [3] * 9, [20, 4, 17, 33, 8, 9, 10]]
PAPER = LossConfig(kind={"hard_labels": 0.1, "total_variation": 0.9}, chunk_tokens=16)


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3", spread=0.08)


def dspark(target, seed=0, spread=0.3, **settings) -> DSparkHead:
    """A random head whose guesses depend on everything they may depend on."""
    shape = {"block_size": 4, "num_layers": 2, "num_taps": 2, "markov_rank": 6}
    head = DSparkHead.new(DSparkConfig(**shape | settings), target, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, spread, generator=generator)
    return head.eval()


def cache_of(head, target, text):
    """A cache of all of the text but its last token."""
    length = len(text) - 1
    taps = target.forward(
        torch.tensor([text[:-1]]),
        position_ids=torch.arange(length)[None],
        mask=torch.ones(1, length, length, dtype=torch.bool).tril(),
        taps=head.taps,
    ).taps
    cache, valid = head.new_cache(1), torch.ones(1, length, dtype=torch.bool)
    head.extend(cache, taps, torch.arange(length)[None], valid, torch.tensor([text[:-1]]))
    return cache


@torch.no_grad()
def log_q_of(head, target, text, parents):
    """log q [D, V] of every place when its parent is the given one, and the confidence logits."""
    cache = cache_of(head, target, text)
    hidden = head.places(cache, torch.tensor(text[-1:]), target.embed, head.depth)[0]
    rows = head.markov_head.markov_w1.weight[torch.tensor(parents)]
    bias = rows @ head.markov_head.markov_w2.weight.T
    log_q = (target.logits(hidden) + bias).log_softmax(-1)
    weight, offset = head.confidence_head.proj.weight[0], head.confidence_head.proj.bias
    return log_q, torch.cat([hidden, rows], 1) @ weight + offset


def drafted(head, target, text, width, **options):
    cache = cache_of(head, target, text)
    return head.draft(cache, torch.tensor(text[-1:]), target.embed, target.logits, width, **options)


def test_every_place_names_the_token_behind_it_the_anchors_too(target):
    head = dspark(target)
    batch = packed_batch(head)
    assert head.depth == 4 and batch.labels.shape[2] == 4
    labels = batch.labels[0, 0]
    anchor = int(batch.anchors[0, 0])
    assert labels.tolist() == batch.input_ids[0, anchor + 1 : anchor + 5].tolist()
    draft = drafted(head, target, [5, 6, 7, 8, 9], 3)
    assert draft.tokens.shape == (1, 4, 3)


@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
def test_edges_are_the_heads_distribution_exact_on_the_greedy_spine(target, mask):
    head = dspark(target, scores="probability", mask=mask)
    text = [5, 6, 7, 8, 9]
    draft = drafted(head, target, text, 5)
    spine = [9, *draft.tokens[0, :-1, 0].tolist()]
    log_q, said = log_q_of(head, target, text, spine)
    for place in range(4):
        best, tokens = log_q[place].topk(5)
        assert draft.tokens[0, place].tolist() == tokens.tolist()
        assert torch.allclose(draft.edge_scores[0, place, 0], best, atol=1e-4)
        confidence = draft.confidence[0, place, 0]
        assert float(confidence) == pytest.approx(float(said[place].sigmoid()), abs=1e-5)
    for rank in range(1, 5):  # another parent: its own row, over the same candidates' mass
        parents = [9, *draft.tokens[0, :-1, rank].tolist()]
        log_q, said = log_q_of(head, target, text, parents)
        for place in range(1, 4):
            row = log_q[place, draft.tokens[0, place]].log_softmax(-1)
            row = row + draft.edge_scores[0, place, 0].logsumexp(-1)
            assert torch.allclose(draft.edge_scores[0, place, rank], row, atol=1e-4)
            confidence = draft.confidence[0, place, rank]
            assert float(confidence) == pytest.approx(float(said[place].sigmoid()), abs=1e-5)


def test_a_wide_draft_is_exact_for_every_parent(target):
    head = dspark(target, scores="probability")
    draft = drafted(head, target, [5, 6, 7, 8, 9], 64)
    log_q, _ = log_q_of(head, target, [5, 6, 7, 8, 9], [9, *draft.tokens[0, :-1, 7].tolist()])
    wanted = log_q.gather(1, draft.tokens[0])
    assert torch.allclose(draft.edge_scores[0, 1:, 7], wanted[1:], atol=1e-4)


@pytest.mark.parametrize("depth", [2, 6])
def test_other_depths_lay_their_blocks_as_the_mask_asks(target, depth):
    text = [5, 6, 7, 8, 9]
    for mask, same in (("causal", True), ("bidirectional", depth < 4)):
        head = dspark(target, mask=mask)
        own, other = drafted(head, target, text, 3), drafted(head, target, text, 3, depth=depth)
        assert other.tokens.shape == (1, depth, 3)
        count = min(depth, 4)
        close = torch.allclose(own.edge_scores[:, :count], other.edge_scores[:, :count], atol=1e-5)
        assert close == same


def test_the_chain_follows_its_own_tokens(target):
    head = dspark(target)
    text = [5, 6, 7, 8, 9]
    anchors = torch.tensor([9])
    tokens, said = head.chain(cache_of(head, target, text), anchors, target.embed, target.logits)
    log_q, wanted = log_q_of(head, target, text, [9, *tokens[0, :-1].tolist()])
    assert tokens[0].tolist() == log_q.argmax(-1).tolist()
    assert torch.allclose(said[0], wanted, atol=1e-5)
    narrow = build_tree(drafted(head, target, text, 1), anchors, TreeConfig(builder="chain"))
    assert narrow.tokens[0, 1:].tolist() == tokens[0].tolist()


def test_survival_edges_give_the_best_child_the_confidence_and_its_siblings_the_rest():
    log_q = torch.tensor([[0.5, 0.3, 0.1], [0.2, 0.6, 0.2]]).log()
    edges = survival_edges(log_q, torch.tensor([0.8, 0.9])).exp()
    assert edges.tolist()[0] == pytest.approx([0.8, 0.2 * 0.3 / 0.5, 0.2 * 0.1 / 0.5])
    assert edges.tolist()[1] == pytest.approx([0.05, 0.9, 0.05])
    sure = survival_edges(torch.tensor([[1.0, 0.0]]).log(), torch.tensor([1.0]))
    assert torch.isfinite(sure[0, 0]) and float(sure[0, 1]) == -torch.inf


def test_a_chains_tree_score_is_its_calibrated_survival(target):
    head = dspark(target)
    head.calibration = ((0.5, 1.0), (2.0, -1.0))
    text = [5, 6, 7, 8, 9]
    tree = build_tree(drafted(head, target, text, 4), torch.tensor([9]), TreeConfig(budget=30))
    anchors = torch.tensor([9])
    chain, said = head.chain(cache_of(head, target, text), anchors, target.embed, target.logits)
    scale, offset = torch.tensor([0.5, 2, 2, 2]), torch.tensor([1.0, -1, -1, -1])
    survival = (scale * said[0] + offset).sigmoid().cumprod(0)
    node = 0
    for depth, token in enumerate(chain[0].tolist()):
        children = (tree.parents[0] == node) & (tree.tokens[0] == token)
        if not children.any():
            break
        node = int(children.nonzero()[0])
        assert float(tree.scores[0, node].exp()) == pytest.approx(float(survival[depth]), rel=1e-4)
    assert node


def packed_batch(head, seed=1):
    """Two documents in one row and one in another, with every possible block."""
    draw = torch.Generator().manual_seed(seed)
    texts = [torch.randint(4, 50, (n,), generator=draw).tolist() for n in (9, 12, 14)]
    corpus = Corpus.from_samples([sample(i, t, [3]) for i, t in enumerate(texts)], 40)
    config = TrainingConfig(anchors=64, sequence_length=40, loss=PAPER)
    maker = BatchMaker(corpus, config, head.depth + 1, fixed_shape=False)
    rows = [(0, 1), (2,)]
    return maker.make(rows, [maker.draw(0, row) for row in rows])


def test_the_loss_is_the_papers_over_the_distributions_of_drafting(target):
    head = dspark(target, confidence_weight=0.7)
    batch = packed_batch(head)
    taps, hidden = OnlineTeacher(target, head.taps)(batch)
    loss, sums = head.loss(batch, taps, hidden, target, PAPER)
    log_p = target.logits(hidden).log_softmax(-1)
    draft = judged = 0.0
    for row in range(2):
        ids = batch.input_ids[row].tolist()
        for block in range(batch.anchors.shape[1]):
            n, start = int(batch.anchors[row, block]), int(batch.starts[row, block])
            count = int((batch.weights[row, block] > 0).sum())
            if not count:
                continue
            parents = [*ids[n : n + count], *[0] * (4 - count)]
            log_q, said = log_q_of(head, target, ids[start : n + 1], parents)
            for place in range(count):
                q, p = log_q[place].exp(), log_p[row, n + place].exp()
                overlap = torch.minimum(p, q).sum()
                draft += -0.1 * log_q[place, ids[n + place + 1]] + 0.9 * (1 - overlap)
                judged += F.binary_cross_entropy_with_logits(said[place], overlap)
    assert float(sums[0]) == pytest.approx(float(draft), rel=1e-4)
    assert loss.item() == pytest.approx(float(draft + 0.7 * judged), rel=1e-4)
    assert float(sums[-head.depth :].sum()) == len(batch.slots)


def test_chunks_only_cut_the_work(target):
    head = dspark(target)
    batch, gradients = packed_batch(head), []
    for size in (5, 1000):
        batch.chunks = plan_chunks(batch.shared.numpy(), size)
        head.zero_grad()
        loss, _ = head.loss(batch, *OnlineTeacher(target, head.taps)(batch), target, PAPER)
        loss.backward()
        gradients.append([p.grad.clone() for p in head.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-4 * float(other.abs().max() + 1))


def test_the_draft_loss_trains_the_draft_and_the_confidence_loss_only_the_confidence(target):
    head = dspark(target).train()
    batch = packed_batch(head)
    teacher = OnlineTeacher(target, head.taps)(batch)

    def gradients(weight):
        head.config = head.config.model_copy(update={"confidence_weight": weight})
        head.zero_grad()
        head.loss(batch, *teacher, target, PAPER)[0].backward()
        return {name: p.grad.clone() for name, p in head.named_parameters()}

    without, with_it = gradients(0.0), gradients(1.0)
    assert all(p.grad is None for p in target.model.parameters())
    for name, gradient in without.items():
        if name.startswith("confidence_head"):
            assert not gradient.any() and with_it[name].any()
        else:
            assert gradient.any() and torch.allclose(gradient, with_it[name], atol=1e-6), name


def test_a_batch_without_slots_gives_every_weight_a_gradient_of_zero(target):
    head = dspark(target).train()
    corpus = Corpus.from_samples([sample(0, [4, 5, 6, 7], [2])], 40)
    maker = BatchMaker(corpus, TrainingConfig(), head.depth + 1, fixed_shape=False)
    batch = maker.make([], [])
    loss, sums = head.loss(batch, *OnlineTeacher(target, head.taps)(batch), target, PAPER)
    loss.backward()
    assert loss.item() == 0 and not sums.any()
    assert all(p.grad is not None and not p.grad.any() for p in head.parameters())


def test_calibration_finds_what_confidence_was_spoilt_by():
    draw = torch.Generator().manual_seed(0)
    true = torch.randn(6000, 3, generator=draw) * 1.5 + 1
    accepted = torch.rand(6000, 3, generator=draw) < true.sigmoid()
    standing = torch.cat([torch.ones(6000, 1).bool(), accepted[:, :-1].cumprod(1).bool()], 1)
    factors, shifts = torch.tensor([3.0, 1.0, 0.4]), torch.tensor([0.0, -2.0, 1.0])
    depths = torch.arange(1, 4).expand(6000, -1)
    said = true * factors + shifts
    found = fit_calibration(said[standing], accepted[standing], depths[standing])
    scale, offset = torch.tensor(found).unbind(1)
    assert scale.tolist() == pytest.approx((1 / factors).tolist(), rel=0.12)
    assert offset.tolist() == pytest.approx((-shifts / factors).tolist(), abs=0.15)
    # Survival to every depth comes true in each fifth of what is predicted.
    survival = (scale * said + offset).sigmoid().cumprod(1)
    survived = accepted.cumprod(1).float()
    for depth in range(3):
        for fifth in survival[:, depth].argsort().chunk(5):
            gap = survival[fifth, depth].mean() - survived[fifth, depth].mean()
            assert abs(float(gap)) < 0.04


def test_calibration_without_evidence_leaves_things_as_they_are():
    none = torch.zeros(0)
    assert fit_calibration(none, none.bool(), none.long()) == ()
    one = fit_calibration(torch.tensor([2.0]), torch.tensor([True]), torch.tensor([2]))
    assert one[0] == (1.0, 0.0) and one[1] == pytest.approx((1.0, 0.0), abs=0.2)
    # All of one kind, and confidence that points the wrong way: finite, and no better than a rate.
    sure = fit_calibration(torch.ones(50) * 30, torch.ones(50).bool(), torch.ones(50).long())
    assert torch.tensor(sure).isfinite().all()
    wrong = fit_calibration(
        torch.tensor([2.0, -2.0] * 50), torch.tensor([False, True] * 50), torch.ones(100).long()
    )
    assert wrong[0] == pytest.approx((0.0, 0.0), abs=0.01)


@torch.no_grad()
def test_calibration_reads_the_rounds_of_real_decoding(target):
    head = dspark(target)
    samples = greedy_samples(target, count=5, tokens=12, stop_token_ids=())
    corpus = Corpus.from_samples(samples, 40)
    states = OnlineTeacher(target, head.taps)
    indices = torch.arange(5).numpy()
    said, accepted, depths = chain_rounds(head, target, corpus, indices, states, batch_size=2)
    assert len(said) == len(accepted) == len(depths)
    tree = TreeConfig(builder="chain", budget=4, width=1)
    replays = replay_tau(target, head, samples, tree)
    assert int((depths == 1).sum()) == sum(replay.rounds for replay in replays)
    assert int(accepted.sum()) == sum(sum(replay.accepted) for replay in replays)


class Seer:
    """A head that always drafts the five tokens that stand behind the anchor."""

    def new_cache(self, batch):
        return self

    def extend(self, cache, taps, positions, valid, tokens):
        self.text = torch.nn.functional.pad(tokens, (0, 5))

    def keep_sequences(self, rows):
        self.text = self.text[rows]

    def chain(self, cache, anchors, embed, logits):
        tokens = self.text.gather(1, self.lengths[:, None] + torch.arange(1, 6))
        return tokens, tokens.float()


def test_what_lies_behind_an_answers_end_is_no_test(target):
    # Generated: 2 to 4 and 6 to 9. A round at 2 knows two tokens; the next one starts at 6.
    corpus = Corpus.from_samples([sample(0, list(range(10, 20)), [2, 5, 6])], 40)
    states = OnlineTeacher(target, (0,))
    said, accepted, depths = chain_rounds(Seer(), target, corpus, torch.tensor([0]).numpy(), states)
    assert said.tolist() == [13, 14, 17, 18, 19]
    assert accepted.all() and depths.tolist() == [1, 2, 1, 2, 3]


def test_training_lowers_the_loss_calibrates_and_replay_is_real_decoding(target, tmp_path):
    samples = greedy_samples(target, count=20, tokens=16, stop_token_ids=())
    config = TrainingConfig(
        anchors=8, sequence_length=48, batch_size=6, micro_batch_size=3, epochs=12,
        learning_rate=3e-3, log_every=1, estimate_every=100, checkpoint_every=8,
        heldout_fraction=0.2, loss=PAPER,
    )  # fmt: skip
    head = new_head(DSparkConfig(block_size=4, num_layers=1, num_taps=2, markov_rank=8), target)
    result = train(config, head, target, samples, directory=str(tmp_path / "a"))
    assert result.curve[-1]["loss"] < 0.9 * result.curve[0]["loss"]
    assert result.curve[-1]["accuracy_1"] > result.curve[0]["accuracy_1"]
    assert result.head.calibration
    resumed = train(config, head, target, samples, directory=str(tmp_path / "a"))
    assert all(map(torch.equal, resumed.head.parameters(), result.head.parameters()))
    assert resumed.head.calibration == result.head.calibration

    save_head(result.head, str(tmp_path / "b"), target_fingerprint=target.fingerprint)
    loaded = load_head(str(tmp_path / "b"))
    assert loaded.calibration == result.head.calibration
    tree = TreeConfig(budget=12, width=4)
    tau = mean_tau(replay_tau(target, loaded, samples, tree))
    decoded = decode(
        target,
        [s.input_ids[: s.loss_mask.index(1)] for s in samples],
        drafter=result.head.drafter(target, width=4),
        tree=tree,
        max_new_tokens=16,
        stop_token_ids=(),
    ).generations
    assert [g.tokens for g in decoded] == [s.input_ids[s.loss_mask.index(1) :] for s in samples]
    rounds = [count for generation in decoded for count in generation.rounds]
    assert tau == pytest.approx(sum(rounds) / len(rounds)) and tau > 1.1


def test_on_a_frozen_backbone_only_the_two_heads_on_top_are_trained(target, tmp_path):
    samples = greedy_samples(target, count=8, tokens=12, stop_token_ids=())
    config = TrainingConfig(
        anchors=8, sequence_length=40, batch_size=4, epochs=2, freeze_backbone=True, loss=PAPER,
        estimate_samples=2, learning_rate=0.01,
    )  # fmt: skip
    head = new_head(DSparkConfig(block_size=3, num_layers=1, num_taps=2, markov_rank=4), target)
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    after = train(config, head, target, samples, directory=str(tmp_path)).head.state_dict()
    changed = {name.split(".")[0] for name in before if not torch.equal(after[name], before[name])}
    assert changed == {"markov_head", "confidence_head"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_drafts_in_the_targets_dtype(target, dtype):
    head = dspark(target).to(dtype)
    draft = drafted(head, target, [5, 6, 7, 8, 9], 4)
    assert draft.edge_scores.dtype == torch.float32
    assert float(draft.edge_scores[0].logsumexp(-1).max()) < 1e-3


@pytest.mark.parametrize("tree", ["chain", "algorithm1", "best_first"])
@pytest.mark.parametrize("arch", ["qwen3", "llama"])
def test_decoding_is_token_identical_to_plain(arch, tree):
    target = tiny_target(arch)
    options = {"max_new_tokens": 16, "stop_token_ids": (7,)}
    plain = decode(target, PROMPTS, **options).generations
    width = 1 if tree == "chain" else 4
    found = decode(
        target,
        PROMPTS,
        drafter=dspark(target).drafter(target, width=width),
        tree=TreeConfig(builder=tree, budget=12, width=width),
        **options,
    ).generations
    assert [g.tokens for g in found] == [g.tokens for g in plain]


def test_a_saved_head_is_a_dspark_directory_and_loads_as_it_was(target, tmp_path):
    head = dspark(target, mask_token_id=63)
    head.calibration = ((1.5, 0.1), (0.7, -0.2))
    save_head(head, str(tmp_path), target_fingerprint=target.fingerprint)
    loaded = load_head(str(tmp_path))
    assert isinstance(loaded, DSparkHead) and loaded.config == head.config
    assert loaded.calibration == ((1.5, 0.1), (0.7, -0.2))
    assert all(map(torch.equal, loaded.parameters(), head.parameters()))
    findings = {finding.check: finding.ok for finding in check_head(str(tmp_path), target)}
    assert all(findings.values())
    assert {"RoPE", "mask token", "training forward equals decoding forward"} <= findings.keys()
    raw, names = read_config(str(tmp_path)), read_weights(str(tmp_path)).keys()
    assert raw["architectures"] == ["Qwen3DSparkModel"] and raw["sample_from_anchor"] is True
    assert {"fc.weight", "markov_head.markov_w1.weight", "confidence_head.proj.bias"} <= names


def test_a_head_of_another_shape_is_refused_in_one_line(target, tmp_path):
    save_head(dspark(target), str(tmp_path), target_fingerprint="")
    with pytest.raises(JetspecError) as caught:
        require_fit(load_head(str(tmp_path)), tiny_target("qwen3", hidden_size=64), "here")
    assert "hidden size 32, the target's is 64" in str(caught.value)
    save_head(dspark(target, markov_rank=5), str(tmp_path / "b"), target_fingerprint="")
    (tmp_path / "b" / "model.safetensors").replace(tmp_path / "model.safetensors")
    with pytest.raises(JetspecError, match="5., config.json makes it .64, 6.; mend one|37.,"):
        load_head(str(tmp_path))
    raw = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"jetspec_head": {"kind": "dspark", "depth": 3}}, "config.json: is no DSpark head's"),
        ({"jetspec_calibration": [1.0]}, "config.json: is no DSpark head's"),
        ({"markov_head_type": "gated"}, "head.markov_head_type: gated: only vanilla is read"),
        ({"mask_token_id": None}, "head.mask_token_id: missing: set it in config.json"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw | change))
        with pytest.raises(JetspecError, match=message):
            load_head(str(tmp_path))


def test_a_directory_of_another_trainer_drafts_the_same(target, tmp_path):
    head = dspark(target, mask="causal")
    save_head(head, str(tmp_path), target_fingerprint="")
    raw = json.loads((tmp_path / "config.json").read_text())
    kept = {key: value for key, value in raw.items() if not key.startswith("jetspec_")}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    state = read_weights(str(tmp_path))
    state["embed_tokens.weight"] = torch.zeros(64, 32)
    write_tensors(str(tmp_path / "model.safetensors"), state, "fp32")
    loaded, text = load_head(str(tmp_path)), [5, 6, 7, 8, 9]
    assert isinstance(loaded, DSparkHead) and loaded.config == head.config
    ours, theirs = (drafted(h, target, text, 4) for h in (head, loaded))
    assert torch.equal(ours.tokens, theirs.tokens)
    assert torch.equal(ours.edge_scores, theirs.edge_scores)


def test_the_run_file_names_the_head_and_its_settings():
    config = parse_config({"head": {"kind": "dspark", "markov_rank": 16}}).head
    assert config == DSparkConfig(markov_rank=16) and config.block_size == 7
    with pytest.raises(JetspecError, match="head.*beam"):
        parse_config({"head": {"kind": "dspark", "beam": 3}})
