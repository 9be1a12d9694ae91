"""EAGLE-3: unrolled training, level-by-level drafting, and everything that any head must do."""

import pytest
import torch

from jetspec.config import parse_config
from jetspec.decode import decode
from jetspec.errors import JetspecError
from jetspec.evaluation.replay import mean_tau, replay_tau
from jetspec.heads.doctor import check_head, require_fit
from jetspec.heads.eagle import EagleConfig, EagleHead
from jetspec.heads.registry import load_head, new_head, save_head
from jetspec.training.config import LossConfig, TrainingConfig
from jetspec.training.corpus import BatchMaker, Corpus
from jetspec.training.hidden_cache import OnlineTeacher
from jetspec.training.loop import train
from jetspec.trees.build import build_tree
from jetspec.trees.config import TreeConfig
from tests.answers import greedy_samples, sample
from tests.tiny import tiny_target

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [3] * 9, [20, 4, 17, 33, 8, 9, 10]]


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3", spread=0.08)


def eagle(target, seed=0, spread=0.3, **settings) -> EagleHead:
    """A random head whose guesses depend on what it reads."""
    config = EagleConfig(**{"block_size": 5, "beam": 3, "num_taps": 2, **settings})
    head = EagleHead.new(config, target, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, spread, generator=generator)
    return head.eval()


def tapped(head, target, text):
    """The target's tapped states of a whole text, [1, T, n·d]."""
    length = len(text)
    return target.forward(
        torch.tensor([text]),
        position_ids=torch.arange(length)[None],
        mask=torch.ones(1, length, length, dtype=torch.bool).tril(),
        taps=head.taps,
    ).taps


@torch.no_grad()
def log_q_after(head, target, text, path):
    """log q [V] of what follows `text` and the drafted `path`, one token after another: every
    token is read with the state behind the one before it, over all tokens before it."""
    layer = head.midlayer
    states = head.fc(tapped(head, target, text))
    states = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)
    x = layer.inputs(target.embed(torch.tensor([text])), states)
    state = states[:, -1:]
    for token in [None, *path]:
        if token is not None:
            x = torch.cat([x, layer.inputs(target.embed(torch.tensor([[token]])), state)], 1)
        rotary = head.rotary(torch.arange(x.shape[1])[None], x.dtype)
        last = tuple(part[:, -1:] for part in rotary)
        keys_values = layer.self_attn.keys_values(x, rotary)
        mask = torch.ones(1, 1, x.shape[1], dtype=torch.bool)
        state = layer(x[:, -1:], state, last, keys_values, mask)
    return target.logits(head.norm(state))[0, 0].log_softmax(-1)


def cache_of(head, target, texts, pieces=(3, 100)):
    """A cache that holds all of each text but its last token, filled piece by piece."""
    cache = head.new_cache(len(texts))
    longest = max(map(len, texts)) - 1
    states = torch.zeros(len(texts), longest, len(head.taps) * target.hidden_size)
    tokens = torch.zeros(len(texts), longest, dtype=torch.long)
    order = torch.arange(longest)
    for row, text in enumerate(texts):
        length = len(text) - 1
        tokens[row, :length] = torch.tensor(text[:-1])
        states[row, :length] = tapped(head, target, text[:-1])[0]
    valid = order < torch.tensor([[len(text) - 1] for text in texts])
    begin = 0
    for size in pieces:
        here = slice(begin, begin + size)
        positions = order.expand(len(texts), -1)[:, here]
        head.extend(cache, states[:, here], positions, valid[:, here], tokens[:, here])
        head._project(cache, target.embed)
        begin += size
    return cache


def paths_of(tree, row):
    """The path to every node: tuple of tokens -> score."""
    found = {0: ()}
    for node in range(1, int(tree.sizes[row])):
        parent = int(tree.parents[row, node])
        found[node] = (*found[parent], int(tree.tokens[row, node]))
    return {found[node]: float(tree.scores[row, node]) for node in range(1, len(found))}


def level_by_level(head, target, text, *, depth, width, beam):
    """Every candidate with its score: each level's best paths, each with its best children."""
    level, found = {(): 0.0}, {}
    for _ in range(depth):
        read = sorted(level, key=lambda path: -level[path])[:beam]
        level = {}
        for path in read:
            best, tokens = log_q_after(head, target, text, path).topk(width)
            start = found.get(path, 0.0)
            for term, token in zip(best.tolist(), tokens.tolist(), strict=True):
                level[(*path, token)] = start + term
        found |= level
    return found


def test_drafted_tree_is_the_brute_force_level_by_level_tree(target):
    head = eagle(target)
    texts = [[5, 6, 7, 8, 9], [3, 20, 4, 17, 33, 8, 9, 10]]
    cache = cache_of(head, target, texts)
    anchors = torch.tensor([text[-1] for text in texts])
    tree = head.draft(cache, anchors, target.embed, target.logits, 4, 3)
    tree.validate()
    for row, text in enumerate(texts):
        wanted = level_by_level(head, target, text, depth=3, width=4, beam=3)
        found = paths_of(tree, row)
        assert found.keys() == wanted.keys()
        assert found == pytest.approx(wanted, abs=1e-4)
        pruned = build_tree(tree, anchors, TreeConfig(budget=9, width=4))
        best = sorted(wanted, key=lambda path: -wanted[path])[:9]
        assert paths_of(pruned, row).keys() == set(best)


def test_drafting_does_not_change_the_cache_and_rows_may_leave(target):
    head = eagle(target)
    texts = [[5, 6, 7, 8, 9], [3, 20, 4, 17, 33, 8, 9, 10]]
    cache = cache_of(head, target, texts, pieces=(2, 1, 4, 100))
    first = head.draft(
        cache, torch.tensor([t[-1] for t in texts]), target.embed, target.logits, 4, 3
    )
    cache.keep_sequences(torch.tensor([1]))
    again = head.draft(cache, torch.tensor([10]), target.embed, target.logits, 4, 3)
    assert torch.equal(again.tokens[0], first.tokens[1])
    assert torch.allclose(again.scores[0], first.scores[1], atol=1e-5)


def test_a_shortened_cache_drafts_as_if_the_tail_had_never_been(target):
    head = eagle(target)
    text, other = [3, 20, 4, 17, 33, 8, 9, 10], [3, 20, 4, 17, 40, 41, 42]
    cache = cache_of(head, target, [text])

    def drafted(cache, anchor):
        return head.draft(cache, torch.tensor([anchor]), target.embed, target.logits, 4, 2)

    cache.lengths = torch.tensor([4])
    short, fresh = drafted(cache, 33), drafted(cache_of(head, target, [text[:5]]), 33)
    assert torch.equal(short.tokens, fresh.tokens)
    assert torch.allclose(short.scores, fresh.scores, atol=1e-5)
    taps, tokens = tapped(head, target, other)[:, 4:6], torch.tensor([other[4:6]])
    head.extend(cache, taps, torch.tensor([[4, 5]]), torch.ones(1, 2, dtype=torch.bool), tokens)
    grown, fresh = drafted(cache, 42), drafted(cache_of(head, target, [other]), 42)
    assert torch.equal(grown.tokens, fresh.tokens)
    assert torch.allclose(grown.scores, fresh.scores, atol=1e-5)


def packed_batch(head, seed=1):
    """Two documents in one row and one in another, with every possible block."""
    draw = torch.Generator().manual_seed(seed)
    texts = [torch.randint(4, 50, (n,), generator=draw).tolist() for n in (9, 12, 14)]
    corpus = Corpus.from_samples([sample(i, t, [3]) for i, t in enumerate(texts)], 40)
    config = TrainingConfig(anchors=64, sequence_length=40, loss=LossConfig(chunk_tokens=16))
    maker = BatchMaker(corpus, config, head.depth + 1, fixed_shape=False)
    rows = [(0, 1), (2,)]
    return maker.make(rows, [maker.draw(0, row) for row in rows])


def test_training_steps_are_the_steps_of_drafting(target):
    head = eagle(target)
    batch = packed_batch(head)
    taps, _ = OnlineTeacher(target, head.taps)(batch)
    with torch.no_grad():
        hidden = head.unroll(
            head.fc(taps),
            target.embed(batch.input_ids),
            batch.positions,
            batch.anchors,
            batch.starts,
            target.embed(batch.parents()),
        )
    log_q = target.logits(hidden).log_softmax(-1)
    checked = 0
    for row in range(2):
        ids = batch.input_ids[row].tolist()
        for block in range(batch.anchors.shape[1]):
            anchor, start = int(batch.anchors[row, block]), int(batch.starts[row, block])
            for step in range(head.depth):
                if batch.weights[row, block, step] == 0:
                    continue
                path = ids[anchor + 1 : anchor + 1 + step]
                wanted = log_q_after(head, target, ids[start : anchor + 1], path)
                assert torch.allclose(log_q[row, block, step], wanted, atol=1e-4)
                checked += 1
    assert checked == len(batch.slots) > 60


def test_gradients_reach_every_weight_of_the_head_through_all_steps_and_none_of_the_target(target):
    head = eagle(target).train()
    batch = packed_batch(head)
    teacher = OnlineTeacher(target, head.taps)(batch)
    loss, _ = head.loss(batch, *teacher, target, LossConfig(chunk_tokens=16))
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())
    assert all(p.grad is None for p in target.model.parameters())
    # The state is handed on with its gradient: the last depth alone teaches the fused context too.
    head.zero_grad()
    batch.weights[:, :, :-1] = 0
    loss, _ = head.loss(batch, *teacher, target, LossConfig(chunk_tokens=16))
    loss.backward()
    assert head.fc.weight.grad.abs().sum() > 0


def test_a_batch_without_slots_gives_every_weight_a_gradient_of_zero(target):
    head = eagle(target).train()
    corpus = Corpus.from_samples([sample(0, [4, 5, 6, 7], [2])], 40)
    maker = BatchMaker(corpus, TrainingConfig(), head.depth + 1, fixed_shape=False)
    batch = maker.make([], [])
    loss, sums = head.loss(batch, *OnlineTeacher(target, head.taps)(batch), target, LossConfig())
    loss.backward()
    assert loss.item() == 0 and not sums.any()
    assert all(p.grad is not None and not p.grad.any() for p in head.parameters())


def test_training_lowers_the_loss_and_replay_is_real_decoding(target, tmp_path):
    samples = greedy_samples(target, count=20, tokens=16, stop_token_ids=())
    config = TrainingConfig(
        anchors=8, sequence_length=48, batch_size=6, micro_batch_size=3, epochs=12,
        learning_rate=3e-3, log_every=1, estimate_every=100, checkpoint_every=8,
        heldout_fraction=0.2, loss=LossConfig(chunk_tokens=64),
    )  # fmt: skip
    head = new_head(EagleConfig(block_size=5, num_taps=2, beam=3), target)
    result = train(config, head, target, samples, directory=str(tmp_path))
    assert result.curve[-1]["loss"] < 0.8 * result.curve[0]["loss"]
    assert result.curve[-1]["accuracy_1"] > result.curve[0]["accuracy_1"]
    resumed = train(config, head, target, samples, directory=str(tmp_path))
    assert all(map(torch.equal, resumed.head.parameters(), result.head.parameters()))

    tree = TreeConfig(budget=12, width=4)
    tau = mean_tau(replay_tau(target, result.head, samples, tree))
    prompts = [s.input_ids[: s.loss_mask.index(1)] for s in samples]
    decoded = decode(
        target,
        prompts,
        drafter=result.head.drafter(target, width=4),
        tree=tree,
        max_new_tokens=16,
        stop_token_ids=(),
    ).generations
    rounds = [count for generation in decoded for count in generation.rounds]
    assert tau == pytest.approx(sum(rounds) / len(rounds)) and tau > 1.1
    answers = [s.input_ids[s.loss_mask.index(1) :] for s in samples]
    assert [generation.tokens for generation in decoded] == answers


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
        drafter=eagle(target).drafter(target, width=width),
        tree=TreeConfig(builder=tree, budget=12, width=width),
        **options,
    ).generations
    assert [g.tokens for g in found] == [g.tokens for g in plain]


def test_a_saved_head_is_loaded_as_it_was(target, tmp_path):
    head = eagle(target)
    save_head(head, str(tmp_path), target_fingerprint=target.fingerprint)
    loaded = load_head(str(tmp_path))
    assert isinstance(loaded, EagleHead) and loaded.config == head.config
    assert all(map(torch.equal, loaded.parameters(), head.parameters()))
    findings = {finding.check: finding.ok for finding in check_head(str(tmp_path), target)}
    assert all(findings.values()) and "RoPE" in findings
    other = tiny_target("qwen3", spread=0.08)
    other.config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
    assert not {f.check: f.ok for f in check_head(str(tmp_path), other)}["RoPE"]


def test_a_head_of_another_shape_is_refused_in_one_line(target, tmp_path):
    save_head(eagle(target), str(tmp_path), target_fingerprint="")
    with pytest.raises(JetspecError) as caught:
        require_fit(load_head(str(tmp_path)), tiny_target("qwen3", hidden_size=64), "here")
    assert "hidden size 32, the target's is 64" in str(caught.value)
    other = eagle(target, num_taps=3)
    (tmp_path / "b").mkdir()
    save_head(other, str(tmp_path / "b"), target_fingerprint="")
    (tmp_path / "b" / "model.safetensors").replace(tmp_path / "model.safetensors")
    with pytest.raises(JetspecError, match="fc.weight is .32, 96., config.json makes it .32, 64."):
        load_head(str(tmp_path))


def test_the_run_file_names_the_head_and_its_settings():
    config = parse_config({"head": {"kind": "eagle3", "beam": 4}}).head
    assert config == EagleConfig(beam=4) and config.block_size == 9
    with pytest.raises(JetspecError, match="head.*mask"):
        parse_config({"head": {"kind": "eagle3", "mask": "causal"}})
