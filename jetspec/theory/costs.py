"""c(N, L) on this machine: what a forward of N tokens at context L costs, and what drafting does.

A table is measured once and then answers for every budget and batch size between its entries.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from jetspec.errors import JetspecError
from jetspec.heads.base import DraftHead
from jetspec.targets.kv_cache import KVCache
from jetspec.targets.target import Target

Listener = Callable[[int, int], None]


@dataclass(frozen=True)
class Cost:
    """One forward of the target.

    Attributes:
        batch: sequences; context: L, tokens each holds already; tokens: N, new ones of each.
        seconds: median clock of the forward, output projection included.
        spread: interquartile range of the clock over its median.
    """

    batch: int
    context: int
    tokens: int
    seconds: float
    spread: float


@dataclass(frozen=True)
class DraftCost:
    """One draft of the head behind L tokens, down to the best candidates; as `Cost`."""

    batch: int
    context: int
    seconds: float
    spread: float


@dataclass(frozen=True)
class CostTable:
    """Forwards at one context length, and drafts where a head was given.

    Attributes:
        facts: how it was measured (target, dtype, device, repeats, environment).
    """

    forwards: tuple[Cost, ...]
    drafts: tuple[DraftCost, ...]
    facts: dict[str, Any]

    @property
    def batches(self) -> list[int]:
        return sorted({cost.batch for cost in self.forwards})

    def relative(self, tokens: float, batch: int) -> float:
        """c(N, L): seconds of a forward of N tokens over those of one token at the same batch."""
        return self.forward_seconds(tokens, batch) / self.forward_seconds(1, batch)

    def forward_seconds(self, tokens: float, batch: int) -> float:
        """Between measured sizes by linear interpolation, beyond them by the last slope."""
        known = sorted((c.tokens, c.seconds) for c in self._at(batch))
        return interpolate(tokens, *zip(*known, strict=True))

    def draft_seconds(self, batch: int) -> float:
        """Of one head pass for the batch; 0 where no head was measured."""
        known = sorted((d.batch, d.seconds) for d in self.drafts)
        return interpolate(batch, *zip(*known, strict=True)) if known else 0.0

    def draft_cost(self, budget: int, batch: int) -> float:
        """The paper's c(N, L) = (T_draft / N) / T_verify, T_verify over N nodes and the root."""
        return self.draft_seconds(batch) / budget / self.forward_seconds(budget + 1, batch)

    def as_json(self) -> dict[str, Any]:
        rows = [
            {**asdict(cost), "relative": round(self.relative(cost.tokens, cost.batch), 4)}
            for cost in self.forwards
        ]
        return {"forwards": rows, "drafts": [asdict(d) for d in self.drafts], "facts": self.facts}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "CostTable":
        """A table as `as_json` wrote it.

        Raises:
            JetspecError: not a cost table.
        """
        try:
            forwards = tuple(
                Cost(**{k: v for k, v in row.items() if k != "relative"})
                for row in record["forwards"]
            )
            drafts = tuple(DraftCost(**row) for row in record["drafts"])
            return cls(forwards, drafts, dict(record["facts"]))
        except (KeyError, TypeError) as error:
            raise JetspecError("--costs", "given", f"not a cost table ({error})") from error

    def _at(self, batch: int) -> list[Cost]:
        """Forwards of a batch size: measured ones, or mixed from the two measured neighbours."""
        own = [c for c in self.forwards if c.batch == batch]
        if own:
            return own
        known = self.batches
        sizes = sorted({c.tokens for c in self.forwards})
        context = self.forwards[0].context
        mixed = []
        for tokens in sizes:
            column = [self.forward_seconds(tokens, b) for b in known]
            mixed.append(Cost(batch, context, tokens, interpolate(batch, known, column), 0.0))
        return mixed


def interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Piecewise linear through (xs ascending, ys); outside, the nearest piece goes on, above 0."""
    if len(xs) == 1:
        return ys[0]
    place = min(max(int(np.searchsorted(xs, x)), 1), len(xs) - 1)
    (x0, x1), (y0, y1) = xs[place - 1 : place + 1], ys[place - 1 : place + 1]
    value = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return float(max(value, min(ys) if x < xs[0] else 0.0))


@torch.no_grad()
def measure_costs(
    target: Target,
    head: DraftHead | None,
    *,
    tokens: Sequence[int],
    batches: Sequence[int],
    context: int,
    repeats: int = 5,
    width: int = 32,
    listen: Listener = lambda done, total: None,
) -> CostTable:
    """Time forwards of the reference path on this machine.

    Every measurement is preceded by one that does not count, and its clock is a median. Each mask
    is causal: what a tree attends to costs the same. On a GPU the eager path is timed, launches
    included; the fast engine has costs of its own.

    Args:
        head: its drafts are timed too.
        tokens: sizes N of a forward; 1 is added, since everything is relative to it.
        batches: batch sizes.
        context: L, tokens that each sequence holds.
        repeats: timed runs of each size.
        width: candidates a slot of a draft.
    """
    sizes = sorted({1, *tokens})
    forwards, drafts = [], []
    total = len(batches) * len(sizes)
    generator = torch.Generator().manual_seed(0)
    for batch in sorted(set(batches)):
        text = torch.randint(target.vocab_size, (batch, context), generator=generator)
        text = text.to(target.device)
        cache = target.new_cache()
        lower = torch.ones(context, context, dtype=torch.bool, device=target.device).tril()
        positions = torch.arange(context, device=target.device).expand(batch, -1)
        taps = head.taps if head is not None else ()
        prefix = target.forward(
            text, position_ids=positions, mask=lower.expand(batch, -1, -1), cache=cache, taps=taps
        )
        for size in sizes:
            forward = _Forward(target, cache, batch, context, size)
            clock = _clock(target, repeats, forward.run, forward.cut_back)
            forwards.append(Cost(batch, context, size, *clock))
            listen(len(forwards), total)
        if head is not None:
            assert prefix.taps is not None
            held = head.new_cache(batch)
            head.extend(held, prefix.taps, positions, torch.ones_like(text, dtype=torch.bool), text)
            arguments = (held, text[:, -1], target.embed, target.logits)
            draft = partial(head.draft, *arguments, min(width, target.vocab_size))
            drafts.append(DraftCost(batch, context, *_clock(target, repeats, draft)))
    facts = {
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "device": str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "context": context,
        "repeats": repeats,
        "threads": torch.get_num_threads(),
    }
    return CostTable(tuple(forwards), tuple(drafts), facts)


class _Forward:
    """Reads `size` tokens behind the context, and can cut the cache back to it."""

    def __init__(self, target: Target, cache: KVCache, batch: int, context: int, size: int) -> None:
        device = target.device
        self.target, self.cache = target, cache
        self.ids = torch.ones(batch, size, dtype=torch.long, device=device)
        self.positions = (context + torch.arange(size, device=device)).expand(batch, -1)
        self.mask = torch.ones(batch, size, context + size, dtype=torch.bool, device=device)
        self.mask[:, :, context:] = self.mask[:, :, context:].tril()
        self.kept = torch.arange(context, device=device).expand(batch, -1)

    def run(self) -> None:
        output = self.target.forward(
            self.ids, position_ids=self.positions, mask=self.mask, cache=self.cache
        )
        self.target.logits(output.hidden)

    def cut_back(self) -> None:
        self.cache.gather(self.kept)


def _clock(
    target: Target,
    repeats: int,
    run: Callable[[], Any],
    between: Callable[[], None] = lambda: None,
) -> tuple[float, float]:
    """(median seconds, interquartile range over it) of `repeats` runs after one to warm up."""
    clocks = []
    for number in range(repeats + 1):
        _synchronize(target)
        started = time.perf_counter()
        run()
        _synchronize(target)
        if number:
            clocks.append(time.perf_counter() - started)
        between()
    middle = median(clocks)
    low, high = np.quantile(clocks, [0.25, 0.75])
    return middle, float(high - low) / middle


def _synchronize(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
