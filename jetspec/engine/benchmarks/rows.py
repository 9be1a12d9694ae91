"""Milliseconds of a round: the rows of docs/measurements/engine_h200.json, and how they grow."""

import statistics
import time
from collections.abc import Iterator

import torch

from jetspec.drafters import LookupDrafter
from jetspec.engine.benchmarks.models import CONTEXT, fill
from jetspec.engine.engine import Engine
from jetspec.engine.layers import Products
from jetspec.heads.config import DraftWeights
from jetspec.heads.parallel import ParallelHead
from jetspec.targets.target import Target
from jetspec.trees.config import TreeConfig

ROUNDS = 10  # replays between two events
REPEATS = 7
CHAIN = TreeConfig(builder="chain", budget=15, depth=15, width=1)
LOOKUP = LookupDrafter(depth=15)
BARS_MS = {
    "ar_b1": 4.9, "ar_b16": 6.0, "chain_b1": 6.2, "chain_b16": 9.5, "tree_b1_16": 6.0,
    "tree_b1_64": 6.2, "tree_b1_128": 6.8, "tree_b1_255": 8.8, "tree_b16_16": 10.0,
    "tree_b16_32": 16.0, "host_b1": 0.25,
}  # fmt: skip


def tree(budget: int) -> TreeConfig:
    return TreeConfig(builder="best_first", budget=budget, depth=15, width=32)


def shape(name: str) -> tuple[TreeConfig | None, int]:
    """(tree, None for plain decoding; batch) of a row's name: ar_b1, chain_b16, lookup_b1,
    tree_b1_128."""
    kind, batch, *budget = name.split("_")
    shapes = {"ar": None, "chain": CHAIN, "lookup": CHAIN}
    config = shapes[kind] if kind != "tree" else tree(int(budget[0]))
    return config, int(batch.removeprefix("b"))


def engine_for(
    name: str, target: Target, head: ParallelHead | None, *, context: int = CONTEXT,
    exact: bool = False, products: Products | None = None, draft_weights: DraftWeights = "own",
) -> Engine:  # fmt: skip
    """The engine of a row, filled and ready to replay."""
    config, batch = shape(name)
    drafter = LOOKUP if name.startswith("lookup") else head if config else None
    engine = Engine(
        target, drafter, tree=config or CHAIN, slots=batch,
        max_rows=max(4096, context + 2048), exact=exact, products=products, forced=True,
        draft_weights=draft_weights,
        pages=batch * (-(-(context + 2200) // 64)),
    )  # fmt: skip
    fill(engine, context)
    return engine


def milliseconds(engine: Engine, context: int = CONTEXT, repeats: int = REPEATS) -> float:
    """Median of a round at a fixed context, rounds enqueued back to back."""
    for _ in range(3):
        engine.state.prefix.fill_(context)
        engine.launch()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(ROUNDS):
            engine.state.prefix.fill_(context)
            engine.launch()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / ROUNDS)
    return statistics.median(times)


def measure(
    names: list[str], target: Target, head: ParallelHead | None, **options: object
) -> Iterator[dict[str, object]]:
    for name in names:
        torch.cuda.reset_peak_memory_stats()
        record: dict[str, object] = {"row": name}
        try:
            engine = engine_for(name, target, head, **options)  # type: ignore[arg-type]
            record["ms"] = milliseconds(engine, int(options.get("context", CONTEXT)))  # type: ignore
            record["bar_ms"] = BARS_MS.get(name)
            record["peak_gb"] = torch.cuda.max_memory_allocated() / 2**30
            del engine
        except Exception as error:
            record["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        yield record


def host(target: Target, head: ParallelHead | None, new_tokens: int = 600) -> dict[str, object]:
    """Decoding one prompt for real: wall time of a round, and how long no round ran between two."""
    config = tree(128) if head else CHAIN
    engine = Engine(target, head, tree=config, slots=1, max_rows=4096, forced=True)
    assert engine.state.forced is not None
    engine.state.forced.fill_(6)
    launch, marks = engine.launch, []

    def timed() -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        launch()
        end.record()
        marks.append((start, end))

    prompt = [17 + index % 1000 for index in range(CONTEXT)]
    engine.decode([prompt], max_new_tokens=40, stop_token_ids=())
    engine.launch = timed  # type: ignore[method-assign]
    torch.cuda.synchronize()
    started = time.perf_counter()
    result = engine.decode([prompt], max_new_tokens=new_tokens, stop_token_ids=())
    torch.cuda.synchronize()
    wall = (time.perf_counter() - started) * 1e3
    gaps = [a[1].elapsed_time(b[0]) for a, b in zip(marks, marks[1:], strict=False)]
    inside = [start.elapsed_time(end) for start, end in marks]
    return {
        "host_b1": statistics.median(gaps),
        "gap_mean_ms": statistics.mean(gaps),
        "round_ms": statistics.median(inside),
        "wall_ms_a_round": (wall - result.seconds["prefill"] * 1e3) / len(marks),
        "prefill_ms": result.seconds["prefill"] * 1e3,
        "rounds": len(marks),
    }
