"""What path scores add: one log, walked with the head's edges and without them.

A parallel head drafts its slots first and its edges on top of them, so one pass holds both drafts:
they are of one training run, made behind the same anchors of the same answers, and every ratio
between them is paired by prompt.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jetspec.diagnostics.log import DraftLog
from jetspec.diagnostics.measures import after_sibling, walk
from jetspec.diagnostics.simulate import Simulation, ratio, simulate
from jetspec.evaluation.statistics import Estimate
from jetspec.trees.config import TreeConfig

ALL = "all"


def path_gain(
    log: DraftLog,
    simulations: Sequence[Simulation],
    slices: Mapping[str, str],
    *,
    reference: TreeConfig,
    samples: int,
    seed: int,
) -> dict[str, Any] | None:
    """tau with slot scores and with path scores, of every tree and slice.

    Args:
        simulations: the trees, walked in `log` as it is: the path side.
        slices: slice of every prompt id.
        reference: the tree of `simulations` at whose rounds the head is looked at.
        samples, seed: of the bootstrap over prompts.

    Returns:
        None where the head has no edges to take out. Else, as plain JSON values,
        {scores: by slice and tree the tau of `slot` and of `path`, and `ratio`, path over slot;
        versus: by slice and budget the ratio of best-first over the chain and over Algorithm 1,
        with `slot` scores on both sides and with `path` scores; each estimate {value, ci};
        next_depth: `measures.after_sibling` with slot scores, at the rounds of `reference`;
        bootstrap: of the intervals}. The slice `all` pools the prompts of every slice.
    """
    bare = log.without_edges()
    if bare is None:
        return None
    path = list(simulations)
    slot = [simulate(bare, s.tree) for s in path]
    pairs = [(ours, theirs) for ours in path for theirs in path if _set_against(ours, theirs)]
    places = {id(s): place for place, s in enumerate(path)}
    draws = {"samples": samples, "seed": seed}
    scores, versus = [], []
    for name, prompts in groups(slices).items():
        for ours, theirs in zip(path, slot, strict=True):
            sides = {
                "slot": theirs.tau(**draws, prompts=prompts),
                "path": ours.tau(**draws, prompts=prompts),
                "ratio": ratio(ours, theirs, **draws, prompts=prompts),
            }
            tree = {"builder": ours.tree.builder, "budget": ours.tree.budget}
            scores.append({"slice": name, "prompts": len(prompts), **tree, **_plain(sides)})
        for ours, theirs in pairs:
            first, second = places[id(ours)], places[id(theirs)]
            sides = {
                kind: ratio(side[first], side[second], **draws, prompts=prompts)
                for kind, side in (("slot", slot), ("path", path))
            }
            tree = {"budget": ours.tree.budget, "over": theirs.tree.builder}
            versus.append({"slice": name, "prompts": len(prompts), **tree, **_plain(sides)})
    looked = next(theirs for theirs in slot if theirs.tree == reference)
    next_depth = after_sibling(bare, looked, walk(bare, looked.rows), **draws)
    return {"bootstrap": draws, "scores": scores, "versus": versus, "next_depth": next_depth}


def groups(slices: Mapping[str, str]) -> dict[str, set[str]]:
    """The prompts of `all` slices together, then of every slice where there are several."""
    found: dict[str, set[str]] = {ALL: set(slices)}
    names = sorted(set(slices.values()))
    if len(names) > 1:
        for name in names:
            found[name] = {prompt for prompt, own in slices.items() if own == name}
    return found


def _set_against(ours: Simulation, theirs: Simulation) -> bool:
    """Best-first over the chain, and over Algorithm 1 of the same budget."""
    if ours.tree.builder != "best_first":
        return False
    same = ours.tree.budget == theirs.tree.budget
    return theirs.tree.builder == "chain" or (theirs.tree.builder == "algorithm1" and same)


def _plain(estimates: Mapping[str, Estimate | None]) -> dict[str, Any]:
    values = {name: found.rounded() if found else (None, None) for name, found in estimates.items()}
    return {name: {"value": value, "ci": ci} for name, (value, ci) in values.items()}
