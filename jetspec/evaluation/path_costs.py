"""What path scores cost: weights, and the time of one proposal as a ratio to a slot head's.

    python -m jetspec.evaluation.path_costs record.json

Heads of one shape take turns in one process; a ratio is of medians of the process's own CPU time,
so that a shared machine moves both sides alike. The heads are untrained: that changes no work but
a second pass's, whose superset is wide and shallow where the slots are unsure.
"""

import statistics
import sys
import time
from typing import Any

import torch

from jetspec.heads.base import DraftHead
from jetspec.heads.config import HeadConfig
from jetspec.heads.registry import new_head
from jetspec.records import environment
from jetspec.storage import write_json
from jetspec.targets.config import TargetConfig
from jetspec.targets.load import load_target
from jetspec.targets.target import Target
from jetspec.trees.build import build_tree
from jetspec.trees.config import TreeConfig

SLOT = "slot"
VARIANTS: dict[str, dict[str, Any]] = {
    SLOT: {},
    "markov, rank 128": {"edge_rank": 128},
    "markov, rank 256": {"edge_rank": 256},
    "selector, rank 256": {"edges": "selector", "edge_rank": 256},
    "lattice, rank 128": {"edges": "lattice", "edge_rank": 128},
    "convolution, rank 64": {"conv_rank": 64},
    "second pass, shared, 64 nodes": {"rescore": "shared", "rescore_nodes": 64},
    "second pass, shared, 256 nodes": {"rescore": "shared", "rescore_nodes": 256},
    "second pass, own, 64 nodes": {"rescore": "own", "rescore_nodes": 64},
    "second pass, own, 256 nodes": {"rescore": "own", "rescore_nodes": 256},
}


@torch.no_grad()
def path_costs(
    target: Target,
    shape: HeadConfig,
    variants: dict[str, dict[str, Any]],
    *,
    context: int,
    tree: TreeConfig,
    repeats: int,
) -> list[dict[str, Any]]:
    """One row a variant: name, parameters, seconds, and the ratio of seconds to the slot head's.

    Args:
        shape: the slot head; variants are settings laid over it, `slot` among them.
        context: tokens behind which one block is drafted, batch 1.
        tree: what is built of the draft, in the same clock.
    """
    heads = {
        name: new_head(HeadConfig.model_validate({**shape.model_dump(), **own}), target).eval()
        for name, own in variants.items()
    }
    caches = {name: _filled(head, target, context) for name, head in heads.items()}
    anchor = torch.zeros(1, dtype=torch.long, device=target.device)
    seconds: dict[str, list[float]] = {name: [] for name in heads}
    for _ in range(1 + repeats):
        for name, head in heads.items():
            started = time.process_time()
            draft = head.draft(caches[name], anchor, target.embed, target.logits, tree.width)
            build_tree(draft, anchor, tree)
            seconds[name].append(time.process_time() - started)
    # The first turn warms up.
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    return [
        {
            "name": name,
            "parameters": sum(p.numel() for p in head.parameters()),
            "seconds": medians[name],
            "ratio": medians[name] / medians[SLOT],
        }
        for name, head in heads.items()
    ]


def _filled(head: DraftHead, target: Target, context: int) -> Any:
    cache = head.new_cache(1)
    generator = torch.Generator().manual_seed(0)
    taps = torch.randn(1, context, len(head.taps) * target.hidden_size, generator=generator)
    tokens = torch.randint(target.vocab_size, (1, context), generator=generator)
    positions = torch.arange(context)[None]
    rest = positions, torch.ones_like(positions, dtype=torch.bool), tokens
    head.extend(cache, taps.to(target.device), *(values.to(target.device) for values in rest))
    return cache


def main(record: str) -> None:
    """Measure the embedded target on a CPU and write `record`."""
    torch.set_num_threads(1)
    target = load_target(TargetConfig(device="cpu"))
    shape, tree = HeadConfig(num_layers=2), TreeConfig(budget=64)
    context, repeats = 512, 15
    rows = path_costs(target, shape, VARIANTS, context=context, tree=tree, repeats=repeats)
    write_json(
        record,
        {
            "rows": rows,
            "target": target.name,
            "head": shape.model_dump(mode="json"),
            "tree": tree.model_dump(mode="json"),
            "context": context,
            "repeats": repeats,
            "clock": "process CPU time of draft and build, batch 1, median; heads take turns",
            "environment": environment(),
        },
    )
    for row in rows:
        print(f"{row['name']:32} {row['parameters']:>12,} {row['ratio']:6.2f}")


if __name__ == "__main__":
    main(sys.argv[1])
