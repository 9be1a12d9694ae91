"""What orders the nodes of a tree (arXiv 2606.18394, scoring ablation; MATH-500 tau 9.81 / 5.52).

Every score is a sum of edge terms along the path, and every edge term is at most 0. A child
therefore never outranks its parent, which is what both builders rely on: the B best nodes are
prefix-closed by themselves.
"""

import torch
from torch import Tensor

from jetspec.trees.config import TreeConfig


def order_edges(edge_scores: Tensor, config: TreeConfig) -> Tensor:
    """Edge terms of the configured score, [B, D, K, K] as in `Draft.edge_scores`.

    - `cumulative`: log q(child | parent); the path's sum is its cumulative log-probability.
    - `entropy`: -H(parent), the same for all children of one parent: a node is as good as the
      distributions on its path are sure. Siblings tie and go by rank.
    - `hybrid`: log q(child | parent) - alpha * H(parent).

    Terms above 0 (an edge producer whose rows are not normalised) count as 0, and -inf (no such
    candidate) stays -inf.
    """
    terms = edge_scores.float().clamp(max=0.0)
    if config.score == "cumulative":
        return terms
    missing = terms == -torch.inf
    penalty = -_entropy(terms)[..., None]
    if config.score == "entropy":
        return penalty.expand_as(terms).masked_fill(missing, -torch.inf)
    return (terms + config.alpha * penalty).masked_fill(missing, -torch.inf)


def _entropy(log_q: Tensor) -> Tensor:
    """Entropy in nats of each parent's row, [..., K] -> [...].

    The mass outside the K candidates counts as one further outcome: a lower bound of the entropy
    over the vocabulary that needs no second pass over it and that path scores have too.
    """
    q = log_q.exp()
    rest = (1.0 - q.sum(-1)).clamp(min=0.0)
    entropy = -torch.xlogy(q, q).sum(-1) - torch.xlogy(rest, rest)
    return entropy.clamp(min=0.0)
