"""Acceptance: which path of the tree the target agrees with, and the token it adds.

All rules walk down from the root: a token that follows the node is found, and the walk goes on
while a child carries that token. The first token without a child is the bonus. Every token found is
distributed as the target's own, given the path above it: losslessness does not depend on the draft.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from jetspec.sampling import (
    SamplingParams,
    Stream,
    gumbel_noise,
    sample,
    target_distribution,
    uniform_noise,
)
from jetspec.trees.tree import Tree

_GREEDY = SamplingParams()


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


def verify_greedy(
    tree: Tree, logits: Tensor, params: SamplingParams = _GREEDY, seen: Tensor | None = None
) -> Acceptance:
    """Accept while the child is the target's argmax.

    Args:
        logits: [B, N + 1, V], the target's at every node.
        params: its bias and penalty count.
        seen: as in `verify_sampled`.
    """
    return verify_sampled(tree, logits, params, torch.zeros_like(tree.tokens), tree.sizes, seen)


def verify_sampled(
    tree: Tree,
    logits: Tensor,
    params: SamplingParams,
    positions: Tensor,
    request_keys: Tensor,
    seen: Tensor | None = None,
) -> Acceptance:
    """Sample-and-match: draw the target's token, accept the child that carries it.

    A child is accepted with the target's probability of its token, the most that any lossless rule
    can give candidates that the drafter picks without randomness (its top K): a rejected draw is
    itself the bonus, so there is no residual to sample from.

    Args:
        logits: [B, N + 1, V], the target's at every node.
        positions: long [B, N + 1], each node's position in its sequence.
        request_keys: long [B], from `sampling.request_keys`.
        seen: bool [B, V], tokens of the committed text; needed where `params` remembers. A node's
            own branch is added to them on the way down.
    """
    rows = torch.arange(logits.shape[0], device=logits.device)
    branch = _Branch(tree, seen)

    def draw(nodes: Tensor) -> Tensor:
        here = logits[rows, nodes]
        return sample(here, params, request_keys, positions[rows, nodes] + 1, branch.down(nodes))

    return walk(tree, draw)


def verify_residual(
    tree: Tree,
    logits: Tensor,
    params: SamplingParams,
    positions: Tensor,
    request_keys: Tensor,
    seen: Tensor | None = None,
) -> Acceptance:
    """Recursive rejection over a tree of drawn candidates (SpecInfer, arXiv 2305.09781; Sequoia).

    At a node with target distribution p, whose children x1, x2, ... were drawn from q without
    replacement, the children are tried in turn. x is accepted with min(1, p(x) / q(x)); if it is
    not, p becomes norm(max(p - q, 0)), and q loses x and is brought back to mass one, which is what
    the next sibling was drawn from. When all have failed the bonus is drawn from p as it then is.
    With one child a node this is speculative sampling (arXiv 2211.17192).

    Args:
        tree: with its `proposal`; the other arguments as in `verify_sampled`.
    """
    assert tree.proposal is not None
    proposal, vocab_size = tree.proposal, logits.shape[-1]
    rows = torch.arange(logits.shape[0], device=logits.device)
    branch = _Branch(tree, seen)

    def draw(nodes: Tensor) -> Tensor:
        p = target_distribution(logits[rows, nodes], params, branch.down(nodes)).double().exp()
        p = p / p.sum(-1, keepdim=True)
        q = proposal.distribution(nodes, tree.depths[rows, nodes], vocab_size)
        children = _children(tree, nodes)  # [B, C]
        place = positions[rows, nodes] + 1
        chance = uniform_noise(
            params.seed, request_keys, place, children.shape[1], Stream.ACCEPTANCE
        )
        token = torch.full_like(nodes, -1)
        for trial, child in enumerate(children.unbind(1)):
            untried = (token < 0) & (child >= 0)
            x = tree.tokens[rows, child.clamp(min=0)]
            # q >= p: accept with p / q; q < p: always.
            taken = untried & (chance[:, trial] * q[rows, x] < p[rows, x])
            token = torch.where(taken, x, token)
            failed = (untried & ~taken)[:, None]
            p = torch.where(failed, _norm((p - q).clamp(min=0), otherwise=p), p)
            rest = q.scatter(1, x[:, None], 0.0)
            q = torch.where(failed, _norm(rest, otherwise=rest), q)
        noise = gumbel_noise(params.seed, request_keys, place, vocab_size)
        return torch.where(token < 0, (p.log() + noise).argmax(-1), token)

    return walk(tree, draw)


def _norm(mass: Tensor, otherwise: Tensor) -> Tensor:
    """Rows [B, V] brought to mass one; a row without mass becomes that of `otherwise`.

    p - q has no mass only where p equals q up to rounding; then nothing is rejected but by
    rounding.
    """
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > 0, mass / total, otherwise)


def _children(tree: Tree, nodes: Tensor) -> Tensor:
    """long [B, C], the children of one node a row in the order of their numbers; -1 pads."""
    is_child = tree.parents == nodes[:, None]
    order = (~is_child).to(torch.int8).argsort(dim=1, stable=True)[:, : int(is_child.sum(1).max())]
    return order.masked_fill(~is_child.gather(1, order), -1)


class _Branch:
    """The tokens seen along each row's path: the committed text and the nodes walked down."""

    def __init__(self, tree: Tree, seen: Tensor | None) -> None:
        self._tokens = tree.tokens
        self._seen = None if seen is None else seen.clone()

    def down(self, nodes: Tensor) -> Tensor | None:
        """bool [B, V] after the step to `nodes`, long [B]; None where nothing is remembered."""
        if self._seen is not None:
            self._seen.scatter_(1, self._tokens.gather(1, nodes[:, None]), True)
        return self._seen


def walk(tree: Tree, next_token: Callable[[Tensor], Tensor]) -> Acceptance:
    """Follow the tokens that `next_token` finds down the tree.

    Args:
        next_token: from a node of every row, long [B], to the token after it, long [B]; a row whose
            walk has ended is asked about its last node again and must answer the same.
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
