import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from jetspec.errors import JetspecError
from jetspec.heads.exports import export_head
from jetspec.heads.registry import load_head, save_head
from tests.tiny import tiny_head, tiny_target

FORMATS = ("jetspec", "speculators", "dspark")


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3", num_layers=5)


def saved(target, directory, **settings):
    head = tiny_head(target, **settings)
    save_head(head, str(directory), target_fingerprint=target.fingerprint)
    return head


def edit(directory, change, name="config.json"):
    path = Path(directory) / name
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def weights(directory, name="model.safetensors"):
    return safetensors.torch.load_file(Path(directory) / name)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
@pytest.mark.parametrize(("rank", "gate"), [(0, True), (4, True), (4, False)])
def test_head_round_trips(target, tmp_path, format, mask, rank, gate):
    head = tiny_head(target, mask, edge_rank=rank, edge_gate=gate, taps=(0, 2, 3))
    export_head(head, str(tmp_path), target, format=format, dtype="fp32")
    loaded = load_head(str(tmp_path))
    expected = head.config
    if not rank:
        expected = expected.model_copy(update={"edge_gate": True})
    assert loaded.config == expected
    assert loaded.num_target_layers == target.num_layers
    assert (loaded.hidden_size, loaded.vocab_size) == (target.hidden_size, target.vocab_size)
    state = loaded.state_dict()
    assert state.keys() == head.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in head.state_dict().items())


def test_native_config_says_causal_in_both_spellings(target, tmp_path):
    for mask, causal in (("causal", True), ("bidirectional", False)):
        saved(target, tmp_path / mask, mask=mask)
        own = json.loads((tmp_path / mask / "config.json").read_text())["dflash_config"]
        assert own["causal_head"] is causal and own["causal"] is causal


@pytest.mark.parametrize(
    ("keys", "mask"),
    [({"causal": True}, "causal"), ({"causal_head": True}, "causal"),
     ({"causal": False}, "bidirectional"), ({}, "bidirectional")],
)  # fmt: skip
def test_either_causal_key_alone_is_read(target, tmp_path, keys, mask):
    saved(target, tmp_path)

    def change(config):
        for key in ("causal", "causal_head"):
            del config["dflash_config"][key]
        config["dflash_config"].update(keys)

    edit(tmp_path, change)
    assert load_head(str(tmp_path)).config.mask == mask


def test_contradicting_causal_keys_are_refused(target, tmp_path):
    saved(target, tmp_path)
    edit(tmp_path, lambda config: config["dflash_config"].update(causal=False))
    with pytest.raises(JetspecError, match="disagree"):
        load_head(str(tmp_path))


def test_block_size_is_read_from_either_place(target, tmp_path):
    saved(target, tmp_path, block_size=6)
    edit(tmp_path, lambda c: c["dflash_config"].update(block_size=c.pop("block_size")))
    assert load_head(str(tmp_path)).config.block_size == 6


def test_layer_ids_of_format_b_count_the_embedding(target, tmp_path):
    head = tiny_head(target, taps=(0, 2, 3))
    export_head(head, str(tmp_path), target, format="speculators")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert load_head(str(tmp_path)).taps == (0, 2, 3)


def test_format_b_says_what_vllm_reads(target, tmp_path):
    export_head(tiny_head(target), str(tmp_path), target, format="speculators")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["sliding_window_non_causal"] is False
    (proposal,) = config["speculators_config"]["proposal_methods"]
    assert proposal == {"proposal_type": "greedy", "speculative_tokens": 7}
    assert config["draft_vocab_size"] == target.vocab_size
    assert config["speculators_config"]["verifier"]["architectures"] == ["Qwen3ForCausalLM"]


@pytest.mark.parametrize("format", FORMATS)
def test_weights_of_the_target_are_never_saved(target, tmp_path, format):
    export_head(tiny_head(target), str(tmp_path), target, format=format)
    names = weights(tmp_path).keys()
    assert not [name for name in names if "lm_head" in name or "embed" in name]
    assert "norm.weight" in names


def test_weights_of_the_target_in_a_foreign_head_are_not_used(target, tmp_path):
    head = saved(target, tmp_path)
    state = weights(tmp_path) | {"lm_head.weight": torch.zeros(64, 32)}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    loaded = load_head(str(tmp_path))
    assert torch.equal(loaded.fc.weight, head.fc.weight)


@pytest.mark.parametrize("format", FORMATS)
def test_bf16_export_says_bf16_everywhere(target, tmp_path, format):
    head = tiny_head(target, edge_rank=4)
    export_head(head, str(tmp_path), target, format=format, dtype="bf16")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    if format == "speculators":
        assert config["transformer_layer_config"]["dtype"] == "bfloat16"
    assert {t.dtype for t in weights(tmp_path).values()} == {torch.bfloat16}
    loaded = load_head(str(tmp_path))
    assert torch.equal(loaded.fc.weight, head.fc.weight.bfloat16().float())


def test_path_scores_do_not_disturb_readers_of_format_a(target, tmp_path):
    head = saved(target, tmp_path, edge_rank=4)
    plain = saved(target, tmp_path / "plain")
    assert weights(tmp_path).keys() == weights(tmp_path / "plain").keys() == set(plain.state_dict())
    assert weights(tmp_path, "edges.safetensors").keys() == set(head.edges.state_dict())


def test_format_c_tables_are_the_path_scores(target, tmp_path):
    head = tiny_head(target, edge_rank=4, edge_gate=False)
    torch.nn.init.normal_(head.edges.child_proj.weight)
    export_head(head, str(tmp_path), target, format="dspark", dtype="fp32")
    state, config = weights(tmp_path), json.loads((tmp_path / "config.json").read_text())
    assert config["markov_rank"] == 4 and config["sample_from_anchor"] is False
    a, b = torch.tensor([5]), torch.tensor([[6, 7]])
    tables = (
        state["markov_head.markov_w1.weight"][a] @ state["markov_head.markov_w2.weight"][b[0]].T
    )
    log_q = torch.tensor([[[-1.0, -1.0]]])
    scores = head.edges.edge_scores(
        b[None], log_q, a, torch.zeros(1, 1, target.hidden_size), target.embed
    )[0, 0, 0]
    torch.testing.assert_close(scores[0] - scores[1], tables[0, 0] - tables[0, 1])


def test_rope_is_written_in_both_spellings_and_read_from_either(target, tmp_path):
    saved(target, tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5e5
    for gone in ("rope_theta", "rope_parameters"):
        (tmp_path / "config.json").write_text(
            json.dumps({key: value for key, value in config.items() if key != gone})
        )
        loaded = load_head(str(tmp_path)).config.rope_parameters
        assert loaded == {"rope_type": "default", "rope_theta": 5e5}


BROKEN = {
    "not a head": (lambda c: c.pop("dflash_config"), "not a parallel head"),
    "two rope thetas": (lambda c: c.update(rope_theta=7.0), "rope_theta"),
    "no mask token": (lambda c: c["dflash_config"].pop("mask_token_id"), "mask_token_id"),
    "no block size": (lambda c: c.pop("block_size"), "block_size"),
    "wrong size": (lambda c: c.update(intermediate_size=99), "mlp"),
    "too many layers": (lambda c: c.update(num_hidden_layers=3, layer_types=None), "lacks"),
    "too few layers": (lambda c: c.update(num_hidden_layers=1, layer_types=None), "does not know"),
    "attention bias": (lambda c: c.update(attention_bias=True), "attention_bias"),
    "sliding layers": (lambda c: c.update(layer_types=["sliding_attention"] * 2), "layer_types"),
    "nonsense": (lambda c: c.update(num_attention_heads="four"), "num_attention_heads"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_head_is_refused_in_one_line(target, tmp_path, name):
    change, named = BROKEN[name]
    saved(target, tmp_path)
    edit(tmp_path, change)
    with pytest.raises(JetspecError, match=named) as caught:
        load_head(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_missing_and_damaged_files_are_named(target, tmp_path):
    with pytest.raises(JetspecError, match=r"no config\.json"):
        load_head(str(tmp_path))
    saved(target, tmp_path, edge_rank=2)
    (tmp_path / "edges.safetensors").unlink()
    with pytest.raises(JetspecError, match=r"edges\.safetensors: not found"):
        load_head(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"12345678901234")
    with pytest.raises(JetspecError, match="damaged"):
        load_head(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"draft_vocab_size": 32}, "draft_vocab_size"),
        ({"speculators_model_type": "eagle3"}, "dflash"),
    ],
)
def test_format_b_heads_of_another_kind_are_refused(target, tmp_path, change, named):
    export_head(tiny_head(target), str(tmp_path), target, format="speculators")
    edit(tmp_path, lambda config: config.update(change))
    with pytest.raises(JetspecError, match=named):
        load_head(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "named"),
    [({"markov_rank": 256}, "markov_rank"), ({"sample_from_anchor": True}, "sample_from_anchor"),
     ({"enable_confidence_head": True}, "confidence")],
)  # fmt: skip
def test_format_c_heads_we_would_misread_are_refused(target, tmp_path, change, named):
    export_head(tiny_head(target), str(tmp_path), target, format="dspark")
    edit(tmp_path, lambda config: config.update(change))
    with pytest.raises(JetspecError, match=named):
        load_head(str(tmp_path))


def test_head_of_another_target_is_not_exported(target, tmp_path):
    other = tiny_target("llama", num_layers=3)
    with pytest.raises(JetspecError, match="target layers 5, the target's is 3"):
        export_head(tiny_head(target), str(tmp_path / "out"), other)
    assert not (tmp_path / "out").exists()
