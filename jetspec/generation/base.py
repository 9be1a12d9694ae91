"""What every generation backend is: conversations in, exact token ids out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from jetspec.errors import JetspecError
from jetspec.generation.config import RegenerationConfig
from jetspec.targets.config import TargetConfig
from jetspec.targets.load import (
    load_target,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
    target_directory,
    target_fingerprint,
)
from jetspec.targets.target import Target

Message = dict[str, str]
Status = Literal["ok", "truncated", "looping", "failed", "skipped"]


@dataclass(frozen=True)
class GenerationRequest:
    """One conversation to answer. `seed` is the request's own: it decides every random draw."""

    id: str
    messages: tuple[Message, ...]
    sample_index: int
    seed: int


@dataclass(frozen=True)
class GenerationResult:
    """The answered conversation.

    Attributes:
        input_ids: the whole conversation as the target saw and wrote it, never tokenised again.
        loss_mask: 1 where the target wrote the token, 0 elsewhere; as long as `input_ids`.
        messages: the conversation with the target's answers in place.
        error: why it failed or was skipped.
    """

    id: str
    input_ids: list[int]
    loss_mask: list[int]
    messages: tuple[Message, ...]
    status: Status
    error: str | None = None


@dataclass(frozen=True)
class Continuation:
    """What the target wrote after one prompt.

    `tokens` ends with the stop token when `finish` is "stop".
    """

    tokens: list[int]
    finish: Literal["stop", "length", "error"]
    error: str | None = None


def ignore_tokens(written: int) -> None:
    """The listener of a backend whose progress nobody follows."""


class Backend(Protocol):
    """One way to have the target answer.

    Attributes:
        semantics: names what decides the bytes (who computes, in which precision); part of every
            sample's id.
        on_tokens: called with the number of tokens written since the last call.
    """

    semantics: str
    on_tokens: Callable[[int], None]

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Answers in the order of `requests`.

        A request that cannot be answered comes back as failed or skipped with its reason.

        Raises:
            JetspecError: nothing can be answered (server unreachable, wrong set-up).
        """
        ...

    def close(self) -> None: ...


def semantics(config: RegenerationConfig, target: TargetConfig) -> str:
    """The name of what decides the bytes, known before a backend is opened."""
    if config.backend == "endpoint":
        return config.backend
    return f"{config.backend}-{_dtype_name(target)}"


def _dtype_name(target: TargetConfig) -> str:
    return str(resolve_dtype(target, resolve_device(target))).removeprefix("torch.")


def text_target(config: TargetConfig) -> Target:
    """The target without its weights: it renders and decodes text for servers that hold them.

    Raises:
        JetspecError: the target's directory is missing or cannot be read.
    """
    directory, name = target_directory(config)
    tokenizer = load_tokenizer(config)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(directory), attn_implementation="sdpa"
            )
            if (directory / "generation_config.json").is_file():
                model.generation_config = GenerationConfig.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise JetspecError(
            "target.source", directory, f"its config cannot be read ({error})"
        ) from error
    return Target(model, tokenizer, name, target_fingerprint(config))


def open_backend(config: RegenerationConfig, target: TargetConfig) -> Backend:
    """The backend that `config` names, ready to answer."""
    if config.backend == "transformers":
        from jetspec.generation.transformers_backend import TransformersBackend

        return TransformersBackend(config, load_target(target))
    if config.backend == "endpoint":
        from jetspec.generation.endpoint import EndpointBackend

        return EndpointBackend(config, text_target(target))
    if config.backend == "vllm":
        from jetspec.generation.vllm_backend import VllmBackend

        directory, _ = target_directory(target)
        return VllmBackend(config, text_target(target), directory, _dtype_name(target))
    from jetspec.generation.engine_backend import EngineBackend

    return EngineBackend(config, load_target(target))
