"""The backends by name: which one a run asks for, and how it is opened.

A backend is imported when it is opened, so that a run needs the libraries of its own alone.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from jetspec.errors import JetspecError
from jetspec.generation.base import Backend
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
    if target.weights != "own" and config.backend in ("endpoint", "vllm"):
        mend = f"the {config.backend} backend serves its own weights; use engine or transformers"
        raise JetspecError("target.weights", target.weights, mend)
    if config.backend == "endpoint":
        from jetspec.generation.endpoint import EndpointBackend

        return EndpointBackend(config, text_target(target))
    if config.backend == "vllm":
        from jetspec.generation.vllm_backend import VllmBackend

        directory, _ = target_directory(target)
        return VllmBackend(config, text_target(target), directory, _dtype_name(target))
    from jetspec.generation.engine_backend import EngineBackend

    return EngineBackend(config, load_target(target))
