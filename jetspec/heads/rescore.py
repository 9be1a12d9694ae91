"""Scores that know the whole branch: a second pass of the head over real tokens.

arXiv 2606.18394 writes q(y_u | x, h, ancestors of u) (eq. 10) under a tree mask (eq. 8). The first
pass cannot give it, since its slots are undecided. Here it proposes a superset of the tree; a
second pass reads the superset's tokens, each node seeing its ancestors, and its states score every
node. What fits the budget is then kept (trees/prune.py).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from jetspec.heads.config import HeadConfig
from jetspec.heads.layers import HeadLayer, RMSNorm
from jetspec.heads.linear import Linear
from jetspec.heads.rows import unit_rows
from jetspec.trees.tree import Tree

_ROWS = 512  # nodes whose vocabulary row exists at one time


class Rescorer(nn.Module):
    """A stack of its own for the second pass, on top of what the slots know.

    A node's input is its token and the state of the slot behind it; its output is that state and a
    correction, which starts at zero. The slots' states come without gradient, so that a frozen
    head can be given one.
    """

    def __init__(self, config: HeadConfig, hidden_size: int) -> None:
        super().__init__()
        assert config.rms_norm_eps is not None
        self.token_proj = Linear(hidden_size, hidden_size, bias=False)
        self.hidden_proj = Linear(hidden_size, hidden_size, bias=False)
        self.layers = nn.ModuleList(
            HeadLayer(config, hidden_size) for _ in range(config.rescore_layers)
        )
        self.norm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.out_proj = Linear(hidden_size, hidden_size, bias=False)

    @torch.no_grad()
    def reset(self) -> None:
        """Zero what must start at zero."""
        self.out_proj.weight.zero_()

    def enter(self, embeddings: Tensor, ahead: Tensor) -> Tensor:
        """Tokens' embeddings [..., d] and the states of the slots behind them [..., d]."""
        return self.token_proj(unit_rows(embeddings)) + self.hidden_proj(ahead)

    def leave(self, x: Tensor, ahead: Tensor) -> Tensor:
        """Input of the target's output projection, [..., d]."""
        return ahead + self.out_proj(self.norm(x))


@torch.no_grad()
def ancestor_scores(tree: Tree, states: Tensor, logits: Callable[[Tensor], Tensor]) -> Tree:
    """`tree` with every node scored by all of its ancestors: sums of log q(node | path above it).

    Args:
        states: [B, N + 1, d], behind which each node's children are predicted.
        logits: the target's output projection, fp32 or in its own type.
    """
    batch, nodes = tree.tokens.shape
    real = tree.valid() & (tree.depths > 0)
    rows = torch.arange(batch, device=states.device)[:, None] * nodes
    above = (rows + tree.parents.clamp(min=0)).flatten()
    # Only a node with children needs its distribution.
    parents, place = torch.unique(above[real.flatten()], return_inverse=True)
    child = tree.tokens[real]
    terms = torch.zeros(len(child), device=states.device)
    flat = states.flatten(0, 1)
    for begin in range(0, len(parents), _ROWS):
        row = logits(flat[parents[begin : begin + _ROWS]]).float()
        here = (place >= begin) & (place < begin + len(row))
        at = place[here] - begin
        terms[here] = row[at, child[here]] - torch.logsumexp(row, dim=-1)[at]
    log_q = torch.zeros(batch, nodes, device=states.device)
    log_q[real] = terms.clamp(max=0)
    scores = torch.zeros_like(log_q)
    above = tree.parents.clamp(min=0)
    for depth in range(1, int(tree.depths.max()) + 1):
        scores = torch.where(tree.depths == depth, scores.gather(1, above) + log_q, scores)
    scores = scores.masked_fill(~tree.valid(), -torch.inf)
    return Tree(tree.tokens, tree.parents, tree.depths, scores, tree.sizes)
