"""The target answers in this process through vLLM, imported only when this backend is opened."""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jetspec.errors import JetspecError
from jetspec.generation.base import Continuation, GenerationRequest, GenerationResult, ignore_tokens
from jetspec.generation.config import RegenerationConfig
from jetspec.generation.conversation import Renderer, TokenPrompt, answer_all, in_order


class VllmBackend:
    """One vLLM engine over the target's directory; prompts and answers are token ids.

    Args:
        directory: the target's Hugging Face directory.
        dtype: `float32` or `bfloat16`.

    Raises:
        JetspecError: vLLM is not installed, or cannot load the target.
    """

    def __init__(
        self, config: RegenerationConfig, renderer: Renderer, directory: Path, dtype: str
    ) -> None:
        self.semantics = f"vllm-{dtype}"
        self.on_tokens: Callable[[int], None] = ignore_tokens
        self._config = config
        self._renderer = renderer
        try:
            self._vllm: Any = importlib.import_module("vllm")
        except ImportError as error:
            raise JetspecError(
                "regeneration.backend", "vllm", f"cannot be imported ({error}); install vllm"
            ) from error
        try:
            self._engine: Any = self._vllm.LLM(
                model=str(directory),
                dtype=dtype,
                max_model_len=config.max_prompt_tokens + config.max_new_tokens,
                max_num_seqs=config.batch_size,
                seed=config.seed,
            )
        except (ValueError, RuntimeError, OSError) as error:
            raise JetspecError(
                "regeneration.backend", "vllm", f"cannot load the target ({error})"
            ) from error

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        return answer_all(
            in_order(self._complete),
            self._renderer,
            self._config,
            requests,
            max_prompt_tokens=self._config.max_prompt_tokens,
        )

    def close(self) -> None:
        del self._engine

    def _complete(self, prompts: Sequence[TokenPrompt]) -> list[Continuation]:
        config = self._config
        sampling = [
            self._vllm.SamplingParams(
                temperature=config.temperature,
                top_p=config.top_p,
                max_tokens=config.max_new_tokens,
                seed=prompt.seed % 2**31,
                stop_token_ids=sorted(self._renderer.eos_token_ids),
                detokenize=False,
                **config.chosen_sampling(),
            )
            for prompt in prompts
        ]
        outputs = self._engine.generate(
            [{"prompt_token_ids": prompt.ids} for prompt in prompts], sampling, use_tqdm=False
        )
        continuations = [self._read(output.outputs[0]) for output in outputs]
        self.on_tokens(sum(len(c.tokens) for c in continuations))
        return continuations

    def _read(self, output: Any) -> Continuation:
        tokens = list(output.token_ids)
        if output.finish_reason == "stop":
            if not tokens or tokens[-1] not in self._renderer.eos_token_ids:
                return Continuation([], "error", "vLLM stopped without a stop token")
            return Continuation(tokens, "stop")
        if output.finish_reason == "length":
            return Continuation(tokens, "length")
        return Continuation([], "error", f"vLLM finished with {output.finish_reason!r}")
