"""A target with eight-bit weights: e4m3 times a power of two an output channel, bf16 activations.

Powers of two make the rounded weights bf16 numbers: a target in eight bits is a target like any
other, which the reference loop, the transformers backend and the engine all run, and output is
lossless against it, not against the weights it was rounded from.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetspec.errors import JetspecError

LARGEST = 448.0  # of e4m3
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(values e4m3 [N, K], exponents int8 [N]): a row is about values * 2^exponent.

    The exponent is the smallest that leaves no value above 448. Rounding what was rounded changes
    nothing.
    """
    wide = weight.float()
    fraction, exponents = torch.frexp(wide.abs().amax(-1) / LARGEST)  # 0.5 <= fraction < 1
    exponents = (exponents - (fraction == 0.5).int()).clamp(-126, 127)
    values = (wide / powers(exponents)[:, None]).clamp(-LARGEST, LARGEST)
    return values.to(torch.float8_e4m3fn), exponents.to(torch.int8)


def powers(exponents: Tensor) -> Tensor:
    """2^exponents in fp32, made of bits: library powers may be a digit off."""
    return ((exponents.int() + 127) << 23).view(torch.float32)


def written_out(values: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """values * 2^exponents, [N, K], exact in fp32 and in bf16."""
    return values.to(dtype) * powers(exponents).to(dtype)[:, None]


class Fp8Linear(nn.Module):
    """A linear layer that holds e4m3 codes and writes its weight out when it runs.

    Codes are bytes, so that a change of the model's type leaves them alone.

    Attributes:
        codes: uint8 [N, K], the bits of e4m3. exponents: int8 [N].
    """

    codes: Tensor
    exponents: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        values, exponents = quantise(linear.weight.detach())
        self.register_buffer("codes", values.view(torch.uint8))
        self.register_buffer("exponents", exponents)
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features

    @property
    def values(self) -> Tensor:
        """e4m3 [N, K]."""
        return self.codes.view(torch.float8_e4m3fn)

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """The weight written out, [N, K]."""
        return written_out(self.values, self.exponents, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight_in(x.dtype), self.bias)


@torch.no_grad()
def to_fp8(model: Any, name: str) -> None:
    """Round every linear layer of the decoder layers in place; embedding and output stay.

    Raises:
        JetspecError: the layers have no such linear layers (mixtures of experts, fused ones).
    """
    for layer in model.base_model.layers:
        parts = [(layer.self_attn, part) for part in _ATTENTION]
        parts += [(layer.mlp, part) for part in _MLP]
        for module, part in parts:
            linear = getattr(module, part, None)
            if type(linear) is not nn.Linear:
                raise JetspecError(
                    "target.weights", "fp8", f"a layer of {name} has no linear {part}; leave it out"
                )
            setattr(module, part, Fp8Linear(linear))
