"""Edge scores from a small transformer over the candidate lattice (LiLiCorr, arXiv 2608.20530)."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetspec.heads.edges import EdgeProducer, Factors, Places
from jetspec.heads.layers import HeadLayer, LayerShape, RMSNorm, RotaryEmbedding
from jetspec.heads.linear import Linear
from jetspec.heads.rows import Embed, ProjectedRows

if TYPE_CHECKING:
    from jetspec.heads.config import HeadConfig

_HEAD_DIM = 32
_EPS = 1e-6


class LatticeEdges(EdgeProducer):
    """S_t(a, b) = <P x_{t-1,a} * G h_t, C x_{t,b}>, x being a transformer's view of the lattice.

    A node (t, k) is candidate k of slot t: its embedding, its slot's hidden state and its
    log-probability, projected to a small width. It attends to the anchor and to every candidate of
    its own and of earlier slots; its slot is its position. Unlike a bias of two tokens, an edge
    knows what else the slots offer. C starts at zero.

    Args:
        hidden_size: d of the embedding and of the slots.
        rank: r of the two factors.
        layers, width: of the transformer; the width is a multiple of 32.
    """

    def __init__(self, hidden_size: int, rank: int, *, layers: int, width: int) -> None:
        super().__init__()
        shape = LayerShape(
            intermediate_size=2 * width,
            num_attention_heads=width // _HEAD_DIM,
            num_key_value_heads=width // _HEAD_DIM,
            head_dim=_HEAD_DIM,
            rms_norm_eps=_EPS,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            max_position_embeddings=1024,
        )
        self.token_proj = ProjectedRows(hidden_size, width)
        self.hidden_proj = Linear(hidden_size, width, bias=False)
        self.score_proj = Linear(1, width, bias=False)
        self.layers = nn.ModuleList(HeadLayer(shape, width) for _ in range(layers))
        self.norm = RMSNorm(width, _EPS)
        self.parent_proj = Linear(width, rank, bias=False)
        self.child_proj = Linear(width, rank, bias=False)
        self.gate_proj = Linear(hidden_size, rank, bias=False)
        self.rotary = RotaryEmbedding(shape)

    @classmethod
    def of(cls, config: "HeadConfig", hidden_size: int, vocab_size: int) -> Self:
        return cls(
            hidden_size, config.edge_rank, layers=config.edge_layers, width=config.edge_width
        )

    @torch.no_grad()
    def reset(self) -> None:
        self.child_proj.weight.zero_()

    def factors(
        self, tokens: Tensor, log_q: Tensor, anchors: Tensor, hidden: Tensor, embed: Embed
    ) -> Factors:
        return self._factors(tokens, log_q, anchors, hidden, partial(self._rows, embed))

    def teacher_forced(
        self,
        tokens: Tensor,
        log_q: Tensor,
        hidden: Tensor,
        places: Places,
        embed: Embed,
        vocab_size: int,
    ) -> Callable[[slice], Tensor]:
        if tokens.numel() < vocab_size:
            return super().teacher_forced(tokens, log_q, hidden, places, embed, vocab_size)
        table = self.token_proj.table(embed, vocab_size)  # narrower rows than the embedding's
        rows = partial(F.embedding, weight=table)
        return self._by_blocks(partial(self._factors, rows=rows), tokens, log_q, hidden, places)

    def _rows(self, embed: Embed, tokens: Tensor) -> Tensor:
        return self.token_proj.of(tokens, embed)

    def _factors(
        self,
        tokens: Tensor,
        log_q: Tensor,
        anchors: Tensor,
        hidden: Tensor,
        rows: Callable[[Tensor], Tensor],
    ) -> Factors:
        """`factors`, from projected tokens: long [...] -> [..., width]."""
        dtype = self.token_proj.weight.dtype
        batch, depth, width = tokens.shape
        hidden = hidden.to(dtype)
        nodes = rows(tokens) + self.hidden_proj(hidden)[:, :, None]
        nodes = nodes + self.score_proj(log_q.to(dtype)[..., None])
        root = rows(anchors)[:, None]
        x = self._attended(torch.cat([root, nodes.flatten(1, 2)], dim=1), depth, width)
        children = x[:, 1:].unflatten(1, (depth, width))
        anchor = x[:, :1, None].expand(-1, min(1, depth), width, -1)
        parents = self.parent_proj(torch.cat([anchor, children[:, :-1]], dim=1))
        return Factors(parents * self.gate_proj(hidden)[:, :, None], self.child_proj(children))

    def _attended(self, x: Tensor, depth: int, width: int) -> Tensor:
        """x [B, 1 + D·K, width], the anchor first, then slot by slot -> the same shape."""
        slots = torch.arange(1, depth + 1, device=x.device).repeat_interleave(width)
        places = torch.cat([slots.new_zeros(1), slots])
        mask = (places[None, :] <= places[:, None])[None]  # one for all rows
        rotary = self.rotary(places[None], x.dtype)
        heads = x.shape[-1] // _HEAD_DIM
        none = x.new_zeros(len(x), 0, heads, _HEAD_DIM)
        for layer in self.layers:
            assert isinstance(layer, HeadLayer)
            x = layer.slots(x, rotary, (none, none), mask)
        return self.norm(x)
