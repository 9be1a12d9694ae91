import json
import shutil
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import httpx
import pytest
import torch
from huggingface_hub import errors
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from jetspec.errors import JetspecError
from jetspec.targets.config import TargetConfig
from jetspec.targets.gguf import build_once
from jetspec.targets.load import (
    from_model,
    load_target,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
    target_directory,
    target_fingerprint,
)
from jetspec.targets.target import Target
from tests.tiny import ARCHITECTURES, EOS, tiny_model, tiny_target, tiny_tokenizer
from tests.tiny_gguf import write_tiny_gguf

ARCHS = tuple(ARCHITECTURES)


def ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, 60, shape, generator=torch.Generator().manual_seed(seed))


def causal(batch: int, new: int, held: int = 0) -> torch.Tensor:
    return torch.ones(batch, new, held + new, dtype=torch.bool).tril(held)


def positions(batch: int, new: int, held: int = 0) -> torch.Tensor:
    return (torch.arange(new) + held).expand(batch, new)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_causal_forward_equals_the_model_s_own(arch):
    target = tiny_target(arch)
    x = ids(2, 9)
    out = target.forward(x, position_ids=positions(2, 9), mask=causal(2, 9))
    with torch.no_grad():
        expected = target.model(input_ids=x).logits
    torch.testing.assert_close(target.logits(out.hidden), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arch", ARCHS)
def test_tree_nodes_see_their_ancestors_and_nothing_else(arch):
    """Each branch of a tree gives what its path alone gives, siblings at equal positions."""
    target = tiny_target(arch)
    prefix, nodes = ids(1, 6), ids(1, 5, seed=1)
    parents = [-1, 0, 0, 1, 2]
    depths = [0, 1, 1, 2, 2]
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]
    mask = torch.zeros(1, 5, 11, dtype=torch.bool)
    mask[:, :, :6] = True
    for node, path in enumerate(paths):
        assert parents[node] == (path[-2] if len(path) > 1 else -1)
        mask[0, node, [6 + index for index in path]] = True
    cache = target.new_cache()
    target.forward(prefix, position_ids=positions(1, 6), mask=causal(1, 6), cache=cache)
    tree = target.forward(
        nodes, position_ids=torch.tensor([depths]) + 6, mask=mask, cache=cache, taps=(0, 1)
    )
    assert cache.length == 11
    for node, path in enumerate(paths):
        alone = torch.cat([prefix, nodes[:, path]], dim=1)
        length = alone.shape[1]
        expected = target.forward(
            alone, position_ids=positions(1, length), mask=causal(1, length), taps=(0, 1)
        )
        torch.testing.assert_close(
            tree.hidden[0, node], expected.hidden[0, -1], rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(tree.taps[0, node], expected.taps[0, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arch", ARCHS)
def test_gathered_rows_continue_like_a_fresh_sequence(arch):
    target = tiny_target(arch)
    x = ids(2, 8)
    cache = target.new_cache()
    target.forward(x, position_ids=positions(2, 8), mask=causal(2, 8), cache=cache)
    keep = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 7]])
    # The second row keeps three tokens; its fourth is padding that points anywhere.
    cache.gather(keep)
    assert cache.length == 4
    mask = torch.ones(2, 1, 5, dtype=torch.bool)
    mask[1, 0, 3] = False
    out = target.forward(x[:, 4:5], position_ids=torch.tensor([[4], [3]]), mask=mask, cache=cache)
    for row, length in enumerate((4, 3)):
        alone = torch.cat([x[row : row + 1, :length], x[row : row + 1, 4:5]], dim=1)
        expected = target.forward(
            alone, position_ids=positions(1, length + 1), mask=causal(1, length + 1)
        )
        torch.testing.assert_close(out.hidden[row, 0], expected.hidden[0, -1], rtol=1e-4, atol=1e-4)


def test_kept_sequences_continue_alone():
    target = tiny_target()
    x = ids(3, 5)
    cache = target.new_cache()
    target.forward(x, position_ids=positions(3, 5), mask=causal(3, 5), cache=cache)
    cache.keep_sequences(torch.tensor([2]))
    assert (cache.batch_size, cache.length) == (1, 5)
    out = target.forward(
        x[2:, :1], position_ids=positions(1, 1, 5), mask=causal(1, 1, 5), cache=cache
    )
    alone = torch.cat([x[2:], x[2:, :1]], dim=1)
    expected = target.forward(alone, position_ids=positions(1, 6), mask=causal(1, 6))
    torch.testing.assert_close(out.hidden[0, 0], expected.hidden[0, -1], rtol=1e-4, atol=1e-4)


def test_a_padding_row_never_poisons_the_cache():
    target = tiny_target()
    x = ids(1, 4)
    mask = causal(1, 4)
    mask[0, 3] = False
    cache = target.new_cache()
    out = target.forward(x, position_ids=positions(1, 4), mask=mask, cache=cache)
    assert out.hidden.isfinite().all()
    for layer in cache.dynamic.layers:
        assert layer.keys.isfinite().all() and layer.values.isfinite().all()


def test_eager_attention_honours_the_same_mask():
    sdpa = tiny_target("qwen3")
    model = tiny_model("qwen3")
    model.set_attn_implementation("eager")
    eager = from_model(model, tiny_tokenizer(), "eager")
    x = ids(2, 7)
    mask = causal(2, 7)
    mask[1, 4:, 1:3] = False
    a = sdpa.forward(x, position_ids=positions(2, 7), mask=mask)
    b = eager.forward(x, position_ids=positions(2, 7), mask=mask)
    torch.testing.assert_close(a.hidden, b.hidden, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arch", ARCHS)
def test_taps_are_the_outputs_of_the_asked_layers_in_the_asked_order(arch):
    target = tiny_target(arch)
    x = ids(2, 5)
    out = target.forward(x, position_ids=positions(2, 5), mask=causal(2, 5), taps=(1, 0))
    with torch.no_grad():
        states = target.model(input_ids=x, output_hidden_states=True).hidden_states
    expected = torch.cat([states[2], states[1]], dim=-1)
    assert out.taps.shape == (2, 5, 2 * target.hidden_size)
    torch.testing.assert_close(out.taps, expected, rtol=1e-4, atol=1e-4)


def test_a_tap_outside_the_target_is_refused():
    target = tiny_target(num_layers=3)
    with pytest.raises(JetspecError, match="layers 0 to 2"):
        target.forward(ids(1, 2), position_ids=positions(1, 2), mask=causal(1, 2), taps=(3,))


def test_a_mask_of_another_width_is_refused():
    target = tiny_target()
    with pytest.raises(ValueError, match="mask"):
        target.forward(ids(1, 3), position_ids=positions(1, 3), mask=causal(1, 3, held=1))


@pytest.mark.parametrize(
    ("config", "model"),
    [
        (GraniteConfig(logits_scaling=3.0), GraniteForCausalLM),
        (CohereConfig(logit_scale=0.3), CohereForCausalLM),
        (GPTNeoXConfig(), GPTNeoXForCausalLM),
    ],
)
def test_logits_follow_the_config_s_scaling(config, model):
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "eos_token_id": 1}
    small |= {"num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 2}
    target = from_model(
        model(type(config)(**{**config.to_diff_dict(), **small, "num_key_value_heads": 4})),
        tiny_tokenizer(),
        "scaled",
    )
    x = ids(1, 6)
    out = target.forward(x, position_ids=positions(1, 6), mask=causal(1, 6))
    with torch.no_grad():
        expected = target.model(input_ids=x).logits
    torch.testing.assert_close(target.logits(out.hidden), expected, rtol=1e-4, atol=1e-4)


def test_logits_soft_cap_and_gradients_of_the_projection():
    target = tiny_target()
    hidden = torch.randn(3, target.hidden_size, requires_grad=True)
    plain = target.logits(hidden)
    assert not plain.requires_grad
    assert target.project(hidden).requires_grad
    target.config.final_logit_softcapping = 2.0
    torch.testing.assert_close(target.logits(hidden), 2 * torch.tanh(plain / 2))


@pytest.mark.parametrize(
    "model",
    [
        lambda shape: MistralForCausalLM(MistralConfig(sliding_window=8, **shape)),
        lambda shape: Qwen2ForCausalLM(
            Qwen2Config(use_sliding_window=True, sliding_window=8, max_window_layers=1, **shape)
        ),
    ],
)
def test_sliding_windows_are_refused(model):
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    with pytest.raises(JetspecError, match="full-attention") as caught:
        from_model(model(shape), tiny_tokenizer(), "windowed")
    assert "SlidingWindow" in str(caught.value)


def test_an_attention_without_a_mask_is_refused():
    model = tiny_model()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(JetspecError, match="sdpa"):
        from_model(model, tiny_tokenizer(), "flash")


def test_every_stop_token_is_found():
    model = tiny_model()
    model.generation_config.eos_token_id = [7, 9]
    target = from_model(model, tiny_tokenizer(), "stops")
    assert target.eos_token_ids == {EOS, 7, 9}


def spelled(target: Target, messages: list[dict[str, str]], **options: bool) -> str:
    return "".join(target.tokenizer.convert_ids_to_tokens(target.render(messages, **options)))


def test_decoded_text_has_no_special_tokens():
    target = tiny_target()
    end = target.tokenizer.eos_token_id
    assert target.decode_text([*target.tokenizer("a")["input_ids"], end]) == "a"


def test_render_is_the_template_s_text_in_tokens():
    target = tiny_target()
    messages = [{"role": "user", "content": "hi"}]
    assert spelled(target, messages) == "u:hi.a:"
    assert spelled(target, messages, add_generation_prompt=False) == "u:hi."


def test_thinking_mode_reaches_the_template():
    target = tiny_target()
    target.tokenizer.chat_template = "{{ 'yes' if enable_thinking else 'no' }}"
    messages = [{"role": "user", "content": "hi"}]
    assert spelled(target, messages) == "no"
    assert spelled(target, messages, enable_thinking=True) == "yes"


def test_messages_that_the_template_refuses_are_one_clear_line():
    target = tiny_target()
    target.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(JetspecError, match="roles must alternate"):
        target.render([{"role": "user", "content": "hi"}])


# Loading


def directory_of(tmp_path: Path, **changes: object) -> Path:
    directory = tmp_path / "model"
    tiny_model("qwen2").save_pretrained(directory, **changes)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def config_of(source: object, tmp_path: Path, **changes: object) -> TargetConfig:
    values = {"source": str(source), "cache_dir": str(tmp_path / "cache"), "device": "cpu"}
    return TargetConfig.model_validate({**values, **changes})


def refusal(source: object, tmp_path: Path) -> str:
    with pytest.raises(JetspecError) as caught:
        load_target(config_of(source, tmp_path))
    line = str(caught.value)
    assert line.startswith("target.source: ") and "\n" not in line
    return line


def test_a_directory_loads_as_it_was_saved(tmp_path):
    target = load_target(config_of(directory_of(tmp_path), tmp_path))
    x = ids(1, 5)
    out = target.forward(x, position_ids=positions(1, 5), mask=causal(1, 5))
    with torch.no_grad():
        expected = tiny_model("qwen2")(input_ids=x).logits
    torch.testing.assert_close(target.logits(out.hidden), expected, rtol=1e-4, atol=1e-4)
    assert target.name == "model"
    assert target.dtype == torch.float32
    assert target.model.config._attn_implementation == "sdpa"
    assert target.fingerprint == target_fingerprint(config_of(tmp_path / "model", tmp_path))
    assert len(load_tokenizer(config_of(tmp_path / "model", tmp_path))) == 64


def test_dtype_and_device_defaults(tmp_path):
    assert resolve_dtype(TargetConfig(), torch.device("cpu")) == torch.float32
    assert resolve_dtype(TargetConfig(), torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype(TargetConfig(dtype="bf16"), torch.device("cpu")) == torch.bfloat16
    for name in ("cuda:99", "toaster"):
        with pytest.raises(JetspecError, match=r"target\.device"):
            resolve_device(TargetConfig(device=name))


def test_bf16_is_loaded_when_asked(tmp_path):
    target = load_target(config_of(directory_of(tmp_path), tmp_path, dtype="bf16"))
    assert target.dtype == torch.bfloat16
    assert target.logits(torch.randn(1, target.hidden_size)).dtype == torch.float32


def test_a_path_that_is_not_there(tmp_path):
    assert "not found" in refusal(tmp_path / "nowhere", tmp_path)
    assert "not found" in refusal(tmp_path / "nowhere.gguf", tmp_path)
    assert "not found" in refusal("a b?c", tmp_path)


def test_a_plain_file(tmp_path):
    (tmp_path / "file").write_text("x")
    assert ".gguf" in refusal(tmp_path / "file", tmp_path)


def test_a_hub_id_when_the_hub_is_out_of_reach(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    line = refusal("nobody-at-all/no-such-model", tmp_path)
    assert "hub" in line and "embedded" in line


@pytest.mark.parametrize(
    ("error", "field", "says"),
    [
        (errors.RepositoryNotFoundError, "target.source", "neither a local path nor a model"),
        (errors.GatedRepoError, "target.source", "licence"),
        (errors.RevisionNotFoundError, "target.revision", "not a revision of some/model"),
    ],
)
def test_what_the_hub_answers_is_one_clear_line(tmp_path, monkeypatch, error, field, says):
    def refuse(*_: object, **__: object) -> None:
        request = httpx.Request("GET", "https://hub.invalid")
        raise error("first\nsecond", response=httpx.Response(404, request=request))

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(JetspecError, match=says) as caught:
        load_target(config_of("some/model", tmp_path, revision="v9"))
    assert str(caught.value).startswith(field) and "\n" not in str(caught.value)


def test_a_hub_id_loads_its_snapshot(tmp_path, monkeypatch):
    directory = directory_of(tmp_path)
    asked = []

    def snapshot(hub_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((hub_id, revision))
        return str(directory)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    target = load_target(config_of("some/model", tmp_path, revision="v1"))
    assert asked == [("some/model", "v1")]
    assert target.name == "some/model"
    assert target.fingerprint == target_fingerprint(config_of(directory, tmp_path))


def test_a_revision_of_something_local_is_refused(tmp_path):
    with pytest.raises(JetspecError, match=r"target\.revision"):
        load_target(config_of(directory_of(tmp_path), tmp_path, revision="v1"))


def test_a_directory_without_config(tmp_path):
    directory = directory_of(tmp_path)
    (directory / "config.json").unlink()
    assert "no config.json" in refusal(directory, tmp_path)


def test_a_directory_without_weights(tmp_path):
    directory = directory_of(tmp_path)
    (directory / "model.safetensors").unlink()
    assert "no weight files" in refusal(directory, tmp_path)


def test_a_directory_without_tokenizer(tmp_path):
    directory = directory_of(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    assert "no tokenizer files" in refusal(directory, tmp_path)


def test_a_directory_without_chat_template(tmp_path):
    directory = directory_of(tmp_path)
    (directory / "chat_template.jinja").unlink()
    assert "no chat template" in refusal(directory, tmp_path)


def test_a_missing_shard(tmp_path):
    directory = directory_of(tmp_path, max_shard_size="20KB")
    shards = sorted(directory.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[1].unlink()
    assert shards[1].name in refusal(directory, tmp_path)


def test_a_broken_weight_index(tmp_path):
    directory = directory_of(tmp_path, max_shard_size="20KB")
    (directory / "model.safetensors.index.json").write_text("{")
    assert "broken weight index" in refusal(directory, tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, 20_000])
def test_a_truncated_weight_file(tmp_path, keep):
    path = directory_of(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "truncated or damaged" in refusal(path.parent, tmp_path)


def test_an_unknown_architecture(tmp_path):
    directory = directory_of(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "nosuch"}))
    assert "cannot be" in refusal(directory, tmp_path)


def test_a_broken_config(tmp_path):
    directory = directory_of(tmp_path)
    (directory / "config.json").write_text("{")
    refusal(directory, tmp_path)


def test_weights_of_another_shape(tmp_path):
    directory = directory_of(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    assert "cannot be loaded" in refusal(directory, tmp_path)


def test_weights_that_are_missing_are_not_made_up(tmp_path):
    directory = directory_of(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    config["num_hidden_layers"] += 1
    config.pop("layer_types", None)
    (directory / "config.json").write_text(json.dumps(config))
    assert "missing" in refusal(directory, tmp_path)


def test_a_tokenizer_larger_than_the_model(tmp_path):
    directory = directory_of(tmp_path)
    tiny_tokenizer(80).save_pretrained(directory)
    assert "80 tokens" in refusal(directory, tmp_path)


# GGUF


def test_a_gguf_file_gives_the_model_it_was_made_of(tmp_path):
    gguf = tmp_path / "tiny.gguf"
    model = write_tiny_gguf(gguf, splitter="smollm")
    target = load_target(config_of(gguf, tmp_path))
    x = ids(1, 9)
    out = target.forward(x, position_ids=positions(1, 9), mask=causal(1, 9))
    with torch.no_grad():
        expected = model(input_ids=x).logits
    torch.testing.assert_close(target.logits(out.hidden), expected, rtol=1e-4, atol=1e-4)
    assert target.name == "tiny"
    assert target.tokenizer.decode(target.render([{"role": "user", "content": "a 1"}])) == (
        "<|user|>a 1<|end|><|assistant|>"
    )
    assert target.eos_token_ids == {target.tokenizer.convert_tokens_to_ids("<|end|>")}


def test_converting_a_gguf_file_prints_nothing_where_nobody_watches(tmp_path, capfd):
    gguf = tmp_path / "tiny.gguf"
    write_tiny_gguf(gguf)
    target_directory(config_of(gguf, tmp_path))
    assert capfd.readouterr() == ("", "")


def test_a_conversion_reads_the_texts_of_a_gguf_file_once(tmp_path, monkeypatch):
    import gguf as library

    from jetspec.targets.gguf import converted_directory

    opened = []
    begin = library.GGUFReader.__init__
    monkeypatch.setattr(
        library.GGUFReader,
        "__init__",
        lambda self, path, mode="r": (opened.append(str(path)), begin(self, path, mode))[1],
    )
    theirs = library.GGUFReader
    write_tiny_gguf(tmp_path / "a.gguf")
    converted_directory(tmp_path / "a.gguf", tmp_path / "cache", "a")
    assert opened == [str(tmp_path / "a.gguf")] and library.GGUFReader is theirs


def test_a_gguf_file_is_converted_once_and_its_directory_is_a_target(tmp_path):
    gguf = tmp_path / "tiny.gguf"
    write_tiny_gguf(gguf)
    directory, _ = target_directory(config_of(gguf, tmp_path))
    before = {path: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert target_directory(config_of(gguf, tmp_path))[0] == directory
    assert {path: path.stat().st_mtime_ns for path in directory.iterdir()} == before
    shutil.move(gguf, tmp_path / "elsewhere")
    again = load_target(config_of(directory, tmp_path))
    assert again.fingerprint == target_fingerprint(config_of(directory, tmp_path))


@pytest.mark.parametrize(
    ("splitter", "pieces"),
    [
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["12", "3", "4"]),
        ("gpt-2", ["12", "34"]),
    ],
)
def test_numbers_are_split_as_the_file_says(tmp_path, splitter, pieces):
    gguf = tmp_path / "tiny.gguf"
    write_tiny_gguf(gguf, splitter=splitter)
    tokenizer = load_tokenizer(config_of(gguf, tmp_path))
    assert tokenizer.tokenize("1234") == pieces


def test_an_unknown_splitter_is_refused(tmp_path):
    gguf = tmp_path / "tiny.gguf"
    write_tiny_gguf(gguf, splitter="martian")
    assert "martian" in refusal(gguf, tmp_path)
    assert not list((tmp_path / "cache" / "targets").glob("*[!k]"))


def test_a_file_that_only_looks_like_gguf(tmp_path):
    gguf = tmp_path / "x.gguf"
    gguf.write_bytes(b"PK\x03\x04 not a model")
    assert "wrong magic" in refusal(gguf, tmp_path)


@pytest.mark.parametrize("keep", [4, 3_000, 0.5, 0.99])
def test_a_truncated_gguf_file(tmp_path, keep):
    gguf = tmp_path / "tiny.gguf"
    write_tiny_gguf(gguf)
    data = gguf.read_bytes()
    gguf.write_bytes(data[: keep if isinstance(keep, int) else int(keep * len(data))])
    assert "GGUF" in refusal(gguf, tmp_path)
    assert not [p for p in (tmp_path / "cache" / "targets").iterdir() if p.suffix != ".lock"]


# Building once


def test_concurrent_callers_build_once(tmp_path):
    built = []

    def build(part: Path) -> None:
        built.append(part)
        time.sleep(0.2)
        (part / "file").write_text("whole")

    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(build_once(tmp_path / "made", build)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert results == [tmp_path / "made"] * 4
    assert (tmp_path / "made" / "file").read_text() == "whole"


def test_a_build_that_fails_leaves_nothing_and_can_be_repeated(tmp_path):
    def fail(part: Path) -> None:
        (part / "file").write_text("half")
        raise JetspecError("target.source", "x", "broken")

    with pytest.raises(JetspecError, match="broken"):
        build_once(tmp_path / "made", fail)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []
    build_once(tmp_path / "made", lambda part: (part / "file").write_text("whole"))
    assert (tmp_path / "made" / "file").read_text() == "whole"


def test_a_cache_that_cannot_be_written_is_one_clear_line():
    with pytest.raises(JetspecError, match=r"target\.cache_dir"):
        build_once(Path("/proc/jetspec/made"), lambda part: None)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("rows", [1, 9])
def test_grouped_attention_gives_what_the_librarys_own_gives(arch, rows, monkeypatch):
    target = tiny_target(arch)
    ids = torch.arange(2 * rows).reshape(2, rows) % target.vocab_size
    mask = torch.ones(rows, rows, dtype=torch.bool).tril().expand(2, -1, -1)
    inputs = {"position_ids": torch.arange(rows).expand(2, -1), "mask": mask}
    ours = target.forward(ids, **inputs).hidden
    monkeypatch.setattr("jetspec.targets.target.grouped", lambda config: nullcontext())
    torch.testing.assert_close(ours, target.forward(ids, **inputs).hidden, rtol=1e-4, atol=1e-5)


def test_a_forward_leaves_the_models_own_attention_as_it_was():
    target = tiny_target("llama")
    before = target.model.config._attn_implementation
    ones = torch.ones(1, 1, 1, dtype=torch.bool)
    target.forward(
        torch.zeros(1, 1, dtype=torch.long), position_ids=torch.zeros(1, 1).long(), mask=ones
    )
    assert target.model.config._attn_implementation == before == "sdpa"
