"""How the target answers the training prompts."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from jetspec.generation.loops import MIN_REPEATS
from jetspec.sampling_settings import SamplingSettings
from jetspec.settings import Settings


class EndpointConfig(Settings):
    """An OpenAI-compatible server that already serves the target.

    Attributes:
        model: the name it is served under; None takes the only one there is.
        api_key_env: the environment variable that holds the key, so that no record holds it.
    """

    url: str = "http://127.0.0.1:8000/v1"
    model: str | None = None
    api_key_env: str | None = None
    timeout_s: float = Field(default=120.0, gt=0)


class RegenerationConfig(SamplingSettings):
    """Regeneration: a pool of workers, one backend each.

    Attributes:
        workers: number of Ray actors; None is one a GPU, or one on a CPU machine.
        batch_size: sequences answered at one time by one worker.
        max_prompt_tokens: a longer prompt is skipped, with its length.
        turns: `all` answers every user turn anew; `last` keeps earlier assistant turns as context.
        shard_size: prompts a file; None is four batches, which keeps a worker's batch full.
        max_attempts: tries before a prompt goes to the dead-letter file.
        loop_min_repeats: an answer whose tail repeats one token cycle this often counts as looping.
    """

    optional: ClassVar[frozenset[str]] = SamplingSettings.optional | {"top_k"}

    backend: Literal["transformers", "endpoint", "vllm", "engine"] = "transformers"
    workers: int | None = Field(default=None, ge=1)
    batch_size: int = Field(default=32, ge=1)
    max_new_tokens: int = Field(default=512, ge=1)
    max_prompt_tokens: int = Field(default=2048, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    samples_per_prompt: int = Field(default=1, ge=1)
    seed: int = 0
    turns: Literal["all", "last"] = "all"
    enable_thinking: bool = False
    shard_size: int | None = Field(default=None, ge=1)
    max_attempts: int = Field(default=3, ge=1)
    loop_min_repeats: int = Field(default=MIN_REPEATS, ge=2)
    endpoint: EndpointConfig = EndpointConfig()

    def chosen_sampling(self) -> dict[str, Any]:
        """The optional sampling settings that were set, as servers name them."""
        return {k: v for k, v in self.model_dump(include=set(self.optional)).items()}
