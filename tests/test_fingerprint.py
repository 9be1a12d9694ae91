import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from jetspec.errors import JetspecError
from jetspec.targets import fingerprint as module
from jetspec.targets.fingerprint import fingerprint, fingerprint_of_model
from tests.tiny import tiny_model, tiny_tokenizer


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "model"
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_one_set_of_files_has_one_fingerprint_wherever_and_whenever(directory, tmp_path):
    first = fingerprint(directory)
    assert len(first) == 64 and int(first, 16) >= 0
    copied = shutil.copytree(directory, tmp_path / "other" / "place")
    for path in copied.iterdir():
        os.utime(path, (1, 1))
    assert fingerprint(copied) == first


def test_a_re_save_by_another_library_version_is_the_same_target(directory):
    first = fingerprint(directory)
    edit(directory / "config.json", transformers_version="9.9.9", _name_or_path="/elsewhere")
    edit(directory / "tokenizer_config.json", is_local=False, backend="other")
    text = (directory / "config.json").read_text()
    (directory / "config.json").write_text(json.dumps(json.loads(text), indent=7))
    assert fingerprint(directory) == first


@pytest.mark.parametrize(
    "change",
    [
        lambda d: edit(d / "config.json", rope_theta=5.0),
        lambda d: edit(d / "generation_config.json", eos_token_id=[1, 5]),
        lambda d: edit(d / "tokenizer_config.json", eos_token="<mask>"),
        lambda d: edit(d / "tokenizer.json", normalizer={"type": "Lowercase"}),
        lambda d: (d / "chat_template.jinja").write_text("{{ messages }}"),
        lambda d: (d / "chat_template.jinja").unlink(),
        lambda d: (d / "tokenizer.model").write_bytes(b"1"),
        lambda d: (d / "special_tokens_map.json").write_text('{"a": 1}'),
    ],
)
def test_it_changes_with_config_tokenizer_and_chat_template(directory, change):
    first = fingerprint(directory)
    change(directory)
    assert fingerprint(directory) != first


def test_it_changes_with_one_flipped_bit_of_the_weights(directory):
    first = fingerprint(directory)
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert fingerprint(directory) != first


def test_a_template_counts_the_same_in_its_own_file_and_in_the_tokenizer_config(directory):
    first = fingerprint(directory)
    path = directory / "chat_template.jinja"
    edit(directory / "tokenizer_config.json", chat_template=path.read_text())
    path.unlink()
    assert fingerprint(directory) == first


def test_weights_are_hashed_once_and_again_when_they_change(directory, tmp_path, monkeypatch):
    hashed = []
    original = module.sha256_file

    def counted(uri: str) -> str:
        hashed.append(Path(uri).name)
        return original(uri)

    monkeypatch.setattr(module, "sha256_file", counted)
    cache = tmp_path / "cache"
    first = fingerprint(directory, cache)
    assert fingerprint(directory, cache) == first
    assert hashed == ["model.safetensors"]
    path = directory / "model.safetensors"
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # size and mtime as before
    assert fingerprint(directory, cache) != first
    assert hashed == ["model.safetensors"] * 2
    assert fingerprint(directory, cache) == fingerprint(directory)


def test_a_broken_or_read_only_hash_cache_only_costs_time(directory, tmp_path):
    first = fingerprint(directory, tmp_path / "cache")
    for record in (tmp_path / "cache" / "hashes").iterdir():
        record.write_text("{")
    assert fingerprint(directory, tmp_path / "cache") == first
    assert fingerprint(directory, "/proc/nowhere") == first


def test_a_directory_without_config_or_weights_is_refused(directory):
    (directory / "model.safetensors").unlink()
    with pytest.raises(JetspecError, match="no weight files"):
        fingerprint(directory)
    (directory / "config.json").unlink()
    with pytest.raises(JetspecError, match=r"no config\.json"):
        fingerprint(directory)


def test_a_model_in_memory_has_one_too():
    first = fingerprint_of_model(tiny_model(), tiny_tokenizer())
    assert fingerprint_of_model(tiny_model(), tiny_tokenizer()) == first
    assert fingerprint_of_model(tiny_model(seed=1), tiny_tokenizer()) != first
    assert fingerprint_of_model(tiny_model("qwen2"), tiny_tokenizer()) != first
    other = tiny_tokenizer()
    other.chat_template = "{{ messages }}"
    assert fingerprint_of_model(tiny_model(), other) != first
    half = tiny_model().to(torch.bfloat16)
    assert fingerprint_of_model(half, tiny_tokenizer()) != first
