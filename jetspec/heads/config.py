"""The shape of a draft head."""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from jetspec.settings import Settings

PARALLEL = "parallel"
Normaliser = Literal["candidates", "vocabulary"]
RowSource = Literal["projected", "learned"]
DraftWeights = Literal["own", "fp8"]


class HeadSettings(Settings):
    """What every kind of draft head is configured by.

    Attributes:
        kind: the head's name in `heads/registry.py`.
        block_size: anchor plus the slots that training lays behind it; a block of 16 trains 15.
    """

    kind: str = PARALLEL
    block_size: int = Field(16, ge=2)


class LayerSettings(HeadSettings):
    """A head of decoder layers over fused target states; sizes left at None follow the target's.

    Attributes:
        taps: target layers whose outputs are fused; None spreads `num_taps` of them.
        rope_parameters: rotary embedding as transformers writes it (`rope_theta`, `rope_type`).
    """

    num_taps: int = Field(5, ge=1)
    taps: tuple[int, ...] | None = None
    intermediate_size: int | None = Field(None, ge=1)
    num_attention_heads: int | None = Field(None, ge=1)
    num_key_value_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=2)
    rms_norm_eps: float | None = Field(None, gt=0)
    rope_parameters: dict[str, Any] | None = None
    max_position_embeddings: int | None = Field(None, ge=1)


class HeadConfig(LayerSettings):
    """A parallel draft head; sizes left at None follow the target's.

    Attributes:
        mask: `causal` is JetSpec's in-block mask, `bidirectional` is DFlash's. That and the loss
            are the only differences between the two heads.
        mask_token_id: the token that fills an undecided slot; None picks an unused id.
        edges: what produces path scores, a name in `heads/producers.py`: `markov` (the parent's
            token), `selector` (gated by the context), `lattice` (a transformer over all
            candidates), `context` (a control that cannot see the parent), or `none`; None is
            `markov` where `edge_rank` is above 0.
        edge_rank: rank of the path scores that see the parent token; 0 leaves slot scores alone.
        edge_gate: let the slot's hidden state scale each of the `edge_rank` factors; markov only.
        edge_rows: where a token's factors come from: its frozen embedding, `projected`, or a
            row of its own, `learned` (DSpark's form; edge_rank weights a token and factor); not
            for the lattice.
        edge_normaliser: over what a corrected slot sums to one, in training and in drafting: its
            top candidates, or the whole vocabulary (not for the lattice, and at a vocabulary row
            for every parent).
        edge_layers, edge_width: of the lattice transformer; the width is a multiple of 32.
        conv_rank: rank of the two-tap convolution in the block; 0 has none.
        rescore: a second pass over a superset of the tree, which scores every node by its real
            ancestors: `shared` runs the head's own layers on real tokens, `own` a stack of its own
            on top of the slots' states, which also trains on a frozen head.
        rescore_layers: of the stack of `own`.
        rescore_nodes: nodes of the superset, from which a tree is pruned to its budget.
    """

    optional: ClassVar[frozenset[str]] = frozenset(
        {"kind", "edges", "edge_layers", "edge_width", "conv_rank"}
        | {"edge_rows", "edge_normaliser", "rescore", "rescore_layers", "rescore_nodes"}
    )

    mask: Literal["causal", "bidirectional"] = "causal"
    num_layers: int = Field(5, ge=1)
    mask_token_id: int | None = None
    edge_rank: int = Field(0, ge=0)
    edge_gate: bool = True
    edges: str | None = None
    edge_rows: RowSource = "projected"
    edge_normaliser: Normaliser = "candidates"
    edge_layers: int = Field(2, ge=1)
    edge_width: int = Field(128, ge=32, multiple_of=32)
    conv_rank: int = Field(0, ge=0)
    rescore: Literal["none", "shared", "own"] = "none"
    rescore_layers: int = Field(1, ge=1)
    rescore_nodes: int = Field(128, ge=1)

    @property
    def producer(self) -> str | None:
        """The name of the edge producer, None for slot scores."""
        return self.edges or ("markov" if self.edge_rank else None)

    @model_validator(mode="before")
    @classmethod
    def _one_spelling(cls, values: Any) -> Any:
        """`markov` and `none` follow from the rank: configs that mean the same are equal."""
        if not isinstance(values, dict) or values.get("edges") is None:
            return values
        name, rank = values["edges"], values.get("edge_rank")
        if name == "none":
            if rank:
                raise ValueError("edge_rank: must be 0 where edges is none")
            return {**values, "edges": None}
        from jetspec.heads.producers import EDGES

        if name not in EDGES:
            raise ValueError(f"edges: choose from none, {', '.join(EDGES)}")
        if not rank:
            raise ValueError(f"edge_rank: must be 1 or more for {name}")
        return {**values, "edges": None if name == "markov" else name}

    @model_validator(mode="after")
    def _sizes_agree(self) -> "HeadConfig":
        if self.taps is not None and len(set(self.taps)) != len(self.taps):
            raise ValueError("taps: layers must differ")
        if self.head_dim is not None and self.head_dim % 2:
            raise ValueError("head_dim: must be even, since RoPE turns pairs")
        heads, shared = self.num_attention_heads, self.num_key_value_heads
        if heads is not None and shared is not None and heads % shared:
            raise ValueError("num_key_value_heads: must divide num_attention_heads")
        if self.edge_normaliser == "vocabulary" and self.producer in (None, "lattice"):
            raise ValueError("edge_normaliser: needs edges that score every token")
        if self.edge_rows == "learned":
            from jetspec.heads.producers import EDGES

            able = [name for name, edges in EDGES.items() if edges.has_rows]
            if self.producer not in able:
                raise ValueError(f"edge_rows: needs edges of tokens: {', '.join(able)}")
        return self
