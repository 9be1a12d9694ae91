"""What a cell runs: the two baselines and every way of drafting, behind one call."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from jetspec.decode import decode
from jetspec.drafters import Drafter, DraftModelDrafter, LookupDrafter
from jetspec.errors import JetspecError
from jetspec.evaluation.cells import Cell
from jetspec.evaluation.config import EvaluationConfig
from jetspec.evaluation.draft_models import draft_model
from jetspec.evaluation.scoring import scored_head
from jetspec.sampling import SamplingParams
from jetspec.trees.config import TreeConfig

Decoder = Literal["transformers", "reference", "engine"]
PARTS = ("draft", "build", "verify", "commit")


@dataclass(frozen=True)
class Request:
    """One prompt to decode: its token ids, and the name that seeds its random draws."""

    input_ids: list[int]
    request_id: str


@dataclass
class Decoded:
    """A batch that was decoded.

    Attributes:
        outputs: generated token ids of each request, the stop token included.
        rounds: tokens committed by each round of each request; the prefill's token is in none.
        accepted: draft tokens that each round accepted, before a stop or the limit cut it.
        prefill_seconds, decode_seconds: wall clock before and after the first token.
        parts: seconds of the decode clock by part of a round; empty where a round has none that
            can be told apart (`hf_eager`, the engine's graphs).
        peak_bytes: most memory held, where the device tells.
        decoder: what decoded it.
    """

    outputs: list[list[int]]
    rounds: list[list[int]]
    accepted: list[list[int]]
    prefill_seconds: float
    decode_seconds: float
    parts: dict[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None
    decoder: Decoder = "reference"


Runner = Callable[[Sequence[Request], int], Decoded]


class FasterDecoder(Protocol):
    """Something beside the reference loop that decodes some cells: `engines.Engines`."""

    def decodes(self, cell: Cell) -> bool: ...

    def runner(self, cell: Cell) -> Runner: ...


def sampling_params(config: EvaluationConfig, temperature: float) -> SamplingParams:
    return config.sampling_params(temperature, config.seed)


def make_runner(
    cell: Cell,
    target: Any,
    head: Any | None,
    config: EvaluationConfig,
    engines: FasterDecoder | None = None,
) -> Runner:
    """A call `(requests, max_new_tokens) -> Decoded` for the cell's method.

    Args:
        engines: decode the cells that they can; None leaves all to the reference loop.
    """
    if engines is not None and engines.decodes(cell):
        return engines.runner(cell)
    head = scored_head(head, cell.scores)
    sampling = sampling_params(config, cell.temperature)
    if cell.method == "hf_eager":
        return lambda requests, limit: _hugging_face(target, requests, limit, sampling)
    model = draft_model(config, target) if cell.method == "draft_model" else None

    def run(requests: Sequence[Request], limit: int) -> Decoded:
        started = time.perf_counter()
        result = decode(
            target,
            [request.input_ids for request in requests],
            drafter=_drafter(cell, target, head, model, config),
            tree=cell_tree(cell, head, config),
            sampling=sampling,
            rule=config.rule,
            max_new_tokens=limit,
            stop_token_ids=target.eos_token_ids,
            request_ids=[request.request_id for request in requests],
        )
        synchronize(target)
        wall = time.perf_counter() - started
        return Decoded(
            outputs=[list(g.tokens) for g in result.generations],
            rounds=[list(g.rounds) for g in result.generations],
            accepted=[list(g.accepted) for g in result.generations],
            prefill_seconds=result.seconds["prefill"],
            decode_seconds=wall - result.seconds["prefill"],
            parts={part: result.seconds.get(part, 0.0) for part in PARTS},
            peak_bytes=result.peak_bytes,
        )

    return run


def _drafter(
    cell: Cell, target: Any, head: Any | None, model: Any | None, config: EvaluationConfig
) -> Drafter | None:
    """A fresh drafter: it carries the state of one batch. `model` is the draft model."""
    if cell.method == "plain":
        return None
    if cell.method == "lookup":
        return lookup_drafter(cell, config)
    if model is not None:
        return DraftModelDrafter(model, depth=cell.budget)
    if head is None:
        raise JetspecError("head", None, f"the method {cell.method} needs a draft head; give one")
    width = _chain_width(head, config) if cell.method == "chain" else config.width
    width = min(width, target.vocab_size)
    depth = cell.budget if cell.method == "chain" else config.depth
    return head.drafter(target, width=width, depth=depth)


def lookup_drafter(cell: Cell, config: EvaluationConfig) -> LookupDrafter:
    return LookupDrafter(max_ngram=config.lookup_ngram, depth=cell.budget)


def _chain_width(head: Any | None, config: EvaluationConfig) -> int:
    """Candidates a slot of a chain: the best alone, unless path scores choose among them or
    candidates are drawn from them."""
    chosen = config.rule == "residual" or (head is not None and head.scores_paths)
    return config.width if chosen else 1


def cell_tree(cell: Cell, head: Any | None, config: EvaluationConfig) -> TreeConfig | None:
    """The shape of a cell's drafts; None decodes plainly."""
    if cell.method == "plain":
        return None
    tree = config.tree(cell.builder or "chain", cell.budget)
    if cell.method == "tree":
        return tree
    width = _chain_width(head, config)
    return tree.model_copy(update={"depth": cell.budget, "width": width, "widths": ()})


def _hugging_face(
    target: Any, requests: Sequence[Request], limit: int, sampling: SamplingParams
) -> Decoded:
    """The baseline users know: `model.generate` as it is, no graph, a left-padded batch."""
    longest = max(len(request.input_ids) for request in requests)
    stops = sorted(target.eos_token_ids)
    pad = stops[0] if stops else 0
    rows = [[pad] * (longest - len(r.input_ids)) + r.input_ids for r in requests]
    mask = [[0] * (longest - len(r.input_ids)) + [1] * len(r.input_ids) for r in requests]
    sampled = sampling.temperature > 0
    options: dict[str, Any] = {
        "do_sample": sampled,
        "repetition_penalty": float(sampling.repetition_penalty),
        "sequence_bias": {(token,): bias for token, bias in sampling.logit_bias} or None,
    }
    if sampled:
        options |= {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p or None,
        }
        torch.manual_seed(sampling.seed)
    clock = _FirstToken(target)
    if target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(target.device)
    started = time.perf_counter()
    with torch.no_grad(), _neutral_generation(target.model):
        generated = target.model.generate(
            input_ids=torch.tensor(rows, device=target.device),
            attention_mask=torch.tensor(mask, device=target.device),
            generation_config=GenerationConfig(
                max_new_tokens=limit, eos_token_id=stops or None, pad_token_id=pad, **options
            ),
            stopping_criteria=StoppingCriteriaList([clock]),
        )
    synchronize(target)
    ended = time.perf_counter()
    outputs = [_until_stop(row, target.eos_token_ids) for row in generated[:, longest:].tolist()]
    return Decoded(
        outputs=outputs,
        rounds=[[1] * (len(output) - 1) for output in outputs],
        accepted=[[0] * (len(output) - 1) for output in outputs],
        prefill_seconds=clock.at - started,
        decode_seconds=ended - clock.at,
        peak_bytes=torch.cuda.max_memory_allocated(target.device)
        if target.device.type == "cuda"
        else None,
        decoder="transformers",
    )


@contextlib.contextmanager
def _neutral_generation(model: Any) -> Iterator[None]:
    """Set the model's own generation defaults aside: a repetition penalty would change the text."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


class _FirstToken(StoppingCriteria):
    """Never stops; notes when the first token is out, which is where the prefill ends."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.at = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if not self.at:
            synchronize(self.target)
            self.at = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _until_stop(tokens: list[int], stops: frozenset[int]) -> list[int]:
    end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[:end]


def synchronize(target: Any) -> None:
    """Wait for the target's device."""
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
