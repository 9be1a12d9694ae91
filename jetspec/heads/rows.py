"""Rows of tokens, from which path scores are made: a token's embedding projected, or a row learned.

Both are linear maps of a token: of its frozen embedding, weights [r, d], or of the token itself,
weights [V, r].
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.heads.linear import Linear

Embed = Callable[[Tensor], Tensor]
_LEARNED_SPREAD = 1.0  # length of a fresh row; see `LearnedRows.spread`


def unit_rows(embeddings: Tensor) -> Tensor:
    """Rows scaled to unit root-mean-square."""
    return F.rms_norm(embeddings, embeddings.shape[-1:])


class ProjectedRows(Linear):
    """P E[token], each row of the frozen embedding E scaled to unit root-mean-square so that
    targets with small and with large embeddings train alike.

    Args:
        hidden_size: d; rank: r.
    """

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__(hidden_size, rank, bias=False)

    def forward(self, embeddings: Tensor) -> Tensor:
        """[..., d] -> [..., r]."""
        return super().forward(unit_rows(embeddings))

    def of(self, tokens: Tensor, embed: Embed) -> Tensor:
        """Tokens long [...] -> [..., r]."""
        return self(embed(tokens).to(self.weight.dtype))

    def table(self, embed: Embed, vocab_size: int) -> Tensor:
        """The rows [V, r] of every token."""
        return self.of(torch.arange(vocab_size, device=self.weight.device), embed)

    def holding(self, tokens: Tensor, embed: Embed, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Rows [U, r] with those of `tokens` among them; where each token's lies, long [...]."""
        if tokens.numel() >= vocab_size:
            # The whole table costs less than finding out which rows of it are needed.
            return self.table(embed, vocab_size), tokens
        if tokens.is_cuda:  # nobody waits to hear how many are distinct
            places = torch.arange(tokens.numel(), device=tokens.device).view_as(tokens)
            return self.of(tokens.flatten(), embed), places
        distinct, places = torch.unique(tokens, return_inverse=True)
        return self.of(distinct, embed), places  # a token's row is projected once


class LearnedRows(Linear):
    """W[token], one learned row a token: DSpark's published form (arXiv 2607.05147).

    As a linear map it takes a row to its products with every token's.

    Args:
        vocab_size: V; rank: r.
    """

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__(rank, vocab_size, bias=False)

    @torch.no_grad()
    def spread(self) -> None:
        """Rescale random weights so that a row's length is about one, whatever the rank.

        A step of AdamW at the rate eta then moves a product with another table's row by
        sqrt(2 r / pi) eta at most: 0.013 at rank 256 and a rate of 1e-3.
        """
        self.weight.mul_(_LEARNED_SPREAD / (self.in_features**0.5 * self.weight.std()))

    def of(self, tokens: Tensor, embed: Embed | None = None) -> Tensor:
        """Tokens long [...] -> [..., r]."""
        return F.embedding(tokens, self.weight)

    def table(self, embed: Embed | None, vocab_size: int) -> Tensor:
        return self.weight

    def holding(self, tokens: Tensor, embed: Embed, vocab_size: int) -> tuple[Tensor, Tensor]:
        return self.weight, tokens  # no copy: a token is its own place


TokenRows = ProjectedRows | LearnedRows
