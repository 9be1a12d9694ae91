import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Config,
    Qwen3DecoderLayer,
    Qwen3RotaryEmbedding,
)

from jetspec.errors import JetspecError
from jetspec.heads import layers as head_layers
from jetspec.heads.config import HeadConfig
from jetspec.heads.doctor import slot_logits_both_ways
from jetspec.heads.layers import HeadLayer, RotaryEmbedding, rope_frequencies
from jetspec.heads.parallel import new_head
from jetspec.heads.sizes import resolve_head_config, spread_taps, unused_token
from jetspec.training.blocks import block_mask_function, dense_mask
from jetspec.trees.draft import Draft
from tests.tiny import tiny_head, tiny_target

MASKS = ("causal", "bidirectional")


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3")


def taps_of(target, head, tokens):
    """Tapped hidden states [1, T, n·d] of tokens [1, T]."""
    length = tokens.shape[1]
    causal = torch.ones(1, length, length, dtype=torch.bool).tril()
    positions = torch.arange(length)[None]
    return target.forward(tokens, position_ids=positions, mask=causal, taps=head.taps).taps


def blocks_forward(target, head, tokens, anchors, taps=None):
    """Training forward of blocks at `anchors` over one sequence -> [A, block, d]."""
    block, length = head.config.block_size, tokens.shape[1]
    taps = taps_of(target, head, tokens) if taps is None else taps
    places = torch.tensor([anchors])
    ids = torch.full((1, len(anchors), block), head.mask_token_id)
    ids[:, :, 0] = tokens[0, places]
    positions = places[:, :, None] + torch.arange(block)
    mask = block_mask_function(
        places, torch.zeros_like(places), length, block, causal=head.config.mask == "causal"
    )
    hidden = head(
        head.fuse(taps),
        torch.arange(length)[None],
        target.embed(ids.flatten(1)),
        positions.flatten(1),
        dense_mask(mask, 1, ids[0].numel(), length + ids[0].numel(), torch.device("cpu")),
    )
    return hidden.view(len(anchors), block, -1)


def random_tokens(count, seed=0):
    return torch.randint(4, 54, (1, count), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_training_and_decoding_forward_give_equal_slot_logits(arch, mask):
    target = tiny_target(arch)
    trained, decoded, _ = slot_logits_both_ways(tiny_head(target, mask), target)
    assert trained.std() > 1e-2
    torch.testing.assert_close(trained, decoded, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", MASKS)
def test_ragged_batch_grown_round_by_round_drafts_like_each_sequence_alone(target, mask):
    head = tiny_head(target, mask)
    lengths, steps = [9, 4, 17], [[3, 1, 8], [2, 3, 0], [4, 0, 9]]
    rows = [random_tokens(n + 1, seed) for seed, n in enumerate(lengths)]
    cache = head.new_cache(3)
    done = [0, 0, 0]
    for counts in steps:
        widest = max(counts) + 2
        taps = torch.full((3, widest, len(head.taps) * target.hidden_size), 7.0)
        positions = torch.zeros(3, widest, dtype=torch.long)
        valid = torch.zeros(3, widest, dtype=torch.bool)
        for row, count in enumerate(counts):
            here = slice(done[row], done[row] + count)
            taps[row, :count] = taps_of(target, head, rows[row])[0, here]
            positions[row, :count] = torch.arange(here.start, here.stop)
            valid[row, :count] = True
            done[row] += count
        head.extend(cache, taps, positions, valid)
    assert cache.lengths.tolist() == lengths

    def draft(cache, chosen):
        anchors = torch.tensor([int(rows[row][0, -1]) for row in chosen])
        ids = torch.full((len(chosen), 8), head.mask_token_id)
        ids[:, 0] = anchors
        positions = cache.lengths[:, None] + torch.arange(8)
        return head.draft_hidden(cache, target.embed(ids), positions)

    together = draft(cache, [0, 1, 2])
    for row, length in enumerate(lengths):
        alone = blocks_forward(target, head, rows[row], [length])[0]
        torch.testing.assert_close(together[row], alone, rtol=1e-4, atol=1e-5)
    cache.keep_sequences(torch.tensor([2, 0]))
    torch.testing.assert_close(draft(cache, [2, 0]), together[[2, 0]], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", MASKS)
def test_head_sees_context_strictly_before_its_anchor(target, mask):
    head = tiny_head(target, mask)
    tokens, anchor = random_tokens(20), 9
    taps = taps_of(target, head, tokens)
    base = blocks_forward(target, head, tokens, [anchor], taps)
    for place in (anchor, anchor + 1, 19):
        changed = taps.clone()
        changed[:, place] += 1.0
        assert torch.equal(blocks_forward(target, head, tokens, [anchor], changed), base)
    changed = taps.clone()
    changed[:, anchor - 1] += 1.0
    assert not torch.allclose(blocks_forward(target, head, tokens, [anchor], changed), base)


@pytest.mark.parametrize("mask", MASKS)
def test_blocks_never_see_each_other(target, mask):
    head = tiny_head(target, mask)
    tokens = random_tokens(20)
    both = blocks_forward(target, head, tokens, [5, 9])
    taps = taps_of(target, head, tokens)
    other = tokens.clone()
    other[0, 9] = 4 if int(tokens[0, 9]) != 4 else 5
    moved = blocks_forward(target, head, other, [5, 9], taps)
    assert torch.equal(moved[0], both[0])
    assert not torch.allclose(moved[1], both[1])
    torch.testing.assert_close(blocks_forward(target, head, tokens, [9])[0], both[1])


@pytest.mark.parametrize(("mask", "sees"), [("causal", False), ("bidirectional", True)])
def test_only_the_bidirectional_mask_lets_a_slot_see_later_slots(target, mask, sees):
    head = tiny_head(target, mask)
    cache = head.new_cache(1)
    tokens = random_tokens(10)
    valid = torch.ones(1, 10, dtype=torch.bool)
    head.extend(cache, taps_of(target, head, tokens), torch.arange(10)[None], valid)
    embedded = target.embed(torch.full((1, 8), head.mask_token_id))
    positions = 10 + torch.arange(8)[None]
    base = head.draft_hidden(cache, embedded, positions)
    changed = embedded.clone()
    changed[:, 5] += 1.0
    moved = head.draft_hidden(cache, changed, positions)
    assert torch.allclose(moved[:, :5], base[:, :5]) is not sees
    assert not torch.allclose(moved[:, 5], base[:, 5])


def test_layer_without_context_is_the_qwen3_layer():
    config = HeadConfig(
        num_layers=1, taps=(0,), mask_token_id=3, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6, max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    torch.manual_seed(0)
    ours = HeadLayer(config, 32)
    theirs_config = Qwen3Config(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, rms_norm_eps=1e-6, num_hidden_layers=1, attn_implementation="sdpa",
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    theirs = Qwen3DecoderLayer(theirs_config, 0)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs.load_state_dict(ours.state_dict())
    x, positions = torch.randn(2, 6, 32), torch.arange(6).expand(2, -1)
    causal = torch.ones(2, 6, 6, dtype=torch.bool).tril()
    rotary = RotaryEmbedding(config)(positions, torch.float32)
    none = torch.zeros(2, 0, 2, 16)
    expected = theirs(
        x,
        attention_mask=causal[:, None],
        position_ids=positions,
        position_embeddings=Qwen3RotaryEmbedding(theirs_config)(x, positions),
    )
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(ours.slots(x, rotary, (none, none), causal), expected)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
         "original_max_position_embeddings": 64},
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    ],
)  # fmt: skip
def test_scaled_rope_equals_transformers(parameters):
    config = Qwen3Config(
        head_dim=16,
        max_position_embeddings=256,
        rope_parameters=dict(parameters),
        num_hidden_layers=1,
    )
    theirs = Qwen3RotaryEmbedding(config)
    ours, factor = rope_frequencies(parameters, 16, 256)
    torch.testing.assert_close(ours, theirs.inv_freq)
    assert factor == pytest.approx(theirs.attention_scaling)


def test_parameter_names_are_those_of_format_a(target):
    names = set(tiny_head(target, num_layers=1).state_dict())
    assert names == {
        "fc.weight", "hidden_norm.weight", "norm.weight",
        "layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight",
        *(f"layers.0.self_attn.{n}_proj.weight" for n in "qkvo"),
        *(f"layers.0.self_attn.{n}_norm.weight" for n in "qk"),
        *(f"layers.0.mlp.{n}_proj.weight" for n in ("gate", "up", "down")),
    }  # fmt: skip


def test_taps_spread_as_the_paper_has_them():
    assert spread_taps(36, 5) == (1, 9, 17, 25, 33)
    assert spread_taps(24, 5) == (1, 6, 11, 16, 21)
    assert spread_taps(3, 5) == (0, 1, 2)
    for layers in range(1, 40):
        taps = spread_taps(layers, 5)
        assert len(set(taps)) == len(taps) and 0 <= min(taps) <= max(taps) < layers


def test_unused_token_is_none_that_text_or_template_holds(target):
    token = unused_token(target)
    assert token not in target.eos_token_ids
    assert token not in {target.tokenizer.pad_token_id, target.tokenizer.unk_token_id}
    wider = tiny_target("llama", vocab_size=64)
    wider.vocab_size = len(wider.tokenizer) + 3
    assert unused_token(wider) == len(wider.tokenizer)


@pytest.mark.parametrize(
    ("settings", "named"), [({"taps": (0, 3)}, "taps"), ({"mask_token_id": 64}, "mask_token_id")]
)
def test_config_outside_the_target_is_refused(target, settings, named):
    with pytest.raises(JetspecError, match=named):
        resolve_head_config(HeadConfig(**settings), target)


def test_one_seed_gives_one_head(target):
    config = HeadConfig(num_layers=1, block_size=4)
    first, again, other = (new_head(config, target, seed).fc.weight for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def prepared(target, head, rows=2, length=6):
    cache = head.new_cache(rows)
    tokens = torch.cat([random_tokens(length, seed) for seed in range(rows)])
    taps = torch.cat([taps_of(target, head, t[None]) for t in tokens])
    positions = torch.arange(length).expand(rows, -1)
    head.extend(cache, taps, positions, torch.ones(rows, length, dtype=torch.bool))
    return cache, torch.tensor([7, 9])


@pytest.mark.parametrize("depth", [3, 7, 12])
def test_causal_head_drafts_shallower_and_deeper_than_its_block(target, depth):
    head = tiny_head(target)
    cache, anchors = prepared(target, head)
    draft = head.draft(cache, anchors, target.embed, target.logits, 4, depth)
    assert draft.tokens.shape == (2, depth, 4)
    whole = head.draft(cache, anchors, target.embed, target.logits, 4)
    shared = min(depth, 7)
    assert torch.equal(draft.tokens[:, :shared], whole.tokens[:, :shared])


def test_bidirectional_head_always_runs_its_whole_block(target):
    head = tiny_head(target, "bidirectional")
    cache, anchors = prepared(target, head)
    whole = head.draft(cache, anchors, target.embed, target.logits, 4)
    cut = head.draft(cache, anchors, target.embed, target.logits, 4, 3)
    assert torch.equal(cut.tokens, whole.tokens[:, :3])
    torch.testing.assert_close(cut.edge_scores, whole.edge_scores[:, :3])


def test_untrained_edges_leave_slot_scores_alone(target):
    head = tiny_head(target, edge_rank=4)
    cache, anchors = prepared(target, head)
    path = head.draft(cache, anchors, target.embed, target.logits, 5)
    head.edges = None
    slot = head.draft(cache, anchors, target.embed, target.logits, 5)
    assert torch.equal(path.tokens, slot.tokens)
    torch.testing.assert_close(path.edge_scores, slot.edge_scores)


@pytest.mark.parametrize("gate", [True, False])
def test_edges_score_every_parent_and_keep_the_candidates_mass(target, gate):
    head = tiny_head(target, edge_rank=4, edge_gate=gate)
    for parameter in head.edges.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    cache, anchors = prepared(target, head)
    draft = head.draft(cache, anchors, target.embed, target.logits, 5)
    edges = head.edges
    head.edges = None
    slot = head.draft(cache, anchors, target.embed, target.logits, 5)
    ids = torch.full((2, 8), head.mask_token_id)
    ids[:, 0] = anchors
    hidden = head.draft_hidden(cache, target.embed(ids), 6 + torch.arange(8).expand(2, -1))

    def unit(token):
        row = target.embed(token)
        return row / (row.pow(2).mean() + torch.finfo(torch.float32).eps).sqrt()

    for b in range(2):
        for depth in range(7):
            log_q = slot.edge_scores[b, depth, 0]
            for i in range(5):
                parent = anchors[b] if depth == 0 else draft.tokens[b, depth - 1, i]
                a = edges.parent_proj.weight @ unit(parent)
                if gate:
                    a = a * 2 * torch.sigmoid(edges.gate_proj.weight @ hidden[b, depth + 1])
                children = [edges.child_proj.weight @ unit(c) for c in draft.tokens[b, depth]]
                score = log_q + torch.stack([a @ child for child in children])
                expected = score - score.logsumexp(0) + log_q.logsumexp(0)
                torch.testing.assert_close(
                    draft.edge_scores[b, depth, i], expected, rtol=1e-4, atol=1e-4
                )
    assert draft.edge_scores.max() <= 0


def test_draft_without_edges_is_the_slot_scoring_of_its_logits(target):
    head = tiny_head(target)
    cache, anchors = prepared(target, head)
    seen = []
    draft = head.draft(
        cache, anchors, target.embed, lambda h: seen.append(h) or target.logits(h), 4
    )
    expected = Draft.from_slot_logits(target.logits(seen[0]), 4)
    assert torch.equal(draft.tokens, expected.tokens)
    assert torch.equal(draft.edge_scores, expected.edge_scores)


@pytest.mark.parametrize("mask", MASKS)
def test_flex_attention_and_sdpa_follow_one_mask_function(target, mask, monkeypatch):
    monkeypatch.setattr(head_layers, "_compiled_flex", lambda: flex_attention)
    head = tiny_head(target, mask)
    anchors, starts = torch.tensor([[3, 9, 17], [5, 5, 20]]), torch.tensor([[0, 0, 12], [0, 0, 6]])
    context, slots = 24, 3 * 8
    function = block_mask_function(anchors, starts, context, 8, causal=mask == "causal")
    dense = dense_mask(function, 2, slots, context + slots, torch.device("cpu"))
    sparse = create_block_mask(function, 2, None, slots, context + slots, device="cpu")
    generator = torch.Generator().manual_seed(0)
    fused, embedded = (torch.randn(2, n, 32, generator=generator) for n in (context, slots))
    positions = torch.arange(context).expand(2, -1)
    places = (anchors[:, :, None] + torch.arange(8)).flatten(1)
    with torch.no_grad():
        by_sdpa = head(fused, positions, embedded, places, dense)
        by_flex = head(fused, positions, embedded, places, sparse)
    torch.testing.assert_close(by_flex, by_sdpa, rtol=1e-4, atol=1e-5)


def test_forgetting_the_tail_of_a_cache_undoes_an_extension(target):
    head = tiny_head(target)
    cache, anchors = prepared(target, head)
    before = head.draft(cache, anchors, target.embed, target.logits, 4)
    more = torch.randn(2, 3, len(head.taps) * target.hidden_size)
    head.extend(cache, more, torch.arange(6, 9).expand(2, -1), torch.ones(2, 3, dtype=torch.bool))
    changed = head.draft(cache, anchors, target.embed, target.logits, 4)
    assert not torch.allclose(changed.edge_scores, before.edge_scores)
    cache.lengths = torch.tensor([6, 6])
    after = head.draft(cache, anchors, target.embed, target.logits, 4)
    torch.testing.assert_close(after.edge_scores, before.edge_scores)
