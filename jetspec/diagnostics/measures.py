"""Figures of a head at the positions where rounds land: ranks, siblings, entropy, calibration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jetspec.diagnostics.log import DraftLog
from jetspec.diagnostics.proposals import levels
from jetspec.diagnostics.simulate import Simulation, right_nodes
from jetspec.evaluation.statistics import ratio_interval
from jetspec.trees.build import build_tree
from jetspec.trees.config import TreeConfig
from jetspec.trees.scores import fit_calibration

RANKS = (1, 2, 4, 8)
"""Upper ends of the rank groups: 1, 2, 3-4, 5-8, the other candidates; then "no candidate"."""

BINS = 10
_FEWEST = 30  # rounds that a depth must have been tested in to be calibrated by itself
_CHUNK = 64  # rounds whose proposals are unfolded at one time


@dataclass(frozen=True)
class Walks:
    """The text walked down through the drafts of R rounds, depth by depth.

    Attributes:
        asked: bool [R, D], the answer reaches this depth and the text before it was among the
            candidates, so that the right parent has children.
        ranks: long [R, D], rank from 0 of the right token in that row; K where no candidate is it.
        best: fp32 [R, D], probability of that row's likeliest candidate.
        entropy: fp32 [R, D], nats of that row; what is outside the K candidates counts as one
            outcome, so it is a lower bound of the entropy over the vocabulary.
    """

    asked: Tensor
    ranks: Tensor
    best: Tensor
    entropy: Tensor


def walk(log: DraftLog, rows: Tensor) -> Walks:
    """The walks behind the anchors `rows`, long [R]."""
    parts = [_walk(log, chunk) for chunk in rows.split(_CHUNK)]
    return Walks(*(torch.cat(field) for field in zip(*parts, strict=True)))


def _walk(log: DraftLog, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    truth = log.truth[rows]
    asked, ranks, best, entropy = [], [], [], []
    for depth, (log_q, right) in enumerate(levels(log.propose(rows), truth)):
        own = log_q.masked_fill(~right, -torch.inf).amax(1, keepdim=True)
        place = right.long().argmax(1, keepdim=True)
        number = torch.arange(log_q.shape[1])
        ahead = (log_q > own) | ((log_q == own) & (number < place))
        known = log_q.amax(1) > -torch.inf
        asked.append(known & (truth[:, depth] >= 0))
        ranks.append(torch.where(right.any(1), ahead.sum(1), log.width))
        best.append(log_q.amax(1).exp())
        q = log_q.exp()
        rest = (1 - q.sum(1)).clamp(min=0)
        entropy.append(-torch.xlogy(q, q).sum(1) - torch.xlogy(rest, rest))
    found = (torch.stack(field, 1) for field in (asked, ranks, best, entropy))
    return next(found), next(found), next(found), next(found)


def by_depth(log: DraftLog, simulation: Simulation, walks: Walks) -> list[dict[str, Any]]:
    """One row a depth: acceptance by the tree, and where the right token stands in its row.

    Returns:
        rows {depth, accepted: share of the rounds whose answer is that long, asked: rounds whose
        text above is among the candidates, ranks: shares of these by rank group (the last is "no
        candidate"), entropy, target_entropy: nats}.
    """
    rows = []
    remaining = log.remaining[simulation.rows]
    for depth in range(1, log.depth + 1):
        asked = walks.asked[:, depth - 1]
        if not asked.any():
            break
        ranks = walks.ranks[asked, depth - 1]
        edges = [*(limit for limit in RANKS if limit < log.width), log.width]
        shares = [float((ranks < edge).float().mean()) for edge in edges]
        groups = [b - a for a, b in zip([0.0, *shares], shares, strict=False)]
        long_enough = remaining >= depth
        accepted = simulation.accepted[long_enough] >= depth
        behind = simulation.rows[asked] + depth - 1  # the log's row of the token before
        rows.append(
            {
                "depth": depth,
                "accepted": _mean(accepted),
                "asked": int(asked.sum()),
                "ranks": {
                    **{
                        name: round(share, 4)
                        for name, share in zip(_names(edges), groups, strict=True)
                    },
                    "none": round(1 - shares[-1], 4),
                },
                "entropy": _mean(walks.entropy[asked, depth - 1]),
                "target_entropy": _mean(log.target_entropy[behind]),
            }
        )
    return rows


def _names(edges: Sequence[int]) -> list[str]:
    starts = [1, *(edge + 1 for edge in edges)]
    return [
        str(edge) if start == edge else f"{start}-{edge}"
        for start, edge in zip(starts, edges, strict=False)
    ]


def after_sibling(
    log: DraftLog, simulation: Simulation, walks: Walks, *, samples: int, seed: int
) -> dict[str, dict[str, Any]]:
    """How often the next depth is right on the rank-1 spine, and after a sibling was accepted.

    Counted are depths from 2 on whose parent the tree accepted: `spine` where every accepted token
    was rank 1 of its row, `sibling` where the last accepted one was not.

    Returns:
        per kind {asked, right: share whose rank-1 candidate is right, right_ci, in_tree: share
        that the tree accepted}; shares are None where nothing was asked.
    """
    depth = torch.arange(1, log.depth + 1)
    parent_accepted = simulation.accepted[:, None] >= depth - 1
    asked = walks.asked & parent_accepted & (depth > 1)
    first = walks.ranks == 0
    spine_above = torch.ones_like(first)
    spine_above[:, 1:] = first[:, :-1].long().cumprod(1).bool()
    last_first = torch.ones_like(first)
    last_first[:, 1:] = first[:, :-1]
    in_tree = simulation.accepted[:, None] >= depth
    kinds = {"spine": asked & spine_above, "sibling": asked & ~last_first}
    owners = _prompts(log, simulation.rows)
    found = {}
    for name, where in kinds.items():
        right = _by_prompt(owners, (where & first).sum(1))
        every = _by_prompt(owners, where.sum(1))
        share = ratio_interval(right, every, samples=samples, seed=seed)
        value, ci = share.rounded(4) if share else (None, None)
        found[name] = {
            "asked": int(where.sum()),
            "right": value,
            "right_ci": ci,
            "in_tree": _mean(in_tree[where]),
        }
    return found


def calibration(log: DraftLog, simulation: Simulation, walks: Walks) -> dict[str, Any]:
    """Draft probability against acceptance.

    - `step`: the likeliest candidate of every row whose parent was accepted, against being right.
    - `path`: every node of the trees, its path's probability against the whole path being right;
      nodes beyond the answer's end are left out.

    Returns:
        per kind {ece, count, bins: [{low, high, count, probability, accepted}]}.
    """
    depth = torch.arange(1, log.depth + 1)
    where = walks.asked & (simulation.accepted[:, None] >= depth - 1)
    step = reliability(walks.best[where], walks.ranks[where] == 0)
    probabilities, hits = [], []
    for rows in simulation.rows.split(_CHUNK):
        tree = build_tree(log.propose(rows), log.anchors[rows], simulation.tree)
        node = tree.valid() & (tree.depths > 0) & (tree.depths <= log.remaining[rows, None])
        probabilities.append(tree.scores[node].exp())
        hits.append(right_nodes(tree, log.truth[rows])[node])
    return {"step": step, "path": reliability(torch.cat(probabilities), torch.cat(hits))}


def reliability(probabilities: Tensor, hits: Tensor, bins: int = BINS) -> dict[str, Any]:
    """A reliability diagram and its expected calibration error.

    ECE = sum over bins of (share of all) · |mean probability - share of hits| (Naeini et al.,
    AAAI 2015).

    Args:
        probabilities: fp32 [n] in [0, 1]; hits: bool [n].
    """
    place = (probabilities * bins).long().clamp(0, bins - 1)
    rows, error = [], 0.0
    for index in range(bins):
        own = place == index
        count = int(own.sum())
        if not count:
            continue
        mean = float(probabilities[own].double().mean())
        rate = float(hits[own].double().mean())
        error += count / len(hits) * abs(mean - rate)
        rows.append(
            {
                "low": index / bins,
                "high": (index + 1) / bins,
                "count": count,
                "probability": round(mean, 4),
                "accepted": round(rate, 4),
            }
        )
    return {"ece": round(error, 4) if len(hits) else None, "count": len(hits), "bins": rows}


def fitted_settings(log: DraftLog, simulation: Simulation) -> dict[str, list[float]]:
    """What static trees and survival scores need, from the rows whose parent was accepted.

    Returns:
        {rank_rates: how often a node's first, second, ... child is right once the node was
        accepted, falling and above 0 as `TreeConfig` wants them; calibration: temperatures by
        depth (`trees.scores.fit_calibration`), as deep as enough rounds came, unless the head
        drafts trees}.
    """
    edges, hits, depths, first = [], [], [], []
    rows_at = [0] * log.depth
    ranked = min(len(TreeConfig().rank_rates), log.width)
    for rows, accepted in zip(
        simulation.rows.split(_CHUNK), simulation.accepted.split(_CHUNK), strict=True
    ):
        truth = log.truth[rows]
        for depth, (log_q, right) in enumerate(levels(log.propose(rows), truth)):
            tested = (accepted >= depth) & (truth[:, depth] >= 0)
            where = tested & (log_q.amax(1) > -torch.inf)
            rows_at[depth] += int(where.sum())
            best, order = log_q[where].sort(dim=1, descending=True, stable=True)
            right = right[where].gather(1, order)
            first.append(right[:, :ranked])
            exists = best > -torch.inf
            edges.append(best[exists])
            hits.append(right[exists])
            depths.append(torch.full((int(exists.sum()),), depth + 1))
    rates = torch.cat(first).double().mean(0).clamp(min=1e-4).cummin(0).values
    rates = rates / max(1.0, float(rates.sum()))
    fitted = {"rank_rates": [round(rate, 6) for rate in rates.tolist()]}
    if log.scoring != "tree":  # scores of whole trees are final
        known = sum(count >= _FEWEST for count in rows_at)
        depth_of = torch.cat(depths)
        here = depth_of <= known
        found = fit_calibration(torch.cat(edges)[here], torch.cat(hits)[here], depth_of[here])
        fitted["calibration"] = [round(temperature, 4) for temperature in found]
    return fitted


def looping(statuses: Mapping[str, int]) -> dict[str, Any]:
    """Share of a run's answers that end in a repeated cycle. statuses: answers by status."""
    answers = sum(statuses.values())
    share = statuses.get("looping", 0) / answers if answers else None
    return {"answers": answers, "looping": statuses.get("looping", 0), "share": share}


def _mean(values: Tensor) -> float | None:
    return round(float(values.float().mean()), 4) if len(values) else None


def _prompts(log: DraftLog, rows: Tensor) -> list[str]:
    return [log.prompt_ids[s] for s in log.sample_of(rows).tolist()]


def _by_prompt(owners: Sequence[str], counts: Tensor) -> list[int]:
    sums: dict[str, int] = {}
    for owner, count in zip(owners, counts.tolist(), strict=True):
        sums[owner] = sums.get(owner, 0) + count
    return [sums[owner] for owner in sorted(sums)]
