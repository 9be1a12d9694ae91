"""tau of many trees in one pass: what each would accept behind every token of known answers.

Replay (`replay.py`) drafts where one tree's rounds land and walks the answers again for the next
tree. A draft depends on the text before it and not on the rounds that led there, so here the head
drafts once behind every token; each tree's rounds are then steps along a row of numbers. The drafts
of an answer's tokens do not wait for each other: many positions of a text fill one pass.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from jetspec.errors import JetspecError
from jetspec.evaluation.replay import Replay
from jetspec.heads.registry import DraftHead
from jetspec.samples import Sample
from jetspec.targets.target import Target
from jetspec.training.corpus import Corpus
from jetspec.training.hidden_cache import OnlineTeacher, sample_states
from jetspec.trees.build import build_tree
from jetspec.trees.config import TreeConfig
from jetspec.trees.draft import Draft
from jetspec.trees.tree import Tree

ROWS = 256  # positions that draft together
_TEXTS = 8  # texts that they belong to


@dataclass(frozen=True)
class Shape:
    """One way to draft with a head.

    Attributes:
        scores: `slot` takes the head's edges out, `path` and None leave the draft as it is.
    """

    tree: TreeConfig
    scores: str | None = None


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
    width = max((shape.tree.width for shape in shapes), default=1)
    # A bidirectional head drafts other slots in a longer block: a depth beyond its own is a pass.
    deep: dict[int, list[int]] = {}
    for number, shape in enumerate(shapes):
        deep.setdefault(max(head.depth, shape.tree.depth or 0), []).append(number)
    usable = np.array([i for i in range(len(anchors)) if len(anchors[i])], dtype=np.int64)
    by_length = usable[np.argsort(-corpus.lengths[usable], kind="stable")]
    states = OnlineTeacher(target, head.taps)
    texts = max(1, min(_TEXTS, rows))
    for begin in range(0, len(by_length), texts):
        chosen = by_length[begin : begin + texts]
        batch, taps = sample_states(corpus, chosen, states, target.device)
        cache = head.new_cache(len(chosen))
        head.extend(cache, taps, batch.positions, batch.documents >= 0, batch.input_ids)
        longest = max(len(anchors[index]) for index in chosen)
        copies = min(max(1, rows // len(chosen)), longest)
        owner = torch.arange(len(chosen), device=target.device).repeat_interleave(copies)
        cache.keep_sequences(owner)  # the same texts, several times
        tokens = batch.input_ids[owner]
        for places, ends, kept in _steps(corpus, chosen, anchors, copies, target.device):
            cache.lengths = places  # the context ends strictly before the anchor
            anchor = tokens.gather(1, places[:, None])[:, 0]
            for depth, numbers in deep.items():
                draft = head.draft(cache, anchor, target.embed, target.logits, width, depth)
                text = _text(tokens, places, ends, depth)
                agreed = _agreed(draft, anchor, text, [shapes[number] for number in numbers])
                depths = torch.stack(agreed).cpu().numpy()
                for row, (index, column) in enumerate(kept):
                    if column is not None:
                        found[index][numbers, column] = depths[:, row]
    return found


def _anchors(corpus: Corpus, index: int) -> np.ndarray:
    ends = corpus.run_ends[corpus.offsets[index] : corpus.offsets[index + 1]]
    return np.flatnonzero(ends > np.arange(len(ends)))


def _steps(
    corpus: Corpus,
    chosen: np.ndarray,
    anchors: Sequence[np.ndarray],
    copies: int,
    device: torch.device,
) -> Iterator[tuple[Tensor, Tensor, list[tuple[int, int | None]]]]:
    """Until every anchor was visited: (places long [R], the answers' last indices long [R], and for
    each of the R rows its sample and which of its anchors this is, None where the row idles)."""
    for first in range(0, max(len(anchors[index]) for index in chosen), copies):
        places, ends, kept = [], [], []
        for index in chosen:
            own = anchors[index]
            run_ends = corpus.run_ends[corpus.offsets[index] : corpus.offsets[index + 1]]
            for number in range(first, first + copies):
                place = own[min(number, len(own) - 1)]
                places.append(int(place))
                ends.append(int(run_ends[place]))
                kept.append((int(index), number if number < len(own) else None))
        yield torch.tensor(places, device=device), torch.tensor(ends, device=device), kept


def _text(tokens: Tensor, places: Tensor, ends: Tensor, depth: int) -> Tensor:
    """long [R, depth]: the text behind each anchor, -1 beyond its answer."""
    ahead = places[:, None] + torch.arange(1, depth + 1, device=places.device)
    text = tokens.gather(1, ahead.clamp(max=tokens.shape[1] - 1))
    return torch.where(ahead <= ends[:, None], text, -1)


def _agreed(
    draft: Draft | Tree, anchors: Tensor, text: Tensor, shapes: Sequence[Shape]
) -> list[Tensor]:
    """long [R] of every shape: depth of the deepest node whose whole path is the text.

    The exact best-first tree of a budget is the beginning of a larger one's, so one build serves
    all budgets of it.
    """
    found: dict[int, Tensor] = {}
    families: dict[Shape, list[int]] = {}
    for number, shape in enumerate(shapes):
        nested = shape.tree.builder == "best_first"
        budget = 1 if nested else shape.tree.budget
        family = Shape(shape.tree.model_copy(update={"budget": budget}), shape.scores)
        families.setdefault(family, []).append(number)
    for numbers in families.values():
        budgets = [shapes[number].tree.budget for number in numbers]
        largest = shapes[numbers[budgets.index(max(budgets))]]
        tree = build_tree(_scored(draft, largest.scores), anchors, largest.tree)
        right = _on_text(tree, text)
        order = _order(tree) if len(numbers) > 1 else None
        for number, budget in zip(numbers, budgets, strict=True):
            inside = right if order is None else right & (order <= budget)
            found[number] = (tree.depths * inside).amax(1)
    return [found[number] for number in range(len(shapes))]


def _scored(draft: Draft | Tree, scores: str | None) -> Draft | Tree:
    if scores != "slot":
        return draft
    bare = None if isinstance(draft, Tree) else draft.without_edges()
    if bare is not None:
        return bare
    if isinstance(draft, Draft) and draft.edge_scores.stride(2) == 0:
        return draft  # a head of slot scores
    raise JetspecError("evaluation.scores", "slot", "this head has path scores alone")


def _on_text(tree: Tree, text: Tensor) -> Tensor:
    """bool [R, N + 1]: nodes whose whole path is the text; the root always is."""
    slot = (tree.depths - 1).clamp(min=0)
    inside = tree.depths <= text.shape[1]
    same = text.gather(1, slot.clamp(max=text.shape[1] - 1)) == tree.tokens
    right = tree.valid() & ((same & inside) | (tree.depths == 0))
    parents = tree.parents.clamp(min=0)
    for _ in range(int(tree.depths.max())):
        right = right & right.gather(1, parents)  # parents precede: one step a level settles all
    return right


def _order(tree: Tree) -> Tensor:
    """long [R, N + 1]: each node's place when best-first takes nodes one by one; the root's is 0.

    Scores that rounding left above their parent's count as equal to it, as builders have it.
    """
    scores, parents = tree.scores, tree.parents.clamp(min=0)
    for _ in range(int(tree.depths.max())):
        scores = torch.minimum(scores, scores.gather(1, parents))
    taken = (-scores).argsort(dim=1, stable=True)
    return taken.argsort(dim=1)


def _walk(corpus: Corpus, index: int, accepted: np.ndarray) -> Replay:
    """The rounds of one shape along one sample. accepted: int64 [anchors]."""
    anchors = _anchors(corpus, index)
    ends = corpus.run_ends[corpus.offsets[index] : corpus.offsets[index + 1]]
    counts, committed = [], 0
    at = 0
    while at < len(anchors):
        count, left = int(accepted[at]), int(ends[anchors[at]] - anchors[at])
        step = min(count + 1, left)
        counts.append(count)
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
