"""How the target answers the training prompts."""

from typing import Literal

from pydantic import Field

from jetspec.settings import Settings


class EndpointConfig(Settings):
    """An OpenAI-compatible server that already serves the target."""

    url: str = "http://127.0.0.1:8000/v1"
    model: str | None = None
    api_key: str | None = None
    timeout_s: float = Field(120.0, gt=0)


class RegenerationConfig(Settings):
    """Regeneration: a pool of workers, one backend each.

    Attributes:
        workers: number of Ray actors; None is one a GPU, or one on a CPU machine.
        turns: `all` answers every user turn anew; `last` keeps earlier assistant turns as context.
        max_attempts: tries before a prompt goes to the dead-letter file.
        loop_min_repeats: an answer whose tail repeats one token cycle this often counts as looping.
    """

    backend: Literal["transformers", "endpoint", "vllm", "engine"] = "transformers"
    workers: int | None = Field(None, ge=1)
    batch_size: int = Field(32, ge=1)
    max_new_tokens: int = Field(512, ge=1)
    max_prompt_tokens: int = Field(2048, ge=1)
    temperature: float = Field(0.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    samples_per_prompt: int = Field(1, ge=1)
    seed: int = 0
    turns: Literal["all", "last"] = "all"
    enable_thinking: bool = False
    shard_size: int = Field(64, ge=1)
    max_attempts: int = Field(3, ge=1)
    loop_min_repeats: int = Field(4, ge=2)
    endpoint: EndpointConfig = EndpointConfig()
