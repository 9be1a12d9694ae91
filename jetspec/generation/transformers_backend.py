"""The target answers in this process: a batch of slots, refilled as answers finish.

Every slot holds one sequence in a preallocated stretch of keys and values, so a step copies no
cache and needs no left padding. A finished sequence frees its slot for the next prompt; when no
prompt is left the batch shrinks, so one long answer does not hold idle rows.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from jetspec.generation.base import Continuation, GenerationRequest, GenerationResult, ignore_tokens
from jetspec.generation.config import RegenerationConfig
from jetspec.generation.conversation import TokenPrompt, answer_all, in_order
from jetspec.sampling import SamplingParams, sample, seen_tokens
from jetspec.targets.kv_cache import KVCache
from jetspec.targets.target import Target

_PREFILL_TOKENS = 16_384  # padded prompt tokens of one forward; bounds its activations
_SAMPLE_ROWS = 256  # rows whose fp64 noise over the vocabulary exists at one time
_CAPACITY_STEP = 128  # cache rows added to every slot when the longest sequence needs more
_GPU_STEPS = 8  # steps queued on a GPU between two looks at the tokens


class TransformersBackend:
    """Batched generation with the reference forward."""

    def __init__(self, config: RegenerationConfig, target: Target) -> None:
        self.semantics = f"transformers-{str(target.dtype).removeprefix('torch.')}"
        self.on_tokens: Callable[[int], None] = ignore_tokens
        self._config = config
        self._target = target

    def generate(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        config = self._config
        context = getattr(self._target.config, "max_position_embeddings", None)
        longest = config.max_prompt_tokens
        if context is not None:
            longest = min(longest, context - config.max_new_tokens - _GPU_STEPS)
        return answer_all(
            in_order(self._complete), self._target, config, requests, max_prompt_tokens=longest
        )

    def close(self) -> None:
        del self._target

    def _complete(self, prompts: Sequence[TokenPrompt]) -> list[Continuation]:
        config = self._config
        return complete(
            self._target,
            prompts,
            sampling=config.sampling_params(config.temperature, config.seed),
            max_new_tokens=config.max_new_tokens,
            batch_size=config.batch_size,
            on_tokens=self.on_tokens,
        )


@torch.no_grad()
def complete(
    target: Target,
    prompts: Sequence[TokenPrompt],
    *,
    sampling: SamplingParams,
    max_new_tokens: int,
    batch_size: int,
    on_tokens: Callable[[int], None] = ignore_tokens,
) -> list[Continuation]:
    """Continue every prompt; results in the order of `prompts`.

    Which prompts share a batch depends on `prompts` and the sizes alone, so equal calls give equal
    bytes on a CPU.
    """
    rows = [_Row(index, prompt) for index, prompt in enumerate(prompts)]
    queue = deque(sorted(rows, key=lambda row: (-len(row.prompt.ids), row.index)))
    slots = _Slots(target, min(batch_size, len(rows)), sampling, max_new_tokens)
    refill_at = max(1, slots.size // 8)  # a prefill of a few prompts at once costs less
    steps = _GPU_STEPS if target.device.type == "cuda" else 1
    while queue or slots.live:
        free = slots.size - len(slots.live)
        if queue and free >= min(refill_at, len(queue)):
            written = slots.admit(queue)
        else:
            if not queue and 4 * len(slots.live) <= 3 * slots.size:
                slots.shrink()
            written = slots.advance(steps)
        on_tokens(written)
    return [Continuation(row.tokens, "stop" if row.stopped else "length") for row in rows]


@dataclass
class _Row:
    """One sequence: its prompt and what was written after it."""

    index: int
    prompt: TokenPrompt
    tokens: list[int] = field(default_factory=list)
    stopped: bool = False

    @property
    def cached(self) -> int:
        """Rows of keys and values held: all but the last token written."""
        return len(self.prompt.ids) + len(self.tokens) - 1


class _SlotLayer(DynamicLayer):
    """One layer's keys and values [R, heads, capacity, width], written at each slot's length."""

    keys: Any
    values: Any

    def __init__(self, view: "_View", keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self._view = view
        self.keys, self.values = keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        view = self._view
        self.keys[view.slots, :, view.lengths] = key_states[:, :, 0]
        self.values[view.slots, :, view.lengths] = value_states[:, :, 0]
        return self.keys[:, :, : view.width], self.values[:, :, : view.width]


@dataclass
class _View:
    """Where this step writes, shared by all layers.

    Attributes:
        slots: long [R], 0 .. R-1.
        lengths: long [R], rows held by each slot.
        width: rows of the longest live slot after this step.
    """

    slots: Tensor
    lengths: Tensor
    width: int = 0


class _SlotCache(KVCache):
    """A KVCache whose sequences have lengths of their own; to a forward it holds the longest."""

    def __init__(self, view: _View) -> None:
        super().__init__()
        self.view = view

    @property
    def length(self) -> int:
        return self.view.width - 1

    @property
    def capacity(self) -> int:
        return int(self.dynamic.layers[0].keys.shape[2]) if self.dynamic.layers else 0

    def reserve(self, capacity: int, like: KVCache | None = None) -> None:
        """Room for `capacity` rows a slot; unused rows are zero, for masked rows must be finite."""
        if capacity <= self.capacity:
            return
        capacity = -(-capacity // _CAPACITY_STEP) * _CAPACITY_STEP
        source = self if like is None else like
        for layer in list(source.dynamic.layers):
            shape = (len(self.view.slots), layer.keys.shape[1], capacity)
            keys = layer.keys.new_zeros((*shape, layer.keys.shape[3]))
            values = layer.values.new_zeros((*shape, layer.values.shape[3]))
            if like is not None:
                self.dynamic.layers.append(_SlotLayer(self.view, keys, values))
                continue
            keys[:, :, : layer.keys.shape[2]] = layer.keys
            values[:, :, : layer.values.shape[2]] = layer.values
            layer.keys, layer.values = keys, values

    def fill(self, slots: Tensor, prefilled: KVCache) -> None:
        """Put freshly computed sequences into `slots`."""
        width = prefilled.length
        self.reserve(width + 1, like=None if self.dynamic.layers else prefilled)
        for mine, theirs in zip(self.dynamic.layers, prefilled.dynamic.layers, strict=True):
            mine.keys[slots, :, :width] = theirs.keys
            mine.values[slots, :, :width] = theirs.values


class _Slots:
    """The running batch. `live` maps a slot to its row; other slots compute into the void."""

    def __init__(
        self, target: Target, size: int, sampling: SamplingParams, max_new_tokens: int
    ) -> None:
        self.live: dict[int, _Row] = {}
        self._target = target
        self._sampling = sampling
        self._limit = max_new_tokens
        device = target.device
        zeros = torch.zeros(size, dtype=torch.long, device=device)
        self._cache = _SlotCache(_View(torch.arange(size, device=device), zeros.clone()))
        self._last = zeros.clone()  # [R] the token each slot feeds next
        self._keys = zeros.clone()  # [R] what its random draws are keyed by
        # bool [R, V], tokens of each slot's text; None where the sampling does not ask
        self._seen = seen_tokens(sampling, [[]] * size, target.vocab_size, device)

    @property
    def size(self) -> int:
        return len(self._last)

    def admit(self, queue: deque[_Row]) -> int:
        """Prefill waiting prompts into free slots; returns the tokens written (one a prompt)."""
        free = [slot for slot in range(self.size) if slot not in self.live]
        group = [queue.popleft()]
        longest = len(group[0].prompt.ids)  # the queue is sorted, longest first
        while queue and len(group) < len(free) and (len(group) + 1) * longest <= _PREFILL_TOKENS:
            group.append(queue.popleft())
        device = self._target.device
        lengths = torch.tensor([len(row.prompt.ids) for row in group], device=device)
        ids = torch.zeros(len(group), longest, dtype=torch.long)
        for line, row in zip(ids, group, strict=True):
            line[: len(row.prompt.ids)] = torch.tensor(row.prompt.ids)
        positions = torch.arange(longest, device=device)
        causal = positions[:, None] >= positions  # right padding stays behind every real token
        prefilled = self._target.new_cache()
        output = self._target.forward(
            ids.to(device),
            position_ids=positions.expand(len(group), -1),
            mask=causal.expand(len(group), -1, -1),
            cache=prefilled,
        )
        slots = torch.tensor(free[: len(group)], device=device)
        keys = torch.tensor([row.prompt.seed for row in group], device=device)
        ends = output.hidden[torch.arange(len(group), device=device), lengths - 1]
        if self._seen is not None:
            texts = [row.prompt.ids for row in group]
            seen = seen_tokens(self._sampling, texts, self._seen.shape[1], device)
            assert seen is not None
            self._seen[slots] = seen
        tokens = self._draw(ends, keys, lengths, slots)
        self._cache.fill(slots, prefilled)
        self._cache.view.lengths[slots] = lengths
        self._last[slots] = tokens
        self._keys[slots] = keys
        self.live.update(zip(free, group, strict=False))
        return self._take([tokens.tolist()], free[: len(group)])

    def advance(self, steps: int) -> int:
        """Write `steps` tokens into every live slot; returns the tokens kept."""
        view = self._cache.view
        longest = max(row.cached for row in self.live.values())
        self._cache.reserve(longest + steps)
        written = []
        for step in range(steps):
            view.width = longest + step + 1
            columns = torch.arange(view.width, device=self._target.device)
            output = self._target.forward(
                self._last[:, None],
                position_ids=view.lengths[:, None],
                mask=(columns <= view.lengths[:, None])[:, None],
                cache=self._cache,
            )
            view.lengths += 1
            self._last = self._draw(output.hidden[:, 0], self._keys, view.lengths, view.slots)
            written.append(self._last)
        return self._take(torch.stack(written).tolist(), range(self.size))

    def shrink(self) -> None:
        """Keep live slots only."""
        kept = torch.tensor(sorted(self.live), device=self._target.device)
        self._cache.keep_sequences(kept)
        view = self._cache.view
        view.slots, view.lengths = view.slots[: len(kept)], view.lengths[kept]
        self._last, self._keys = self._last[kept], self._keys[kept]
        self._seen = None if self._seen is None else self._seen[kept]
        self.live = dict(enumerate(self.live[slot] for slot in sorted(self.live)))

    def _draw(self, hidden: Tensor, keys: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """Tokens [R] at `positions` from hidden states [R, d] of `slots`, which then hold them."""
        rows = hidden.shape[0] if self._sampling.greedy else _SAMPLE_ROWS
        parts = (part.split(rows) for part in (hidden, keys, positions, slots))
        tokens = torch.cat(
            [
                sample(
                    self._target.logits(h),
                    self._sampling,
                    k,
                    p,
                    None if self._seen is None else self._seen[s],
                )
                for h, k, p, s in zip(*parts, strict=True)
            ]
        )
        if self._seen is not None:
            self._seen[slots, tokens] = True
        return tokens

    def _take(self, steps: Sequence[Sequence[int]], slots: Sequence[int]) -> int:
        """Hand each slot's tokens to its row, up to a stop or the limit; free finished slots."""
        kept = 0
        for column, slot in enumerate(slots):
            row = self.live.get(slot)
            if row is None:
                continue
            for tokens in steps:
                row.tokens.append(tokens[column])
                kept += 1
                row.stopped = tokens[column] in self._target.eos_token_ids
                if row.stopped or len(row.tokens) == self._limit:
                    del self.live[slot]
                    break
        # A free slot computes on from row 0, so that it stays inside the capacity.
        idle = [slot for slot in range(self.size) if slot not in self.live]
        if idle:
            self._cache.view.lengths[torch.tensor(idle, device=self._target.device)] = 0
        return kept
