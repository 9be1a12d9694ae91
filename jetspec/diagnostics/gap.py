"""The rank-1 gap: how much surer the head is of its best branch than the target is.

arXiv 2606.18394, rank-1 branch analysis: the draft's joint log-probability of the top-ranked branch
minus the target's of the same branch. A head that scores slots apart from each other is sure of
branches that no text would take; its gaps have a long tail.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jetspec.diagnostics.log import DraftLog
from jetspec.targets.target import Target
from jetspec.trees.build import build_tree
from jetspec.trees.config import TreeConfig

SMALL, LARGE = 5.0, 80.0
"""Nats: the paper's two tails, gaps under SMALL and gaps of LARGE or more."""

_BRANCH_TOKENS = 1024  # branch tokens that one forward holds beside the text


def rank1_gaps(
    target: Target, log: DraftLog, samples: Sequence[Any], rows: Tensor, *, branches: int
) -> Tensor:
    """fp32 [n]: gaps in nats of the top-ranked branches behind some of the anchors `rows`.

    Only anchors with a whole block of answer behind them count: behind an answer's end there is
    no text to be likely. Of those, `branches` evenly spread ones are taken.

    Args:
        samples: what the log was made of, in its order.
        rows: long [R], ascending.
        branches: at most so many.
    """
    whole = rows[log.remaining[rows] >= log.depth]
    if not len(whole):
        return torch.zeros(0)
    count = min(branches, len(whole))
    chosen = whole[torch.linspace(0, len(whole) - 1, count).round().long()]
    owners = log.sample_of(chosen)
    gaps = []
    per_forward = max(1, _BRANCH_TOKENS // log.depth)
    for sample in owners.unique().tolist():
        for own in chosen[owners == sample].split(per_forward):
            tokens, lengths, drafted = top_branches(log, own)
            text = torch.tensor(samples[sample].input_ids)
            gaps.append(drafted - branch_log_p(target, text, log.places[own], tokens, lengths))
    return torch.cat(gaps)


def top_branches(log: DraftLog, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens long [n, D], lengths long [n], joint log q fp32 [n]) of the chains that always take
    the best child; a tree's may end before depth D."""
    config = TreeConfig(builder="chain", budget=log.depth, width=log.width)
    tree = build_tree(log.propose(rows), log.anchors[rows], config)
    joint = tree.scores.gather(1, tree.sizes[:, None] - 1)[:, 0]
    return tree.tokens[:, 1:], tree.sizes - 1, joint


@torch.no_grad()
def branch_log_p(
    target: Target, text: Tensor, places: Tensor, branches: Tensor, lengths: Tensor
) -> Tensor:
    """fp32 [n]: the target's joint log-probability of branches behind places of one text.

    One forward holds the text and every branch beside it; a branch sees the text up to its anchor
    and itself.

    Args:
        text: long [T]; places: long [n], the anchors' indices.
        branches: long [n, D], of which the first `lengths` (long [n]) tokens count.
    """
    count, depth = branches.shape
    text = text[: int(places.max()) + 1]
    length, inner = len(text), depth - 1  # a branch's last token predicts nothing here
    ids = torch.cat([text, branches[:, :inner].flatten()])
    steps = torch.arange(inner)
    positions = torch.cat([torch.arange(length), (places[:, None] + 1 + steps).flatten()])
    mask = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    mask[:length, :length] = torch.ones(length, length, dtype=torch.bool).tril()
    mask[length:, :length] = torch.arange(length) <= places.repeat_interleave(inner)[:, None]
    owner = torch.arange(count).repeat_interleave(inner)
    order = steps.repeat(count)
    same = owner[:, None] == owner
    mask[length:, length:] = same & (order[:, None] >= order)
    device = target.device
    hidden = target.forward(
        ids.to(device)[None], position_ids=positions.to(device)[None], mask=mask.to(device)[None]
    ).hidden[0]
    inside = length + torch.arange(count * inner).view(count, inner)
    source = torch.cat([places[:, None], inside], dim=1)  # [n, D]: who predicts each branch token
    total = torch.zeros(count)
    for step in range(depth):  # one depth's vocabulary rows at a time
        log_p = target.logits(hidden[source[:, step].to(device)]).log_softmax(-1)
        found = log_p.gather(1, branches[:, step, None].to(device))[:, 0].cpu()
        total += torch.where(step < lengths, found, 0.0)
    return total


def gap_summary(gaps: Tensor, depth: int) -> dict[str, Any]:
    """{branches, depth, mean, median, p90, below_5, at_least_80}; None where there is no branch."""
    known = len(gaps) > 0
    return {
        "branches": len(gaps),
        "depth": depth,
        "mean": round(float(gaps.mean()), 3) if known else None,
        "median": round(float(gaps.median()), 3) if known else None,
        "p90": round(float(gaps.quantile(0.9)), 3) if known else None,
        "below_5": round(float((gaps < SMALL).float().mean()), 4) if known else None,
        "at_least_80": round(float((gaps >= LARGE).float().mean()), 4) if known else None,
    }
