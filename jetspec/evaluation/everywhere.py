"""tau of many trees in one pass: what each would accept behind every token of known answers.

Replay (`replay.py`) drafts where one tree's rounds land and walks the answers again for the next
tree. A draft depends on the text before it and not on the rounds that led there, so here the head
drafts once behind every token; each tree's rounds are then steps along a row of numbers. The drafts
of an answer's tokens do not wait for each other: many positions of a text fill one pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jetspec.evaluation.agreement import Shape, agreed
from jetspec.evaluation.replay import Replay
from jetspec.evaluation.scoring import scored_head
from jetspec.heads.base import DraftCache, DraftHead
from jetspec.heads.parallel import ParallelHead
from jetspec.samples import Sample
from jetspec.targets.target import Target
from jetspec.training.corpus import Corpus
from jetspec.training.hidden_cache import OnlineTeacher, sample_states

ROWS = 256  # positions that draft together
_TEXTS = 8  # texts that they belong to


def replay_everywhere(
    target: Target,
    head: DraftHead,
    samples: Sequence[Sample],
    shapes: Sequence[Shape],
    *,
    rows: int = ROWS,
) -> list[list[Replay]]:
    """Exact greedy rounds of every shape along answers that the target gave greedily.

    Args:
        samples: as `replay.replay_tau` takes them.
        rows: positions that draft together; memory grows with it.

    Returns:
        for each shape the replays of `samples`, in their order: what `replay_tau` gives.
    """
    if not shapes:
        return []
    longest = max((len(sample.input_ids) for sample in samples), default=1)
    corpus = Corpus.from_samples(samples, longest)
    accepted = _accepted(target, head, corpus, shapes, rows)
    return [
        [
            _walk(corpus, index, depths[number] if len(depths) else depths)
            for index, depths in enumerate(accepted)
        ]
        for number in range(len(shapes))
    ]


@torch.no_grad()
def _accepted(
    target: Target, head: DraftHead, corpus: Corpus, shapes: Sequence[Shape], rows: int
) -> list[np.ndarray]:
    """For each sample int64 [shapes, anchors]: draft tokens that the text behind each of its
    anchors agrees with, as far as the answer goes. Anchors are all answer tokens but the last."""
    anchors = [_anchors(corpus, index) for index in range(len(corpus.ids))]
    found = [np.zeros((len(shapes), len(own)), dtype=np.int64) for own in anchors]
    counts = np.array([len(own) for own in anchors], dtype=np.int64)
    # Texts with as many anchors draft together: a row whose text has no more of them idles.
    order = np.lexsort((-corpus.lengths, -counts))
    order = order[: int((counts > 0).sum())]
    passes = _passes(head, shapes)
    states = OnlineTeacher(target, head.taps)
    texts = max(1, min(_TEXTS, rows))
    for begin in range(0, len(order), texts):
        chosen = order[begin : begin + texts]
        batch, taps = sample_states(corpus, chosen, states, target.device)
        cache = head.new_cache(len(chosen))
        head.extend(cache, taps, batch.positions, batch.documents >= 0, batch.input_ids)
        most = min(max(1, rows // len(chosen)), int(counts[chosen].max()))
        places, ends = _steps(corpus, chosen, anchors, most)  # [steps, R]
        copies = places.shape[1] // len(chosen)
        owner = torch.arange(len(chosen), device=target.device).repeat_interleave(copies)
        cache.keep_sequences(owner)  # the same texts, several times
        tokens = batch.input_ids[owner]
        steps = (torch.from_numpy(both).to(target.device) for both in (places, ends))
        depths = torch.stack(
            [_step(target, passes, cache, tokens, *step) for step in zip(*steps, strict=True)]
        )  # [steps, shapes, R]
        by_text = depths.unflatten(2, (-1, copies)).permute(2, 1, 0, 3).flatten(2).cpu().numpy()
        for index, here in zip(chosen, by_text, strict=True):
            found[index] = here[:, : counts[index]]
    return found


@dataclass
class _Pass:
    """Shapes that one draft serves; numbers: theirs among all."""

    head: DraftHead
    depth: int
    shapes: list[Shape] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)


def _passes(head: DraftHead, shapes: Sequence[Shape]) -> list[_Pass]:
    """The drafts that shapes need: one, unless what a draft holds depends on its depth.

    A bidirectional head drafts other slots in a longer block than its own. A second pass scores
    the best nodes of exactly as many slots as decoding drafts, and slot scores know none of it.
    """
    rescores = isinstance(head, ParallelHead) and head.rescores
    found: dict[tuple[int, bool], _Pass] = {}
    for number, shape in enumerate(shapes):
        bare = rescores and shape.scores == "slot"
        depth = shape.tree.depth or head.depth
        if bare or not rescores:
            depth = max(depth, head.depth)
        own: Any = scored_head(head, "slot") if bare else head
        one = found.setdefault((depth, bare), _Pass(own, depth))
        one.shapes.append(shape)
        one.numbers.append(number)
    return list(found.values())


def _step(
    target: Target,
    passes: Sequence[_Pass],
    cache: DraftCache,
    tokens: Tensor,
    places: Tensor,
    ends: Tensor,
) -> Tensor:
    """long [shapes, R]: what R anchors accept.

    Args:
        tokens: long [R, T], the texts that the cache holds.
        places, ends: long [R], the anchors and the last index of their answers.
    """
    width = max(shape.tree.width for one in passes for shape in one.shapes)
    cache.lengths = places  # the context ends strictly before the anchor
    anchors = tokens.gather(1, places[:, None])[:, 0]
    found: dict[int, Tensor] = {}
    for one in passes:
        # A parallel head only looks for the best logits: their copy in fp32 is left out.
        rounded = isinstance(one.head, ParallelHead)
        logits = target.project_rounded if rounded else target.logits
        draft = one.head.draft(cache, anchors, target.embed, logits, width, one.depth)
        text = _text(tokens, places, ends, one.depth)
        found |= zip(one.numbers, agreed(draft, anchors, text, one.shapes), strict=True)
    return torch.stack([found[number] for number in range(len(found))])


def _anchors(corpus: Corpus, index: int) -> np.ndarray:
    ends = _run_ends(corpus, index)
    return np.flatnonzero(ends > np.arange(len(ends)))


def _run_ends(corpus: Corpus, index: int) -> np.ndarray:
    return corpus.run_ends[corpus.offsets[index] : corpus.offsets[index + 1]]


def _steps(
    corpus: Corpus, chosen: np.ndarray, anchors: Sequence[np.ndarray], most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Places of anchors and last indices of their answers, both int64 [steps, texts * copies]: in
    every step the next anchors of each text, equally many and at most `most`. A text that has no
    more repeats its last."""
    longest = max(len(anchors[index]) for index in chosen)
    steps = -(-longest // most)
    copies = -(-longest // steps)
    places, ends = [], []
    for index in chosen:
        own = anchors[index]
        place = own[np.minimum(np.arange(steps * copies), len(own) - 1)]
        places.append(place.reshape(steps, copies))
        ends.append(_run_ends(corpus, index)[place].reshape(steps, copies).astype(np.int64))
    return np.concatenate(places, 1), np.concatenate(ends, 1)


def _text(tokens: Tensor, places: Tensor, ends: Tensor, depth: int) -> Tensor:
    """long [R, depth]: the text behind each anchor, -1 beyond its answer."""
    ahead = places[:, None] + torch.arange(1, depth + 1, device=places.device)
    text = tokens.gather(1, ahead.clamp(max=tokens.shape[1] - 1))
    return torch.where(ahead <= ends[:, None], text, -1)


def _walk(corpus: Corpus, index: int, accepted: np.ndarray) -> Replay:
    """The rounds of one shape along one sample. accepted: int64 [anchors]."""
    anchors = _anchors(corpus, index)
    left = (_run_ends(corpus, index)[anchors] - anchors).tolist()
    along = accepted.tolist()
    counts, committed = [], 0
    at = 0
    while at < len(anchors):
        step = min(along[at] + 1, left[at])
        counts.append(along[at])
        committed += step
        # An answer's last token is no anchor: past it the next answer's first is next in line.
        at += step
    return Replay(
        id=corpus.ids[index],
        prompt_id=corpus.prompt_ids[index],
        rounds=len(counts),
        committed=committed,
        accepted=tuple(counts),
    )
