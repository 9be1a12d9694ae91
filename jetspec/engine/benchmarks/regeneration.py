"""Answering many prompts plainly: the engine against the transformers backend, in one run."""

import time
from collections.abc import Callable, Iterator

import torch

from jetspec.engine.engine import Engine
from jetspec.generation.conversation import TokenPrompt
from jetspec.generation.transformers_backend import complete
from jetspec.sampling import SamplingParams
from jetspec.targets.target import Target

NEW_TOKENS = 64


def prompts(count: int) -> list[list[int]]:
    """Random prompts of 32 to 255 tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(32, 256, (count,), generator=generator).tolist()
    return [torch.randint(0, 150000, (n,), generator=generator).tolist() for n in lengths]


def rates(target: Target, batch: int) -> Iterator[dict[str, object]]:
    """Tokens a second over one and a half batches of prompts, prefill included."""
    given = prompts(batch * 3 // 2)
    engine = Engine(target, slots=batch, max_rows=512)
    engine.decode(given[:batch], max_new_tokens=4, stop_token_ids=())  # compiles, captures

    def ours() -> dict[str, float]:
        done = engine.decode(given, max_new_tokens=NEW_TOKENS, stop_token_ids=())
        return {"prefill_s": done.seconds["prefill"]}

    def theirs() -> dict[str, float]:
        complete(
            target, [TokenPrompt(ids, seed) for seed, ids in enumerate(given)],
            sampling=SamplingParams(), max_new_tokens=NEW_TOKENS, batch_size=batch,
        )  # fmt: skip
        return {}

    calls: dict[str, Callable[[], dict[str, float]]] = {"engine": ours, "transformers": theirs}
    for name, call in calls.items():
        torch.cuda.synchronize()
        started = time.perf_counter()
        more = call()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        yield {
            "backend": name,
            "batch": batch,
            "tokens_per_second": len(given) * NEW_TOKENS / seconds,
            "seconds": seconds,
            **more,
        }
