import json

import pytest
import safetensors.torch
import torch

from jetspec.errors import JetspecError
from jetspec.heads import doctor
from jetspec.heads.doctor import check_head, require_fit, training_record
from jetspec.heads.registry import head_class, new_head, save_head
from tests.tiny import tiny_head, tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def saved(target, directory, **settings):
    head = tiny_head(target, **settings)
    record = training_record(target, enable_thinking=False)
    save_head(head, str(directory), target_fingerprint=target.fingerprint, training=record)
    return head


def failing(directory, target, **options):
    return {f.check: f.detail for f in check_head(str(directory), target, **options) if not f.ok}


def edit(directory, change):
    config = json.loads((directory / "config.json").read_text())
    change(config)
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_head_fresh_from_training_passes_every_check(tmp_path, arch, mask):
    target = tiny_target(arch)
    saved(target, tmp_path, mask=mask, edge_rank=2)
    findings = check_head(str(tmp_path), target, enable_thinking=False)
    assert [f for f in findings if not f.ok] == []
    assert {"mask token", "causal keys", "RoPE", "anchor slot", "tokenizer", "chat template",
            "enable thinking", "layer ids", "vocabulary", "hidden size",
            "training forward equals decoding forward"} <= {f.check for f in findings}  # fmt: skip


@pytest.mark.parametrize(
    ("token", "reason"),
    [(1, "ends answers"), (2, "pad_token_id"), (10, "texts contain"), (64, "outside")],
)
def test_mask_token_in_use_is_found(target, tmp_path, token, reason):
    saved(target, tmp_path)
    edit(tmp_path, lambda c: c["dflash_config"].update(mask_token_id=token))
    if token == 64:  # beyond the embedding, so that nothing else can be checked
        edit(tmp_path, lambda c: c.update(vocab_size=65))
    assert reason in failing(tmp_path, target)["mask token"]


def test_layer_ids_outside_the_target_are_found(target, tmp_path):
    saved(target, tmp_path)
    edit(tmp_path, lambda c: c["dflash_config"].update(target_layer_ids=[1, 3]))
    assert "[3]" in failing(tmp_path, target)["layer ids"]


@pytest.mark.parametrize(
    ("shape", "check"),
    [({"vocab_size": 80}, "vocabulary"), ({"hidden_size": 64}, "hidden size"),
     ({"num_layers": 4}, "target layers")],
)  # fmt: skip
def test_head_of_another_shape_is_found_and_refused(target, tmp_path, shape, check):
    head = saved(tiny_target("llama", **shape), tmp_path)
    assert check in failing(tmp_path, target)
    with pytest.raises(JetspecError, match=f"does not fit tiny-llama: {check}"):
        require_fit(head, target, "head")


@pytest.mark.parametrize("kept", ["causal", "causal_head"])
def test_single_causal_key_is_found(target, tmp_path, kept):
    saved(target, tmp_path)
    other = {"causal": "causal_head", "causal_head": "causal"}[kept]
    edit(tmp_path, lambda c: c["dflash_config"].pop(other))
    assert f"only {kept}" in failing(tmp_path, target)["causal keys"]


def test_rope_is_compared_as_numbers(target, tmp_path):
    saved(target, tmp_path)

    def change(config, theta):
        config.pop("rope_parameters", None)
        config["rope_theta"] = theta

    edit(tmp_path, lambda c: change(c, 10000))  # another spelling of the same numbers
    assert failing(tmp_path, target) == {}
    edit(tmp_path, lambda c: change(c, 1e6))
    assert "1000000.0 against 10000.0" in failing(tmp_path, target)["RoPE"]


def test_retrained_target_is_found(target, tmp_path):
    saved(target, tmp_path)
    assert list(failing(tmp_path, tiny_target("llama", seed=1))) == ["target fingerprint"]


def test_other_template_tokenizer_and_thinking_mode_are_found(target, tmp_path):
    saved(target, tmp_path)
    other = tiny_target("llama")
    other.tokenizer.chat_template += " "
    other.tokenizer.add_tokens(["wow"])
    found = failing(tmp_path, other, enable_thinking=True)
    assert {"tokenizer", "chat template", "enable thinking"} <= found.keys()


def test_facts_a_foreign_trainer_did_not_record_are_not_compared(target, tmp_path):
    saved(target, tmp_path)
    edit(tmp_path, lambda c: c.pop("jetspec_training"))
    assert failing(tmp_path, target, enable_thinking=True) == {}


def test_lm_head_in_the_weights_is_found(target, tmp_path):
    saved(target, tmp_path)
    path = tmp_path / "model.safetensors"
    state = safetensors.torch.load_file(path) | {"lm_head.weight": torch.zeros(64, 32)}
    safetensors.torch.save_file(state, path)
    assert "lm_head.weight" in failing(tmp_path, target)["target's own weights"]


def test_dtype_that_is_not_the_weights_is_found(target, tmp_path):
    saved(target, tmp_path)
    edit(tmp_path, lambda c: c.update(dtype="bfloat16"))
    assert failing(tmp_path, target)["dtype"] == "config says bfloat16, the weights are float32"


PARTS = {"edges": "selector", "edge_rank": 2, "rescore": "own", "conv_rank": 2}


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        ("parallel", {}, "fc.weight"),
        ("parallel", PARTS, "layers.1.mlp_conv.taps"),
        ("parallel", PARTS, "edges.child_proj.weight"),
        ("parallel", {"edges": "lattice", "edge_rank": 2}, "edges.layers.0.mlp.up_proj.weight"),
        ("parallel", PARTS, "rescorer.norm.weight"),
        ("dspark", {}, "trunk.norm.weight"),
        ("dspark", {}, "markov_head.markov_w2.weight"),
        ("dspark", {}, "confidence_head.proj.bias"),
        ("eagle3", {}, "midlayer.self_attn.k_proj.weight"),
    ],
)
def test_a_weight_that_is_no_number_is_named_whatever_part_it_is_of(
    target, tmp_path, kind, settings, named, value
):
    shape = {} if kind == "eagle3" else {"num_layers": 2}
    head = new_head(head_class(kind).settings(num_taps=2, **shape, **settings), target)
    with torch.no_grad():
        head.get_parameter(named).view(-1)[-1] = float(value)
    save_head(head, str(tmp_path), target_fingerprint=target.fingerprint)
    found = failing(tmp_path, target)["finite weights"]
    assert found == f"{named.removeprefix('trunk.')} holds NaN or infinity; train again"


def test_a_calibration_that_is_no_number_is_found(target, tmp_path):
    head = new_head(head_class("dspark").settings(num_layers=1, num_taps=2), target)
    head.calibration = ((1.0, 0.0), (float("nan"), 0.0))
    save_head(head, str(tmp_path), target_fingerprint=target.fingerprint)
    assert failing(tmp_path, target) == {
        "finite weights": "calibration holds NaN or infinity; train again"
    }


def test_every_weight_of_every_file_is_counted_and_has_the_type_that_is_said(target, tmp_path):
    head = saved(target, tmp_path, **PARTS)
    counts = [f.detail for f in check_head(str(tmp_path), target) if f.check == "files"]
    assert counts == [f"{sum(p.numel() for p in head.parameters()):,} weights"]
    path = tmp_path / "edges.safetensors"
    state = {name: t.bfloat16() for name, t in safetensors.torch.load_file(path).items()}
    safetensors.torch.save_file(state, path)
    found = failing(tmp_path, target)["dtype"]
    assert found == "config says float32, the weights are bfloat16, float32"


@pytest.mark.parametrize("key", ["sample_from_anchor", "shift_label"])
def test_head_that_predicts_from_its_anchor_slot_is_found(target, tmp_path, key):
    saved(target, tmp_path)
    edit(tmp_path, lambda c: c.update({key: True}))
    assert key in failing(tmp_path, target)["anchor slot"]


def test_decoding_forward_that_drifts_from_training_is_found(target, tmp_path, monkeypatch):
    saved(target, tmp_path)
    original = doctor.ParallelHead.draft_hidden

    def shifted(self, cache, embeddings, positions):
        return original(self, cache, embeddings, positions + 1)

    monkeypatch.setattr(doctor.ParallelHead, "draft_hidden", shifted)
    assert list(failing(tmp_path, target)) == ["training forward equals decoding forward"]


def test_anchor_missing_from_its_slot_is_found(target, tmp_path, monkeypatch):
    saved(target, tmp_path)
    original = doctor.ParallelHead.draft_hidden

    def masked(self, cache, embeddings, positions):
        return original(self, cache, embeddings[:, -1:].expand_as(embeddings), positions)

    monkeypatch.setattr(doctor.ParallelHead, "draft_hidden", masked)
    assert "anchor slot" in failing(tmp_path, target)


def test_unreadable_head_is_one_finding(target, tmp_path):
    (finding,) = check_head(str(tmp_path), target)
    assert not finding.ok and "no config.json" in finding.detail
