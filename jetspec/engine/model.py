"""The target and the draft head as the engine runs them: fused weights over paged caches."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.engine.layers import Layer, Rows, product, run_layer
from jetspec.engine.paged_cache import PagedCache
from jetspec.errors import JetspecError
from jetspec.heads.parallel import ParallelHead
from jetspec.targets.target import Target
from kernels.norms import add_rms_norm
from kernels.rope import qkv_to_cache

ARCHITECTURES = ("llama", "qwen2", "qwen3")


class EngineModel:
    """A Llama, Qwen2 or Qwen3 with fused weights.

    Args:
        target: its weights are read once; the embedding and the output projection are shared.
        max_rows: longest sequence, for the rotary table.
        exact: bitwise mode, see `layers.product`.

    Raises:
        JetspecError: another architecture, or one with settings the kernels do not have.
    """

    def __init__(self, target: Target, *, max_rows: int, exact: bool) -> None:
        config = target.config
        if config.model_type not in ARCHITECTURES:
            raise JetspecError(
                "target.source",
                config.model_type,
                f"the engine runs {', '.join(ARCHITECTURES)}; use the transformers backend",
            )
        base = target.model.base_model
        self.target, self.exact = target, exact
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps = config.rms_norm_eps
        self.layers = [Layer.from_module(m, self.heads, self.eps) for m in base.layers]
        self.embedding = base.embed_tokens.weight
        self.norm = base.norm.weight
        self.rope_table = rope_table(
            base.rotary_emb.inv_freq, float(base.rotary_emb.attention_scaling), max_rows
        )

    def new_cache(self, slots: int, max_rows: int, page_size: int) -> PagedCache:
        return PagedCache(
            layers=len(self.layers), slots=slots, max_rows=max_rows, kv_heads=self.kv_heads,
            head_dim=self.head_dim, page_size=page_size, dtype=self.embedding.dtype,
            device=self.embedding.device,
        )  # fmt: skip

    def forward(
        self, tokens: Tensor, rows: Rows, cache: PagedCache, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """tokens long [T] -> (hidden [T, d] after the final norm, taps [T, n·d] or None)."""
        x, residual = F.embedding(tokens, self.embedding), None
        tapped = {}
        for index, layer in enumerate(self.layers):
            x, residual = run_layer(
                layer, x, residual, *cache.layer(index), self.rope_table, rows, self.exact
            )
            if index in taps:
                # The layer's output is the residual stream with its MLP added.
                whole = x.sum(0) if x.dim() == 3 else x
                tapped[index] = residual + whole.to(residual.dtype)
        hidden, _ = add_rms_norm(x, residual, self.norm, self.eps)
        return hidden, torch.cat([tapped[i] for i in taps], -1) if taps else None

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, d] -> [T, V], in the model's type: rounding is the target's own."""
        weight = self.target.model.get_output_embeddings().weight
        x = product(hidden, weight, self.exact)
        return x.sum(0).to(hidden.dtype) if x.dim() == 3 else x


class EngineHead:
    """A parallel head whose context keys and values live in pages of their own.

    The page table is the target's: row n of the head's cache belongs to token n. Context rows come
    from fused taps; a draft writes its slots' rows behind them, and the next round's context
    overwrites those.
    """

    def __init__(self, head: ParallelHead, *, max_rows: int, exact: bool) -> None:
        config = head.config
        assert config.num_attention_heads and config.num_key_value_heads
        assert config.rms_norm_eps and config.head_dim
        self.head, self.exact, self.eps = head, exact, config.rms_norm_eps
        self.taps, self.depth = head.taps, head.depth
        self.kv_heads, self.head_dim = config.num_key_value_heads, config.head_dim
        self.layers = [
            Layer.from_module(module, config.num_attention_heads, self.eps)
            for module in head.layers
        ]
        # Context rows need keys and values only: one product for all layers.
        skip = config.num_attention_heads * self.head_dim
        self.context = torch.cat([layer.qkv[skip:] for layer in self.layers])
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

    def extend(
        self, taps: Tensor, positions: Tensor, cache_rows: Tensor, cache: PagedCache
    ) -> None:
        """Project newly committed context: taps [T, n·d], positions [T], cache rows [T] or -1."""
        fused = F.linear(taps.to(self.head.dtype), self.head.fc.weight)
        fused, _ = add_rms_norm(fused, None, self.head.hidden_norm.weight, self.eps)
        both = F.linear(fused, self.context).view(len(fused), len(self.layers), -1)
        for index, layer in enumerate(self.layers):
            qkv_to_cache(
                both[:, index].contiguous(), *cache.layer(index), self.rope_table, positions,
                cache_rows, heads=0, q_norm=layer.q_norm, k_norm=layer.k_norm, eps=self.eps,
            )  # fmt: skip

    def forward(self, embeddings: Tensor, rows: Rows, cache: PagedCache) -> Tensor:
        """Slot embeddings [T, d] -> hidden [T, d] after the final norm."""
        x, residual = embeddings.to(self.head.dtype), None
        for index, layer in enumerate(self.layers):
            x, residual = run_layer(
                layer, x, residual, *cache.layer(index), self.rope_table, rows, self.exact
            )
        hidden, _ = add_rms_norm(x, residual, self.head.norm.weight, self.eps)
        return hidden


def rope_table(frequencies: Tensor, factor: float, positions: int) -> Tensor:
    """fp32 [positions, head_dim]: cosines, then sines. frequencies: [head_dim / 2]."""
    place = torch.arange(positions, device=frequencies.device, dtype=torch.float32)
    angles = place[:, None] * frequencies.float()
    return torch.cat([angles.cos(), angles.sin()], -1) * factor
