"""The diagnosis of one head: a log of drafts, the figures read from it, what is checked anew."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from jetspec.config import RunConfig, parse_config
from jetspec.diagnostics.gap import gap_summary, rank1_gaps
from jetspec.diagnostics.log import DraftLog, log_drafts
from jetspec.diagnostics.measures import (
    after_sibling,
    by_depth,
    calibration,
    fitted_settings,
    looping,
    walk,
)
from jetspec.diagnostics.paths import path_gain
from jetspec.diagnostics.report import write_figures
from jetspec.diagnostics.simulate import Simulation, beaten_by, oracle, simulate
from jetspec.errors import JetspecError
from jetspec.evaluation.cells import cell_label
from jetspec.evaluation.matrix import load_fitting_head
from jetspec.evaluation.replay import mean_tau, replay_tau
from jetspec.heads.base import DraftHead
from jetspec.records import environment
from jetspec.samples import STATUSES, Sample, read_samples, samples_hash
from jetspec.storage import (
    absolute,
    content_hash,
    exists,
    is_local,
    join,
    list_files,
    read_json,
    read_manifest,
    write_json,
    write_manifest,
)
from jetspec.targets.load import load_target
from jetspec.targets.target import Target
from jetspec.training.corpus import Corpus
from jetspec.trees.config import TreeConfig

BUILDERS = ("best_first", "algorithm1")
Listener = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is diagnosed and on what.

    Attributes:
        samples: answers that the head was not trained on.
        statuses: all answers of the samples' directory, by status.
        held_out: the samples are the head's own held-out ones, not foreign ones.
    """

    config: RunConfig
    head_uri: str
    samples_uri: str
    samples: tuple[Sample, ...]
    statuses: dict[str, int]
    held_out: bool


@dataclass(frozen=True)
class Diagnosis:
    """The facts as plain JSON values, and the log they were read from."""

    facts: dict[str, Any]
    log: DraftLog

    def write(self, directory: str) -> None:
        """`diagnosis.json`, figures where the directory is local, `drafts.npz`, manifest last.

        Raises:
            JetspecError: the directory holds something already.
        """
        if list_files(directory):
            raise JetspecError("--out", directory, "is not empty; give a new directory")
        write_json(join(directory, "diagnosis.json"), self.facts)
        if is_local(directory):
            write_figures(self.facts, absolute(directory))
        self.log.save(join(directory, "drafts.npz"))
        kept = ("head", "head_hash", "target_fingerprint", "samples_hash")
        facts = {name: self.facts[name] for name in kept}
        write_manifest(directory, kind="diagnosis", config_hash=content_hash(facts), **facts)


def make_plan(head_uri: str, config: RunConfig | None, samples_uri: str | None, limit: int) -> Plan:
    """Choose held-out answers for a head.

    Args:
        config: the run; None takes target, head and training settings from the head's own record.
        samples_uri: a samples directory; None is the one that the head was trained on, of which
            only the prompts that training kept out are used.
        limit: at most so many answers; which ones depends on their prompts' ids alone.

    Raises:
        JetspecError: nothing says where samples are, or none is left.
    """
    manifest = read_manifest(head_uri, kind="head")
    record = join(head_uri, "training.json")
    own = read_json(record).get("config") if exists(record) else None
    if config is None:
        if own is None:
            raise JetspecError("RUN", "not given", f"{head_uri} does not record its run; give it")
        config = parse_config(own)
    trained_on = manifest.get("samples_uri")
    uri = samples_uri or trained_on
    if uri is None:
        raise JetspecError("--samples", "not given", f"{head_uri} does not record them; give them")
    files = content_hash(read_manifest(uri, kind="samples")["files"])
    held_out = files == manifest.get("samples_key")
    everything = read_samples(uri, statuses=STATUSES)
    statuses = dict(Counter(str(sample.status) for sample in everything))
    # Looping answers are no training text either.
    usable: Sequence[Sample] = [s for s in everything if s.status != "looping"]
    if held_out:
        training = (parse_config(own) if own else config).training
        corpus = Corpus.from_samples(usable, training.sequence_length)
        usable = [usable[i] for i in corpus.split(training.heldout_fraction)[1]]
    usable = sorted(usable, key=lambda s: (sha256(s.prompt_id.encode()).hexdigest(), s.id))
    if not usable:
        raise JetspecError("samples", uri, "holds no answer to look at; regenerate more")
    return Plan(config, head_uri, uri, tuple(usable[:limit]), statuses, held_out)


def diagnose_head(
    plan: Plan,
    *,
    budgets: Sequence[int] | None = None,
    branches: int = 256,
    replay_all: bool = False,
    listen: Listener = lambda stage: None,
) -> Diagnosis:
    """Load the head and its target and diagnose; see `diagnose`."""
    listen("loading the target and the head")
    target = load_target(plan.config.target)
    head = load_fitting_head(plan.head_uri, target)
    settings = plan.config.evaluation
    diagnosis = diagnose(
        target,
        head,
        plan.samples,
        budgets=budgets or settings.budgets,
        width=settings.width,
        branches=branches,
        replay_all=replay_all,
        bootstrap=settings.bootstrap_samples,
        seed=settings.seed,
        batch_size=plan.config.regeneration.batch_size,
        listen=listen,
    )
    facts = {
        "head": plan.head_uri,
        "head_hash": content_hash(read_manifest(plan.head_uri, kind="head")["files"]),
        "target_fingerprint": target.fingerprint,
        "samples_uri": plan.samples_uri,
        "samples_hash": samples_hash(plan.samples),
        "held_out": plan.held_out,
        **diagnosis.facts,
        "looping": looping(plan.statuses),
        "environment": environment(),
    }
    return Diagnosis(facts, diagnosis.log)


def diagnose(
    target: Target,
    head: DraftHead,
    samples: Sequence[Any],
    *,
    budgets: Sequence[int],
    width: int,
    branches: int,
    replay_all: bool,
    bootstrap: int,
    seed: int,
    batch_size: int,
    listen: Listener = lambda stage: None,
) -> Diagnosis:
    """Every figure of a head on answers of its target.

    Args:
        budgets: tree budgets whose tau is predicted; the middle one's rounds are looked at.
        width: candidates a slot.
        branches: top-ranked branches whose gap is measured.
        replay_all: replay every tree with the head, not only the one whose rounds are looked at.
        bootstrap: resamples of an interval.
        batch_size: answers that draft together.
    """
    listen("drafting behind every token")
    width = min(width, target.vocab_size)
    log = log_drafts(target, head, samples, width=width, batch_size=batch_size)
    draws = {"samples": bootstrap, "seed": seed}
    listen("walking the rounds of every tree")
    trees = candidate_trees(log, budgets)
    simulations = [simulate(log, tree) for tree in trees]
    slices = {sample.prompt_id: sample.slice for sample in samples}
    reference = simulations[trees.index(reference_tree(log, budgets))]
    gain = path_gain(log, simulations, slices, reference=reference.tree, **draws)
    fitted = fitted_settings(log, reference)
    trees += fitted_trees(log, budgets, fitted)
    simulations += [simulate(log, tree) for tree in trees[len(simulations) :]]
    best = oracle(log)
    walks = walk(log, reference.rows)
    replayed = trees if replay_all else [reference.tree]
    listen("replaying rounds to check the prediction")
    measured = {
        tree: mean_tau(replay_tau(target, head, samples, tree, batch_size=batch_size))
        for tree in replayed
    }
    listen("asking the target about the top-ranked branches")
    gaps = rank1_gaps(target, log, samples, reference.rows, branches=branches)
    beaten = beaten_by(simulations, **draws)
    facts = {
        "answers": len(log.ids),
        "prompts": len(set(log.prompt_ids)),
        "anchors": len(log),
        "depth": log.depth,
        "width": log.width,
        "scoring": log.scoring,
        "greedy": round(float(log.target_first.float().mean()), 4),
        "reference": {
            "tree": tree_label(reference.tree),
            "rounds": len(reference.rows),
            "settings": reference.tree.model_dump(mode="json"),
        },
        "predictions": [
            _prediction(s, measured.get(s.tree), b, draws)
            for s, b in zip(simulations, beaten, strict=True)
        ],
        "oracle": _tau(best, draws),
        "gap": gap_summary(gaps, log.depth),
        "by_depth": by_depth(log, reference, walks),
        "next_depth": after_sibling(log, reference, walks, **draws),
        "entropy": round(float(walks.entropy[walks.asked].mean()), 4),
        "target_entropy": round(float(log.target_entropy[reference.rows].mean()), 4),
        "calibration": calibration(log, reference, walks),
        "settings": fitted,
    }
    if gain is not None:
        facts["path_scores"] = gain
    return Diagnosis(facts, log)


def candidate_trees(log: DraftLog, budgets: Sequence[int]) -> list[TreeConfig]:
    """The chain as deep as the head drafts, and every builder at every budget."""
    trees = [TreeConfig(builder="chain", budget=log.depth, width=log.width)]
    for builder in BUILDERS:
        for budget in sorted(set(budgets)):
            shape = {"builder": builder, "budget": budget, "width": log.width}
            trees.append(TreeConfig.model_validate(shape))
    return trees


def fitted_trees(
    log: DraftLog, budgets: Sequence[int], fitted: dict[str, list[float]]
) -> list[TreeConfig]:
    """Trees of one static shape, and by calibrated survival where the head drafts edges."""
    shapes: list[dict[str, Any]] = [{"builder": "static", "rank_rates": fitted["rank_rates"]}]
    if "calibration" in fitted:
        shapes.append({"score": "survival", "calibration": fitted["calibration"]})
    return [
        TreeConfig.model_validate({**shape, "budget": budget, "width": log.width})
        for shape in shapes
        for budget in sorted(set(budgets))
    ]


def reference_tree(log: DraftLog, budgets: Sequence[int]) -> TreeConfig:
    """The best-first tree of the middle budget: its rounds are where the head is looked at."""
    ordered = sorted(set(budgets))
    return TreeConfig(
        builder="best_first", budget=ordered[(len(ordered) - 1) // 2], width=log.width
    )


def tree_label(tree: TreeConfig) -> str:
    """The tree as tables name it, e.g. `tree 64`."""
    if tree.score == "survival" or tree.builder == "static":
        return f"{'survival' if tree.score == 'survival' else 'static'} {tree.budget}"
    method = "chain" if tree.builder == "chain" else "tree"
    return cell_label({"method": method, "builder": tree.builder, "budget": tree.budget})


def _prediction(
    simulation: Simulation, replayed: float | None, beaten: Simulation | None, draws: dict[str, Any]
) -> dict[str, Any]:
    tree = simulation.tree
    return {
        "tree": tree_label(tree),
        "builder": tree.builder,
        "budget": tree.budget,
        **_tau(simulation, draws),
        "replayed": None if replayed is None else round(replayed, 6),
        "expected": round(float(simulation.expected.mean()), 4),
        "beaten_by": None if beaten is None else tree_label(beaten.tree),
    }


def _tau(simulation: Simulation, draws: dict[str, Any]) -> dict[str, Any]:
    estimate = simulation.tau(**draws)
    value, ci = estimate.rounded() if estimate else (None, None)
    return {"tau": value, "ci": ci}
