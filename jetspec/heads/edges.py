"""Producers of edge scores: how likely a candidate is once its parent on the branch is known.

Slot scores are marginals: they do not know which token the branch chose. An edge producer adds a
correction S(parent, child) over each slot's top-K candidates (DSpark, arXiv 2607.05147; DFlash2).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MarkovEdges(nn.Module):
    """S_t(a, b) = <(P_a E[a]) * g(h_t), P_b E[b]>, a low-rank bias from the parent's identity.

    E is the target's frozen embedding, each row scaled to unit root-mean-square so that targets
    with small and with large embeddings train alike; h_t is the slot's hidden state. The gate
    g = 2·sigmoid(W h) starts at one, P_b at zero: an untrained producer changes nothing.

    Args:
        hidden_size: d of the embedding and of the slots.
        rank: r.
        gate: whether g exists; without it S depends on the two tokens alone (DSpark's form).
    """

    def __init__(self, hidden_size: int, rank: int, *, gate: bool) -> None:
        super().__init__()
        self.rank = rank
        self.parent_proj = nn.Linear(hidden_size, rank, bias=False)
        self.child_proj = nn.Linear(hidden_size, rank, bias=False)
        self.gate_proj = nn.Linear(hidden_size, rank, bias=False) if gate else None

    @torch.no_grad()
    def reset(self) -> None:
        """Zero what must start at zero."""
        self.child_proj.weight.zero_()
        if self.gate_proj is not None:
            self.gate_proj.weight.zero_()

    def parent_factors(self, embeddings: Tensor) -> Tensor:
        """Embedding rows [..., d] -> parent factors [..., r]."""
        return self.parent_proj(self._normed(embeddings))

    def child_factors(self, embeddings: Tensor) -> Tensor:
        """Embedding rows [..., d] -> child factors [..., r]."""
        return self.child_proj(self._normed(embeddings))

    def gate(self, hidden: Tensor) -> Tensor | None:
        """Slot hidden states [..., d] -> gates [..., r], or None."""
        if self.gate_proj is None:
            return None
        return 2 * torch.sigmoid(self.gate_proj(hidden))

    def edge_scores(
        self,
        tokens: Tensor,
        log_q: Tensor,
        anchors: Tensor,
        hidden: Tensor,
        embed: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """log q(child | parent) over the candidates of neighbouring slots.

        S is added to the slots' log-probabilities and the sum is renormalised over the K
        candidates of the slot, which keep their joint probability under the slot (a
        candidate-only normaliser: the rest of the vocabulary is never scored).

        Args:
            tokens: long [B, D, K], best first.
            log_q: [B, D, K], their log-probabilities under the slot.
            anchors: long [B], the only parent of slot 0.
            hidden: [B, D, d], the slots' hidden states.
            embed: the target's embedding.

        Returns:
            fp32 [B, D, K, K]; at slot 0 every parent row is the anchor's.
        """
        dtype = self.parent_proj.weight.dtype
        embeddings = embed(tokens).to(dtype)
        width = tokens.shape[2]
        root = embed(anchors).to(dtype)[:, None, None].expand(-1, 1, width, -1)
        parents = self.parent_factors(torch.cat([root, embeddings[:, :-1]], dim=1))  # [B, D, K, r]
        gate = self.gate(hidden.to(dtype))
        if gate is not None:
            parents = parents * gate[:, :, None]
        bias = parents @ self.child_factors(embeddings).transpose(2, 3)  # [B, D, parents, children]
        # Rounding must not make a child likelier than its parent: builders rely on that.
        return renormalise(log_q[:, :, None], bias).clamp(max=0)

    def _normed(self, embeddings: Tensor) -> Tensor:
        return F.rms_norm(embeddings, embeddings.shape[-1:])


def renormalise(log_q: Tensor, bias: Tensor) -> Tensor:
    """log q + bias, its mass over the last dimension brought back to that of log q; fp32."""
    log_q = log_q.float()
    mass = torch.logsumexp(log_q, dim=-1, keepdim=True)
    return F.log_softmax(log_q + bias.float(), dim=-1) + mass
