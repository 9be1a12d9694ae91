"""The target answers through the engine: paged caches, one CUDA graph a step, slots refilled."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from jetspec.engine.engine import PAGE_SIZE, Engine
from jetspec.engine.model import EngineModel
from jetspec.generation.base import Continuation, GenerationRequest, GenerationResult, ignore_tokens
from jetspec.generation.config import RegenerationConfig
from jetspec.generation.conversation import Take, TokenPrompt, answer_all
from jetspec.targets.target import Target

MEMORY_SHARE = 0.7
"""Of the free memory for keys and values; a prefill's activations take the rest."""


class EngineBackend:
    """Plain decoding in `batch_size` slots; without a GPU the reference loop answers.

    Raises:
        JetspecError: the engine does not run this target.
    """

    def __init__(self, config: RegenerationConfig, target: Target) -> None:
        self.semantics = f"engine-{str(target.dtype).removeprefix('torch.')}"
        self.on_tokens: Callable[[int], None] = ignore_tokens
        self._config, self._target = config, target
        self._engine = Engine(
            target,
            slots=config.batch_size,
            max_rows=self._max_rows(),
            pages=self._pages(),
            sampling=config.sampling_params(config.temperature, config.seed),
        )

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        longest = min(self._config.max_prompt_tokens, self._context - self._config.max_new_tokens)
        return answer_all(
            self._complete, self._target, self._config, requests, max_prompt_tokens=longest
        )

    def close(self) -> None:
        del self._engine, self._target

    @property
    def _context(self) -> int:
        """Tokens the target reads at most."""
        stated = getattr(self._target.config, "max_position_embeddings", None)
        asked = self._config.max_prompt_tokens + self._config.max_new_tokens
        return asked if stated is None else min(asked, int(stated))

    def _max_rows(self) -> int:
        return -(-(self._context + PAGE_SIZE) // PAGE_SIZE) * PAGE_SIZE

    def _pages(self) -> int | None:
        """As many as every slot can need, or as the memory holds."""
        target, slots = self._target, self._config.batch_size
        if target.device.type != "cuda":
            return None
        free, _ = torch.cuda.mem_get_info(target.device)
        page = EngineModel.row_bytes(target) * PAGE_SIZE
        most = slots * self._max_rows() // PAGE_SIZE
        return max(self._max_rows() // PAGE_SIZE, min(most, int(free * MEMORY_SHARE) // page))

    def _complete(self, prompts: Sequence[TokenPrompt], take: Take) -> None:
        self._engine.decode(
            [prompt.ids for prompt in prompts],
            max_new_tokens=self._config.max_new_tokens,
            request_ids=[prompt.seed for prompt in prompts],
            on_tokens=lambda count: self.on_tokens(count),
            on_answer=lambda place, g: take(place, Continuation(g.tokens, _finish(g.finish))),
        )


def _finish(finish: str) -> Literal["stop", "length"]:
    return "stop" if finish == "stop" else "length"
