"""How sure a head was, how right it was, and what brings the two together.

A head is asked along answers that the target gave: the greedy chains of the rounds that decoding
would have had.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from jetspec.targets.target import Target
from jetspec.training.corpus import Corpus
from jetspec.training.hidden_cache import HiddenStates, sample_states


class SaysHowSure(Protocol):
    """A head whose chains come with a logit for every token."""

    def new_cache(self, batch: int) -> Any: ...

    def extend(
        self, cache: Any, taps: Tensor, positions: Tensor, valid: Tensor, tokens: Tensor | None
    ) -> None: ...

    def chain(
        self,
        cache: Any,
        anchors: Tensor,
        embed: Callable[[Tensor], Tensor],
        logits: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]: ...


@torch.no_grad()
def chain_rounds(
    head: SaysHowSure,
    target: Target,
    corpus: Corpus,
    indices: np.ndarray,
    states: HiddenStates,
    *,
    batch_size: int = 16,
) -> tuple[Tensor, Tensor, Tensor]:
    """Drafted tokens that were put to the test: those whose predecessors were all accepted.

    Rounds start where decoding's would, each behind what the one before committed; anchors drawn
    at random would be easier.

    Args:
        indices: samples of the corpus, each with a block to draft.

    Returns:
        (logits fp32 [n], accepted bool [n], depths long [n], from 1 on).
    """
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for begin in range(0, len(indices), batch_size):
        chosen = indices[begin : begin + batch_size]
        batch, taps = sample_states(corpus, chosen, states, target.device)
        cache = head.new_cache(len(chosen))
        head.extend(cache, taps, batch.positions, batch.documents >= 0, batch.input_ids)
        text = batch.input_ids
        ends = torch.full_like(text, -1)
        for row, index in enumerate(chosen):
            own = corpus.run_ends[corpus.offsets[index] : corpus.offsets[index + 1]]
            ends[row, : len(own)] = torch.from_numpy(own).to(ends)
        starts = [corpus.anchors(int(index)) for index in chosen]
        at = np.array([anchors[0] for anchors in starts])
        while len(starts):
            place = torch.from_numpy(at).to(text)[:, None]
            cache.lengths = place[:, 0]  # the context ends strictly before the anchor
            tokens, said = head.chain(
                cache, text.gather(1, place)[:, 0], target.embed, target.logits
            )
            depth = torch.arange(1, tokens.shape[1] + 1, device=text.device).expand_as(tokens)
            known = place + depth <= ends.gather(1, place)
            true = text.gather(1, (place + depth).clamp(max=text.shape[1] - 1))
            right = (known & (tokens == true)).long()
            standing = right.cumprod(1)
            tested = known & torch.cat([torch.ones_like(right[:, :1]), standing[:, :-1]], 1).bool()
            found.append((said[tested], right[tested].bool(), depth[tested]))
            behind = at + standing.sum(1).cpu().numpy() + 1
            next_ = [np.searchsorted(a, b) for a, b in zip(starts, behind, strict=True)]
            keep = [row for row, n in enumerate(next_) if n < len(starts[row])]
            at = np.array([starts[row][next_[row]] for row in keep])
            if len(keep) < len(starts):
                rows = torch.tensor(keep, dtype=torch.long, device=text.device)
                cache.keep_sequences(rows)
                text, ends = text[rows], ends[rows]
                starts = [starts[row] for row in keep]
    said, accepted, depths = (torch.cat(part) for part in zip(*found, strict=True))
    return said.float(), accepted, depths


def fit_calibration(
    said: Tensor, accepted: Tensor, depths: Tensor, *, prior: float = 1.0
) -> tuple[tuple[float, float], ...]:
    """(scale, offset) of every depth, left to right, so that sigmoid(scale * said + offset) is the
    rate at which tokens of that depth are accepted once their predecessors are.

    DSpark fits the scale (one over its temperature) alone. The offset is for greedy acceptance:
    confidence is trained on what draft and target share at temperature 1, another event with
    another rate. A depth without tokens takes its predecessor's.

    Args:
        said: logits [n]; accepted: bool [n]; depths: long [n], from 1 on; see `chain_rounds`.
        prior: strength, in tokens, of the belief that nothing is to be mended; keeps the fit finite
            where all tokens went one way.
    """
    found: list[tuple[float, float]] = []
    for depth in range(1, int(depths.max()) + 1 if len(depths) else 1):
        here = depths == depth
        if not bool(here.any()):
            found.append(found[-1] if found else (1.0, 0.0))
            continue
        logit, truth = said[here].double().cpu(), accepted[here].double().cpu()
        scale, offset = _logistic(logit, truth, prior)
        if scale < 0:  # what it said was worse than nothing: the rate alone
            scale, offset = 0.0, _logistic(torch.zeros_like(logit), truth, prior)[1]
        found.append((scale, offset))
    return tuple(found)


def _logistic(logit: Tensor, truth: Tensor, prior: float) -> tuple[float, float]:
    """Newton's steps to the best (scale, offset), kept short so that none overshoots."""
    inputs = torch.stack([logit, torch.ones_like(logit)], dim=1)
    start = torch.tensor([1.0, 0.0], dtype=torch.double)
    weights = start.clone()
    for _ in range(100):
        rate = torch.sigmoid(inputs @ weights)
        slope = inputs.T @ (rate - truth) + prior * (weights - start)
        curve = (inputs.T * (rate * (1 - rate))) @ inputs + prior * torch.eye(2).double()
        step = torch.linalg.solve(curve, slope).clamp(-1, 1)
        weights = weights - step
        if float(step.abs().max()) < 1e-9:
            break
    return float(weights[0]), float(weights[1])
