"""The reference loop of arXiv 2606.18394: draft, build, verify, accept, commit.

Plain decoding is the same loop with a tree that has no node but its root.
"""

import resource
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from jetspec.drafters import Drafter
from jetspec.errors import JetspecError
from jetspec.rules import Rule, resolve_rule
from jetspec.sampling import SamplingParams, request_keys, sample, seen_tokens
from jetspec.targets.kv_cache import KVCache
from jetspec.targets.target import Target
from jetspec.trees.build import build_tree
from jetspec.trees.config import TreeConfig
from jetspec.trees.draft import Draft
from jetspec.trees.drawn import Draws
from jetspec.trees.tree import Tree
from jetspec.verify import Acceptance, verify_greedy, verify_residual, verify_sampled

PHASES = ("prefill", "draft", "build", "verify", "commit")


@dataclass
class Generation:
    """One prompt's answer.

    Attributes:
        tokens: the answer's token ids; a stop token that ended it is the last one.
        rounds: tokens kept of each round, the bonus included. The prefill's token is no round's,
            so len(tokens) = 1 + sum(rounds), and tau = sum(rounds) / len(rounds).
        accepted: draft tokens accepted in each round, before a stop or the limit cut the round.
        finish: `stop` (a stop token) or `length` (max_new_tokens).
    """

    tokens: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    finish: str = ""

    def accepted_by_depth(self) -> list[int]:
        """Rounds that accepted at least d draft tokens, for d = 0, 1, ...

        The acceptance at depth d is entry d over entry d - 1; sum the lists of several prompts
        before dividing.
        """
        deepest = max(self.accepted, default=0)
        return [sum(count >= depth for count in self.accepted) for depth in range(deepest + 1)]


@dataclass
class DecodeResult:
    """The answers of one batch and what they took.

    Attributes:
        generations: in the order of the prompts.
        seconds: wall time of the phases `PHASES`; on a GPU each ends with a synchronisation.
        peak_bytes: on a GPU the peak allocated during this call; on a CPU the process's peak
            resident size so far.
    """

    generations: list[Generation]
    seconds: dict[str, float]
    peak_bytes: int


def decode(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    drafter: Drafter | None = None,
    tree: TreeConfig | None = None,
    sampling: SamplingParams = SamplingParams(),
    rule: Rule | None = None,
    max_new_tokens: int,
    stop_token_ids: Collection[int] | None = None,
    request_ids: Sequence[int | str] | None = None,
) -> DecodeResult:
    """Decode a batch of prompts, losslessly whatever the drafter proposes.

    Args:
        prompts: token ids, of any lengths.
        drafter: None decodes plainly.
        tree: how drafts become trees; None is a chain.
        rule: how a candidate is accepted; None fits the temperature (see rules.py).
        stop_token_ids: None is the target's end-of-sequence tokens; empty never stops.
        request_ids: with `sampling.seed` they fix each prompt's tokens at temperature > 0; None
            numbers the prompts.

    Raises:
        JetspecError: no prompt, an empty prompt, a limit below 1, or settings that do not fit
            together.
    """
    tree = tree or TreeConfig(builder="chain")
    _check(prompts, max_new_tokens, request_ids)
    _check_bias(sampling, target.vocab_size)
    ids = range(len(prompts)) if request_ids is None else request_ids
    batch = Batch(
        target=target,
        drafter=drafter,
        tree=tree,
        sampling=sampling,
        rule=resolve_rule(rule, sampling.temperature, tree.builder),
        limit=max_new_tokens,
        stops=frozenset(target.eos_token_ids if stop_token_ids is None else stop_token_ids),
        running=[Sequel(list(prompt)) for prompt in prompts],
        keys=request_keys(ids, target.device),
    )
    sequels = list(batch.running)
    clock = Clock(target.device)

    with clock.phase("prefill"):
        prefill(batch)
    while batch.running:
        with clock.phase("draft"):
            proposal = draft(batch)
        with clock.phase("build"):
            candidates = build(batch, proposal)
        with clock.phase("verify"):
            verified = verify(batch, candidates)
            acceptance = accept(batch, candidates, verified)
        with clock.phase("commit"):
            commit(batch, candidates, verified, acceptance)

    return DecodeResult([s.generation for s in sequels], clock.seconds, clock.peak_bytes())


@dataclass
class Sequel:
    """A prompt and what has been committed after it."""

    history: list[int]
    generation: Generation = field(default_factory=Generation)

    def extend(self, tokens: list[int], stops: frozenset[int], limit: int) -> int:
        """Commit tokens up to a stop token or the limit; returns how many were kept."""
        generation = self.generation
        kept = tokens[: limit - len(generation.tokens)]
        for index, token in enumerate(kept):
            if token in stops:
                kept = kept[: index + 1]
                generation.finish = "stop"
                break
        generation.tokens += kept
        self.history += kept
        if not generation.finish and len(generation.tokens) == limit:
            generation.finish = "length"
        return len(kept)


@dataclass
class Batch:
    """The running sequences; row b of every tensor belongs to `running[b]`.

    Attributes:
        cache: keys and values of verified tokens; the anchor's do not exist yet.
        valid: bool [B, cache.length], the rows of `cache` that hold a sequence's own tokens, in
            order. The others are padding that no mask lets through.
        anchors: long [B], the last committed tokens.
        keys: long [B], each request's key for the sampling noise.
        seen: bool [B, V], tokens of each sequence so far, the anchor's included; None where the
            sampling does not ask.
    """

    target: Target
    drafter: Drafter | None
    tree: TreeConfig
    sampling: SamplingParams
    rule: Rule
    limit: int
    stops: frozenset[int]
    running: list[Sequel]
    keys: Tensor
    cache: KVCache = field(init=False)
    valid: Tensor = field(init=False)
    anchors: Tensor = field(init=False)
    seen: Tensor | None = field(init=False)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.taps if self.drafter else ()

    def leave(self) -> None:
        """Finished sequences leave the batch."""
        rows = [row for row, sequel in enumerate(self.running) if not sequel.generation.finish]
        if len(rows) == len(self.running):
            return
        self.running = [self.running[row] for row in rows]
        if not rows:
            return
        index = torch.tensor(rows, device=self.keys.device)
        self.keys, self.anchors = self.keys[index], self.anchors[index]
        self.valid = self.valid[index]
        if self.seen is not None:
            self.seen = self.seen[index]
        self.cache.keep_sequences(index)
        if self.drafter:
            self.drafter.keep_sequences(index)


class Verified(NamedTuple):
    """The target's view of a tree: logits [B, N + 1, V], taps [B, N + 1, n·d] or None, positions
    [B, N + 1] of the nodes in their sequences."""

    logits: Tensor
    taps: Tensor | None
    positions: Tensor


def prefill(batch: Batch) -> None:
    """Read the prompts, padded on the right, and sample the first anchors."""
    target, device = batch.target, batch.target.device
    lengths = torch.tensor([len(sequel.history) for sequel in batch.running], device=device)
    longest = int(lengths.max())
    padded = [s.history + [0] * (longest - len(s.history)) for s in batch.running]
    tokens = torch.tensor(padded, device=device)  # [B, T]
    order = torch.arange(longest, device=device)
    positions = order.expand_as(tokens)
    batch.valid = order < lengths[:, None]
    causal = order[:, None] >= order  # [T, T]
    batch.cache = target.new_cache()
    output = target.forward(
        tokens,
        position_ids=positions,
        mask=causal & batch.valid[:, None, :],
        cache=batch.cache,
        taps=batch.taps,
    )
    if batch.drafter:
        batch.drafter.begin(len(batch.running), target)
        batch.drafter.observe(output.taps, positions, batch.valid, tokens)
    last = output.hidden[torch.arange(len(lengths), device=device), lengths - 1]
    histories = [sequel.history for sequel in batch.running]
    batch.seen = seen_tokens(batch.sampling, histories, target.vocab_size, device)
    batch.anchors = sample(target.logits(last), batch.sampling, batch.keys, lengths, batch.seen)
    _remember(batch, batch.anchors[:, None])
    for sequel, token in zip(batch.running, batch.anchors.tolist(), strict=True):
        sequel.extend([token], batch.stops, batch.limit)
    batch.leave()


def draft(batch: Batch) -> Draft | Tree | None:
    """Candidates after each anchor; None when decoding plainly."""
    if batch.drafter is None:
        return None
    return batch.drafter.propose(batch.anchors, [sequel.history for sequel in batch.running])


def build(batch: Batch, proposal: Draft | Tree | None) -> Tree:
    """The tree to verify under each anchor."""
    if proposal is None:
        return Tree.root_only(batch.anchors)
    draws = None
    if batch.rule == "residual":
        sampling, positions = batch.sampling, batch.valid.sum(1)
        draws = Draws(sampling.temperature, sampling.seed, batch.keys, positions)
    return build_tree(proposal, batch.anchors, batch.tree, draws)


def verify(batch: Batch, tree: Tree) -> Verified:
    """One pass of the target over all nodes: a node sees the prefix, its ancestors and itself
    (eq. 8), and stands at its depth behind the prefix."""
    positions = batch.valid.sum(1, keepdim=True) + tree.depths
    nodes = tree.tokens.shape[1]
    prefix = batch.valid[:, None, :].expand(-1, nodes, -1)
    output = batch.target.forward(
        tree.tokens,
        position_ids=positions,
        mask=torch.cat([prefix, tree.ancestor_mask()], dim=2),
        cache=batch.cache,
        taps=batch.taps,
    )
    return Verified(batch.target.logits(output.hidden), output.taps, positions)


def accept(batch: Batch, tree: Tree, verified: Verified) -> Acceptance:
    """The deepest path that the target agrees with, and its bonus token."""
    if batch.rule == "greedy":
        return verify_greedy(tree, verified.logits, batch.sampling, batch.seen)
    # A tree that is only a root has no candidate to try: its bonus is plain sampling's.
    drawn = batch.rule == "residual" and tree.proposal is not None
    return (verify_residual if drawn else verify_sampled)(
        tree, verified.logits, batch.sampling, verified.positions, batch.keys, batch.seen
    )


def commit(batch: Batch, tree: Tree, verified: Verified, acceptance: Acceptance) -> None:
    """Append the accepted tokens and the bonus; keep only the accepted nodes' keys and values."""
    path = acceptance.path.clamp(min=0)  # [B, P]
    tokens = tree.tokens.gather(1, path)
    ends = zip(tokens.tolist(), acceptance.lengths.tolist(), acceptance.bonus.tolist(), strict=True)
    for sequel, (nodes, length, bonus) in zip(batch.running, ends, strict=True):
        kept = sequel.extend([*nodes[1:length], bonus], batch.stops, batch.limit)
        sequel.generation.rounds.append(kept)
        sequel.generation.accepted.append(length - 1)
    batch.anchors = acceptance.bonus
    _remember(batch, torch.cat([tokens, acceptance.bonus[:, None]], dim=1))

    _compact(batch, tree, acceptance)
    if batch.drafter:
        taps = None
        if verified.taps is not None:
            width = verified.taps.shape[-1]
            taps = verified.taps.gather(1, path[..., None].expand(-1, -1, width))
        positions = verified.positions.gather(1, path)
        batch.drafter.observe(taps, positions, acceptance.path >= 0, tokens)
    batch.leave()


def _remember(batch: Batch, tokens: Tensor) -> None:
    """Committed tokens, long [B, T], join those seen; a path's padding repeats the root's."""
    if batch.seen is not None:
        batch.seen.scatter_(1, tokens, True)


def _compact(batch: Batch, tree: Tree, acceptance: Acceptance) -> None:
    """Drop rejected nodes from the cache; each sequence's rows move to the left, in order.

    Nodes on a path have growing numbers, so keeping the cache's order keeps the path's. Where all
    nodes stay (plain decoding, a chain accepted whole) nothing is copied.
    """
    accepted = (acceptance.path >= 0).long()
    hits = torch.zeros_like(tree.tokens).scatter_add_(1, acceptance.path.clamp(min=0), accepted)
    keep = torch.cat([batch.valid, hits > 0], dim=1)
    if not torch.all(hits > 0):
        lengths = keep.sum(1, keepdim=True)
        longest = int(lengths.max())
        batch.cache.gather((~keep).to(torch.int8).argsort(dim=1, stable=True)[:, :longest])
        keep = torch.arange(longest, device=keep.device) < lengths
    batch.valid = keep


class Clock:
    """Wall time per phase; a GPU is synchronised at the boundaries, so a phase pays for its own."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = self._now()
        yield
        self.seconds[name] += self._now() - started

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def peak_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _check(
    prompts: Sequence[Sequence[int]], limit: int, request_ids: Sequence[int | str] | None
) -> None:
    if not prompts:
        raise JetspecError("prompts", "none", "give at least one")
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise JetspecError(f"prompts[{index}]", "empty", "give at least one token")
    if limit < 1:
        raise JetspecError("max_new_tokens", limit, "must be 1 or more")
    if request_ids is not None and len(request_ids) != len(prompts):
        raise JetspecError("request_ids", len(request_ids), f"give one for each of {len(prompts)}")


def _check_bias(sampling: SamplingParams, vocab_size: int) -> None:
    for token, bias in sampling.logit_bias:
        if token >= vocab_size:
            raise JetspecError("logit_bias", f"{token}: {bias}", f"the target has {vocab_size}")
