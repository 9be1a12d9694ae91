"""What orders the nodes of a tree (arXiv 2606.18394, scoring ablation; MATH-500 tau 9.81 / 5.52).

Every score is a sum of edge terms along the path, and every edge term is at most 0. A child
therefore never outranks its parent, which is what both builders rely on: the B best nodes are
prefix-closed by themselves.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.trees.config import TreeConfig


def order_edges(
    edge_scores: Tensor, config: TreeConfig, confidence: Tensor | None = None
) -> Tensor:
    """Edge terms of the configured score, [B, D, K, K] as in `Draft.edge_scores`.

    - `cumulative`: log q(child | parent); the path's sum is its cumulative log-probability.
    - `entropy`: -H(parent), the same for all children of one parent: a node is as good as the
      distributions on its path are sure. Siblings tie and go by rank.
    - `hybrid`: log q(child | parent) - alpha * H(parent).
    - `survival`: log of sigmoid(logit q(child | parent) / T_d), T_d calibrated at each depth, plus
      the log of the drafter's own confidence in the slot where it has one: min(p, q) is about c q
      when a share c of q's mass is p's too. The path's sum is its calibrated survival.

    Terms above 0 (an edge producer whose rows are not normalised) count as 0, and -inf (no such
    candidate) stays -inf.

    Args:
        confidence: [B, D, K] of `Draft.confidence`, or None.
    """
    terms = edge_scores.float().clamp(max=0.0)
    if config.score == "cumulative":
        return terms
    missing = terms == -torch.inf
    if config.score == "survival":
        terms = _survival(terms, config.calibration)
        if confidence is not None:
            terms = terms + confidence.float().clamp(0.0, 1.0).log()[..., None]
        return terms.masked_fill(missing, -torch.inf)
    penalty = -_entropy(terms)[..., None]
    if config.score == "entropy":
        return penalty.expand_as(terms).masked_fill(missing, -torch.inf)
    return (terms + config.alpha * penalty).masked_fill(missing, -torch.inf)


def _survival(log_q: Tensor, calibration: Sequence[float]) -> Tensor:
    """log of calibrated probabilities, [B, D, K, K] -> the same."""
    if not calibration:
        return log_q
    depth = log_q.shape[1]
    wanted = [*calibration, *[calibration[-1]] * depth][:depth]
    return F.logsigmoid(_logit(log_q) / log_q.new_tensor(wanted)[:, None, None])


def fit_calibration(
    log_q: Tensor, accepted: Tensor, depths: Tensor, *, smallest: float = 0.1, largest: float = 10.0
) -> tuple[float, ...]:
    """The temperature T_d of every depth, left to right, that makes probabilities come true.

    T_d minimises the log loss of sigmoid(logit q / T_d) over the edges that were put to the test:
    those whose parent was accepted, so that each depth is conditional on the ones before. A depth
    without edges takes its predecessor's.

    Args:
        log_q: [n], the edges' log-probabilities; accepted: bool [n]; depths: long [n], from 1 on.
        smallest, largest: of the temperatures tried, on a grid that is refined once.
    """
    found: list[float] = []
    for depth in range(1, int(depths.max()) + 1 if len(depths) else 1):
        here = depths == depth
        logit = _logit(log_q[here].double().clamp(max=0.0)).clamp(-50, 50)
        sign = torch.where(accepted[here], 1.0, -1.0).double()
        low, high = math.log(smallest), math.log(largest)
        for _ in range(2):
            grid = torch.linspace(low, high, 41, dtype=torch.double, device=log_q.device)
            loss = -F.logsigmoid(sign[:, None] * logit[:, None] / grid.exp()).sum(0)
            best, step = float(grid[loss.argmin()]), (high - low) / 40
            low, high = max(low, best - step), min(high, best + step)
        empty = not bool(here.any())
        found.append((found[-1] if found else 1.0) if empty else math.exp(best))
    return tuple(found)


def _logit(log_q: Tensor) -> Tensor:
    return log_q - torch.log1p(-log_q.exp())


def _entropy(log_q: Tensor) -> Tensor:
    """Entropy in nats of each parent's row, [..., K] -> [...].

    The mass outside the K candidates counts as one further outcome: a lower bound of the entropy
    over the vocabulary that needs no second pass over it and that path scores have too.
    """
    q = log_q.exp()
    rest = (1.0 - q.sum(-1)).clamp(min=0.0)
    return -torch.xlogy(q, q).sum(-1) - torch.xlogy(rest, rest)
