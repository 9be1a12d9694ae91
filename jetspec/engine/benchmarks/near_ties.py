"""`python -m jetspec.engine.benchmarks.near_ties TARGET HEAD PROMPTS`: does the engine write what
the reference loop writes?

Every prompt is decoded plainly by the reference loop, then by the engine plainly, with chains and
with trees. In bf16 a first difference must be a near tie: both tokens within `--ulps` of the best
logit of one uncached forward, or of its sum with the place's noise above temperature 0. One line a
configuration; the exit code says whether all were.
"""

import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from jetspec.decode import decode
from jetspec.engine.benchmarks.answers import (
    command_line,
    configurations,
    new_record,
    opened,
    sampling_of,
)
from jetspec.engine.engine import Engine
from jetspec.errors import JetspecError
from jetspec.evaluation.config import EvaluationConfig
from jetspec.evaluation.methods import Request
from jetspec.evaluation.output_check import first_difference, gap_in_ulps
from jetspec.heads.parallel import ParallelHead
from jetspec.sampling import SamplingParams
from jetspec.targets.target import Target
from jetspec.trees.config import TreeConfig

PROGRAM = "python -m jetspec.engine.benchmarks.near_ties"
_ULPS = EvaluationConfig.model_fields["near_tie_ulps"].default


def check(
    target: Target, head: ParallelHead, prompts: Sequence[list[int]], tokens: int, *,
    batches: Sequence[int], budgets: Sequence[int], depth: int, ulps: float,
    sampling: SamplingParams = SamplingParams(), **options: Any,
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
    most, ids = max(batches), [str(place) for place in range(len(prompts))]
    for first in range(0, len(prompts), most):
        part = slice(first, first + most)
        done = decode(
            target, prompts[part], sampling=sampling, max_new_tokens=tokens, stop_token_ids=(),
            request_ids=ids[part],
        )  # fmt: skip
        plain += [generation.tokens for generation in done.generations]
    rows = max(map(len, prompts)) + tokens + 2 * (max(budgets, default=0) + depth + 2)
    for name, batch, tree in configurations(batches, budgets, depth):
        engine = Engine(
            target, head if tree else None, tree=tree or TreeConfig(builder="chain"), slots=batch,
            max_rows=rows, sampling=sampling, **options,
        )  # fmt: skip
        started = time.perf_counter()
        found = engine.decode(
            prompts, max_new_tokens=tokens, stop_token_ids=(), request_ids=ids
        ).generations
        seconds = time.perf_counter() - started
        gaps = []
        answers = (generation.tokens for generation in found)
        for request_id, prompt, ours, theirs in zip(ids, prompts, answers, plain, strict=True):
            at = first_difference(theirs, ours)
            if at is not None:
                request, pair = Request(prompt, request_id), (ours[at], theirs[at])
                gaps.append(gap_in_ulps(target, request, theirs[:at], pair, sampling))
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
        gc.collect()  # its graphs and pages


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(PROGRAM, __doc__, count=64, tokens=128, batches=[16], budgets=[64])
    parser.add_argument("--ulps", type=float, default=_ULPS, help="what counts as a near tie")
    args = parser.parse_args(arguments)
    try:
        sampling = sampling_of(args)
        target, head, prompts = opened(args)
        record = {**new_record(PROGRAM, target, sampling), "ulps": args.ulps}
        for row in check(
            target, head, prompts, args.tokens, batches=args.batches, budgets=args.budgets,
            depth=args.depth, ulps=args.ulps, sampling=sampling,
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
