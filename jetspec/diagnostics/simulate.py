"""tau of any tree from a log of drafts: the head and the target do not run again.

The walk is the one of decoding: draft behind the anchor, build, follow the text, move the anchor.
On a log of greedy answers it gives exactly the tau of replay and of real greedy decoding; on
answers drawn with a seed, the tau of sample-and-match with that seed.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jetspec.diagnostics.log import DraftLog
from jetspec.diagnostics.proposals import levels
from jetspec.errors import JetspecError
from jetspec.evaluation.replay import Replay
from jetspec.evaluation.statistics import Estimate, paired_ratio_interval, ratio_interval
from jetspec.theory.formulas import tree_expectation
from jetspec.trees.build import build_tree
from jetspec.trees.config import TreeConfig
from jetspec.trees.tree import Tree

_CHUNK = 64  # anchors whose proposals are unfolded at one time


@dataclass(frozen=True)
class Simulation:
    """The rounds of one tree in a log.

    Attributes:
        rows: long [R], the log's row of every round; accepted: long [R], its draft tokens.
        expected: fp32 [R], tokens the head itself expects of the round (1 + sum of path
            probabilities), whatever the answer's end allows.
        replays: the same by sample, as evaluation/replay.py tells it.
    """

    tree: TreeConfig
    rows: Tensor
    accepted: Tensor
    expected: Tensor
    replays: tuple[Replay, ...]

    def tau(
        self, *, samples: int, seed: int, prompts: Collection[str] | None = None
    ) -> Estimate | None:
        """Tokens a round, with an interval over prompts."""
        return ratio_interval(*self.columns(prompts), samples=samples, seed=seed)

    def columns(self, prompts: Collection[str] | None = None) -> tuple[list[int], list[int]]:
        """(tokens, rounds) of every prompt, or of these `prompts`, in order of their id."""
        sums: dict[str, list[int]] = {}
        for replay in self.replays:
            if prompts is not None and replay.prompt_id not in prompts:
                continue
            entry = sums.setdefault(replay.prompt_id, [0, 0])
            entry[0] += replay.committed
            entry[1] += replay.rounds
        ordered = [sums[prompt] for prompt in sorted(sums)]
        return [entry[0] for entry in ordered], [entry[1] for entry in ordered]


def simulate(log: DraftLog, tree: TreeConfig) -> Simulation:
    """Walk the rounds of `tree` through the log.

    A tree narrower than the log takes the first of the logged candidates. Path scores that are
    normalised over the candidates were made for the log's width: there a narrower tree is close to
    what the head would draft for it, and not the same.

    Raises:
        JetspecError: the tree is wider or deeper than what was logged.
    """
    if (depth := min(tree.depth or log.depth, tree.budget)) > log.depth:
        raise JetspecError("tree.depth", depth, f"the log's drafts end at depth {log.depth}")
    samples = [s for s in range(len(log.ids)) if log.offsets[s + 1] > log.offsets[s]]
    running = torch.tensor(samples)
    rows = log.offsets[running]
    owners, visited, accepted, committed, expected = [], [], [], [], []
    while len(rows):
        grown = build_tree(log.propose(rows), log.anchors[rows], tree)
        count = agreed_depth(grown, log.truth[rows])
        step = torch.minimum(count + 1, log.remaining[rows])
        owners.append(running)
        visited.append(rows)
        accepted.append(count)
        committed.append(step)
        expected.append(tree_expectation(grown))
        rows = rows + step
        left = rows < log.offsets[running + 1]
        rows, running = rows[left], running[left]
    owner, taken = torch.cat(owners), torch.cat(committed)
    order = torch.cat(visited).argsort()
    found = torch.cat(accepted)
    return Simulation(
        tree=tree,
        rows=torch.cat(visited)[order],
        accepted=found[order],
        expected=torch.cat(expected)[order],
        replays=tuple(
            Replay(
                id=log.ids[s],
                prompt_id=log.prompt_ids[s],
                rounds=int((owner == s).sum()),
                committed=int(taken[owner == s].sum()),
                accepted=tuple(found[owner == s].tolist()),
            )
            for s in range(len(log.ids))
        ),
    )


def right_nodes(tree: Tree, truth: Tensor) -> Tensor:
    """bool [B, N + 1]: nodes whose whole path is the text; the root is one of them.

    Args:
        truth: long [B, D], the text behind each root, -1 where there is none.
    """
    text = truth.gather(1, (tree.depths - 1).clamp(min=0))
    right = tree.valid() & ((tree.depths == 0) | (text == tree.tokens))
    parents = tree.parents.clamp(min=0)
    for _ in range(int(tree.depths.max())):
        right = right & right.gather(1, parents)  # parents precede: one step a level settles all
    return right


def agreed_depth(tree: Tree, truth: Tensor) -> Tensor:
    """long [B]: depth of the deepest node whose whole path is the text."""
    return (tree.depths * right_nodes(tree, truth)).amax(1)


def oracle(log: DraftLog) -> Simulation:
    """A chain that always chose rightly among the K candidates: what better scores could reach."""
    reach = torch.cat([_reach(log, chunk) for chunk in torch.arange(len(log)).split(_CHUNK)])
    rows, counts, replays = [], [], []
    for s in range(len(log.ids)):
        row, end = int(log.offsets[s]), int(log.offsets[s + 1])
        own, committed = [], 0
        while row < end:
            step = min(int(reach[row]) + 1, int(log.remaining[row]))
            own.append(int(reach[row]))
            rows.append(row)
            committed += step
            row += step
        counts += own
        replays.append(Replay(log.ids[s], log.prompt_ids[s], len(own), committed, tuple(own)))
    accepted = torch.tensor(counts, dtype=torch.long)
    tree = TreeConfig(builder="chain", budget=log.depth, width=log.width)
    rows_ = torch.tensor(rows, dtype=torch.long)
    return Simulation(tree, rows_, accepted, accepted.float() + 1, tuple(replays))


def _reach(log: DraftLog, rows: Tensor) -> Tensor:
    """long [B]: how far the text stays among the candidates."""
    right = [level.right.any(1) for level in levels(log.propose(rows), log.truth[rows])]
    return torch.stack(right).sum(0)


def ratio(
    ours: Simulation,
    theirs: Simulation,
    *,
    samples: int,
    seed: int,
    prompts: Collection[str] | None = None,
) -> Estimate | None:
    """tau of ours over tau of theirs, paired by prompt; of these `prompts` or of all."""
    columns = (*ours.columns(prompts), *theirs.columns(prompts))
    return paired_ratio_interval(*columns, samples=samples, seed=seed)


def beaten_by(
    simulations: Sequence[Simulation], *, samples: int, seed: int
) -> list[Simulation | None]:
    """For every tree the one that makes measuring it pointless, or None.

    That is a tree of no larger budget whose tau on these answers is no smaller (of equals at one
    budget the earlier one stays), or surely larger: no load makes the beaten tree the better one.
    """
    verdicts: list[Simulation | None] = []
    for place, theirs in enumerate(simulations):
        verdict = None
        for other, ours in enumerate(simulations):
            if ours is theirs or ours.tree.budget > theirs.tree.budget:
                continue
            estimate = ratio(ours, theirs, samples=samples, seed=seed)
            if estimate is None:
                continue
            first = ours.tree.budget < theirs.tree.budget or other < place
            surely = estimate.ci is not None and estimate.ci[0] > 1
            if surely or (first and estimate.value >= 1):
                verdict = ours
                break
        verdicts.append(verdict)
    return verdicts
