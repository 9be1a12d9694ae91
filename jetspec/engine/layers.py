"""One decoder layer over paged keys and values: five matrix products and the fused kernels."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.mlp import silu_mul
from kernels.norms import add_rms_norm
from kernels.rope import qkv_to_cache
from kernels.small_gemm import parts_for, small_gemm
from kernels.tree_attention import tree_attention


@dataclass(frozen=True)
class Rows:
    """Where the rows of one pass stand. T = B x N rows, sequence by sequence.

    Attributes:
        batch, nodes: B and N.
        positions: int [T], rotary positions.
        cache_rows: long [T], where keys and values go; -1 for padding.
        table: int32 [B, max_pages].
        prefix, counts: int32 [B], committed rows and this pass's rows.
        bits: int32 [B, N, words], who sees whom; None is causal.
        max_context: no prefix plus rows is longer.
    """

    batch: int
    nodes: int
    positions: Tensor
    cache_rows: Tensor
    table: Tensor
    prefix: Tensor
    counts: Tensor
    bits: Tensor | None
    max_context: int


@dataclass(frozen=True)
class Layer:
    """A decoder layer's weights, QKV and gate-up fused."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor
    heads: int
    eps: float

    @classmethod
    def from_module(cls, module: Any, heads: int, eps: float) -> "Layer":
        """From a Llama, Qwen2 or Qwen3 layer of transformers, or a layer of a parallel head."""
        attention, mlp = module.self_attn, module.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        biases = [projection.bias for projection in projections]
        norms = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
        return cls(
            input_norm=module.input_layernorm.weight,
            qkv=torch.cat([projection.weight for projection in projections]),
            qkv_bias=None if biases[0] is None else torch.cat(biases),
            q_norm=None if norms[0] is None else norms[0].weight,
            k_norm=None if norms[1] is None else norms[1].weight,
            out=attention.o_proj.weight,
            post_norm=module.post_attention_layernorm.weight,
            gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
            down=mlp.down_proj.weight,
            heads=heads,
            eps=eps,
        )


def product(x: Tensor, weight: Tensor, exact: bool) -> Tensor:
    """x @ weight^T: [T, N], or fp32 [S, T, N] partial sums that the next kernel adds.

    Args:
        exact: one reduction order whatever T is, so that a row's bits do not depend on how many
            rows share the pass.
    """
    if exact:
        return small_gemm(x, weight, parts=parts_for(*weight.shape))
    return F.linear(x, weight)


def run_layer(
    layer: Layer,
    x: Tensor,
    residual: Tensor | None,
    keys: Tensor,
    values: Tensor,
    rope_table: Tensor,
    rows: Rows,
    exact: bool,
) -> tuple[Tensor, Tensor]:
    """(the MLP's output, not yet added; the residual stream before it).

    Args:
        x: [T, d] or partial sums: the last layer's MLP output, or the embeddings.
        residual: [T, d], None before the first layer.
    """
    normed, residual = add_rms_norm(x, residual, layer.input_norm, layer.eps)
    q = qkv_to_cache(
        product(normed, layer.qkv, exact), keys, values, rope_table, rows.positions,
        rows.cache_rows, heads=layer.heads, bias=layer.qkv_bias, q_norm=layer.q_norm,
        k_norm=layer.k_norm, eps=layer.eps,
    )  # fmt: skip
    attended = tree_attention(
        q.view(rows.batch, rows.nodes, layer.heads, -1), keys, values, rows.table, rows.prefix,
        rows.counts, rows.bits, max_context=rows.max_context, exact=exact,
    )  # fmt: skip
    x = product(attended.view(len(q), -1), layer.out, exact)
    normed, residual = add_rms_norm(x, residual, layer.post_norm, layer.eps)
    gated = silu_mul(product(normed, layer.gate_up, exact), dtype=normed.dtype)
    return product(gated, layer.down, exact), residual
