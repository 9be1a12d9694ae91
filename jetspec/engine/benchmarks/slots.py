"""What a step costs the host alone, by the number of slots: a table that needs no GPU.

`python -m jetspec.engine.benchmarks.slots [--json FILE]`. A stub stands in for the device: it
commits tokens at once, and prompts are read for nothing. What is left is the engine's own
bookkeeping, in processor time of its thread. A GPU's driver calls are not in it: a graph's replay,
two copies and an event a step, and the launches of a prefill pass.
"""

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from jetspec.engine import engine as engine_module
from jetspec.engine.engine import Engine
from jetspec.engine.launches import Arrival
from jetspec.records import environment
from jetspec.targets.target import Target

SLOTS = (64, 512, 2048)
COMMITTED = (1, 4)  # tokens a round: plain decoding, and a draft that is accepted
PROMPT, ANSWER, LIMIT = 130, 340, 1024  # tokens: a prompt's, an answer's on average and at most
VOCABULARY = 1024
STOP = 0
STEPS = 300  # measured, after all slots have filled


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jetspec.engine.benchmarks.slots", description=__doc__
    )
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args(arguments)
    rows = []
    for row in host_slots():
        rows.append(row)
        shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
        print("  ".join(f"{name} {value}" for name, value in shown.items()), flush=True)
    if args.json:
        record = {
            "host_slots": rows, "prompt_tokens": PROMPT, "answer_tokens": ANSWER,
            "steps": STEPS, "environment": environment(),
        }  # fmt: skip
        args.json.write_text(json.dumps(record, indent=1))
    return 0


def host_slots() -> Iterator[dict[str, object]]:
    """Milliseconds of the host a step: enqueueing a round, its landing, new prompts."""
    for committed in COMMITTED:
        for slots in SLOTS:
            yield {"slots": slots, "committed": committed, **_measure(slots, committed)}


class _Enough(Exception):
    """Enough steps were measured."""


def _measure(slots: int, committed: int) -> dict[str, float]:
    engine = Engine(
        _target(), slots=slots, max_rows=PROMPT + LIMIT + 64, pages=slots * 24, kernels=True,
        graphs=False, ahead=1,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    seconds: dict[str, list[float]] = {"_admit_waiting": [], "_fly": [], "_land": [], "launch": []}
    state = engine.state
    engine.state.out = torch.zeros(slots, committed + 1, dtype=torch.long)
    # Whether a token stops its answer is drawn, and which token it is does not matter.
    drawn = torch.rand(512, slots, committed, generator=generator) >= 1 / ANSWER

    def launch() -> None:
        state.out[:, 0] = state.active * committed
        state.out[:, 1:] = drawn[len(seconds["launch"]) % len(drawn)]

    def read(engine_round: object, cache: object, prompts: list[list[int]], *_: object) -> Tensor:
        return torch.arange(2.0).expand(len(prompts), -1)  # the first token is a 1

    engine.launch = launch  # type: ignore[method-assign]
    engine.model.logits = lambda hidden: hidden  # type: ignore
    for name, times in seconds.items():
        setattr(engine, name, _timed(getattr(engine, name), times))
    engine._arrivals = [Arrival.of(state) for _ in engine._arrivals]
    fly = engine._fly

    def counted(job: object) -> object:
        if len(seconds["_fly"]) >= STEPS:
            raise _Enough
        return fly(job)  # type: ignore[arg-type]

    engine._fly = counted  # type: ignore[method-assign, assignment]
    prompts = [[5] * PROMPT] * (slots * (2 + STEPS * committed // ANSWER))
    with contextlib.suppress(_Enough), patch.object(engine_module, "read_prompts", read):
        engine.decode(prompts, max_new_tokens=LIMIT, stop_token_ids=[STOP])
    return _summary(seconds)


def _summary(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Means of the steps after the first, in which every slot was filled."""
    means = {name: statistics.mean(times[1:]) * 1e3 for name, times in seconds.items()}
    enqueue = means["_fly"] - means["launch"]  # the stub's own time is the device's
    return {
        "enqueue_ms": enqueue,
        "land_ms": means["_land"],
        "admit_ms": means["_admit_waiting"],
        "step_ms": enqueue + means["_land"] + means["_admit_waiting"],
    }


def _timed(call: Callable[..., object], times: list[float]) -> Callable[..., object]:
    def timed(*arguments: object) -> object:
        started = time.thread_time()
        result = call(*arguments)
        times.append(time.thread_time() - started)
        return result

    return timed


def _target() -> Target:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    return Target(LlamaForCausalLM(config).eval(), None, "stub", "none")


if __name__ == "__main__":
    sys.exit(main())
