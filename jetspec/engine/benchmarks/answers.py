"""What the checks of the engine's answers on a real target share: options, models, records."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from jetspec.errors import JetspecError
from jetspec.heads.parallel import ParallelHead
from jetspec.heads.registry import load_head
from jetspec.prompts import PromptSource, load_source
from jetspec.sampling import SamplingParams
from jetspec.targets.config import TargetConfig
from jetspec.targets.load import load_target
from jetspec.targets.target import Target
from jetspec.trees.config import TreeConfig


def command_line(
    program: str, description: str | None, *, count: int, tokens: int, batches: Sequence[int],
    budgets: Sequence[int],
) -> argparse.ArgumentParser:  # fmt: skip
    """The command line of a check, with its defaults."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("target", help="a directory, a .gguf file, or `embedded`")
    parser.add_argument("head", help="a head's directory")
    parser.add_argument("prompts", help="JSONL or Parquet, or `bundled`")
    parser.add_argument("--count", type=int, default=count, help="prompts")
    parser.add_argument("--tokens", type=int, default=tokens, help="new tokens of each")
    parser.add_argument("--batches", type=int, nargs="+", default=list(batches))
    parser.add_argument("--budgets", type=int, nargs="*", default=list(budgets))
    parser.add_argument("--depth", type=int, default=15)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top-p", type=float, default=1.0, help="above temperature 0")
    parser.add_argument("--seed", type=int, default=0, help="of the draws above temperature 0")
    parser.add_argument("--weights", default="own", help="`own` or `fp8`, as target.weights")
    parser.add_argument("--json", type=Path, help="write the record here")
    return parser


def opened(args: argparse.Namespace) -> tuple[Target, ParallelHead, list[list[int]]]:
    """The target, the head on its device in its type, and the prompts' token ids.

    Raises:
        JetspecError: no GPU, another kind of head, too few prompts, or what loading raises.
    """
    if not torch.cuda.is_available():
        raise JetspecError("device", "none", "this check needs a CUDA GPU")
    target = load_target(TargetConfig(source=args.target, weights=args.weights))
    head = load_head(args.head)
    if not isinstance(head, ParallelHead):
        raise JetspecError("HEAD", args.head, "the engine runs parallel heads")
    prompts = read_prompts(target, args.prompts, args.count)
    return target, head.to(target.device, target.dtype), prompts


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """How every configuration of the run draws its tokens."""
    return SamplingParams(temperature=args.temperature, top_p=args.top_p, seed=args.seed)


def new_record(program: str, target: Target, sampling: SamplingParams) -> dict[str, Any]:
    """Of this run, with no configuration yet."""
    from kernels.benchmarks.timing import environment

    return {
        "command": " ".join([program, *sys.argv[1:]]),
        "target": {"name": target.name, "fingerprint": target.fingerprint},
        "dtype": str(target.dtype).removeprefix("torch."),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "environment": environment(),
        "configurations": [],
    }


def read_prompts(target: Target, source: str, count: int) -> list[list[int]]:
    """Token ids of the first `count` prompts, as the target's chat template writes them."""
    found = load_source(PromptSource(source=source, limit=count), field="PROMPTS")
    if len(found) < count:
        raise JetspecError("PROMPTS", f"{len(found)} prompts", f"give {count}, or lower --count")
    return [target.render(prompt.messages) for prompt in found]


def configurations(
    batches: Sequence[int], budgets: Sequence[int], depth: int
) -> Iterator[tuple[str, int, TreeConfig | None]]:
    """(name, batch, tree; None decodes plainly), grouped by batch."""
    for batch in batches:
        yield f"plain, batch {batch}", batch, None
        chain = TreeConfig(builder="chain", budget=depth, depth=depth)
        yield f"chain of {depth}, batch {batch}", batch, chain
        for budget in budgets:
            tree = TreeConfig(builder="best_first", budget=budget, depth=depth)
            yield f"tree of {budget}, batch {batch}", batch, tree
