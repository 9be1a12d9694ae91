"""Acceptance: which path of the tree the target agrees with, and the token it adds.

Both rules walk down from the root: the target names the token that follows the node, and the walk
goes on while a child carries that token. The first token without a child is the bonus. What is
committed is therefore what the target itself would have produced, token by token: losslessness
does not depend on the draft.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from jetspec.sampling import SamplingParams, sample
from jetspec.trees.tree import Tree


@dataclass(frozen=True)
class Acceptance:
    """One round's verdict.

    Attributes:
        path: long [B, P], the accepted nodes from the root (node 0) down; padded with -1. P is the
            longest path of the batch.
        lengths: long [B], nodes on the path, the root included: the number of tokens committed
            (the path's tokens without the root's, plus the bonus).
        bonus: long [B], the target's token after the last node of the path.
    """

    path: Tensor
    lengths: Tensor
    bonus: Tensor


def verify_greedy(tree: Tree, logits: Tensor) -> Acceptance:
    """Accept while the child is the target's argmax.

    Args:
        logits: [B, N + 1, V], the target's at every node.
    """
    rows = torch.arange(logits.shape[0], device=logits.device)
    return walk(tree, lambda nodes: logits[rows, nodes].argmax(-1))


def verify_sampled(
    tree: Tree, logits: Tensor, params: SamplingParams, positions: Tensor, request_keys: Tensor
) -> Acceptance:
    """Sample-and-match: draw the target's token, accept the child that carries it.

    A child is accepted with the target's probability of its token, the most that any lossless rule
    can give candidates that the drafter picks without randomness (its top K): a rejected draw is
    itself the bonus, so there is no residual to sample from.

    Args:
        logits: [B, N + 1, V], the target's at every node.
        positions: long [B, N + 1], each node's position in its sequence.
        request_keys: long [B], from `sampling.request_keys`.
    """
    rows = torch.arange(logits.shape[0], device=logits.device)

    def draw(nodes: Tensor) -> Tensor:
        return sample(logits[rows, nodes], params, request_keys, positions[rows, nodes] + 1)

    return walk(tree, draw)


def walk(tree: Tree, next_token: Callable[[Tensor], Tensor]) -> Acceptance:
    """Follow the target's tokens down the tree.

    Args:
        next_token: from a node of every row, long [B], to the target's token after it, long [B];
            a row whose walk has ended is asked about its last node again and must answer the same.
    """
    node = torch.zeros_like(tree.sizes)
    alive = torch.ones_like(tree.sizes, dtype=torch.bool)
    path = [node]
    token = next_token(node)
    while True:
        child = (tree.parents == node[:, None]) & (tree.tokens == token[:, None])  # [B, N + 1]
        alive = alive & child.any(1)
        if not alive.any():
            break
        node = torch.where(alive, child.long().argmax(1), node)
        path.append(node.masked_fill(~alive, -1))
        token = next_token(node)
    nodes = torch.stack(path, 1)
    return Acceptance(path=nodes, lengths=(nodes >= 0).sum(1), bonus=token)
