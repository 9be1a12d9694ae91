"""`torchrun --nproc-per-node N -m jetspec.engine.benchmarks.parallel`: one target over N GPUs: what
a round costs against one GPU, where the time goes, and whether all ranks agree.

Qwen3-8B shapes with random bf16 weights; chains and trees commit 6 tokens a round by force. Every
process first measures one GPU by itself, all at the same time. On a machine without a GPU only the
check of tokens runs.
"""

import argparse
import gc
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM

from jetspec.engine.benchmarks.models import CONTEXT, fill, random_head, random_target
from jetspec.engine.benchmarks.rows import milliseconds, shape, tree
from jetspec.engine.benchmarks.split import graph_ms
from jetspec.engine.engine import Engine
from jetspec.engine.parallel import Ranks
from jetspec.heads.config import HeadConfig
from jetspec.heads.parallel import ParallelHead, new_head
from jetspec.records import environment
from jetspec.targets.target import Target
from jetspec.training.world import World, join_world
from jetspec.trees.config import TreeConfig
from kernels.launch import overlap

ROWS = ["ar_b1", "chain_b1", "ar_b16"] + [f"tree_b{b}_{n}" for b in (1, 16) for n in (16, 64, 128)]
ROWS += ["tree_b1_255", "tree_b16_255"]
SPLIT_ROWS = ["ar_b1", "tree_b1_128", "tree_b16_64"]
MESSAGES = (1, 16, 129, 256, 1040, 2064)  # rows of 4,096 bf16 values
AGREED_ROUNDS = 5
KINDS = {
    "between ranks": ("nccl", "_pack_best", "_merge_packed"),
    "top-k": ("_chunk_max", "_chunk_best", "_merge_best"),
    "attention": ("_attend", "_merge", "_finish"),
    "linears": ("_product", "gemm", "nvjet", "cutlass", "gemv", "splitKreduce", "cublas"),
}  # the rest: norms, RoPE, gates, tree, commit


def engine_for(name: str, target: Target, head: ParallelHead, ranks: Ranks) -> Engine:
    """As the engine's other benchmarks make it, filled with the same values on every rank."""
    config, batch = shape(name)
    engine = Engine(
        target, head if config else None, tree=config or TreeConfig(builder="chain"), slots=batch,
        max_rows=4096, forced=True, pages=batch * (-(-(CONTEXT + 2200) // 64)), ranks=ranks,
    )  # fmt: skip
    torch.manual_seed(1)
    fill(engine)
    return engine


def agree(engine: Engine, world: World) -> bool:
    """Whether the state of every rank has the same bits after each of a few rounds."""
    same = True
    for _ in range(AGREED_ROUNDS):
        engine.launch()
        for name in ("prefix", "anchors", "ids", "out"):
            found = world.gather(getattr(engine.state, name))
            same &= bool((found == found[:1]).all())
    return same


def by_kind(engine: Engine) -> dict[str, float]:
    """Milliseconds of a round by kind of kernel, each waiting for the one before it; what crosses
    between ranks holds the wait for the slower one."""
    with overlap(False):
        engine.state.prefix.fill_(CONTEXT)
        engine.launch()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(3):
                engine.state.prefix.fill_(CONTEXT)
                engine.launch()
            torch.cuda.synchronize()
    spent: dict[str, float] = defaultdict(float)
    for event in trace.events():
        if event.device_type == DeviceType.CUDA:
            name = event.name
            kind = next((k for k, parts in KINDS.items() if any(p in name for p in parts)), "rest")
            spent[kind] += float(event.device_time_total) / 3e3
    return dict(spent)


@torch.no_grad()
def measure_row(
    name: str, target: Target, head: ParallelHead, ranks: Ranks, *, split: bool
) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats()
    engine = engine_for(name, target, head, ranks)
    row: dict[str, Any] = {"row": name, "ms": milliseconds(engine)}
    row["peak_gb"] = torch.cuda.max_memory_allocated() / 2**30
    if ranks.world.size > 1:
        row["agree"] = agree(engine, ranks.world)
    if split:
        if engine.head is not None:
            row["head_ms"] = graph_ms(engine.round.draft_hidden)
        del engine
        gc.collect()
        with overlap(False):
            row["kinds_ms"] = by_kind(engine_for(name, target, head, ranks))
    return row


def rounds(
    names: Sequence[str], target: Target, head: ParallelHead, ranks: Ranks, what: str, **fact: Any
) -> Iterator[dict[str, Any]]:
    """One record a row; a row that fails on one rank fails on all, since they run in step."""
    for name in names:
        split = name in SPLIT_ROWS
        yield {"how": what, **fact, **measure_row(name, target, head, ranks, split=split)}
        gc.collect()
        torch.cuda.empty_cache()


def messages(world: World) -> Iterator[dict[str, Any]]:
    """Microseconds of one exchange, of 72 in one graph: our gather, and an all-reduce."""
    for rows in MESSAGES:
        x = torch.randn(rows, 4096, dtype=torch.bfloat16, device="cuda")

        def gathers(x: torch.Tensor = x) -> None:
            for _ in range(72):
                world.gather(x)

        def reduces(x: torch.Tensor = x) -> None:
            for _ in range(72):
                dist.all_reduce(x)

        yield {
            "rows": rows,
            "gather_us": graph_ms(gathers) * 1e3 / 72,
            "all_reduce_us": graph_ms(reduces) * 1e3 / 72,
        }


def small_models() -> tuple[Target, ParallelHead]:
    """fp32, the same on every process."""
    config = Qwen3Config(
        vocab_size=8192, hidden_size=512, intermediate_size=1024, num_hidden_layers=3,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, max_position_embeddings=1024,
        tie_word_embeddings=False, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        target = Target(Qwen3ForCausalLM(config), None, "random", "none")
    shape = {"mask_token_id": 8191, "block_size": 8, "num_layers": 2, "num_taps": 2}
    return target, new_head(HeadConfig.model_validate(shape), target).eval()


def tokens(world: World, new: int) -> Iterator[dict[str, Any]]:
    """Whether the ranks together decode what one decodes, in fp32."""
    prompts = [[5 + 3 * n, 100 + n, 7, 2000 + 31 * n, 9] for n in range(4)]
    chain = TreeConfig(builder="chain", budget=7, depth=7, width=4)
    for name, config in (("plain", None), ("chain", chain), ("tree", tree(64))):
        found = []
        for ranks in (Ranks(), Ranks(world, split_output=True)):
            target, head = small_models()
            engine = Engine(
                target, head if config else None, tree=config or chain, slots=2, max_rows=1024,
                ranks=ranks,
            )  # fmt: skip
            done = engine.decode(prompts, max_new_tokens=new, stop_token_ids=()).generations
            found.append([generation.tokens for generation in done])
        pairs = list(zip(*found, strict=True))
        yield {"mode": name, "prompts": len(pairs), "equal": sum(a == b for a, b in pairs)}


def measure(world: World, args: argparse.Namespace, record: dict[str, Any]) -> None:
    """Fill the record; rank 0 writes it after every row, so that a run that is cut leaves those."""
    names, layers = args.rows, args.layers
    record["tokens"] = list(tokens(world, 64 if torch.cuda.is_available() else 8))
    if not torch.cuda.is_available():
        return
    record["rounds"] = []
    torch.manual_seed(0)
    target = random_target(layers)

    def add(ranks: Ranks, chosen: Sequence[str], what: str) -> None:
        torch.manual_seed(0)
        for row in rounds(chosen, target, random_head(target), ranks, what, gpus=ranks.world.size):
            record["rounds"].append(row)
            if world.rank == 0:
                print(row, flush=True)
                save(args.json, record)

    add(Ranks(), names, "one GPU")
    if world.size > 1:
        record["messages"] = list(messages(world))
        few = [name for name in names if name in SPLIT_ROWS]
        # The layers of the target are split from here on; each set has a head of its own.
        add(Ranks(world), names, "split")
        add(Ranks(world, split_head=False), few, "head whole")
        add(Ranks(world, split_output=False), few, "output whole")
    gc.collect()  # graphs go before the communicator that they hold


def save(path: Path | None, record: dict[str, Any]) -> None:
    if path:
        path.write_text(json.dumps(record, indent=1))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="torchrun -m jetspec.engine.benchmarks.parallel", description=__doc__
    )
    parser.add_argument("--rows", nargs="*", default=ROWS, metavar="ROW")
    parser.add_argument("--layers", type=int, default=36, help="of the random target")
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args(arguments)
    with join_world() as world:
        record: dict[str, Any] = {
            "command": " ".join(
                ["python -m jetspec.engine.benchmarks.parallel", *sys.argv[1:]]
            ),
            "shapes": f"Qwen3-8B, {args.layers} layers, random bf16 weights, context {CONTEXT}",
            "processes": world.size,
            "environment": environment(),
        }  # fmt: skip
        measure(world, args, record)
    if world.rank == 0:
        print(*record["tokens"], *record.get("messages", ()), sep="\n")
        save(args.json, record)
    unequal = [t for t in record["tokens"] if t["equal"] < t["prompts"]]
    return int(bool(unequal) or any(row.get("agree") is False for row in record.get("rounds", ())))


if __name__ == "__main__":
    sys.exit(main())
