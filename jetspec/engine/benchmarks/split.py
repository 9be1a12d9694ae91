"""Where a round's time goes: its steps in graphs of their own, and its kernels by name."""

import statistics
from collections import defaultdict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from jetspec.engine.benchmarks.models import CONTEXT
from jetspec.engine.benchmarks.rows import engine_for
from jetspec.engine.engine import Engine
from jetspec.engine.layers import Mlp
from jetspec.heads.parallel import ParallelHead
from jetspec.targets.target import Target
from kernels.launch import overlap

_KINDS = {  # by the first that a name holds: `_merge_best` holds `_merge`
    "top-k": ("_chunk_max", "_chunk_best", "_merge_best"),
    "attention": ("_attend", "_merge", "_finish"),
    "norm, RoPE, gate": ("_add_rms_norm", "_qkv_to_cache", "_silu_mul", "_context_to_caches"),
    "tree": ("_build", "_pack_ancestors", "_list_ancestors", "_place"),
    "commit": ("_accept", "_compact", "_advance"),
    "linears": ("_product", "gemm", "nvjet", "cutlass", "gemv", "splitKreduce", "cublas"),
}


def graph_ms(call: Callable[[], object], repeats: int = 9) -> float:
    """Median milliseconds of a call, replayed five times back to back."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's threads go on
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(5):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 5)
    return statistics.median(times)


@torch.no_grad()
def steps(name: str, target: Target, head: ParallelHead | None) -> dict[str, object]:
    """Milliseconds of each step of a row's round, each as a graph; `floor` is the target's linear
    layers alone, by cuBLAS."""
    engine = engine_for(name, target, head)
    round_, state = engine.round, engine.state
    out: dict[str, object] = {"row": name}
    if head is not None:
        hidden = round_.draft_hidden()
        out["head"] = graph_ms(round_.draft_hidden)
        out["candidates"] = graph_ms(lambda: round_.candidates(hidden))
        out["draft and build"] = graph_ms(round_.draft_and_build)
    built = round_.draft_and_build()
    out["verify"] = graph_ms(lambda: round_.verify(built))
    following, taps = round_.verify(built)
    path, lengths, bonus = round_.accept(built, following)

    def finish() -> None:
        round_.accept(built, following)
        round_.commit(built, taps, path, lengths, bonus)
        state.prefix.fill_(CONTEXT)

    out["accept and commit"] = graph_ms(finish)
    state.prefix.fill_(CONTEXT)
    out["floor"] = graph_ms(linears(engine, len(state.anchors) * round_.nodes))
    return out


def linears(engine: Engine, rows: int) -> Callable[[], None]:
    """A call of every linear layer of the target once over `rows` rows."""
    model, device = engine.model, engine.state.anchors.device
    first = model.layers[0]
    dense = [layer.mlp for layer in model.layers if isinstance(layer.mlp, Mlp)]
    x, attended, gated = (
        torch.randn(rows, weight.shape[1], dtype=torch.bfloat16, device=device)
        for weight in (first.qkv, first.out, dense[0].down)
    )

    def run() -> None:
        for layer, mlp in zip(model.layers, dense, strict=True):
            inputs = (x, layer.qkv), (attended, layer.out), (x, mlp.gate_up), (gated, mlp.down)
            for source, weight in inputs:
                assert isinstance(weight, torch.Tensor)
                F.linear(source, weight)
        F.linear(x, engine.target.model.get_output_embeddings().weight)

    return run


def kernels(name: str, target: Target, head: ParallelHead | None) -> dict[str, object]:
    """Milliseconds of a round by kind of kernel, each kernel waiting for the one before it."""
    with overlap(False):
        engine = engine_for(name, target, head)
        engine.launch()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(3):
                engine.state.prefix.fill_(CONTEXT)
                engine.launch()
            torch.cuda.synchronize()
    kinds: dict[str, float] = defaultdict(float)
    single: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in trace.events():
        if event.device_type != DeviceType.CUDA:
            continue
        microseconds = float(event.device_time_total)
        kind = next(
            (k for k, parts in _KINDS.items() if any(p in event.name for p in parts)), "other"
        )
        kinds[kind] += microseconds / 3e3
        single[event.name[:80]][0] += microseconds / 3
        single[event.name[:80]][1] += 1 / 3
    top = sorted(single.items(), key=lambda item: -item[1][0])[:24]
    return {
        "row": name,
        "ms": dict(kinds),
        "kernels": [{"name": n, "us": us, "launches": count} for n, (us, count) in top],
    }
