"""`python -m jetspec.engine.benchmarks.near_ties TARGET HEAD PROMPTS`: does the engine write what
the reference loop writes?

Every prompt is decoded plainly by the reference loop, then by the engine plainly, with chains and
with trees. In bf16 a first difference must be a near tie: both tokens within `--ulps` of the best
logit of one uncached forward. One line a configuration; the exit code says whether all were.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from jetspec.decode import decode
from jetspec.engine.benchmarks.exact_tokens import configurations, read_prompts
from jetspec.engine.engine import Engine
from jetspec.errors import JetspecError
from jetspec.evaluation.methods import Request
from jetspec.evaluation.output_check import first_difference, gap_in_ulps
from jetspec.heads.parallel import ParallelHead
from jetspec.heads.registry import load_head
from jetspec.sampling import SamplingParams
from jetspec.targets.config import TargetConfig
from jetspec.targets.load import load_target
from jetspec.targets.target import Target
from jetspec.trees.config import TreeConfig

PROGRAM = "python -m jetspec.engine.benchmarks.near_ties"


def check(
    target: Target, head: ParallelHead, prompts: Sequence[list[int]], tokens: int, *,
    batches: Sequence[int], budgets: Sequence[int], depth: int, ulps: float, **options: Any,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """One record a configuration of the engine, each against the reference loop's plain answers.

    Args:
        prompts: token ids. tokens: new ones of each, stop tokens ignored.
        options: for `Engine`.

    Yields:
        `equal`, `near_ties` and `errors` as numbers of prompts; `gaps`, of every prompt that is
        not equal, how far its first differing tokens lie apart in ulps, largest first.
    """
    plain: list[list[int]] = []
    most = max(batches)
    for first in range(0, len(prompts), most):
        part = prompts[first : first + most]
        done = decode(target, part, max_new_tokens=tokens, stop_token_ids=())
        plain += [generation.tokens for generation in done.generations]
    rows = max(map(len, prompts)) + tokens + 2 * (max(budgets, default=0) + depth + 2)
    for name, batch, tree in configurations(batches, budgets, depth):
        engine = Engine(
            target, head if tree else None, tree=tree or TreeConfig(builder="chain"), slots=batch,
            max_rows=rows, **options,
        )  # fmt: skip
        started = time.perf_counter()
        found = engine.decode(prompts, max_new_tokens=tokens, stop_token_ids=()).generations
        seconds = time.perf_counter() - started
        gaps = []
        for prompt, ours, theirs in zip(prompts, (g.tokens for g in found), plain, strict=True):
            at = first_difference(theirs, ours)
            if at is not None:
                request, pair = Request(prompt, ""), (ours[at], theirs[at])
                gaps.append(gap_in_ulps(target, request, theirs[:at], pair, SamplingParams()))
        near = sum(gap <= ulps for gap in gaps)
        yield {
            "configuration": name,
            "prompts": len(prompts),
            "equal": len(prompts) - len(gaps),
            "near_ties": near,
            "errors": len(gaps) - near,
            "gaps": sorted(gaps, reverse=True),
            "seconds": seconds,
        }
        del engine


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument("target", help="a directory, a .gguf file, or `embedded`")
    parser.add_argument("head", help="a head's directory")
    parser.add_argument("prompts", help="JSONL or Parquet, or `bundled`")
    parser.add_argument("--count", type=int, default=64, help="prompts")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each")
    parser.add_argument("--batches", type=int, nargs="+", default=[16])
    parser.add_argument("--budgets", type=int, nargs="*", default=[64])
    parser.add_argument("--depth", type=int, default=15)
    parser.add_argument("--ulps", type=float, default=2.0, help="what counts as a near tie")
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args(arguments)
    try:
        if not torch.cuda.is_available():
            raise JetspecError("device", "none", "this check needs a CUDA GPU")
        from kernels.benchmarks.timing import environment

        target = load_target(TargetConfig(source=args.target))
        head = load_head(args.head)
        if not isinstance(head, ParallelHead):
            raise JetspecError("HEAD", args.head, "the engine runs parallel heads")
        head = head.to(target.device, target.dtype)
        prompts = read_prompts(target, args.prompts, args.count)
        record: dict[str, Any] = {
            "command": " ".join([PROGRAM, *sys.argv[1:]]),
            "target": {"name": target.name, "fingerprint": target.fingerprint},
            "dtype": str(target.dtype).removeprefix("torch."),
            "ulps": args.ulps,
            "environment": environment(),
            "configurations": [],
        }
        for row in check(
            target, head, prompts, args.tokens, batches=args.batches, budgets=args.budgets,
            depth=args.depth, ulps=args.ulps,
        ):  # fmt: skip
            record["configurations"].append(row)
            worst = f", the largest gap {row['gaps'][0]:.2f} ulps" if row["gaps"] else ""
            print(
                f"{row['configuration']:24} {row['equal']:4} of {row['prompts']} equal, "
                f"{row['near_ties']} near ties, {row['errors']} errors{worst}"
                f"  {row['seconds']:.1f} s",
                flush=True,
            )
            if args.json:
                args.json.write_text(json.dumps(record, indent=1))
    except JetspecError as error:
        print(error, file=sys.stderr)
        return 2
    return int(any(row["errors"] for row in record["configurations"]))


if __name__ == "__main__":
    sys.exit(main())
