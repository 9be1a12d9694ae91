"""Linear layers' weights as the engine holds them: fused, in the target's type or eight bits."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jetspec.targets.fp8 import Fp8Linear, quantise, written_out


@dataclass(frozen=True)
class Fp8Weight:
    """values e4m3 [N, K] times 2^exponents, int8 [N].

    Attributes:
        whole: the same weight written out, where it is held anyway.
    """

    values: Tensor
    exponents: Tensor
    whole: Tensor | None = None

    @classmethod
    def holding(cls, weight: Tensor) -> "Fp8Weight":
        """A weight [N, K] whose values eight bits hold: rounding them changes nothing."""
        return cls(*quantise(weight), whole=weight)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def written_out(self, dtype: torch.dtype) -> Tensor:
        """[N, K]."""
        if self.whole is not None and self.whole.dtype == dtype:
            return self.whole
        return written_out(self.values, self.exponents, dtype)


Weight = Tensor | Fp8Weight


@torch.no_grad()
def fused(*linears: Any) -> Weight:
    """The weights on top of each other; each linear keeps its own as a view of them."""
    if isinstance(linears[0], Fp8Linear):
        codes = _stacked([linear.codes for linear in linears])
        exponents = torch.cat([linear.exponents for linear in linears])
        return Fp8Weight(codes.view(torch.float8_e4m3fn), exponents)
    return _stacked([linear.weight for linear in linears])


def _stacked(weights: list[Tensor]) -> Tensor:
    if len(weights) == 1:
        return weights[0]
    whole = torch.cat([weight.detach() for weight in weights])
    for weight, part in zip(weights, whole.split([len(w) for w in weights]), strict=True):
        weight.data = part
    return whole
