"""A mixture of experts in the engine: six launches of fixed shapes."""

from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from jetspec.errors import JetspecError
from kernels.experts import first_product, list_pairs, route, second_product
from kernels.mlp import silu_mul


@dataclass(frozen=True)
class Experts:
    """The sparse MLP of a Qwen3-MoE layer.

    Attributes:
        router: [E, d].
        gate_up: [E, 2 I, d], gate first. down: [E, d, I].
        choices: C, experts a token.
        normalise: whether the chosen probabilities are scaled to sum to one.
    """

    router: Tensor
    gate_up: Tensor
    down: Tensor
    choices: int
    normalise: bool

    @classmethod
    def of(cls, mlp: Any) -> Self | None:
        """From a layer's MLP; None where it is dense.

        Raises:
            JetspecError: the experts' weights are laid out otherwise.
        """
        if not hasattr(mlp, "experts"):
            return None
        gate, experts = mlp.gate, mlp.experts
        names = ("gate_up_proj", "down_proj")
        shapes = [tuple(getattr(getattr(experts, name, None), "shape", ())) for name in names]
        count, hidden = gate.weight.shape
        inner = shapes[1][-1] if shapes[1] else 0
        if shapes != [(count, 2 * inner, hidden), (count, hidden, inner)] or inner % 16:
            raise JetspecError(
                "target.source", f"experts of {shapes}",
                "the engine runs fused ones of Qwen3-MoE; use the transformers backend",
            )  # fmt: skip
        return cls(
            gate.weight, experts.gate_up_proj, experts.down_proj, int(gate.top_k),
            bool(gate.norm_topk_prob),
        )  # fmt: skip

    def run(self, x: Tensor, logits: Tensor) -> Tensor:
        """What every choice adds, fp32 [C, T, d]: partial sums that the next kernel adds in order.

        Args:
            x: [T, d]; logits: [T, E] of the router, or fp32 [S, T, E] partial sums.
        """
        ids, weights = route(logits, self.choices, normalise=self.normalise, like=x)
        pairs, counts = list_pairs(ids, len(self.router))
        both = first_product(x, self.gate_up, pairs, counts, weights)
        return second_product(silu_mul(both), self.down, pairs, counts, weights)
