"""`[torchrun --nproc-per-node N -m | python -m] jetspec.training.benchmarks`: training, measured.

The real loop on random weights and random answers: one process alone, then all of them with DDP and
with FSDP2, on the same global batches. With `--resume` also a run that one process begins, all go
on with and one ends, against an unbroken one. The loop writes no checkpoint while it is timed.
With `--parts`, or `--group` for producers of path scores on one frozen head, what every part of one
process's step costs the host and the GPU instead.
"""

import argparse
import contextlib
import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from jetspec.heads.config import HeadConfig
from jetspec.heads.parallel import ParallelHead, new_head
from jetspec.records import environment
from jetspec.targets.target import Target
from jetspec.training.config import LossConfig, TrainingConfig
from jetspec.training.costs import PRODUCERS, costs, group, one_head, table
from jetspec.training.flops import PEAKS, step_flops
from jetspec.training.loop import train
from jetspec.training.world import World, join_world

PROMPT_SHARE = 4  # a row's first quarter is its prompt
_NEVER = 10**9


@dataclass(frozen=True)
class Shape:
    """A target of random weights, and the blocks of its head's training."""

    config: Any
    model: Any
    head: dict[str, int]


def shapes() -> dict[str, Shape]:
    """By the name of `--shape`."""
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
    served = {"mask_token_id": 151669, "block_size": 16}
    small = Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
        num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=32768,
        tie_word_embeddings=True, rope_parameters=rope,
    )  # fmt: skip
    large = Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=40960, tie_word_embeddings=False, rope_parameters=rope,
    )  # fmt: skip
    tiny = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=128,
        tie_word_embeddings=False,
    )  # fmt: skip
    head = {"mask_token_id": 63, "block_size": 4, "num_layers": 1, "num_taps": 2}
    return {
        "0.5b": Shape(small, Qwen2ForCausalLM, served),
        "8b": Shape(large, Qwen3ForCausalLM, served),
        "tiny": Shape(tiny, Qwen3ForCausalLM, head),
    }


@dataclass(frozen=True)
class Row:
    """A sample of random tokens, as long as a row."""

    id: str
    prompt_id: str
    input_ids: list[int]
    loss_mask: list[int]


class _Enough(Exception):
    """The run has been timed."""


def random_models(shape: Shape) -> tuple[Target, ParallelHead]:
    """The same on every process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with device:
            model = shape.model(shape.config)
    finally:
        torch.set_default_dtype(before)
    target = Target(model, None, f"random-{shape.config.hidden_size}", "none")
    return target, new_head(HeadConfig.model_validate(shape.head), target)


def random_rows(count: int, length: int, vocab: int) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, vocab - 4, (count, length), generator=generator).tolist()
    prompt = length // PROMPT_SHARE
    mask = [0] * prompt + [1] * (length - prompt)
    return [Row(f"{n:064x}", f"p{n}", row, mask) for n, row in enumerate(ids)]


def settings(args: argparse.Namespace, strategy: str, **changes: Any) -> TrainingConfig:
    # The loop compiles its layers where a run promises to be long.
    epochs = 1000 if args.compile else max(args.steps, 2 * args.log_every)
    return TrainingConfig(
        anchors=args.anchors, sequence_length=args.row_tokens, batch_size=args.batch,
        micro_batch_size=args.micro, epochs=epochs, max_steps=_NEVER, estimate_samples=1,
        estimate_every=_NEVER, heldout_fraction=0.05, strategy=strategy,
        loss=LossConfig(chunk_tokens=args.chunk), optimizer=args.optimizer,
        **{"checkpoint_every": _NEVER, "log_every": args.log_every} | changes,
    )  # fmt: skip


def timed(shape: Shape, args: argparse.Namespace, strategy: str, world: World) -> dict[str, Any]:
    """One run of `args.steps` steps; its rates leave out what lies before the first report."""
    target, head = random_models(shape)
    cuda = target.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    rows = random_rows(2 * args.batch + 2, args.row_tokens, target.vocab_size)
    marks: list[tuple[int, float]] = []
    curve: list[dict[str, float]] = []

    def report(step: int, metrics: dict[str, float]) -> None:
        if cuda:
            torch.cuda.synchronize()
        marks.append((step, time.perf_counter()))
        curve.append({name: metrics[name] for name in ("step", "loss", "grad_norm")})
        curve[-1]["slots_per_token"] = metrics["slots_per_second"] / metrics["tokens_per_second"]
        if step >= args.steps:
            raise _Enough

    with tempfile.TemporaryDirectory() as directory:
        config = settings(args, strategy)
        with contextlib.suppress(_Enough):
            train(config, head, target, rows, directory=directory, world=world, report=report)
    seconds = (marks[-1][1] - marks[0][1]) / (marks[-1][0] - marks[0][0])
    tokens = args.batch * args.row_tokens
    flops = step_flops(
        head, target, args.batch, args.row_tokens, anchors=args.anchors,
        slots=curve[-1]["slots_per_token"] * tokens,
    )  # fmt: skip
    return {
        "strategy": strategy if world.size > 1 else "one process",
        "processes": world.size,
        "seconds_per_step": seconds,
        "samples_per_second": args.batch / seconds,
        "tokens_per_second": tokens / seconds,
        "flop_per_step": flops,
        "mfu": flops / seconds / (args.peak * world.size),
        "peak_gb": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "curve": curve,
    }


def resumed(shape: Shape, args: argparse.Namespace, strategy: str, world: World) -> dict[str, Any]:
    """Largest difference of the loss between an unbroken run of one process and one that one
    process begins, all go on with, and one ends; checkpoints every `args.log_every` steps."""
    part = args.log_every
    config = settings(args, strategy, checkpoint_every=part, log_every=1)

    def run(directory: str, last: int, among: World) -> list[float]:
        """Losses up to step `last`, whose checkpoint the next part takes up."""
        target, head = random_models(shape)
        rows = random_rows(2 * args.batch + 2, args.row_tokens, target.vocab_size)
        losses: dict[int, float] = {}

        def report(step: int, metrics: dict[str, float]) -> None:
            losses[step] = metrics["loss"]
            if step > last:
                raise _Enough

        with contextlib.suppress(_Enough):
            train(config, head, target, rows, directory=directory, world=among, report=report)
        _free()
        return [loss for step, loss in losses.items() if step <= last]

    with tempfile.TemporaryDirectory() as own:
        shared = _of_rank_0(own, world)
        whole = run(f"{own}/whole", 3 * part, World())
        broken = run(f"{shared}/broken", part, World()) if world.rank == 0 else []
        _wait(world)
        broken += run(f"{shared}/broken", 2 * part, world)
        _wait(world)
        broken += run(f"{shared}/broken", 3 * part, World()) if world.rank == 0 else []
        _wait(world)
    pairs = list(zip(whole, broken, strict=world.rank == 0))
    return {
        "strategy": strategy,
        "processes": [1, world.size, 1],
        "steps": part,
        "unbroken": whole,
        "resumed": broken,
        "largest_relative_difference": max((abs(a - b) / a for a, b in pairs), default=None),
    }


def measure(args: argparse.Namespace, world: World) -> dict[str, Any]:
    """All rows; every process must call it, and rank 0's record counts."""
    shape = shapes()[args.shape]
    runs = [timed(shape, args, "ddp", World())]
    _free()
    if world.size > 1:
        for strategy in args.strategies:
            _wait(world)
            runs.append(timed(shape, args, strategy, world))
            runs[-1]["speedup"] = runs[0]["seconds_per_step"] / runs[-1]["seconds_per_step"]
            losses = [[entry["loss"] for entry in run["curve"]] for run in (runs[0], runs[-1])]
            runs[-1]["largest_loss_difference"] = max(
                abs(a - b) / a for a, b in zip(*losses, strict=True)
            )
            _free()
    again = [resumed(shape, args, s, world) for s in args.strategies] if args.resume else []
    return {"runs": runs, "resumed": again}


def measure_parts(args: argparse.Namespace) -> dict[str, Any]:
    """What every part of a step costs, of one head or of a group; see `costs`."""
    shape = shapes()[args.shape]
    target, _ = random_models(shape)
    quarter = args.row_tokens // 4  # several samples share a row, as they mostly do
    rows = random_rows(8 * args.batch + 8, quarter, target.vocab_size)
    config = settings(args, "ddp")
    if args.group is None:
        head = HeadConfig.model_validate(shape.head | args.head)
        run = one_head(head, config, target, rows)
    else:
        names = args.group or PRODUCERS
        base = shape.head | {"edge_rank": 256, "edge_rows": "learned"} | args.head
        heads = {name: HeadConfig.model_validate(base | PRODUCERS[name]) for name in names}
        run = group(heads, config, target, rows)
    return {"parts": costs(run, args.steps)}


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _wait(world: World) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    world.sum(torch.zeros(1, device=device)).item()


def _of_rank_0(text: str, world: World) -> str:
    found = [text]
    if world.size > 1:
        dist.broadcast_object_list(found, src=0)
    return found[0]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jetspec.training.benchmarks", description=__doc__
    )
    parser.add_argument("--shape", choices=sorted(shapes()), default="0.5b")
    parser.add_argument("--steps", type=int, default=40, help="of each timed run")
    parser.add_argument("--log-every", type=int, default=10, help="steps; the first are warm-up")
    parser.add_argument("--batch", type=int, default=16, help="rows of a step, over all processes")
    parser.add_argument("--micro", type=int, default=2, help="rows a process holds at one time")
    parser.add_argument("--row-tokens", type=int, default=3072)
    parser.add_argument("--anchors", type=int, default=512, help="blocks of a row")
    parser.add_argument("--optimizer", default=TrainingConfig().optimizer, help="adamw or muon")
    parser.add_argument("--chunk", type=int, default=LossConfig().chunk_tokens, help="slots")
    parser.add_argument("--head", type=json.loads, default={}, help="settings, as JSON")
    parser.add_argument("--parts", action="store_true", help="what each part of a step costs")
    parser.add_argument(
        "--group", nargs="*", choices=[*PRODUCERS], help="of these producers (or all) together"
    )
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp2"])
    parser.add_argument("--compile", action="store_true", help="as runs of 500 steps and more do")
    parser.add_argument("--resume", action="store_true", help="one process, all, one")
    parser.add_argument(
        "--peak", type=float, default=PEAKS["H200"], help="FLOP/s of one GPU, for the MFU"
    )
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args(arguments)
    by_part = args.parts or args.group is not None
    with join_world() as world:
        record: dict[str, Any] = {
            "command": " ".join(["python -m jetspec.training.benchmarks", *sys.argv[1:]]),
            "settings": {k: v for k, v in vars(args).items() if k != "json"},
            "environment": environment(),
            **(measure_parts(args) if by_part else measure(args, world)),
        }
    if world.rank == 0:
        if args.json:
            args.json.write_text(json.dumps(record, indent=1))
        for line in table(record["parts"]) if by_part else ():
            print(line)
        for run in record.get("runs", ()):
            shown = {k: v for k, v in run.items() if k != "curve"}
            print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                            for k, v in shown.items()))  # fmt: skip
        for run in record.get("resumed", ()):
            print(f"resumed {run['strategy']}: {run['largest_relative_difference']:.2e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
