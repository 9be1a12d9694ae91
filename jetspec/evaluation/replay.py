"""tau without decoding: rounds replayed along answers that the target has already given.

Greedy acceptance only asks which tree path agrees with the target's own greedy continuation. Where
that continuation is known, the target need not run again: each round drafts behind its anchor,
builds the tree, walks it along the answer and moves the anchor, exactly as decoding would.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jetspec.heads.base import DraftCache, DraftHead
from jetspec.targets.target import Target
from jetspec.training.corpus import Corpus
from jetspec.training.hidden_cache import HiddenStates, OnlineTeacher, sample_states
from jetspec.trees.build import build_tree
from jetspec.trees.config import TreeConfig
from jetspec.trees.tree import Tree


@dataclass(frozen=True)
class Replay:
    """One sample's rounds.

    Attributes:
        id: the sample's; prompt_id: its prompt's, which intervals resample.
        rounds: draft-and-verify rounds it took.
        committed: tokens they committed, bonuses included; an answer's first token is the
            prefill's and in no round.
        accepted: draft tokens accepted in each round, before the answer's end cut the round.
    """

    id: str
    prompt_id: str
    rounds: int
    committed: int
    accepted: tuple[int, ...]


def mean_tau(replays: Sequence[Replay]) -> float:
    """Tokens committed per round over all samples; nan without any round."""
    rounds = sum(replay.rounds for replay in replays)
    return sum(replay.committed for replay in replays) / rounds if rounds else float("nan")


def replay_tau(
    target: Target,
    head: DraftHead,
    samples: Sequence[Any],
    tree: TreeConfig | None = None,
    *,
    batch_size: int = 16,
) -> list[Replay]:
    """Replay greedy rounds on samples that the target answered greedily.

    Args:
        samples: `id`, `prompt_id`, `input_ids`, `loss_mask` (1 on the target's own tokens). Every
            unbroken run of them is one answer.
        tree: how drafts become trees; None is a chain as deep as the head drafts.
        batch_size: samples that draft together.
    """
    longest = max((len(sample.input_ids) for sample in samples), default=1)
    corpus = Corpus.from_samples(samples, longest)
    states = OnlineTeacher(target, head.taps)
    indices = np.arange(len(samples))
    return replay_corpus(target, head, corpus, indices, states, tree, batch_size=batch_size)


@torch.no_grad()
def replay_corpus(
    target: Target,
    head: DraftHead,
    corpus: Corpus,
    indices: np.ndarray,
    states: HiddenStates,
    tree: TreeConfig | None = None,
    *,
    batch_size: int = 16,
) -> list[Replay]:
    """As `replay_tau`, for samples `indices` of a corpus whose hidden states come from `states`."""
    tree = tree or TreeConfig(builder="chain", budget=head.depth)
    by_length = indices[np.argsort(-corpus.lengths[indices], kind="stable")]
    found: dict[int, Replay] = {}
    for begin in range(0, len(by_length), batch_size):
        chosen = by_length[begin : begin + batch_size]
        batch, taps = sample_states(corpus, chosen, states, target.device)
        cache = head.new_cache(len(chosen))
        head.extend(cache, taps, batch.positions, batch.documents >= 0, batch.input_ids)
        accepted = _walk(target, head, cache, batch.input_ids, corpus, chosen, tree)
        for index, rounds in zip(chosen, accepted, strict=True):
            found[int(index)] = Replay(
                id=corpus.ids[index],
                prompt_id=corpus.prompt_ids[index],
                rounds=len(rounds),
                committed=sum(len_ for _, len_ in rounds),
                accepted=tuple(count for count, _ in rounds),
            )
    return [found[int(index)] for index in indices]


def _walk(
    target: Target,
    head: DraftHead,
    cache: DraftCache,
    tokens: Tensor,
    corpus: Corpus,
    chosen: np.ndarray,
    tree: TreeConfig,
) -> list[list[tuple[int, int]]]:
    """(accepted, committed) of every round of every row. The cache holds each row's whole text."""
    rounds: list[list[tuple[int, int]]] = [[] for _ in chosen]
    answers = [list(_answers(corpus, int(index))) for index in chosen]
    rows = [row for row in range(len(chosen)) if answers[row]]
    anchors = [answers[row][0][0] for row in rows]  # the position each running row stands at
    cache.keep_sequences(torch.tensor(rows, dtype=torch.long, device=target.device))
    # As deep as decoding drafts, whatever the budget: a second pass scores what the slots of one
    # depth propose, and a bidirectional block holds other slots where it is longer.
    depth = tree.depth or head.depth
    while rows:
        place = torch.tensor(anchors, device=target.device)
        running = tokens[torch.tensor(rows, device=target.device)]
        cache.lengths = place  # the context ends strictly before the anchor
        anchor = running.gather(1, place[:, None])[:, 0]
        draft = head.draft(cache, anchor, target.embed, target.logits, tree.width, depth)
        ends = torch.tensor([answers[row][0][1] for row in rows], device=target.device)
        agreed = _agreement(build_tree(draft, anchor, tree), running, place, ends).tolist()
        kept = []
        for slot, (row, count) in enumerate(zip(rows, agreed, strict=True)):
            end = answers[row][0][1]
            committed = min(count + 1, end - anchors[slot])
            rounds[row].append((count, committed))
            anchors[slot] += committed
            if anchors[slot] == end:
                answers[row].pop(0)
                if not answers[row]:
                    continue
                anchors[slot] = answers[row][0][0]
            kept.append(slot)
        if len(kept) < len(rows):
            rows, anchors = [rows[s] for s in kept], [anchors[s] for s in kept]
            cache.keep_sequences(torch.tensor(kept, dtype=torch.long, device=target.device))
    return rounds


def _agreement(tree: Tree, tokens: Tensor, anchors: Tensor, ends: Tensor) -> Tensor:
    """long [B]: depth of the deepest node whose whole path is the text behind the anchor.

    Args:
        tokens: long [B, T], the text; anchors: long [B]; ends: long [B], the answers' last index.
    """
    place = anchors[:, None] + tree.depths
    text = tokens.gather(1, place.clamp(max=tokens.shape[1] - 1))
    right = tree.valid() & (place <= ends[:, None]) & (text == tree.tokens)
    parents = tree.parents.clamp(min=0)
    for _ in range(int(tree.depths.max())):
        right = right & right.gather(1, parents)  # parents precede: one step a level settles all
    return (tree.depths * right).amax(1)


def _answers(corpus: Corpus, index: int) -> Iterator[tuple[int, int]]:
    """(first, last) index of every run of generated tokens with more than one token."""
    ends = corpus.run_ends[corpus.offsets[index] : corpus.offsets[index + 1]]
    first = 0
    while first < len(ends):
        if ends[first] < 0:
            first += 1
            continue
        if ends[first] > first:
            yield first, int(ends[first])
        first = int(ends[first]) + 1
