"""The parallel draft head: one pass over [anchor, MASK, MASK, ...] drafts a whole block.

arXiv 2606.18394, round step 2. The in-block mask is causal (JetSpec) or bidirectional (DFlash);
the embedding and the output projection are the target's own and live with the target.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from jetspec.errors import JetspecError
from jetspec.heads.cache import HeadCache
from jetspec.heads.config import HeadConfig
from jetspec.heads.edges import MarkovEdges
from jetspec.heads.files import DType
from jetspec.heads.layers import HeadLayer, RMSNorm, RotaryEmbedding
from jetspec.heads.registry import DraftHead, register
from jetspec.targets.target import Target
from jetspec.trees.draft import Draft

if TYPE_CHECKING:
    from jetspec.training.blocks import Batch
    from jetspec.training.config import LossConfig


@register
class ParallelHead(DraftHead):
    """A draft head over a frozen target.

    Args:
        config: resolved, no size left at None (see `resolve_head_config`).
        hidden_size: d, the target's.
        vocab_size: V, rows of the target's output projection; recorded, since the head has none.
        num_target_layers: recorded, so that a head is refused by a target of another depth.
    """

    settings = HeadConfig
    config: HeadConfig

    def __init__(
        self, config: HeadConfig, *, hidden_size: int, vocab_size: int, num_target_layers: int
    ) -> None:
        super().__init__(
            config,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            num_target_layers=num_target_layers,
        )
        assert config.taps is not None and config.rms_norm_eps is not None
        self.fc = nn.Linear(len(config.taps) * hidden_size, hidden_size, bias=False)
        self.hidden_norm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(
            HeadLayer(config, hidden_size) for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.edges = (
            MarkovEdges(hidden_size, config.edge_rank, gate=config.edge_gate)
            if config.edge_rank
            else None
        )
        self.rotary = RotaryEmbedding(config)

    @property
    def scores_paths(self) -> bool:
        return self.edges is not None

    @property
    def mask_token_id(self) -> int:
        assert self.config.mask_token_id is not None
        return self.config.mask_token_id

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @classmethod
    def resolve(cls, config: HeadConfig, target: Target) -> HeadConfig:
        return resolve_head_config(config, target)

    def reset(self) -> None:
        if self.edges is not None:
            self.edges.reset()

    def added_to(self, start: Self) -> frozenset[str]:
        return frozenset({"edge_rank", "edge_gate"}) if start.edges is None else frozenset()

    def shards(self) -> Iterable[nn.Module]:
        return self.layers

    def loss(
        self,
        batch: "Batch",
        taps: Tensor,
        teacher_hidden: Tensor,
        target: Target,
        config: "LossConfig",
    ) -> tuple[Tensor, Tensor]:
        from jetspec.training.step import block_loss

        return block_loss(self, batch, taps, teacher_hidden, target, config)

    def save(self, directory: str, *, record: dict[str, Any], dtype: DType = "fp32") -> None:
        from jetspec.heads.formats import save_native

        save_native(self, directory, record, dtype)

    @classmethod
    def load(cls, raw: dict[str, Any], directory: str) -> Self:
        from jetspec.heads.formats import load_parallel

        return load_parallel(cls, raw, directory)

    def _layers(self) -> Iterator[HeadLayer]:
        for layer in self.layers:
            assert isinstance(layer, HeadLayer)
            yield layer

    def fuse(self, taps: Tensor) -> Tensor:
        """Tapped hidden states [B, T, n·d] -> fused context [B, T, d]."""
        return self.hidden_norm(self.fc(taps))

    def forward(
        self,
        fused: Tensor,
        context_positions: Tensor,
        slot_embeddings: Tensor,
        slot_positions: Tensor,
        mask: Tensor | BlockMask,
    ) -> Tensor:
        """Many blocks at once over one context, for training and as the reference.

        Args:
            fused: [B, C, d].
            context_positions: long [B, C].
            slot_embeddings: [B, S, d], blocks one after another.
            slot_positions: long [B, S].
            mask: bool [B, S, C + S] or its BlockMask; see training/blocks.py.

        Returns:
            [B, S, d] after the final norm: the input of the target's output projection.
        """
        x = slot_embeddings
        context_rotary = self.rotary(context_positions, fused.dtype)
        slot_rotary = self.rotary(slot_positions, x.dtype)
        for layer in self.layers:
            x = layer(x, slot_rotary, fused, context_rotary, mask)
        return self.norm(x)

    def new_cache(self, batch: int) -> HeadCache:
        """An empty context for `batch` sequences."""
        assert self.config.num_key_value_heads and self.config.head_dim
        return HeadCache(
            batch,
            self.config.num_layers,
            self.config.num_key_value_heads,
            self.config.head_dim,
            like=self.fc.weight,
        )

    @torch.no_grad()
    def extend(
        self,
        cache: HeadCache,
        taps: Tensor,
        positions: Tensor,
        valid: Tensor,
        tokens: Tensor | None = None,
    ) -> None:
        """Project newly committed context once and append it; `tokens` are not needed."""
        fused = self.fuse(taps.to(self.dtype))
        rotary = self.rotary(positions, fused.dtype)
        places = cache.destinations(valid)
        for index, layer in enumerate(self._layers()):
            cache.write(index, places, layer.self_attn.keys_values(fused, rotary))
        cache.commit(valid)

    @torch.no_grad()
    def draft_hidden(
        self, cache: HeadCache, slot_embeddings: Tensor, slot_positions: Tensor
    ) -> Tensor:
        """One block a sequence behind its cached context: [B, S, d], [B, S] long -> [B, S, d]."""
        x = slot_embeddings.to(self.dtype)
        batch, slots, _ = x.shape
        rotary = self.rotary(slot_positions, x.dtype)
        block = torch.ones(slots, slots, dtype=torch.bool, device=x.device)
        if self.config.mask == "causal":
            block = block.tril()
        context = cache.valid()[:, None].expand(-1, slots, -1)
        mask = torch.cat([context, block.expand(batch, -1, -1)], dim=2)
        for index, layer in enumerate(self._layers()):
            x = layer.slots(x, rotary, cache.layer(index), mask)
        return self.norm(x)

    @torch.no_grad()
    def draft(
        self,
        cache: HeadCache,
        anchors: Tensor,
        embed: Callable[[Tensor], Tensor],
        logits: Callable[[Tensor], Tensor],
        width: int,
        depth: int | None = None,
    ) -> Draft:
        """Candidates and edges of one block a sequence.

        Args:
            cache: the context strictly before each anchor, so an anchor's position is its length.
            anchors: long [B], the last committed tokens.
            embed: the target's embedding; logits: its output projection, fp32.
            width: K, candidates a slot.
            depth: slots wanted; None is the training block's. A causal head may draft deeper or
                shallower; a bidirectional one always runs its whole block.

        Returns:
            Slot scoring, or path scoring when the head has edges.
        """
        depth = self.depth if depth is None else depth
        slots = 1 + (depth if self.config.mask == "causal" else max(depth, self.depth))
        ids = torch.full(
            (anchors.shape[0], slots), self.mask_token_id, device=anchors.device, dtype=torch.long
        )
        ids[:, 0] = anchors
        positions = cache.lengths[:, None] + torch.arange(slots, device=anchors.device)
        hidden = self.draft_hidden(cache, embed(ids), positions)[:, 1 : 1 + depth]
        slot_logits = logits(hidden)
        if self.edges is None:
            return Draft.from_slot_logits(slot_logits, width)
        width = min(width, slot_logits.shape[-1])
        best, tokens = slot_logits.topk(width, dim=-1)
        log_q = best - torch.logsumexp(slot_logits, dim=-1, keepdim=True)
        return Draft(tokens, self.edges.edge_scores(tokens, log_q, anchors, hidden, embed))


def resolve_head_config(config: HeadConfig, target: Target) -> HeadConfig:
    """Fill every size left at None from the target.

    Raises:
        JetspecError: a tap outside the target, a mask token outside its vocabulary, or no unused
            token to be found.
    """
    source = target.config
    heads = config.num_attention_heads or source.num_attention_heads
    shared = config.num_key_value_heads
    if shared is None:
        shared = getattr(source, "num_key_value_heads", None) or heads
        if heads % shared:
            shared = heads
    head_dim = config.head_dim or getattr(source, "head_dim", None)
    taps = config.taps or spread_taps(target.num_layers, config.num_taps)
    for layer in taps:
        if not 0 <= layer < target.num_layers:
            raise JetspecError(
                "head.taps", layer, f"the target has layers 0 to {target.num_layers - 1}"
            )
    mask_token = config.mask_token_id
    if mask_token is None:
        mask_token = unused_token(target)
    elif not 0 <= mask_token < target.vocab_size:
        raise JetspecError(
            "head.mask_token_id", mask_token, f"the target has {target.vocab_size} tokens"
        )
    resolved = config.model_dump() | {
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "head_dim": head_dim or target.hidden_size // source.num_attention_heads,
        "intermediate_size": config.intermediate_size or source.intermediate_size,
        "taps": taps,
        "num_taps": len(taps),
        "mask_token_id": mask_token,
        "rms_norm_eps": config.rms_norm_eps or getattr(source, "rms_norm_eps", 1e-6),
        "rope_parameters": config.rope_parameters or target_rope(target),
        "max_position_embeddings": config.max_position_embeddings or source.max_position_embeddings,
    }
    return HeadConfig.model_validate(resolved)


def spread_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` layers from the second to the third last: round(1 + k·(L - 4)/(count - 1)).

    A target too shallow for that is tapped evenly, every layer at most once.
    """
    first, last = 1, num_layers - 3
    if last - first + 1 < count:
        first, last, count = 0, num_layers - 1, min(count, num_layers)
    if count == 1:
        return (last,)
    step = (last - first) / (count - 1)
    return tuple(round(first + k * step) for k in range(count))


def target_rope(target: Target) -> dict[str, Any]:
    """The target's rotary parameters, without what only its own attention uses."""
    source = target.config
    parameters = dict(getattr(source, "rope_parameters", None) or {})
    if "full_attention" in parameters:  # one entry a layer type
        parameters = dict(parameters["full_attention"])
    theta = parameters.get("rope_theta") or getattr(source, "rope_theta", None) or 10000.0
    kind = parameters.get("rope_type", "default")
    if kind not in ("linear", "llama3", "yarn"):
        return {"rope_type": "default", "rope_theta": float(theta)}
    for key in ("partial_rotary_factor", "mrope_section", "mrope_interleaved"):
        parameters.pop(key, None)
    return parameters | {"rope_theta": float(theta)}


def unused_token(target: Target) -> int:
    """A token of the target's vocabulary that no text contains, to stand for an undecided slot.

    First choice: a row behind the tokenizer's last token; then a special token that neither ends
    nor pads text and that the chat template does not write.

    Raises:
        JetspecError: every token is in use.
    """
    tokenizer = target.tokenizer
    try:
        known = len(tokenizer)
    except TypeError:
        known = target.vocab_size
    reserved = set(target.eos_token_ids)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
        value = getattr(tokenizer, name, None)
        if isinstance(value, int):
            reserved.add(value)
    for token in range(known, target.vocab_size):
        if token not in reserved:
            return token
    template = str(getattr(tokenizer, "chat_template", None) or "")
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    for token, details in sorted(added.items(), reverse=True):
        special = getattr(details, "special", False) and token < target.vocab_size
        if special and token not in reserved and str(details) not in template:
            return int(token)
    raise JetspecError("head.mask_token_id", "null", "no unused token was found; set the id of one")


def new_head(config: HeadConfig, target: Target, seed: int = 0) -> ParallelHead:
    """A fresh parallel head; see `DraftHead.new`."""
    return ParallelHead.new(config, target, seed)
