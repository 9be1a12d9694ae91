"""`python -m jetspec.engine.benchmarks.exact_tokens TARGET HEAD PROMPTS`: is the bitwise mode true?

Every prompt is decoded plainly at batch 1, then plainly, with chains and with trees at every batch
and budget; token ids must be equal, above temperature 0 too, where a prompt and a place have their
noise. One line a configuration; the exit code says whether all were.
"""

import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jetspec.engine.benchmarks.answers import (
    command_line,
    configurations,
    new_record,
    opened,
    sampling_of,
)
from jetspec.engine.engine import Engine, Shared
from jetspec.engine.layers import Products
from jetspec.engine.model import EngineHead, EngineModel
from jetspec.errors import JetspecError
from jetspec.heads.parallel import ParallelHead
from jetspec.sampling import SamplingParams
from jetspec.targets.target import Target
from jetspec.trees.config import TreeConfig

PROGRAM = "python -m jetspec.engine.benchmarks.exact_tokens"
SHOWN = 3
"""Differences of a configuration that are printed."""


@dataclass(frozen=True)
class Difference:
    """Where a prompt's tokens first differ from those of plain decoding at batch 1."""

    prompt: int
    place: int
    plain: int | None
    found: int | None


def differences(plain: Sequence[list[int]], found: Sequence[list[int]]) -> list[Difference]:
    """The first difference of every prompt that has one; a shorter answer ends in None."""
    out = []
    for prompt, (a, b) in enumerate(zip(plain, found, strict=True)):
        if a != b:
            short = min(len(a), len(b))
            place = next((i for i in range(short) if a[i] != b[i]), short)
            tokens = [answer[place] if place < len(answer) else None for answer in (a, b)]
            out.append(Difference(prompt, place, *tokens))
    return out


def check(
    target: Target, head: ParallelHead, prompts: Sequence[list[int]], tokens: int, *,
    batches: Sequence[int], budgets: Sequence[int], depth: int,
    sampling: SamplingParams = SamplingParams(), tried: bool = False, **options: Any,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """One record a configuration; the first is plain decoding at batch 1, all others' measure.

    Args:
        prompts: token ids. tokens: new ones of each, stop tokens ignored.
        tried: as `Products.tried`. options: for `Engine`.
    """
    page = options.setdefault("page_size", 64)
    margin = 2 * (max(budgets, default=0) + depth + 2)
    rows = -(-(max(map(len, prompts)) + tokens + margin) // page) * page
    exact = Products(exact=True, tried=tried)
    model = EngineModel(target, max_rows=rows, products=exact)
    drafts = EngineHead(head, max_rows=rows, products=Products())
    plain: list[list[int]] | None = None
    cache, slots = None, 0
    for name, batch, tree in [
        ("plain, batch 1", 1, None),
        *(c for c in configurations(batches, budgets, depth) if c[1:] != (1, None)),
    ]:
        if cache is None or slots != batch:
            cache = None  # the old pages go before the new ones come
            cache, slots = model.new_cache(batch, rows, page), batch
        engine = Engine(
            target, head if tree else None, tree=tree or TreeConfig(builder="chain"), slots=batch,
            max_rows=rows, sampling=sampling, exact=True, shared=Shared(model, drafts, cache),
            **options,
        )  # fmt: skip
        started = time.perf_counter()
        done = engine.decode(prompts, max_new_tokens=tokens, stop_token_ids=()).generations
        found = [generation.tokens for generation in done]
        plain = found if plain is None else plain
        differing = differences(plain, found)
        rounds = sum(len(generation.rounds) for generation in done)
        yield {
            "configuration": name,
            "prompts": len(prompts),
            "tokens": sum(map(len, found)),
            "tokens_per_round": sum(sum(g.rounds) for g in done) / max(rounds, 1),
            "seconds": time.perf_counter() - started,
            "differing_prompts": len(differing),
            "differences": [vars(difference) for difference in differing],
        }
        del engine
        gc.collect()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(
        PROGRAM, __doc__, count=100, tokens=256, batches=[1, 3, 16], budgets=[16, 64, 256]
    )
    parser.add_argument("--tried", action="store_true", help="cuBLAS where its bits are the same")
    args = parser.parse_args(arguments)
    try:
        sampling = sampling_of(args)
        target, head, prompts = opened(args)
        record = {**new_record(PROGRAM, target, sampling), "tried": args.tried}
        failed = 0
        for row in check(
            target, head, prompts, args.tokens, batches=args.batches, budgets=args.budgets,
            depth=args.depth, sampling=sampling, tried=args.tried,
        ):  # fmt: skip
            record["configurations"].append(row)
            failed += row["differing_prompts"]
            print(
                f"{row['configuration']:24} {row['differing_prompts']:4} of {row['prompts']} differ"
                f"  {row['tokens_per_round']:.2f} tokens a round  {row['seconds']:.1f} s",
                flush=True,
            )
            for found in row["differences"][:SHOWN]:
                print(
                    f"  prompt {found['prompt']} at token {found['place']}: "
                    f"{found['plain']} plainly, {found['found']} here"
                )
            if args.json:
                args.json.write_text(json.dumps(record, indent=1))
    except JetspecError as error:
        print(error, file=sys.stderr)
        return 2
    print("equal" if not failed else f"{failed} answers differ")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
