"""The draft tree: one flat record that builders write and verification reads."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Proposal(Protocol):
    """What a drawn tree's nodes came from: draws without replacement under each node."""

    def distribution(self, nodes: Tensor, depths: Tensor, vocab_size: int) -> Tensor:
        """q float64 [B, V] that the children of one node a row were drawn from.

        Args:
            nodes: long [B]; depths: long [B], theirs. For a node at the deepest level, which can
                have no children, what is returned means nothing.
        """


@dataclass(frozen=True)
class Tree:
    """A batch of draft trees, node 0 being the root (the anchor) and parents before children.

    Attributes:
        tokens: long [B, N + 1].
        parents: long [B, N + 1]; -1 for the root and for padding.
        depths: long [B, N + 1]; the root has 0, and so has padding.
        scores: float [B, N + 1]; cumulative log q of the path to the node (0 at the root, -inf at
            padding), whatever score ordered the builder.
        sizes: long [B]; nodes including the root. Rows beyond are padding.
        proposal: what the nodes were drawn from; None where they are the draft's best. Siblings
            were drawn in the order of their numbers.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    scores: Tensor
    sizes: Tensor
    proposal: Proposal | None = None

    @classmethod
    def root_only(cls, anchors: Tensor) -> "Tree":
        """The tree of plain decoding: nothing but the anchor. anchors: long [B]."""
        tokens = anchors[:, None]
        return cls(
            tokens=tokens,
            parents=torch.full_like(tokens, -1),
            depths=torch.zeros_like(tokens),
            scores=torch.zeros(tokens.shape, device=tokens.device),
            sizes=torch.ones_like(anchors),
        )

    def valid(self) -> Tensor:
        """bool [B, N + 1]: real nodes, not padding."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.sizes[:, None]

    def surrogate(self) -> Tensor:
        """float [B]: the expected number of accepted draft tokens if q were the target.

        The sum over draft nodes of their path probability: what exact best-first maximises.
        """
        return self.scores.exp()[:, 1:].sum(-1)

    def ancestor_mask(self) -> Tensor:
        """bool [B, N + 1, N + 1]: row v may attend to column u (eq. 8): its ancestors and itself.

        Padding rows see only themselves, so that no attention row is empty.
        """
        batch, nodes = self.tokens.shape
        mask = torch.zeros(batch, nodes, nodes, dtype=torch.bool, device=self.tokens.device)
        here = torch.arange(nodes, device=self.tokens.device).expand(batch, -1)
        for _ in range(int(self.depths.max()) + 1):
            mask.scatter_(2, here[..., None], True)
            # Climbing stops at the root and at padding: staying there marks the same bit again.
            parent = self.parents.gather(1, here)
            here = torch.where(parent < 0, here, parent)
        return mask

    def validate(self) -> None:
        """Raise ValueError on a record that is no tree: for tests and for builders from outside."""
        for row in range(self.tokens.shape[0]):
            size = int(self.sizes[row])
            parents = self.parents[row].tolist()
            depths = self.depths[row].tolist()
            if not 1 <= size <= len(parents):
                raise ValueError(f"row {row}: size {size} outside 1..{len(parents)}")
            if parents[0] != -1 or depths[0] != 0:
                raise ValueError(f"row {row}: node 0 is not a root")
            if self.scores[row, 0] != 0:
                raise ValueError(f"row {row}: the root's score is not 0")
            edges = set()
            for node in range(1, size):
                parent = parents[node]
                if not 0 <= parent < node:
                    raise ValueError(f"row {row}: node {node} precedes its parent {parent}")
                if depths[node] != depths[parent] + 1:
                    raise ValueError(f"row {row}: node {node} is not one below its parent")
                edges.add((parent, int(self.tokens[row, node])))
            if len(edges) != size - 1:
                raise ValueError(f"row {row}: two children of one parent have the same token")
            rest = (parents[size:], depths[size:], self.scores[row, size:].tolist())
            if any(bare != (-1, 0, -math.inf) for bare in zip(*rest, strict=True)):
                raise ValueError(f"row {row}: padding has a parent, a depth or a score")
