"""The target and the draft head as the engine runs them: fused weights over paged caches."""

from collections.abc import Sequence

import torch
from torch import Tensor

from jetspec.engine.edges import EdgeTables
from jetspec.engine.layers import Layer, Mlp, Products, Rows, product, run_layer
from jetspec.engine.paged_cache import PagedCache
from jetspec.engine.parallel import Output, Ranks, split_layers, split_target
from jetspec.engine.weights import Fp8Weight, Weight
from jetspec.errors import JetspecError
from jetspec.heads.parallel import ParallelHead
from jetspec.targets.target import Target
from jetspec.training.world import World
from kernels.norms import add_rms_norm
from kernels.place import gather_rows
from kernels.rope import context_to_caches
from kernels.small_gemm import LEAST_STEP
from kernels.topk import topk_logsumexp

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_moe")


class EngineModel:
    """A Llama, Qwen2, Qwen3 or Qwen3-MoE with fused weights.

    Args:
        target: shares all of its weights.
        max_rows: longest sequence, for the rotary table.
        ranks: the processes that hold the target together; its layers are split in place.

    Raises:
        JetspecError: another architecture, one with settings the kernels do not have, or one that
            cannot be split over so many ranks.
    """

    def __init__(
        self, target: Target, *, max_rows: int, products: Products, ranks: Ranks = Ranks()
    ) -> None:
        config = target.config
        if config.model_type not in ARCHITECTURES:
            raise JetspecError(
                "target.source",
                config.model_type,
                f"the engine runs {', '.join(ARCHITECTURES)}; use the transformers backend",
            )
        base = target.model.base_model
        for name, module in base.layers[0].named_modules():
            projection = name.rpartition(".")[2]
            biased = isinstance(module, torch.nn.Linear) and module.bias is not None
            if biased and projection not in ("q_proj", "k_proj", "v_proj"):
                raise JetspecError(
                    "target.source",
                    f"bias of {name}",
                    "the engine adds biases to queries, keys and values alone; use the "
                    "transformers backend",
                )
        split_target(target, ranks.world)
        self.target, self.products, self.ranks = target, products, ranks
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads // ranks.world.size
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps = config.rms_norm_eps
        self.layers = [Layer.from_module(m, self.heads, self.eps, ranks.world) for m in base.layers]
        if products.exact:
            require_steps(self.layers[0])
        self.output = Output.of(target.model.get_output_embeddings().weight, ranks)
        self.embedding = base.embed_tokens.weight
        self.norm = base.norm.weight
        self.rope_table = rope_table(
            base.rotary_emb.inv_freq, float(base.rotary_emb.attention_scaling), max_rows
        )

    @staticmethod
    def row_bytes(target: Target) -> int:
        """Bytes of one token's keys and values in all layers."""
        config = target.config
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        values = 2 * target.num_layers * config.num_key_value_heads * head_dim
        return int(values) * target.dtype.itemsize

    def new_cache(
        self, slots: int, max_rows: int, page_size: int, pages: int | None = None
    ) -> PagedCache:
        return PagedCache(
            layers=len(self.layers), slots=slots, max_rows=max_rows, kv_heads=self.kv_heads,
            head_dim=self.head_dim, page_size=page_size, dtype=self.embedding.dtype,
            device=self.embedding.device, pages=pages,
        )  # fmt: skip

    def forward(
        self, tokens: Tensor, rows: Rows, cache: PagedCache, taps: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """tokens long [T] -> (hidden [T, d] after the final norm, each tap [T, d])."""
        embedded = gather_rows([self.embedding], tokens)
        hidden, outputs = run_layers(
            self.layers, self.norm, embedded, cache, self.rope_table, rows, self.products, taps
        )
        return hidden, [outputs[tap] for tap in taps]

    def logits(
        self, hidden: Tensor, products: Products | None = None, weight: Weight | None = None
    ) -> Tensor:
        """hidden [T, d] -> [T, V], in the model's type: rounding is the target's own.

        Args:
            weight: in place of the target's output projection.
        """
        if weight is None:
            return self.output.logits(hidden, products or self.products)
        return product(hidden, weight, products or self.products, whole=True)

    def best(
        self, hidden: Tensor, width: int, products: Products | None = None,
        weight: Weight | None = None, *, sums: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """`topk_logsumexp` of `logits`, which are whole on no rank where the output is split."""
        if weight is None:
            return self.output.best(hidden, width, products or self.products, sums=sums)
        return topk_logsumexp(self.logits(hidden, products, weight), width, sums=sums)


class EngineHead:
    """A parallel head whose context keys and values live in pages of their own.

    The page table is the target's: row n of the head's cache belongs to token n. Context rows come
    from fused taps; a draft writes its slots' rows behind them, and the next round's context
    overwrites those.

    Args:
        world: the ranks that hold its layers together, which are split in place.
    """

    def __init__(
        self, head: ParallelHead, *, max_rows: int, products: Products, world: World = World()
    ) -> None:
        if not isinstance(head, ParallelHead) or head.config.conv_rank or head.rescores:
            raise JetspecError(
                "head.kind", head.config.kind,
                "the engine runs parallel heads without convolution or a second pass",
            )  # fmt: skip
        config = head.config
        if config.conv_rank or head.rescores:
            name, value = ("conv_rank", config.conv_rank) if config.conv_rank else (
                "rescore", config.rescore
            )  # fmt: skip
            raise JetspecError(f"head.{name}", value, "only the reference loop decodes it")
        if config.edge_normaliser != "candidates":
            raise JetspecError(
                "head.edge_normaliser", config.edge_normaliser, "only the reference loop decodes it"
            )
        assert config.num_attention_heads and config.num_key_value_heads
        assert config.rms_norm_eps and config.head_dim
        self.head, self.products, self.eps = head, products, config.rms_norm_eps
        self.taps, self.depth = head.taps, head.depth
        self._edges: EdgeTables | None = None
        heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.kv_heads = config.num_key_value_heads // world.size
        split_layers(head.layers, world, heads=heads, kv_heads=config.num_key_value_heads)
        self.layers = [Layer.from_module(m, heads, self.eps, world) for m in head.layers]
        # Context rows need keys and values only: one product for all layers.
        skip = heads // world.size * self.head_dim
        own = [layer.qkv for layer in self.layers]
        context = torch.cat([qkv[skip:] for qkv in own if isinstance(qkv, Tensor)])
        self.context: Weight = context
        self.fc: Weight = head.fc.weight
        self.projection: Weight | None = None
        if head.projection is not None:
            self.projection = Fp8Weight.holding(head.projection)
            self.context, self.fc = Fp8Weight.holding(context), Fp8Weight.holding(head.fc.weight)
            self.layers = [layer.in_eight_bits() for layer in self.layers]
        norms = [layer.k_norm for layer in self.layers if layer.k_norm is not None]
        self.k_norms = torch.stack(norms) if norms else None
        device = head.fc.weight.device
        self.rope_table = rope_table(
            head.rotary.frequencies.to(device), head.rotary.factor, max_rows
        )

    def new_cache(self, like: PagedCache) -> PagedCache:
        """A cache of the head's layers that uses the page table of `like`."""
        weight = self.head.fc.weight
        cache = PagedCache(
            layers=len(self.layers), slots=len(like.table),
            max_rows=like.max_pages * like.page_size, kv_heads=self.kv_heads,
            head_dim=self.head_dim, page_size=like.page_size, dtype=weight.dtype,
            device=weight.device, pages=like.pages,
        )  # fmt: skip
        cache.table = like.table
        return cache

    def edge_tables(self, embedding: Tensor) -> EdgeTables | None:
        """Factors of every token for path scores, made once; None where torch scores them."""
        if self._edges is None:
            self._edges = EdgeTables.of(self.head.edges, embedding)
        return self._edges

    def extend(
        self, taps: Tensor, positions: Tensor, cache_rows: Tensor, cache: PagedCache
    ) -> None:
        """Project newly committed context: taps [T, n·d], positions [T], cache rows [T] or -1."""
        fused = product(taps.to(self.head.dtype), self.fc, self.products)
        fused, _ = add_rms_norm(fused, None, self.head.hidden_norm.weight, self.eps)
        context_to_caches(
            product(fused, self.context, self.products, whole=True), cache.kv, self.rope_table,
            positions, cache_rows,
            k_norms=self.k_norms, eps=self.eps,
        )  # fmt: skip

    def forward(self, embeddings: Tensor, rows: Rows, cache: PagedCache) -> Tensor:
        """Slot embeddings [T, d] -> hidden [T, d] after the final norm."""
        hidden, _ = run_layers(
            self.layers, self.head.norm.weight, embeddings.to(self.head.dtype), cache,
            self.rope_table, rows, self.products,
        )  # fmt: skip
        return hidden


def run_layers(
    layers: Sequence[Layer], norm: Tensor, x: Tensor, cache: PagedCache, rope: Tensor,
    rows: Rows, products: Products, taps: Sequence[int] = (),
) -> tuple[Tensor, dict[int, Tensor]]:  # fmt: skip
    """(hidden [T, d] after the final norm, the output [T, d] of every tapped layer).

    A layer's output is the residual stream that the next norm leaves behind.
    """
    residual: Tensor | None = None
    outputs = {}
    for index, layer in enumerate(layers):
        normed, residual = add_rms_norm(x, residual, layer.input_norm, layer.eps)
        if index - 1 in taps:
            outputs[index - 1] = residual
        x, residual = run_layer(layer, normed, residual, *cache.layer(index), rope, rows, products)
    hidden, last = add_rms_norm(x, residual, norm, layers[0].eps)
    return hidden, outputs | {len(layers) - 1: last}


def require_steps(layer: Layer) -> None:
    """Refuse weights that the bitwise mode's product cannot cut into whole steps."""
    dense = [layer.mlp.down] if isinstance(layer.mlp, Mlp) else []
    for weight in (layer.qkv, layer.out, *dense):
        if weight.shape[1] % LEAST_STEP:
            raise JetspecError(
                "engine.exact", True, f"a weight has {weight.shape[1]} inputs; the bitwise mode "
                f"needs multiples of {LEAST_STEP}; leave it off",
            )  # fmt: skip


def rope_table(frequencies: Tensor, factor: float, positions: int) -> Tensor:
    """fp32 [positions, head_dim]: cosines, then sines. frequencies: [head_dim / 2]."""
    place = torch.arange(positions, device=frequencies.device, dtype=torch.float32)
    angles = place[:, None] * frequencies.float()
    return torch.cat([angles.cos(), angles.sin()], -1) * factor
