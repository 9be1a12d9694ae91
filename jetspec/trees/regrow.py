"""From a scored tree to a smaller one of a fixed shape, its nodes the best or drawn.

What `build.py` does with slots, for heads that hand over a tree (see prune.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from jetspec.sampling import Stream, gumbel_noise
from jetspec.trees.config import TreeConfig
from jetspec.trees.drawn import Draws
from jetspec.trees.prune import allowed_nodes, keep_nodes
from jetspec.trees.tree import Tree


@dataclass(frozen=True)
class TreeProposal:
    """What the nodes of a drawn tree came from, as `tree.Proposal`: the children of the tree that
    the head handed over, their probabilities tempered and brought to mass one at every node.

    Attributes:
        tokens, parents: long [B, N + 1], of that tree.
        log_q: float64 [B, N + 1], of each node under its parent; -inf where it takes no part.
        origins: long [B, M + 1], each drawn node's number in that tree.
    """

    tokens: Tensor
    parents: Tensor
    log_q: Tensor
    origins: Tensor

    def distribution(self, nodes: Tensor, depths: Tensor, vocab_size: int) -> Tensor:
        """See `tree.Proposal`."""
        origins = self.origins.gather(1, nodes[:, None])
        q = self.log_q.exp().masked_fill(self.parents != origins, 0.0)
        return q.new_zeros(len(nodes), vocab_size).scatter_add_(1, self.tokens, q)


def regrow_tree(
    tree: Tree,
    config: TreeConfig,
    shape: tuple[Tensor, Tensor, Tensor],
    draws: Draws | None,
) -> Tree:
    """`shape` filled with nodes of `tree`.

    Args:
        tree: scores never grow from a node to its child.
        config: depth and width limit which nodes take part.
        shape: parents, numbers among siblings and depths, long [M + 1] each.
        draws: draw a node's children rather than taking its best.
    """
    allowed = allowed_nodes(tree, config)
    above = tree.parents.clamp(min=0)
    log_q = (tree.scores - tree.scores.gather(1, above)).double()
    log_q = log_q.masked_fill(~allowed, -torch.inf)
    siblings = (tree.parents[:, :, None] == tree.parents[:, None]) & allowed[:, None]
    keys = log_q
    if draws is not None:
        tempered = log_q / draws.temperature
        among = tempered[:, None].masked_fill(~siblings, -torch.inf).logsumexp(-1)
        log_q = (tempered - among).masked_fill(~allowed, -torch.inf)
        count = tree.tokens.shape[1]
        keys = log_q + gumbel_noise(
            draws.seed, draws.keys, draws.positions, count, Stream.CANDIDATES
        )
    order = torch.arange(tree.tokens.shape[1], device=keys.device)
    ahead = (keys[:, None] > keys[..., None]) | (
        (keys[:, None] == keys[..., None]) & (order < order[:, None])
    )
    number = (siblings & ahead).sum(2)  # place among siblings

    parents, numbers, depths = (field.to(keys.device) for field in shape)
    origins = torch.zeros(len(tree.tokens), len(parents), dtype=torch.long, device=keys.device)
    exists = torch.ones_like(origins, dtype=torch.bool)
    for depth in range(1, int(depths.max()) + 1):
        here = (depths == depth).nonzero()[:, 0]  # [m]
        from_ = parents[here]
        match = (tree.parents[:, None] == origins[:, from_, None]) & allowed[:, None]
        match &= number[:, None] == numbers[here, None]  # [B, m, N + 1]
        origins[:, here] = match.long().argmax(-1)
        exists[:, here] = match.any(-1) & exists[:, from_]
    whole = Tree(
        tokens=tree.tokens.gather(1, origins),
        parents=parents.expand_as(origins),
        depths=depths.expand_as(origins),
        scores=tree.scores.gather(1, origins),
        sizes=exists.sum(1),
    )
    kept = keep_nodes(whole, exists)
    if draws is None:
        return kept
    order = (~exists).to(torch.int8).argsort(dim=1, stable=True)[:, : kept.tokens.shape[1]]
    proposal = TreeProposal(tree.tokens, tree.parents, log_q, origins.gather(1, order))
    return Tree(kept.tokens, kept.parents, kept.depths, kept.scores, kept.sizes, proposal=proposal)
