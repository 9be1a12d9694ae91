"""The shape of a draft head."""

from typing import Literal

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
    head_dim: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _taps_agree(self) -> "HeadConfig":
        if self.taps is not None and len(set(self.taps)) != len(self.taps):
            raise ValueError("taps: layers must differ")
        return self
