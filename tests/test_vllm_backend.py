"""The vLLM adapter against a stand-in module with vLLM's interface."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from jetspec.errors import JetspecError
from jetspec.generation.backends import open_backend
from jetspec.generation.base import GenerationRequest
from jetspec.generation.config import RegenerationConfig
from jetspec.generation.vllm_backend import VllmBackend
from jetspec.targets.config import TargetConfig
from tests.tiny import EOS, tiny_target

HI = GenerationRequest("r", ({"role": "user", "content": "hi"},), 0, 2**40 + 5)


def install(monkeypatch: pytest.MonkeyPatch, *outputs: SimpleNamespace) -> SimpleNamespace:
    """Put a module named vllm in place that answers with `outputs` and records its calls."""
    calls = SimpleNamespace(engine=None, prompts=[], sampling=[])

    class LLM:
        def __init__(self, **settings: Any) -> None:
            if settings["model"] == "/broken":
                raise ValueError("no such model")
            calls.engine = settings

        def generate(self, prompts: Any, sampling: Any, use_tqdm: bool) -> list[SimpleNamespace]:
            calls.prompts += prompts
            calls.sampling += sampling
            return [SimpleNamespace(outputs=[output]) for output in outputs[: len(prompts)]]

    module = ModuleType("vllm")
    module.LLM = LLM  # type: ignore[attr-defined]
    module.SamplingParams = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    return calls


def output(tokens: list[int], reason: str) -> SimpleNamespace:
    return SimpleNamespace(token_ids=tuple(tokens), finish_reason=reason)


def backend(directory: str = "/models/tiny", **settings: Any) -> VllmBackend:
    config = RegenerationConfig(backend="vllm", **settings)
    return VllmBackend(config, tiny_target(), Path(directory), "bfloat16")


def test_ids_go_in_and_come_out_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = install(monkeypatch, output([20, 21, EOS], "stop"))
    engine = backend(temperature=0.7, top_p=0.9, max_new_tokens=50, batch_size=3)
    written: list[int] = []
    engine.on_tokens = written.append
    (result,) = engine.generate([HI])
    prompt = tiny_target().render(HI.messages)
    assert calls.prompts == [{"prompt_token_ids": prompt}]
    assert result.status == "ok"
    assert result.input_ids == [*prompt, 20, 21, EOS]
    assert result.loss_mask == [0] * len(prompt) + [1, 1, 1]
    assert calls.engine["model"] == "/models/tiny" and calls.engine["dtype"] == "bfloat16"
    (sampling,) = calls.sampling
    assert sampling["temperature"] == 0.7 and sampling["top_p"] == 0.9
    assert sampling["max_tokens"] == 50 and sampling["stop_token_ids"] == [EOS]
    assert sampling["seed"] == 5
    assert sum(written) == 3


def test_a_cut_answer_is_truncated_and_an_aborted_one_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, output([20, 21], "length"), output([], "abort"), output([20], "stop"))
    cut, aborted, odd = backend().generate([HI, HI, HI])
    assert cut.status == "truncated" and sum(cut.loss_mask) == 2
    assert aborted.status == "failed" and "'abort'" in (aborted.error or "")
    assert odd.status == "failed" and "without a stop token" in (odd.error or "")


def test_without_vllm_the_mend_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(JetspecError, match=r"regeneration.backend: vllm: .*install vllm") as error:
        backend()
    assert "\n" not in str(error.value)


def test_a_target_vllm_cannot_load_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(JetspecError, match="no such model"):
        backend("/broken")


def test_opening_by_name_finds_directory_stop_tokens_and_precision(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = tiny_target()
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    calls = install(monkeypatch, output([20, EOS], "stop"))
    config = RegenerationConfig(backend="vllm")
    engine = open_backend(config, TargetConfig(source=str(tmp_path), dtype="fp32"))
    (result,) = engine.generate([HI])
    assert result.status == "ok"
    assert calls.engine["model"] == str(tmp_path) and calls.engine["dtype"] == "float32"
    assert engine.semantics == "vllm-float32"
