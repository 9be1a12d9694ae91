"""DSpark (arXiv 2607.05147): a block whose anchor predicts too, a Markov head, a confidence head.

The block is a parallel head's, [anchor, MASK, ...], but every place in it names the token behind
it: a block of 7 drafts 7. The Markov head adds W1[parent] · W2[child] to a place's logits, so that
a token's probability depends on the token before it. The confidence head reads a place's state
and its parent's row of W1, and says how much of the drafted distribution the target shares.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from jetspec.heads.base import DraftHead, register
from jetspec.heads.cache import HeadCache
from jetspec.heads.config import HeadConfig, LayerSettings
from jetspec.heads.dspark_files import load_dspark, save_dspark
from jetspec.heads.files import DType
from jetspec.heads.linear import Linear
from jetspec.heads.parallel import ParallelHead
from jetspec.heads.rows import LearnedRows
from jetspec.training.blocks import Batch, attention_mask
from jetspec.training.calibration import chain_rounds, fit_calibration
from jetspec.training.config import LossConfig
from jetspec.training.losses import slot_losses_on
from jetspec.training.step import Statistics
from jetspec.trees.draft import Draft

if TYPE_CHECKING:
    from jetspec.targets.target import Target
    from jetspec.training.corpus import Corpus
    from jetspec.training.hidden_cache import HiddenStates


class DSparkConfig(LayerSettings):
    """A DSpark head; sizes left at None follow the target's.

    The paper's loss is `training.loss.kind: {hard_labels: 0.1, total_variation: 0.9}`.

    Attributes:
        block_size: places of the block, the anchor's included: the tokens it drafts.
        mask, mask_token_id: as a parallel head's.
        markov_rank: r of the two tables [V, r].
        confidence_weight: weight of the confidence head's loss.
        scores: what a draft's edges are: `survival`, where a parent's best child has the calibrated
            confidence as its probability and its siblings share the rest, or the drafted
            `probability` itself.
    """

    kind: str = "dspark"
    block_size: int = Field(7, ge=2)
    mask: Literal["causal", "bidirectional"] = "bidirectional"
    num_layers: int = Field(5, ge=1)
    mask_token_id: int | None = None
    markov_rank: int = Field(256, ge=1)
    confidence_weight: float = Field(1.0, ge=0)
    scores: Literal["survival", "probability"] = "survival"

    @model_validator(mode="after")
    def _sizes_agree(self) -> "DSparkConfig":
        self.trunk()
        return self

    def trunk(self) -> HeadConfig:
        """The parallel head that runs the block; its own slot count is not used."""
        fields = {name: getattr(self, name) for name in SHARED}
        return HeadConfig(**fields, block_size=self.block_size)


# Settings that are the parallel head's own.
SHARED = (DSparkConfig.model_fields.keys() & HeadConfig.model_fields.keys()) - {
    "kind",
    "block_size",
}


class MarkovHead(nn.Module):
    """W1[parent] · W2[child], two tables [V, r]; W2 starts at zero and then changes nothing."""

    def __init__(self, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = LearnedRows(vocab_size, rank)
        self.markov_w2 = LearnedRows(vocab_size, rank)

    def rows(self, parents: Tensor) -> Tensor:
        """Tokens long [...] -> [..., r]."""
        return self.markov_w1.of(parents)

    def bias(self, rows: Tensor) -> Tensor:
        """Rows of parents [..., r] -> what they add to the logits, fp32 [..., V]."""
        bias: Tensor = self.markov_w2(rows)
        return bias.float()

    def pairs(self, rows: Tensor, children: Tensor) -> Tensor:
        """Rows [..., P, r] and tokens long [..., K] -> fp32 [..., P, K]."""
        return (rows @ self.markov_w2.of(children).transpose(-1, -2)).float()


class ConfidenceHead(nn.Module):
    """w · [h; W1[parent]] + b: the logit of how much of a draft the target shares."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.proj = Linear(hidden_size + rank, 1)

    def forward(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """[..., d], [..., r] -> fp32 [...]."""
        both = torch.cat([hidden, rows.to(hidden.dtype)], dim=-1)
        return self.proj(both.to(self.proj.weight.dtype))[..., 0].float()


@register
class DSparkHead(DraftHead):
    """The draft head of DSpark."""

    settings = DSparkConfig
    config: DSparkConfig

    def __init__(self, config: DSparkConfig, **sizes: int) -> None:
        super().__init__(config, **sizes)
        self.trunk = ParallelHead(config.trunk(), **sizes)
        self.markov_head = MarkovHead(self.vocab_size, config.markov_rank)
        self.confidence_head = ConfidenceHead(self.hidden_size, config.markov_rank)
        # (scale, offset) of the confidence logit, by depth; see `finish`.
        self.calibration: tuple[tuple[float, float], ...] = ()

    @property
    def depth(self) -> int:
        return self.config.block_size

    @classmethod
    def resolve(cls, config: DSparkConfig, target: "Target") -> DSparkConfig:
        trunk = ParallelHead.resolve(config.trunk(), target)
        found = {name: getattr(trunk, name) for name in SHARED}
        return DSparkConfig.model_validate(config.model_dump() | found)

    def reset(self) -> None:
        self.trunk.reset()
        self.markov_head.markov_w2.weight.zero_()
        self.confidence_head.proj.weight.zero_()
        assert self.confidence_head.proj.bias is not None
        self.confidence_head.proj.bias.zero_()

    def added_to(self, start: Self) -> frozenset[str]:
        return frozenset({"confidence_weight", "scores"})  # no weight depends on them

    def path_parameters(self) -> Iterable[nn.Parameter]:
        yield from self.markov_head.parameters()
        yield from self.confidence_head.parameters()

    def shards(self) -> Iterable[nn.Module]:
        return self.trunk.layers

    def loss(
        self,
        batch: Batch,
        taps: Tensor,
        teacher_hidden: Tensor,
        target: "Target",
        config: LossConfig,
    ) -> tuple[Tensor, Tensor]:
        """The draft's loss, teacher-forced (a place's parent is the true token), and the
        confidence head's, whose gradient reaches that head alone."""
        # Places are slots less the last mask: blocks shorter by one.
        block = replace(batch, weights=batch.weights[:, :, 1:])
        hidden = self.trunk(
            self.trunk.fuse(taps),
            batch.positions,
            target.embed(block.slot_ids(self.trunk.mask_token_id)),
            block.slot_positions(),
            attention_mask(block, causal=self.config.mask == "causal"),
        ).flatten(0, 1)  # [R * A * D, d]
        chosen = batch.chosen()
        teacher = teacher_hidden.flatten(0, 1)
        labels, weights, parents = (
            x.flatten()[chosen] for x in (batch.labels, batch.weights, batch.parents())
        )

        measure = slot_losses_on(hidden.device)

        def measured(
            places: Tensor, rows: Tensor, first: int, last: int, here: slice
        ) -> tuple[Tensor, Tensor, Tensor]:
            """(draft loss, confidence loss, hits) of one chunk; only it has logits at a time."""
            with torch.autocast(places.device.type, enabled=False):
                logits = target.project(places) + self.markov_head.bias(rows)
                taught = target.project(teacher[batch.teachers[first:last]])
                shared, weight = batch.shared[here] - first, weights[here]
                found = measure(
                    logits.detach(), taught, shared, labels[here], weight,
                    config.terms, config.temperature,
                )  # fmt: skip
                # The gradient is known in closed form; this has it, and the loss as its value.
                draft = found.loss + ((logits - logits.detach()) * found.gradient).sum()
                # What they share, 1 - |p - q| / 2, is the chance that a token drawn from the
                # draft is accepted.
                share = torch.minimum(logits.detach().softmax(-1), taught.softmax(-1)[shared])
                said = self.confidence_head(places.detach(), rows.detach())
                truth = share.sum(-1).clamp(max=1)
                judged = F.binary_cross_entropy_with_logits(said, truth, weight, reduction="sum")
            return draft, judged, found.hits

        # Every parameter has a gradient, even where there is no slot.
        draft = 0 * hidden.sum() + 0 * sum(p.sum() for p in self.path_parameters())
        judged = torch.zeros((), device=hidden.device)
        hits = [weights.new_zeros(0)]
        for begin, end, first, last in batch.chunks:
            here = slice(begin, end)
            places, rows = hidden[chosen[here]], self.markov_head.rows(parents[here])
            parts: tuple[Tensor, Tensor, Tensor] = checkpoint(
                measured, places, rows, first, last, here, use_reentrant=False
            )
            draft, judged = draft + parts[0], judged + parts[1]
            hits.append(parts[2])
        sums = Statistics.of(batch, draft, torch.zeros_like(judged), torch.cat(hits)).sums
        return draft + self.config.confidence_weight * judged, sums

    def new_cache(self, batch: int) -> HeadCache:
        return self.trunk.new_cache(batch)

    def extend(
        self,
        cache: HeadCache,
        taps: Tensor,
        positions: Tensor,
        valid: Tensor,
        tokens: Tensor | None = None,
    ) -> None:
        self.trunk.extend(cache, taps, positions, valid, tokens)

    def places(
        self, cache: HeadCache, anchors: Tensor, embed: Callable[[Tensor], Tensor], depth: int
    ) -> Tensor:
        """The block behind each anchor: states [B, depth, d], place t names the token at t + 1."""
        count = depth if self.config.mask == "causal" else max(depth, self.depth)
        ids = torch.full((len(anchors), count), self.trunk.mask_token_id, device=anchors.device)
        ids[:, 0] = anchors
        positions = cache.lengths[:, None] + torch.arange(count, device=anchors.device)
        return self.trunk.draft_hidden(cache, embed(ids), positions)[:, :depth]

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
        """Candidates of every place, and edges from each to each.

        A place's candidates are its best behind the greedy chain's token, whose row is therefore
        exact; the rows of other parents are normalised to the same mass over these candidates.
        """
        hidden = self.places(cache, anchors, embed, self.depth if depth is None else depth)
        slot_logits = logits(hidden)  # [B, D, V]
        width = min(width, slot_logits.shape[-1])
        tokens, mass, parent = [], [], anchors
        for place in slot_logits.unbind(1):
            log_q = (place + self.markov_head.bias(self.markov_head.rows(parent))).log_softmax(-1)
            best, found = log_q.topk(width, dim=-1)  # [B, K]
            tokens.append(found)
            mass.append(best.logsumexp(-1))
            parent = found[:, 0]
        candidates, kept = torch.stack(tokens, 1), torch.stack(mass, 1)[..., None, None]
        parents = torch.cat([anchors[:, None, None].expand(-1, 1, width), candidates[:, :-1]], 1)
        rows = self.markov_head.rows(parents)  # [B, D, K, r]
        bias = self.markov_head.pairs(rows, candidates)
        edges = (slot_logits.gather(2, candidates)[:, :, None] + bias).log_softmax(-1) + kept
        # Rounding must not make a child likelier than its parent: builders rely on that.
        edges = edges.clamp(max=0)
        said = self.confidence_head(hidden[:, :, None].expand(-1, -1, width, -1), rows)
        confidence = torch.sigmoid(self._calibrated(said))
        if self.config.scores == "probability":
            return Draft(candidates, edges, confidence)
        return Draft(candidates, survival_edges(edges, confidence))

    @torch.no_grad()
    def chain(
        self,
        cache: HeadCache,
        anchors: Tensor,
        embed: Callable[[Tensor], Tensor],
        logits: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """The greedy chain: tokens long [B, D] and uncalibrated confidence logits [B, D]."""
        hidden = self.places(cache, anchors, embed, self.depth)
        tokens, said, parent = [], [], anchors
        for state, place in zip(hidden.unbind(1), logits(hidden).unbind(1), strict=True):
            rows = self.markov_head.rows(parent)
            said.append(self.confidence_head(state, rows))
            parent = (place + self.markov_head.bias(rows)).argmax(-1)
            tokens.append(parent)
        return torch.stack(tokens, 1), torch.stack(said, 1)

    def finish(
        self, target: "Target", corpus: "Corpus", heldout: np.ndarray, states: "HiddenStates"
    ) -> None:
        """Calibrate the confidence on the chains of held-out rounds, depth by depth."""
        self.calibration = fit_calibration(*chain_rounds(self, target, corpus, heldout, states))

    def _calibrated(self, said: Tensor) -> Tensor:
        """Logits [B, D, K] -> the same; depths beyond the calibrated ones take the last."""
        depth = said.shape[1]
        known = self.calibration or ((1.0, 0.0),)
        wanted = said.new_tensor([*known, *[known[-1]] * depth][:depth])
        scale, offset = wanted[:, None].unbind(-1)  # [D, 1]
        return scale * said + offset

    def save(self, directory: str, *, record: dict[str, Any], dtype: DType = "fp32") -> None:
        save_dspark(self, directory, record, dtype)

    @classmethod
    def load(cls, raw: dict[str, Any], directory: str) -> Self:
        return load_dspark(cls, raw, directory)


def survival_edges(edges: Tensor, confidence: Tensor) -> Tensor:
    """Each parent's best child gets the confidence as its probability, the others what is left of
    one, in the proportion they had.

    Args:
        edges: log q [..., K]; confidence: [...], the chance that the best child is the target's.
    """
    sure = confidence.float().clamp(1e-4, 1 - 1e-4)[..., None]
    top, best = edges.max(-1, keepdim=True)
    rest = torch.log1p(-top.exp().clamp(max=1 - 1e-6))
    others = (edges + (torch.log1p(-sure) - rest)).clamp(max=0)
    return others.scatter(-1, best, sure.log())
