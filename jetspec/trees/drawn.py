"""Candidates that are drawn from the draft instead of ranked by it.

The residual rule (SpecInfer, Sequoia) needs to know the distribution q that each candidate came
from. Here q is the draft's row over the slot's K candidates, tempered like the target and brought
to mass one: any q that is really drawn from keeps the rule lossless, and this one costs no second
pass over the vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from jetspec.sampling import Stream, gumbel_noise
from jetspec.trees.draft import Draft


@dataclass(frozen=True)
class Draws:
    """Where the randomness of drawn candidates comes from.

    Attributes:
        temperature: the request's own.
        seed, keys: of the sampling noise; keys long [B].
        positions: long [B], the anchors' in their sequences.
    """

    temperature: float
    seed: int
    keys: Tensor
    positions: Tensor


@dataclass(frozen=True)
class SlotProposal:
    """`tree.Proposal` over slots: a node's children came from its row of log q.

    Attributes:
        tokens: long [B, D, K], each slot's candidates.
        log_q: float64 [B, D, K, K], of child j under parent i, every row of mass one; a row without
            candidates is -inf throughout.
        ranks: long [B, N + 1], each node's place among its slot's candidates.
    """

    tokens: Tensor
    log_q: Tensor
    ranks: Tensor

    def distribution(self, nodes: Tensor, depths: Tensor, vocab_size: int) -> Tensor:
        """See `tree.Proposal`."""
        rows = torch.arange(len(nodes), device=nodes.device)
        slots = depths.clamp(max=self.tokens.shape[1] - 1)
        q = self.log_q[rows, slots, self.ranks[rows, nodes]].exp()  # [B, K]
        whole = q.new_zeros(len(nodes), vocab_size)
        return whole.scatter_add_(1, self.tokens[rows, slots], q)


def draw_order(draft: Draft, draws: Draws) -> tuple[Tensor, Tensor]:
    """(log_q as in `SlotProposal`, keys), both [B, D, K, K].

    A parent's children in descending order of their keys are draws without replacement from its row
    of q (Gumbel top-k).

    Two nodes of one slot with the same candidate share their draws. Verification visits one node a
    slot, so what it sees is independent along the path.
    """
    batch, depth, width = draft.tokens.shape
    log_q = (draft.edge_scores.double() / draws.temperature).log_softmax(-1)
    log_q = log_q.masked_fill(draft.edge_scores == -torch.inf, -torch.inf)
    slots = torch.arange(1, depth + 1, device=log_q.device)
    positions = (draws.positions[:, None] + slots).flatten()
    keys = draws.keys.repeat_interleave(depth)
    noise = gumbel_noise(draws.seed, keys, positions, width * width, Stream.CANDIDATES)
    return log_q, log_q + noise.view(batch, depth, width, width)
