"""The decoder layer of a parallel head: Qwen3's, with the fused context as extra keys and values.

Parameter names are those of checkpoint format A (z-lab DFlash), so a state dict is a checkpoint.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from jetspec.errors import JetspecError
from jetspec.heads.linear import Linear

if TYPE_CHECKING:
    from jetspec.heads.config import HeadConfig

Rotary = tuple[Tensor, Tensor]
KeysValues = tuple[Tensor, Tensor]
Previous = Callable[[Tensor], Tensor]  # x [B, S, d] -> the row before each, zero where none is


@dataclass(frozen=True)
class LayerShape:
    """What a decoder layer is built from; a head's resolved settings say as much."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    conv_rank: int = 0


Shape = Union["HeadConfig", LayerShape]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in the dtype of its input."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def rope_frequencies(
    parameters: dict[str, Any], head_dim: int, max_positions: int
) -> tuple[Tensor, float]:
    """Inverse frequencies fp32 [head_dim / 2] and the factor on cos and sin.

    Args:
        parameters: `rope_theta`, `rope_type` and that type's own keys, as transformers writes them.

    Raises:
        JetspecError: a type that transformers does not know.
    """
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / parameters["rope_theta"] ** exponents, 1.0
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        raise JetspecError("head.rope_parameters", kind, "unknown rope_type")
    config = Qwen3Config(
        head_dim=head_dim, max_position_embeddings=max_positions, rope_parameters=dict(parameters)
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies.float(), float(factor)


class RotaryEmbedding:
    """cos and sin of positions. Not a module: frequencies stay fp32 whatever the head's dtype."""

    def __init__(self, config: Shape) -> None:
        assert config.rope_parameters and config.head_dim and config.max_position_embeddings
        self.frequencies, self.factor = rope_frequencies(
            config.rope_parameters, config.head_dim, config.max_position_embeddings
        )
        self._by_device: dict[torch.device, Tensor] = {}

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        """positions long [B, T] -> cos, sin [B, T, 1, head_dim]."""
        device = positions.device
        if device not in self._by_device:
            self._by_device[device] = self.frequencies.to(device)
        angles = positions[..., None].float() * self._by_device[device]
        angles = torch.cat([angles, angles], dim=-1)[:, :, None]
        return (angles.cos() * self.factor).to(dtype), (angles.sin() * self.factor).to(dtype)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Apply RoPE to x [B, T, heads, head_dim]; the two halves of a head are the pairs."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


@functools.cache
def _compiled_flex() -> Any:
    # Without compilation flex_attention materialises every score.
    return torch.compile(flex_attention, dynamic=False)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | BlockMask) -> Tensor:
    """Attention of q [B, S, H, hd] over k, v [B, L, Hkv, hd] -> [B, S, H * hd].

    Args:
        mask: bool [B, S, L] for SDPA, or a BlockMask for flex_attention.
    """
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if isinstance(mask, BlockMask):
        # Inside a compiled layer it is compiled with what surrounds it.
        flex = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
        out = flex(query, key, value, block_mask=mask, enable_gqa=True)
    elif query.is_cuda:
        out = _grouped(query, key, value, mask)
    else:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask[:, None], enable_gqa=True
        )
    return out.transpose(1, 2).flatten(2)


def _grouped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention [B, H, S, hd] whose query heads are further rows of the head they share.

    Under a mask of its own and with grouped heads, SDPA on a GPU would write every key and value
    out in fp32, once a query head.
    """
    shared = key.shape[1]
    groups = query.shape[1] // shared
    rows = query.reshape(query.shape[0], shared, -1, query.shape[3])  # [B, Hkv, groups * S, hd]
    seen = mask[:, None].repeat(1, 1, groups, 1)
    return F.scaled_dot_product_attention(rows, key, value, attn_mask=seen).reshape(query.shape)


class HeadAttention(nn.Module):
    """Grouped-query attention whose keys are the fused context followed by the block's slots."""

    def __init__(self, config: Shape, hidden_size: int) -> None:
        super().__init__()
        assert config.num_attention_heads and config.num_key_value_heads
        assert config.head_dim and config.rms_norm_eps
        self.head_dim = config.head_dim
        query, shared = (
            heads * config.head_dim
            for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q_proj = Linear(hidden_size, query, bias=False)
        self.k_proj = Linear(hidden_size, shared, bias=False)
        self.v_proj = Linear(hidden_size, shared, bias=False)
        self.o_proj = Linear(query, hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def keys_values(self, x: Tensor, rotary: Rotary) -> KeysValues:
        """x [B, T, d] -> keys and values [B, T, Hkv, hd]; fused context and slots alike."""
        key = rotate(self.k_norm(self._heads(self.k_proj(x))), rotary)
        return key, self._heads(self.v_proj(x))

    def forward(
        self, x: Tensor, rotary: Rotary, context: KeysValues, mask: Tensor | BlockMask
    ) -> Tensor:
        query = rotate(self.q_norm(self._heads(self.q_proj(x))), rotary)
        key, value = self.keys_values(x, rotary)
        key = torch.cat([context[0], key], dim=1)
        value = torch.cat([context[1], value], dim=1)
        return self.o_proj(attend(query, key, value, mask))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class HeadMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class BlockConvolution(nn.Module):
    """y_t = x_t + a_t * x_t + b_t * x_{t-1}: DFlash2's two-tap dynamic depthwise convolution.

    The taps [a_t; b_t] = W_2 silu(W_1 x_t) + c depend on the slot; W_2 and c start at zero, so that
    it begins as the identity. x_{t-1} is the slot before, or in a tree the parent.
    """

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.down_proj = Linear(size, rank, bias=False)
        self.up_proj = Linear(rank, 2 * size, bias=False)
        self.taps = nn.Parameter(torch.zeros(2 * size))

    @torch.no_grad()
    def reset(self) -> None:
        self.up_proj.weight.zero_()

    def forward(self, x: Tensor, previous: Previous) -> Tensor:
        taps = self.up_proj(F.silu(self.down_proj(x))) + self.taps.to(x.dtype)
        own, before = taps.chunk(2, dim=-1)
        return x + own * x + before * previous(x)


def block_shift(block_size: int) -> Previous:
    """The slot before, in blocks that lie one after another."""

    def previous(x: Tensor) -> Tensor:
        blocks = x.unflatten(1, (-1, block_size))
        return F.pad(blocks[:, :, :-1], (0, 0, 1, 0)).flatten(1, 2)

    return previous


def parent_rows(parents: Tensor) -> Previous:
    """The parent's row in a tree; parents: long [B, N], -1 where there is none."""

    def previous(x: Tensor) -> Tensor:
        rows = parents.clamp(min=0)[..., None].expand(-1, -1, x.shape[-1])
        return x.gather(1, rows).masked_fill((parents < 0)[..., None], 0.0)

    return previous


class HeadLayer(nn.Module):
    """Pre-norm attention and MLP. The fused context enters as it is: only slots are normed here.

    With `conv_rank` a convolution inside the block mixes the input of either.
    """

    def __init__(self, config: Shape, hidden_size: int) -> None:
        super().__init__()
        assert config.intermediate_size and config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.self_attn = HeadAttention(config, hidden_size)
        self.post_attention_layernorm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.mlp = HeadMLP(hidden_size, config.intermediate_size)
        rank = config.conv_rank
        self.attn_conv = BlockConvolution(hidden_size, rank) if rank else None
        self.mlp_conv = BlockConvolution(hidden_size, rank) if rank else None

    def forward(
        self,
        x: Tensor,
        rotary: Rotary,
        fused: Tensor,
        context_rotary: Rotary,
        mask: Tensor | BlockMask,
        previous: Previous | None = None,
    ) -> Tensor:
        """Training: the context is projected here. x [B, S, d], fused [B, C, d] -> [B, S, d]."""
        context = self.self_attn.keys_values(fused, context_rotary)
        return self.slots(x, rotary, context, mask, previous)

    def slots(
        self,
        x: Tensor,
        rotary: Rotary,
        context: KeysValues,
        mask: Tensor | BlockMask,
        previous: Previous | None = None,
    ) -> Tensor:
        """Decoding: the context's keys and values come from a cache.

        Args:
            previous: what the convolutions mix in; None where the layer has none.
        """
        normed = self._mixed(self.attn_conv, self.input_layernorm(x), previous)
        x = x + self.self_attn(normed, rotary, context, mask)
        normed = self._mixed(self.mlp_conv, self.post_attention_layernorm(x), previous)
        return x + self.mlp(normed)

    @staticmethod
    def _mixed(conv: nn.Module | None, x: Tensor, previous: Previous | None) -> Tensor:
        return x if conv is None else conv(x, previous)
