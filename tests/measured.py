"""Records as the bench makes them, from decoding that is made up: no model, no clock."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jetspec.evaluation.bench import run_group
from jetspec.evaluation.cells import Cell
from jetspec.evaluation.config import EvaluationConfig
from jetspec.evaluation.methods import Decoded, Request, Runner
from jetspec.evaluation.record import failed_record

EOS = 0
FINGERPRINT = "f" * 64
SHARES = {"draft": 0.2, "build": 0.1, "verify": 0.6, "commit": 0.05}


@dataclass(frozen=True)
class FakePrompt:
    id: str
    slice: str
    messages: tuple[dict[str, str], ...] = ()


class FakeTarget:
    """What the bench asks of a target besides decoding; its best two tokens are always tied."""

    device = torch.device("cpu")
    eos_token_ids = frozenset({EOS})
    vocab_size = 50

    def __init__(self, dtype: torch.dtype = torch.float32, gap: float = 0.0) -> None:
        self.dtype = dtype
        self.gap = gap

    def render(self, messages: Any) -> list[int]:
        return [7, 8, 9]

    def forward(self, ids: torch.Tensor, **_: Any) -> Any:
        return type("Output", (), {"hidden": torch.zeros(*ids.shape, 4)})

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Tokens 1 and 2 lead at 16 and 16 - gap."""
        logits = torch.zeros(*hidden.shape[:-1], self.vocab_size)
        logits[..., 1], logits[..., 2] = 16.0, 16.0 - self.gap
        return logits


def text(request: Request, limit: int) -> list[int]:
    """The made-up answer to a prompt: does not loop, ends at the limit."""
    start = sum(map(ord, request.request_id))
    return [(start + i * i) % 40 + 3 for i in range(limit)]


def runner(
    tau: float | Callable[[str], float] = 1.0,
    round_seconds: float = 0.1,
    answer: Callable[[Request, int], list[int]] = text,
) -> Runner:
    """Decoding that commits `tau` tokens a round on average and takes `round_seconds` a round."""

    def run(requests: Sequence[Request], limit: int) -> Decoded:
        outputs = [answer(request, limit) for request in requests]
        rounds = []
        for request, output in zip(requests, outputs, strict=True):
            mean = tau(request.request_id) if callable(tau) else tau
            edges = [round(i * mean) for i in range(int((len(output) - 1) / mean) + 1)]
            edges.append(len(output) - 1)
            steps = [b - a for a, b in zip(edges, edges[1:], strict=False) if b > a]
            rounds.append(steps)
        seconds = round_seconds * max(map(len, rounds))
        return Decoded(
            outputs=outputs,
            rounds=rounds,
            accepted=[[count - 1 for count in row] for row in rounds],
            prefill_seconds=0.05,
            decode_seconds=seconds,
            parts={part: seconds * share for part, share in SHARES.items()},
            peak_bytes=1_000_000,
        )

    return run


def prompts(slice_: str = "math", count: int = 6) -> list[FakePrompt]:
    return [FakePrompt(f"{slice_}-{i}", slice_) for i in range(count)]


def group(
    methods: dict[tuple[str, int], Runner],
    *,
    slice_: str = "math",
    batch_size: int = 1,
    temperature: float = 0.0,
    count: int = 6,
    target: FakeTarget | None = None,
    config: EvaluationConfig | None = None,
    **facts: Any,
) -> list[dict[str, Any]]:
    """Records of one group: `plain` and `hf_eager` are added at one token a round."""
    base = {("plain", 0): runner(), ("hf_eager", 0): runner(round_seconds=0.2)}
    runners = {}
    for (method, budget), run in {**base, **methods}.items():
        builder = {"tree": "best_first", "chain": "chain", "lookup": "chain"}.get(method)
        runners[Cell(method, builder, budget, batch_size, slice_, temperature)] = run
    return run_group(
        list(runners),
        target or FakeTarget(),
        None,
        prompts(slice_, count),
        config or EvaluationConfig(max_new_tokens=24, warmup_prompts=0, bootstrap_samples=300),
        runners=runners,
        **{"target_fingerprint": FINGERPRINT, **facts},
    )


def by_method(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {record["method"]: record for record in records}


def failed(method: str, budget: int, reason: str, slice_: str = "math", batch_size: int = 1) -> Any:
    builder = {"tree": "best_first", "chain": "chain"}.get(method)
    cell = Cell(method, builder, budget, batch_size, slice_, 0.0)
    return failed_record(cell, "out_of_memory", reason, target_fingerprint=FINGERPRINT)
