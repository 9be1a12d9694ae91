import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from jetspec.errors import JetspecError
from jetspec.training import corpus as corpus_module
from jetspec.training.blocks import attention_mask, block_mask_function, dense_mask, tiled_mask
from jetspec.training.config import LossConfig, TrainingConfig
from jetspec.training.corpus import BatchMaker, Corpus, Schedule
from jetspec.training.hidden_cache import OnlineTeacher
from jetspec.training.step import Distiller
from tests.answers import greedy_samples, sample
from tests.tiny import tiny_head, tiny_target

DEPTH = 3  # block of 4


def corpus(*masks, cut=100):
    """One sample a mask string: `.` is a prompt's token, `x` a generated one."""
    samples = []
    for index, mask in enumerate(masks):
        turns = [i for i in range(len(mask)) if mask[i] != (mask[i - 1] if i else ".")]
        tokens = [10 * (index + 1) + i for i in range(len(mask))]
        samples.append(sample(index, tokens, turns))
        assert samples[-1].loss_mask == [int(c == "x") for c in mask]
    return Corpus.from_samples(samples, cut)


def maker(corpus, fixed_shape=False, **settings):
    config = TrainingConfig(**{"anchors": 8, "sequence_length": 16, **settings})
    return BatchMaker(corpus, config, DEPTH + 1, fixed_shape=fixed_shape)


def test_anchor_is_a_generated_token_with_a_generated_one_behind_it():
    c = corpus("..xxx", "..x", "x" * 3, "..xx..xxx")
    assert [c.anchors(i).tolist() for i in range(4)] == [[2, 3], [], [1], [2, 6, 7]]


def test_slots_end_with_the_answer_and_labels_are_the_tokens_ahead():
    c = corpus("..xx..xxxxx")
    m = maker(c)
    batch = m.make([(0,)], [m.draw(0, (0,))])
    assert batch.anchors[0].tolist() == [2, 6, 7, 8, 9]
    kept = (batch.weights[0] > 0).int().tolist()
    assert kept == [[1, 0, 0], [1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0]]
    for block, anchor in enumerate(batch.anchors[0].tolist()):
        for k in range(1, DEPTH + 1):
            if batch.weights[0, block, k - 1]:
                assert batch.labels[0, block, k - 1] == batch.input_ids[0, anchor + k]


def test_teacher_of_token_n_plus_k_stands_one_before_it():
    c = corpus("..xxxxx", ".xxxx")
    m = maker(c)
    rows = [(0,), (1,)]
    batch = m.make(rows, [m.draw(0, row) for row in rows])
    width = batch.input_ids.shape[1]
    for slot, teacher in zip(batch.slots, batch.teachers[batch.shared], strict=True):
        block, k = divmod(int(slot), DEPTH + 1)
        row, a = divmod(block, batch.anchors.shape[1])
        assert k >= 1 and teacher == row * width + batch.anchors[row, a] + k - 1
    assert len(batch.slots) == int((batch.weights > 0).sum())
    assert batch.shared.tolist() == sorted(batch.shared.tolist())
    for slot, place in zip(batch.slots.tolist(), batch.chosen().tolist(), strict=True):
        row, block, k = np.unravel_index(slot, (*batch.anchors.shape, DEPTH + 1))
        assert np.unravel_index(place, batch.labels.shape) == (row, block, k - 1)
        assert batch.true_ids().view(-1)[slot] == batch.labels.view(-1)[place]


def test_slots_stand_behind_their_anchor_and_hold_masks():
    c = corpus("..xxx")
    m = maker(c)
    batch = m.make([(0,)], [m.draw(0, (0,))])
    assert batch.slot_positions().view(2, 4).tolist() == [[2, 3, 4, 5], [3, 4, 5, 6]]
    assert batch.slot_ids(99).view(2, 4).tolist() == [[12, 99, 99, 99], [13, 99, 99, 99]]
    assert batch.parents()[0, 0].tolist()[:2] == [12, 13]


@pytest.mark.parametrize("gamma", [0.0, 4.0])
def test_depth_weights_follow_gamma(gamma):
    c = corpus(".xxxxxxx")
    m = maker(c, loss=LossConfig(gamma=gamma))
    batch = m.make([(0,)], [m.draw(0, (0,))])
    expected = np.exp(-np.arange(3) / gamma) if gamma else np.ones(3)
    np.testing.assert_allclose(batch.weights[0, 0].numpy(), expected, rtol=1e-6)
    assert m.weight((0,), m.draw(0, (0,))) == pytest.approx(float(batch.weights.sum()))


def test_mask_shows_own_document_before_the_anchor_and_own_block():
    anchors, starts, context = torch.tensor([[2, 6]]), torch.tensor([[0, 4]]), 8
    for causal in (True, False):
        function = block_mask_function(anchors, starts, context, 3, causal=causal)
        mask = dense_mask(function, 1, 6, context + 6, torch.device("cpu"))[0]
        for query in range(6):
            block, slot = divmod(query, 3)
            seen = {0: {0, 1}, 1: {4, 5}}[block]
            own = range(slot + 1) if causal else range(3)
            expected = seen | {context + 3 * block + s for s in own}
            assert set(mask[query].nonzero()[:, 0].tolist()) == expected


def test_block_that_does_not_exist_sees_only_itself():
    c = corpus("..xxx", ".xxxxxx")
    m = maker(c)
    rows = [(0,), (1,)]
    batch = m.make(rows, [m.draw(0, row) for row in rows])
    mask = attention_mask(batch, causal=True)
    missing = batch.weights.sum(-1) == 0
    assert missing.any()
    for row, block in missing.nonzero().tolist():
        queries = mask[row, block * 4 : block * 4 + 4]
        assert queries.any(-1).all() and not queries[:, : batch.input_ids.shape[1]].any()


@pytest.mark.parametrize("causal", [True, False])
def test_tiles_of_the_mask_are_those_of_all_its_pairs(causal):
    generator = torch.Generator().manual_seed(0)
    batch = type("Batch", (), {"block_size": 16})()
    batch.input_ids = torch.zeros(3, 512).long()
    ends = torch.randint(0, 513, (3, 32, 2), generator=generator)
    ends[1] = torch.tensor([0, 512]) - torch.randint(0, 9, (32, 2), generator=generator).abs()
    ends[1, :8] = torch.tensor([128, 384])  # whole tiles, and blocks that do not exist
    ends[1, 8:24] = 0
    ends[2] = ends[2].sort(0).values
    batch.starts, batch.anchors = ends.clamp(min=0).sort(-1).values.unbind(-1)
    mask = block_mask_function(batch.anchors, batch.starts, 512, 16, causal=causal)
    found = tiled_mask(batch, mask)
    expected = create_block_mask(mask, 3, None, 512, 1024, device="cpu")
    assert found.full_kv_num_blocks.any() and found.seq_lengths == expected.seq_lengths
    assert found.BLOCK_SIZE == expected.BLOCK_SIZE
    for side in ("kv", "full_kv", "q", "full_q"):
        for name in (f"{side}_num_blocks", f"{side}_indices"):
            one, other = getattr(found, name), getattr(expected, name)
            assert one.dtype == other.dtype and torch.equal(one, other)


def test_anchors_depend_on_seed_and_step_only():
    c = corpus("." + "x" * 60, "." + "x" * 50)
    first, again = maker(c), maker(c)
    assert np.array_equal(first.draw(3, (0,)), again.draw(3, (0,)))
    assert not np.array_equal(first.draw(3, (0,)), first.draw(4, (0,)))
    assert not np.array_equal(first.draw(3, (0,)), maker(c, seed=1).draw(3, (0,)))
    assert len(first.draw(3, (0,))) == 8


def test_long_samples_are_cut_and_counted():
    c = corpus("..xxxxxxxx", "..xx", cut=5)
    assert c.cut == 1 and c.lengths.tolist() == [5, 4]
    assert c.anchors(0).tolist() == [2, 3]


@pytest.mark.parametrize("cut", [100, 6])
def test_flat_arrays_say_what_each_sample_alone_says(cut, monkeypatch):
    monkeypatch.setattr(corpus_module, "_TOGETHER", 7)
    random = np.random.default_rng(0)
    sizes = [*random.integers(0, 12, 60), 0]
    masks = [random.integers(0, 2, size).repeat(random.integers(1, 4)) for size in sizes]
    texts = ["".join("x" if flag else "." for flag in mask) for mask in masks]
    c = corpus(*texts, cut=cut)
    usable = []
    for index, text in enumerate(texts):
        text = text[:cut]
        own = slice(*c.offsets[index : index + 2])
        assert c.tokens[own].tolist() == [10 * (index + 1) + i for i in range(len(text))]
        ends = [(text + ".").index(".", i) - 1 if text[i] == "x" else -1 for i in range(len(text))]
        assert c.run_ends[own].tolist() == ends
        if any(end > place >= 1 for place, end in enumerate(ends)):
            usable.append(index)
    assert c.lengths.tolist() == [len(text[:cut]) for text in texts]
    assert c.cut == sum(len(text) > cut for text in texts)
    assert (c.tokens.dtype, c.run_ends.dtype, c.offsets.dtype) == (np.int32, np.int32, np.int64)
    training, heldout = c.split(0.3)
    assert sorted([*training, *heldout]) == usable


def test_split_is_by_prompt_and_stable_when_samples_are_added():
    masks = ["..xxx"] * 20
    c = corpus(*masks)
    c = Corpus(c.tokens, c.run_ends, c.offsets, c.ids, tuple(f"p{i // 2}" for i in range(20)), 0)
    training, heldout = c.split(0.2)
    assert len(heldout) == 4 and len(training) == 16
    assert not {c.prompt_ids[i] for i in training} & {c.prompt_ids[i] for i in heldout}
    assert sorted([*training, *heldout]) == list(range(20))
    again, _ = c.split(0.2)
    assert np.array_equal(again, training)


def test_samples_without_an_answer_are_left_out():
    training, heldout = corpus("..xxx", "...", "..x", ".xxxx").split(0.5)
    assert sorted([*training, *heldout]) == [0, 3]
    with pytest.raises(JetspecError, match="at least two"):
        corpus("..xxx", "...").split(0.5)


def test_mask_of_another_length_is_refused():
    broken = sample(0, [1, 2, 3], [1])
    broken.loss_mask.pop()
    with pytest.raises(JetspecError, match="differ in length"):
        Corpus.from_samples([broken], 10)


@pytest.mark.parametrize("capacity", [None, 20])
def test_every_epoch_visits_each_sample_once_in_a_new_order(capacity):
    lengths = np.random.default_rng(0).integers(3, 15, 48)
    config = TrainingConfig(batch_size=1, epochs=3)
    schedule = Schedule(lengths, np.arange(48), config, capacity)
    orders = []
    for epoch in range(3):
        steps = [s for s in range(schedule.total_steps) if int(schedule.epoch(s)) == epoch]
        rows = [row for s in steps for row in schedule.rows(s)]
        assert sorted(i for row in rows for i in row) == list(range(48))
        assert all(lengths[list(row)].sum() <= (capacity or 15) for row in rows)
        orders.append(rows)
    assert orders[0] != orders[1] != orders[2]
    if capacity:
        assert len(orders[0]) < 1.15 * lengths.sum() / capacity + 1


def test_steps_have_whole_batches_and_stop_at_max_steps():
    config = TrainingConfig(batch_size=4, epochs=2)
    schedule = Schedule(np.full(11, 5), np.arange(11), config, None)
    assert schedule.total_steps == 4
    assert all(len(schedule.rows(step)) == 4 for step in range(4))
    few = Schedule(np.full(3, 5), np.arange(3), config, None)
    assert few.total_steps == 2 and len(few.rows(1)) == 3
    short = config.model_copy(update={"max_steps": 3})
    assert Schedule(np.full(11, 5), np.arange(11), short, None).total_steps == 3


def test_epochs_beyond_the_last_step_are_never_packed(monkeypatch):
    packed = []
    rows = corpus_module._rows
    monkeypatch.setattr(corpus_module, "_rows", lambda *a: packed.append(1) or rows(*a))
    config = TrainingConfig(batch_size=4, epochs=10**6, max_steps=5)
    schedule = Schedule(np.full(11, 5), np.arange(11), config, 20)
    walked = [schedule.rows(step) for step in range(schedule.total_steps)]
    assert schedule.total_steps == 5 and len(packed) < 12
    again = Schedule(np.full(11, 5), np.arange(11), config, 20)
    assert [again.rows(step) for step in reversed(range(5))] == walked[::-1]


@pytest.fixture(scope="module")
def packing():
    target = tiny_target("qwen3")
    samples = greedy_samples(target, count=6, tokens=10, stop_token_ids=())
    return target, Corpus.from_samples(samples, 64)


@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
def test_packed_rows_and_padding_train_like_samples_alone(packing, mask):
    target, c = packing
    head = tiny_head(target, mask, block_size=4, edge_rank=2)
    torch.nn.init.normal_(head.edges.child_proj.weight)
    distiller = Distiller(head, target, LossConfig(chunk_tokens=9))
    teacher = OnlineTeacher(target, head.taps)

    def gradients(m, rows):
        head.zero_grad()
        batch = m.make(rows, [m.draw(0, row) for row in rows])
        loss, sums = distiller(batch, *teacher(batch))
        loss.backward()
        return sums, [p.grad.clone() for p in head.parameters()]

    plain = maker(c, anchors=64, sequence_length=64)
    alone = [gradients(plain, [(i,)]) for i in range(6)]
    packed = maker(c, True, anchors=64, sequence_length=64, micro_batch_size=4)
    sums, together = gradients(packed, [(0, 1), (2, 3, 4), (5,)])
    torch.testing.assert_close(sums, sum(s for s, _ in alone), rtol=1e-4, atol=1e-4)
    for index, gradient in enumerate(together):
        expected = sum(g[index] for _, g in alone)
        torch.testing.assert_close(gradient, expected, rtol=2e-3, atol=2e-4)


def test_batch_of_no_rows_has_a_zero_gradient_for_every_parameter(packing):
    target, c = packing
    head = tiny_head(target, block_size=4, edge_rank=2)
    distiller = Distiller(head, target, LossConfig())
    batch = maker(c).make([], [])
    loss, sums = distiller(batch, *OnlineTeacher(target, head.taps)(batch))
    loss.backward()
    assert float(loss.detach()) == 0 and not sums.any()
    assert all(p.grad is not None and not p.grad.any() for p in head.parameters())
