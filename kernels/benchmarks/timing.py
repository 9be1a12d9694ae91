"""How everything here is timed, and what a record says about the machine."""

import platform
import statistics
from collections.abc import Callable, Sequence

import torch
import triton

WARMUP = 3
REPEATS = 25


def cold_copies(bytes_per_copy: int, floor: int = 256 << 20, most: int = 48) -> int:
    """Input sets to rotate so that none is still in the L2 cache when its turn comes."""
    return max(2, min(most, -(-floor // max(bytes_per_copy, 1))))


def time_us(calls: Sequence[Callable[[], object]], repeats: int = REPEATS) -> float:
    """Microseconds a call: the calls captured in one CUDA graph, median over its replays.

    Pass one call per input set: together they should exceed the L2 cache.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(WARMUP):
        graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def environment() -> dict[str, object]:
    """Card, versions and the timing method, for every record."""
    try:
        clock: object = torch.cuda.clock_rate()
    except Exception as error:  # no management library on this machine
        clock = str(error)
    properties = torch.cuda.get_device_properties(0)
    return {
        "card": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "clock_mhz": clock,
        "timing": "median of CUDA graph replays, inputs rotated beyond the L2 cache",
        "warmup_replays": WARMUP,
        "repeats": REPEATS,
    }


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """|out - expected| / |expected| in fp64; NaN when anything is not finite."""
    out, expected = out.double(), expected.double()
    return float((out - expected).norm() / expected.norm())
