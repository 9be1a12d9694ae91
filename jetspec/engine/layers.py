"""One decoder layer over paged keys and values: five matrix products and the fused kernels."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.engine.experts import Experts
from jetspec.engine.weights import Fp8Weight, Weight, fused
from jetspec.training.world import World
from kernels.exact_attention import exact_attention
from kernels.exact_products import exact_product
from kernels.fp8_gemm import fp8_gemm
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
        ancestors: int32 [B, N, TAIL], who sees whom in the bitwise mode; None is causal.
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
    ancestors: Tensor | None = None


@dataclass(frozen=True)
class Products:
    """Which matrix product runs.

    Attributes:
        exact: one reduction order whatever the number of rows and wherever they lie, so that a
            row's bits depend on its own sequence alone.
        tried: in the exact order, more than a few rows go to cuBLAS where a trial of the shape
            shows the same bits (`kernels.exact_products`).
        small_rows: up to so many rows our product is faster than cuBLAS's (docs/kernels.md).
        fp8_rows: up to so many rows eight-bit weights go through our product.
        light: take cuBLASLt's choice of kernel where the rows fill no whole tiles of 64.
    """

    exact: bool = False
    tried: bool = False
    small_rows: int = 32
    fp8_rows: int = 128
    light: bool = True

    def ours(self, x: Tensor, weight: Tensor) -> bool:
        if self.exact:
            return True
        few = len(x) <= self.small_rows and x.element_size() == 2
        return few and x.is_cuda and weight.shape[1] % 128 == 0

    def ours_fp8(self, x: Tensor, weight: Fp8Weight) -> bool:
        """Whether eight-bit weights are read as such; many rows write them out for cuBLAS."""
        few = len(x) <= self.fp8_rows and weight.shape[1] % 128 == 0
        return self.exact or (few and x.is_cuda)

    def library(self, rows: int) -> str:
        """cuBLAS's interface that picks the faster kernel for so many rows."""
        return "cublaslt" if self.light and rows > 64 and rows % 64 else "cublas"


@dataclass(frozen=True)
class Mlp:
    """A dense gated MLP, gate and up fused."""

    gate_up: Weight
    down: Weight

    @classmethod
    def of(cls, mlp: Any) -> "Mlp":
        return cls(fused(mlp.gate_proj, mlp.up_proj), fused(mlp.down_proj))


@dataclass(frozen=True)
class Layer:
    """A decoder layer's weights, QKV fused.

    Attributes:
        heads: query heads of this rank.
        world: the ranks that hold the layer's parts together.
    """

    input_norm: Tensor
    qkv: Weight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Weight
    post_norm: Tensor
    mlp: Mlp | Experts
    heads: int
    eps: float
    world: World = World()

    @classmethod
    def from_module(cls, module: Any, heads: int, eps: float, world: World = World()) -> "Layer":
        """From a Llama, Qwen2, Qwen3 or Qwen3-MoE layer, or a layer of a parallel head.

        The module's own weights become views of the fused ones: memory holds them once.
        """
        attention = module.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        biases = [projection.bias for projection in projections]
        norms = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
        return cls(
            input_norm=module.input_layernorm.weight,
            qkv=fused(*projections),
            qkv_bias=None if biases[0] is None else torch.cat(biases),
            q_norm=None if norms[0] is None else norms[0].weight,
            k_norm=None if norms[1] is None else norms[1].weight,
            out=fused(attention.o_proj),
            post_norm=module.post_attention_layernorm.weight,
            mlp=Experts.of(module.mlp) or Mlp.of(module.mlp),
            heads=heads // world.size,
            eps=eps,
            world=world,
        )

    def in_eight_bits(self) -> "Layer":
        """The layer of a head whose weights eight bits hold (`heads.eight_bits`)."""
        mlp = self.mlp
        assert isinstance(mlp, Mlp)
        assert isinstance(self.qkv, Tensor) and isinstance(self.out, Tensor)
        assert isinstance(mlp.gate_up, Tensor) and isinstance(mlp.down, Tensor)
        return replace(
            self, qkv=Fp8Weight.holding(self.qkv), out=Fp8Weight.holding(self.out),
            mlp=Mlp(Fp8Weight.holding(mlp.gate_up), Fp8Weight.holding(mlp.down)),
        )  # fmt: skip


def product(x: Tensor, weight: Weight, products: Products, *, whole: bool = False) -> Tensor:
    """x @ weight^T: [T, N], or fp32 [S, T, N] partial sums that the next kernel adds.

    Args:
        whole: a finished product in any case.
    """
    if isinstance(weight, Fp8Weight):
        if products.ours_fp8(x, weight):
            parts = 1 if whole else parts_for(*weight.shape)
            return fp8_gemm(x, weight.values, weight.exponents, parts=parts)
        weight = weight.written_out(x.dtype)
    if products.ours(x, weight):
        run = exact_product if products.exact and products.tried else small_gemm
        return run(x, weight, parts=1 if whole else parts_for(*weight.shape))
    if not x.is_cuda:
        return F.linear(x, weight)
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(products.library(len(x)))
    try:
        return F.linear(x, weight)
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def joint_product(x: Tensor, weight: Weight, products: Products, world: World) -> Tensor:
    """x @ weight^T where every rank of `world` has a share of the inputs: partial sums [S, T, N].

    One rank's are those of `product`. Otherwise they are the ranks' shares, in the order of ranks
    and the type of x, and the next kernel adds them: the same bits on every rank.
    """
    if world.size == 1:
        return product(x, weight, products)
    return world.gather(product(x, weight, replace(products, small_rows=0), whole=True))


def run_layer(
    layer: Layer,
    normed: Tensor,
    residual: Tensor,
    keys: Tensor,
    values: Tensor,
    rope_table: Tensor,
    rows: Rows,
    products: Products,
) -> tuple[Tensor, Tensor]:
    """(the MLP's output or its partial sums, not yet added; the residual stream before it).

    Args:
        normed, residual: [T, d], the layer's input after its norm and before it.
    """
    q = qkv_to_cache(
        product(normed, layer.qkv, products), keys, values, rope_table, rows.positions,
        rows.cache_rows, heads=layer.heads, bias=layer.qkv_bias, q_norm=layer.q_norm,
        k_norm=layer.k_norm, eps=layer.eps,
    )  # fmt: skip
    q = q.view(rows.batch, rows.nodes, layer.heads, -1)
    where = (keys, values, rows.table, rows.prefix, rows.counts)
    if products.exact:
        attended = exact_attention(
            q, *where, rows.positions, rows.ancestors, max_context=rows.max_context
        )
    else:
        attended = tree_attention(q, *where, rows.bits, max_context=rows.max_context)
    x = joint_product(attended.view(len(normed), -1), layer.out, products, layer.world)
    normed, residual = add_rms_norm(x, residual, layer.post_norm, layer.eps)
    mlp = layer.mlp
    if isinstance(mlp, Experts):
        return mlp.run(normed, product(normed, mlp.router, products)), residual
    gated = silu_mul(product(normed, mlp.gate_up, products), dtype=normed.dtype)
    return joint_product(gated, mlp.down, products, layer.world), residual
