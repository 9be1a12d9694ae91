"""The log of drafts: what a head proposes behind every token of answers that are known.

Replay (evaluation/replay.py) drafts only where one tree's rounds land. A log drafts everywhere, so
that the rounds of any tree can be walked in it afterwards, without the head and without the target.
"""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jetspec.diagnostics.proposals import Proposal, pad_trees, select, stored, stored_bytes
from jetspec.errors import JetspecError
from jetspec.heads.base import DraftHead
from jetspec.storage import atomic_write, filesystem
from jetspec.targets.target import Target
from jetspec.training.corpus import Corpus
from jetspec.training.hidden_cache import OnlineTeacher, sample_states
from jetspec.trees.draft import Draft
from jetspec.trees.tree import Tree

_TEACHER_ROWS = 256  # positions whose vocabulary row exists at one time


@dataclass(frozen=True)
class DraftLog:
    """Drafts behind A anchors of N samples; on the CPU.

    The anchors of an answer are all its tokens but the last, in order, so row a + 1 stands one
    token behind row a unless an answer ends between them, and row a + `remaining[a]` begins the
    next answer.

    Attributes:
        proposals: of A anchors: candidates and edges (slot scores are rows expanded, not copied),
            or scored trees where the head drafts those.
        anchors: long [A], the anchor's token; places: long [A], its index in the sample.
        truth: long [A, D], the text behind it, -1 beyond the answer's end.
        remaining: long [A], tokens of the answer behind the anchor, at least 1.
        target_entropy: fp32 [A], nats, of the target's distribution behind the anchor.
        target_first: bool [A], the text goes on with the target's likeliest token.
        offsets: long [N + 1], where each sample's anchors begin.
        ids, prompt_ids: of the N samples.
        width: candidates a slot, or children a node may have.
    """

    proposals: Proposal
    anchors: Tensor
    places: Tensor
    truth: Tensor
    remaining: Tensor
    target_entropy: Tensor
    target_first: Tensor
    offsets: Tensor
    ids: tuple[str, ...]
    prompt_ids: tuple[str, ...]
    width: int

    def __len__(self) -> int:
        return len(self.anchors)

    @property
    def depth(self) -> int:
        return self.truth.shape[1]

    @property
    def scoring(self) -> str:
        """`slot` where every parent has the same row, `path` where it has its own, or `tree`."""
        if isinstance(self.proposals, Tree):
            return "tree"
        return "slot" if self.proposals.edge_scores.stride(2) == 0 else "path"

    def without_edges(self) -> "DraftLog | None":
        """The log of the same head with its edges taken out; None where it has none to take."""
        slots = None if isinstance(self.proposals, Tree) else self.proposals.without_edges()
        return None if slots is None else replace(self, proposals=slots)

    def propose(self, rows: Tensor) -> Proposal:
        """What the head drafted behind the anchors `rows`, long [B]."""
        return select(self.proposals, rows)

    def sample_of(self, rows: Tensor) -> Tensor:
        """Index of the sample that each row belongs to."""
        return torch.searchsorted(self.offsets, rows, right=True) - 1

    def save(self, uri: str) -> None:
        """Write the log as one .npz file."""
        arrays: dict[str, Any] = {
            f.name: _array(getattr(self, f.name)) for f in fields(self) if f.name != "proposals"
        }
        kind = type(self.proposals).__name__
        arrays |= {f"{kind}.{name}": t.numpy() for name, t in stored(self.proposals).items()}
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        with atomic_write(uri) as file:
            file.write(buffer.getvalue())

    @classmethod
    def load(cls, uri: str) -> "DraftLog":
        """A log that `save` wrote.

        Raises:
            JetspecError: no such file, or not a log.
        """
        fs, path = filesystem(uri)
        try:
            with fs.open(path, "rb") as file:
                values = dict(np.load(io.BytesIO(file.read()), allow_pickle=False))
            names = ("ids", "prompt_ids")
            loaded: dict[str, Any] = {name: tuple(map(str, values.pop(name))) for name in names}
            loaded["width"] = int(values.pop("width"))
            loaded |= {name: torch.from_numpy(value) for name, value in values.items()}
            trees = any(name.startswith("Tree.") for name in loaded)
            parts = {n.partition(".")[2]: loaded.pop(n) for n in list(loaded) if "." in n}
            return cls(proposals=Tree(**parts) if trees else _draft(parts), **loaded)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise JetspecError("log", uri, f"is not a log of drafts ({error})") from error


@torch.no_grad()
def log_drafts(
    target: Target,
    head: DraftHead,
    samples: Sequence[Any],
    *,
    width: int,
    batch_size: int = 16,
    limit_gb: float = 8.0,
) -> DraftLog:
    """Draft behind every token of the samples' answers, as deep as the head was trained.

    Args:
        samples: `id`, `prompt_id`, `input_ids`, `loss_mask` (1 on the target's own tokens).
        width: K, candidates a slot.
        batch_size: samples that draft together.
        limit_gb: refuse a log that would be larger.

    Raises:
        JetspecError: the samples hold no answer of two tokens, or the log would be too large.
    """
    corpus = Corpus.from_samples(samples, max((len(s.input_ids) for s in samples), default=1))
    anchors = [_anchors(corpus, index) for index in range(len(samples))]
    if not any(map(len, anchors)):
        raise JetspecError("samples", len(samples), "none has an answer of two tokens or more")
    states = OnlineTeacher(target, head.taps)
    parts: dict[int, dict[str, Tensor]] = {}
    proposed: dict[int, list[dict[str, Tensor]]] = {}
    trees = False
    usable = np.array([i for i in range(len(samples)) if len(anchors[i])])
    by_length = usable[np.argsort(-corpus.lengths[usable], kind="stable")]
    total = sum(map(len, anchors))
    for begin in range(0, len(by_length), batch_size):
        chosen = by_length[begin : begin + batch_size]
        batch, taps = sample_states(corpus, chosen, states, target.device)
        hidden = states(batch)[1]
        cache = head.new_cache(len(chosen))
        head.extend(cache, taps, batch.positions, batch.documents >= 0, batch.input_ids)
        drafted: list[list[dict[str, Tensor]]] = [[] for _ in chosen]
        for rows, places in _steps([anchors[i] for i in chosen], target.device):
            # The context ends strictly before the anchor; idle rows repeat their last anchor.
            cache.lengths = places
            anchor = batch.input_ids.gather(1, places[:, None])[:, 0]
            proposal = head.draft(cache, anchor, target.embed, target.logits, width)
            _check_size(proposal, total, limit_gb)
            trees = isinstance(proposal, Tree)
            held = {name: tensor.cpu() for name, tensor in stored(proposal).items()}
            for row in rows:
                drafted[row].append({name: t[row : row + 1] for name, t in held.items()})
        for row, index in enumerate(chosen):
            own = torch.from_numpy(anchors[index])
            parts[int(index)] = _text(corpus, int(index), own, head.depth)
            parts[int(index)] |= _teacher(target, hidden[row], batch.input_ids[row], own)
            proposed[int(index)] = drafted[row]
    order = sorted(parts)
    joined = {key: torch.cat([parts[i][key] for i in order]) for key in parts[order[0]]}
    steps = [step for i in order for step in proposed[i]]
    if trees:
        steps = pad_trees(steps)
    flat: dict[str, Any] = {name: torch.cat([step[name] for step in steps]) for name in steps[0]}
    counts = torch.tensor([0, *map(len, anchors)])
    return DraftLog(
        proposals=Tree(**flat) if trees else _draft(flat),
        **joined,
        offsets=counts.cumsum(0),
        ids=corpus.ids,
        prompt_ids=corpus.prompt_ids,
        width=width,
    )


def _anchors(corpus: Corpus, index: int) -> np.ndarray:
    """Tokens of a sample that another of the same answer follows: [a], ascending."""
    ends = corpus.run_ends[corpus.offsets[index] : corpus.offsets[index + 1]]
    return np.flatnonzero(ends > np.arange(len(ends)))


def _steps(
    anchors: Sequence[np.ndarray], device: torch.device
) -> Iterator[tuple[list[int], Tensor]]:
    """Step by step (rows that have an anchor left, every row's place), until none has."""
    for step in range(max(map(len, anchors))):
        rows = [row for row, own in enumerate(anchors) if step < len(own)]
        places = [int(own[min(step, len(own) - 1)]) for own in anchors]
        yield rows, torch.tensor(places, device=device)


def _draft(parts: dict[str, Tensor]) -> Draft:
    width = parts["tokens"].shape[2]
    return Draft(**{**parts, "edge_scores": parts["edge_scores"].expand(-1, -1, width, -1)})


def _check_size(proposal: Proposal, anchors: int, limit_gb: float) -> None:
    size = stored_bytes(proposal) * anchors / 1e9
    if size > limit_gb:
        raise JetspecError(
            "samples",
            f"{anchors} anchors",
            f"their log would take {size:.3g} GB, more than {limit_gb:g}; give fewer samples or a "
            "smaller width",
        )


def _text(corpus: Corpus, index: int, places: Tensor, depth: int) -> dict[str, Tensor]:
    """What followed each anchor of one sample."""
    here = slice(corpus.offsets[index], corpus.offsets[index + 1])
    tokens = torch.from_numpy(corpus.tokens[here].astype(np.int64))
    ends = torch.from_numpy(corpus.run_ends[here].astype(np.int64))[places]
    ahead = places[:, None] + torch.arange(1, depth + 1)
    text = tokens[ahead.clamp(max=len(tokens) - 1)]
    return {
        "anchors": tokens[places],
        "places": places,
        "truth": torch.where(ahead <= ends[:, None], text, -1),
        "remaining": ends - places,
    }


def _teacher(target: Target, hidden: Tensor, ids: Tensor, places: Tensor) -> dict[str, Tensor]:
    """The target's own view of the token behind each anchor."""
    entropy, first = [], []
    for chunk in places.to(hidden.device).split(_TEACHER_ROWS):
        log_p = target.logits(hidden[chunk]).log_softmax(-1)  # [c, V]
        entropy.append(-(log_p.exp() * log_p).nan_to_num(0.0).sum(-1).cpu())
        first.append((log_p.argmax(-1) == ids[chunk + 1]).cpu())
    return {"target_entropy": torch.cat(entropy), "target_first": torch.cat(first)}


def _array(value: Any) -> np.ndarray:
    return value.numpy() if isinstance(value, Tensor) else np.asarray(value, dtype=np.str_)
