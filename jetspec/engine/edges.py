"""Path scores in the engine: an edge producer's factors of every token, made once."""

from dataclasses import dataclass

import torch
from torch import Tensor

from jetspec.heads.edges import EdgeProducer, MarkovEdges, SelectorEdges
from jetspec.heads.rows import LearnedRows, TokenRows
from kernels.edges import Gate, edge_scores

CHUNK = 8192  # tokens whose embeddings are scaled and projected at one time


@dataclass(frozen=True)
class EdgeTables:
    """Factors of Markov or selector edges, by token.

    Attributes:
        parents, children: [V, r]; together 4 V r bytes in bf16. Learned rows are the head's own.
        gate: how a slot's hidden state turns the parents' factors; weight [r, d] or None.
    """

    parents: Tensor
    children: Tensor
    gate: Gate
    weight: Tensor | None

    @classmethod
    def of(cls, edges: EdgeProducer | None, embedding: Tensor) -> "EdgeTables | None":
        """The tables of a producer whose factors depend on a token and a gate; else None.

        Args:
            embedding: [V, d], the target's.
        """
        if type(edges) not in (MarkovEdges, SelectorEdges):
            return None
        assert isinstance(edges, MarkovEdges)
        weight = None if edges.gate_proj is None else edges.gate_proj.weight
        linear: Gate = "linear" if isinstance(edges, SelectorEdges) else "sigmoid"
        return cls(
            parents=_table(edges.parent_proj, embedding),
            children=_table(edges.child_proj, embedding),
            gate="none" if weight is None else linear,
            weight=weight,
        )

    def scores(
        self, tokens: Tensor, best: Tensor, lse: Tensor, anchors: Tensor, gates: Tensor | None
    ) -> Tensor:
        """log q(child | parent), fp32 [B, D, K, K]; arguments as in `kernels.edges.edge_scores`."""
        return edge_scores(
            tokens, best, lse, anchors, self.parents, self.children, gates, gate=self.gate
        )


@torch.no_grad()
def _table(rows: TokenRows, embedding: Tensor) -> Tensor:
    weight = rows.weight.detach()
    if isinstance(rows, LearnedRows):
        return weight
    return torch.cat([rows(part.to(weight.dtype)) for part in embedding.split(CHUNK)]).contiguous()
