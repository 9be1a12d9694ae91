"""Several producers of path scores, trained in one pass over one frozen head.

On a frozen backbone the target's pass, the head's, the products over the vocabulary and the
candidates are the same for every producer. They are computed once a step; each producer has a loss,
a gradient norm and a learning rate of its own, and takes the steps that it would take alone.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from jetspec.config import RunConfig
from jetspec.errors import JetspecError
from jetspec.heads.base import DraftHead
from jetspec.heads.config import PARALLEL
from jetspec.heads.parallel import ParallelHead
from jetspec.stages import StageResult
from jetspec.storage import atomic_write, content_hash, filesystem, join, stage_uri
from jetspec.targets.load import load_target
from jetspec.targets.target import Target
from jetspec.training.blocks import Batch
from jetspec.training.checkpoints import (
    close_checkpoint,
    latest_checkpoint,
    read_tensors,
    step_directory,
)
from jetspec.training.config import LossConfig, TrainingConfig
from jetspec.training.corpus import TrainingSamples
from jetspec.training.health import Health, not_finite
from jetspec.training.loop import Report, Run, TrainResult, freeze_backbone
from jetspec.training.optimizers import clip_gradients, clipped_apart, make_optimizers
from jetspec.training.stage import (
    align_weights,
    distil_head,
    head_stage,
    starting_head,
    training_samples,
    write_stage,
)
from jetspec.training.step import Statistics, Window, first_pass, path_loss
from jetspec.training.world import World

_MEMBERS = "members.pt"


def shared_shape(run: RunConfig) -> str | None:
    """Equal for runs that, from one start on the same samples, differ in their path scores alone.

    None for a run that has no frozen backbone to share.
    """
    if not run.training.freeze_backbone or run.head.kind != PARALLEL:
        return None
    backbone = {
        name: value
        for name, value in run.head.model_dump(mode="json").items()
        if not name.startswith(("edge", "rescore"))
    }
    parts = {
        "head": backbone,
        "training": run.training.model_dump(mode="json", exclude={"path_learning_rate"}),
        "rest": run.model_dump(mode="json", include={"storage", "target", "regeneration"}),
    }
    return content_hash(parts)


def distil_heads_together(
    runs: Mapping[str, RunConfig],
    samples_uri: str,
    *,
    warm_start: str,
    report: Report = lambda step, metrics: None,
) -> dict[str, StageResult | JetspecError]:
    """The heads of several runs, as `distil_head` gives them one by one, from one training.

    Heads that are there already are reused; one that is missing alone is trained alone. A training
    that was broken off resumes from its last checkpoint. In one process.

    Args:
        runs: by name, all of one `shared_shape`.
        warm_start: the head directory that all start from.
        report: told of the shared metrics, and `edge_loss/NAME` of every run.

    Returns:
        by name the finished stage, or what its training died of while the others went on.

    Raises:
        JetspecError: runs that cannot share a backbone, or what `distil_head` raises for all.
    """
    shapes = {name: shared_shape(run) for name, run in runs.items()}
    alike = next(iter(shapes.values()), None)
    for name, shape in shapes.items():
        if shape is None or shape != alike:
            mend = "differs from the others in more than its path scores; train it alone"
            raise JetspecError("training", name, mend)
    stages = {name: head_stage(run, samples_uri, warm_start)[0] for name, run in runs.items()}
    missing = {stage.key: name for name, stage in stages.items() if not stage.reused}
    lost: dict[str, JetspecError] = {}
    if len(missing) == 1:
        for key, name in missing.items():
            try:
                distil_head(runs[name], samples_uri, warm_start=warm_start, report=report)
            except JetspecError as error:
                lost[key] = error
    elif missing:
        whole = content_hash({"together": sorted({stage.key for stage in stages.values()})})
        wanted = {key: (name, runs[name], stages[name]) for key, name in missing.items()}
        lost = _train(wanted, whole, samples_uri, warm_start, report)
    return {
        name: lost.get(stage.key) or head_stage(runs[name], samples_uri, warm_start)[0]
        for name, stage in stages.items()
    }


def _train(
    wanted: Mapping[str, tuple[str, RunConfig, StageResult]],
    whole: str,
    samples_uri: str,
    warm_start: str,
    report: Report,
) -> dict[str, JetspecError]:
    """Train and write what is wanted, by key; returns what did not come of it."""
    lost: dict[str, JetspecError] = {}
    members: list[Member] = []
    config = next(iter(wanted.values()))[1]
    target = load_target(config.target)
    align_weights(target)
    for key, (name, run, _) in wanted.items():
        try:
            head = starting_head(
                run.head, target, warm_start, run.training.seed, tell=_telling(name)
            )
            freeze_backbone(head)
        except JetspecError as error:
            lost[key] = error
            continue
        assert isinstance(head, ParallelHead)
        if members:
            share_backbone(members[0].head, head, name)
        members.append(Member(name, key, run.training, head))
    if not members:
        return lost
    directory = stage_uri(config.storage, "checkpoints", whole)
    samples = training_samples(config, samples_uri)
    together = RunTogether(members, whole, target, samples, directory, report)
    keys = [member.key for member in members]
    for key, result in together.results():
        _, run, stage = wanted[key]
        facts = {
            "trained_with": [other for other in keys if other != key],
            "together_seconds": round(result.seconds * len(keys), 3),
        }
        write_stage(run, stage, target, result, samples_uri, warm_start, World(), facts)
    _remove(directory)
    return lost | {keys[place]: error for place, error in together.lost.items()}


def _telling(name: str) -> Callable[[str], None]:
    return lambda line: print(f"{name}: {line}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Member:
    """One of the heads that are trained; `key` is that of its stage."""

    name: str
    key: str
    config: TrainingConfig
    head: ParallelHead


def share_backbone(lead: ParallelHead, head: ParallelHead, name: str) -> None:
    """Give `head` the backbone of `lead`, which must be equal to its own."""
    own = {id(parameter) for parameter in head.path_parameters()}
    for part, module in list(head.named_children()):
        if any(id(parameter) in own for parameter in module.parameters()):
            continue
        theirs = lead.get_submodule(part)
        state = theirs.state_dict()
        if not all(torch.equal(tensor, state[key]) for key, tensor in module.state_dict().items()):
            mend = "its frozen weights are not the others'; train it alone"
            raise JetspecError("training.freeze_backbone", f"{name}: {part}", mend)
        setattr(head, part, theirs)


class HeadsTogether(DraftHead):
    """Heads of one frozen backbone as one that can only be trained.

    `loss` gives the sum of their path scores' losses, and statistics [N, 2 + 2 D], a row a head.
    """

    def __init__(self, heads: Sequence[ParallelHead]) -> None:
        lead = heads[0]
        super().__init__(
            lead.config,
            hidden_size=lead.hidden_size,
            vocab_size=lead.vocab_size,
            num_target_layers=lead.num_target_layers,
        )
        self.heads = nn.ModuleList(heads)

    @property
    def members(self) -> list[ParallelHead]:
        return cast(list[ParallelHead], list(self.heads))

    def path_parameters(self) -> Iterable[nn.Parameter]:
        for head in self.members:
            yield from head.path_parameters()

    def shards(self) -> Iterable[nn.Module]:
        return list(dict.fromkeys(part for head in self.members for part in head.shards()))

    def loss(
        self,
        batch: Batch,
        taps: Tensor,
        teacher_hidden: Tensor,
        target: Target,
        config: LossConfig,
    ) -> tuple[Tensor, Tensor]:
        first = first_pass(
            self.members[0], batch, taps, teacher_hidden, target, config, scored_by=self.members
        )
        paths = [path_loss(head, first, teacher_hidden, target, config) for head in self.members]
        slots, hits = first.found.loss, first.found.hits
        edges = torch.stack(paths)
        sums = Statistics.of(batch, slots, edges.new_zeros(()), hits).sums.repeat(len(paths), 1)
        sums[:, Statistics.EDGE] = edges.detach()
        return config.edge_weight * edges.sum(), sums


class RunTogether(Run):
    """A run whose sums, norms and curves are by member.

    A member whose loss or gradient is not finite is lost; the others share nothing with it that is
    trained, and go on.
    """

    def __init__(
        self,
        members: Sequence[Member],
        whole: str,
        target: Target,
        samples: TrainingSamples,
        directory: str,
        report: Report,
    ) -> None:
        self.members = members
        self.lost: dict[int, JetspecError] = {}
        self.curves: list[list[dict[str, float]]] = [[] for _ in members]
        head = HeadsTogether([member.head for member in members])
        super().__init__(members[0].config, head, target, samples, directory, World(), report)
        self.config_hash = whole
        self._parts = [clipped_apart(member.head, member.head) for member in members]

    def results(self) -> Iterator[tuple[str, TrainResult]]:
        """(key, finished run) of every member that is not lost; an equal share of the seconds."""
        done = self.take_steps(resume=True)
        share = self._seconds() / len(self.members)
        for place, member in enumerate(self.members):
            if place not in self.lost:
                head = member.head.empty_copy().to(self.device)
                head.load_state_dict(member.head.state_dict())
                yield member.key, self.result(head, done, self.curves[place], share)

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        fused = self.device.type == "cuda"
        return [
            optimizer
            for member in self.members
            for optimizer in make_optimizers(
                member.config, member.head, member.head, sharded=False, fused=fused
            )
        ]

    def _clip(self) -> Tensor:
        largest = self.config.clip_norm
        return torch.stack([clip_gradients(parts, largest) for parts in self._parts])

    def _check(self, health: Health | None) -> None:
        if health is None:
            return
        losses, norms = health.values().tolist()
        for place, values in enumerate(zip(losses, norms, strict=True)):
            if place not in self.lost and not all(map(math.isfinite, values)):
                self.lost[place] = not_finite(health.step, *values)
        if len(self.lost) == len(self.members):
            raise self.lost[0]

    def _report(self, done: int, health: Tensor, estimate: bool) -> None:
        norms = health[1].tolist()
        shared: dict[str, float] = {}
        for place, member in enumerate(self.members):
            if place in self.lost:
                continue
            window = replace(self.window, sums=self.window.sums[place])
            metrics = self._metrics(member.head, window, done, norms[place], estimate)
            self.curves[place].append(metrics)
            own = {"edge_loss", "grad_norm", "tau_estimate"}
            shared |= {name: value for name, value in metrics.items() if name not in own}
            shared[f"edge_loss/{member.name}"] = metrics["edge_loss"]
        self.window = self._new_window()
        self.report(done, shared)

    def _new_window(self) -> Window:
        window = super()._new_window()
        return replace(window, sums=window.sums.expand(len(self.members), -1))

    def _save(self, done: int) -> None:
        if done == self.schedule.total_steps:
            return  # the heads themselves are written next
        uri = step_directory(self.directory, done)
        state = {
            member.key: {
                "weights": _trained(member.head),
                "optimizer": optimizer.state_dict(),
            }
            for member, optimizer in zip(self.members, self.optimizers, strict=True)
        }
        with atomic_write(join(uri, _MEMBERS)) as file:
            torch.save(state, file)
        kept = {
            "keys": [member.key for member in self.members],
            "curves": self.curves,
            "lost": {self.members[i].key: list(error.args) for i, error in self.lost.items()},
            "window": self.window.state(),
            "seconds": self._seconds(),
        }
        close_checkpoint(self.directory, done, kept, self.config_hash)

    def _resume(self) -> int:
        checkpoint = latest_checkpoint(self.directory, self.config_hash)
        if checkpoint is None:
            return 0
        state = checkpoint.state
        place_of = {key: place for place, key in enumerate(state["keys"])}
        if any(member.key not in place_of for member in self.members):
            _remove(self.directory)  # of a time when some of these heads were there
            return 0
        tensors = read_tensors(join(checkpoint.uri, _MEMBERS))
        for member, optimizer in zip(self.members, self.optimizers, strict=True):
            kept = tensors[member.key]
            with torch.no_grad():
                for name, parameter in _trained(member.head).items():
                    parameter.copy_(kept["weights"][name])
            optimizer.load_state_dict(kept["optimizer"])
        places = [place_of[member.key] for member in self.members]
        self.curves = [list(state["curves"][place]) for place in places]
        for place, member in enumerate(self.members):
            if member.key in state["lost"]:
                self.lost[place] = JetspecError(*state["lost"][member.key])
        self.began -= state["seconds"]
        window = dict(state["window"])
        window["sums"] = torch.tensor(window["sums"], device=self.device)[places]
        self.window = Window(**window)
        return checkpoint.step


def _trained(head: DraftHead) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in head.named_parameters() if p.requires_grad}


def _remove(directory: str) -> None:
    fs, path = filesystem(directory)
    if fs.exists(path):
        fs.rm(path, recursive=True)
