"""The shape of a draft head."""

from typing import Any, Literal

from pydantic import Field, model_validator

from jetspec.settings import Settings


class HeadConfig(Settings):
    """A parallel draft head; sizes left at None follow the target's.

    Attributes:
        mask: `causal` is JetSpec's in-block mask, `bidirectional` is DFlash's. That and the loss
            are the only differences between the two heads.
        block_size: anchor plus slots; a block of 16 drafts 15 tokens.
        taps: target layers whose outputs are fused; None spreads `num_taps` of them.
        mask_token_id: the token that fills an undecided slot; None picks an unused id.
        rope_parameters: rotary embedding as transformers writes it (`rope_theta`, `rope_type`).
        edge_rank: rank of the path scores that see the parent token; 0 leaves slot scores alone.
        edge_gate: let the slot's hidden state scale each of the `edge_rank` factors.
    """

    mask: Literal["causal", "bidirectional"] = "causal"
    num_layers: int = Field(5, ge=1)
    block_size: int = Field(16, ge=2)
    num_taps: int = Field(5, ge=1)
    taps: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    intermediate_size: int | None = Field(None, ge=1)
    num_attention_heads: int | None = Field(None, ge=1)
    num_key_value_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=2)
    rms_norm_eps: float | None = Field(None, gt=0)
    rope_parameters: dict[str, Any] | None = None
    max_position_embeddings: int | None = Field(None, ge=1)
    edge_rank: int = Field(0, ge=0)
    edge_gate: bool = True

    @model_validator(mode="after")
    def _sizes_agree(self) -> "HeadConfig":
        if self.taps is not None and len(set(self.taps)) != len(self.taps):
            raise ValueError("taps: layers must differ")
        if self.head_dim is not None and self.head_dim % 2:
            raise ValueError("head_dim: must be even, since RoPE turns pairs")
        heads, shared = self.num_attention_heads, self.num_key_value_heads
        if heads is not None and shared is not None and heads % shared:
            raise ValueError("num_key_value_heads: must divide num_attention_heads")
        return self
