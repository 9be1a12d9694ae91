"""Distillation of a draft head from a frozen target.

The global batch, its order and its anchors are pure functions of (samples, config, step); workers
share them out. A run on N workers takes the steps of a run on one, and a resumed run takes the
steps of an unbroken one.
"""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from jetspec.errors import JetspecError
from jetspec.evaluation.replay import replay_corpus
from jetspec.heads.base import DraftHead
from jetspec.storage import content_hash
from jetspec.targets.target import Target
from jetspec.training.checkpoints import (
    full_head,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from jetspec.training.compiled import compile_parts
from jetspec.training.config import TrainingConfig
from jetspec.training.corpus import BatchMaker, Corpus, Schedule, TrainingSamples
from jetspec.training.flops import peak_flops, utilisation
from jetspec.training.health import Health, not_finite
from jetspec.training.hidden_cache import (
    HiddenCache,
    HiddenStates,
    OnlineTeacher,
    RecordedTeacher,
)
from jetspec.training.optimizers import (
    clip_gradients,
    clipped_apart,
    learning_rate,
    make_optimizers,
    set_learning_rate,
)
from jetspec.training.plans import Plan, Planner, made_ahead
from jetspec.training.step import Distiller, Statistics, Window
from jetspec.training.world import World

_COMPILED_STEPS = 500
"""A run that is shorter ends before its compiled layers have paid for their compilation."""

Report = Callable[[int, dict[str, float]], None]


class Stop(Exception):
    """Raised by a report, on every rank: training ends with a checkpoint of the step reported.

    A later call goes on from there.
    """


@dataclass
class TrainResult:
    """A finished run.

    Attributes:
        head: with its final weights, on the CPU; on every rank.
        steps: done in all, the resumed ones included.
        curve: the reported metrics, one entry a report, `step` among them.
        tau_estimate: of the last estimate.
        counts: samples trained on, held out, cut to a row, and left out for want of an answer.
        seconds: wall time, that of earlier attempts up to their last checkpoint included.
    """

    head: DraftHead
    steps: int
    curve: list[dict[str, float]]
    tau_estimate: float
    counts: dict[str, int]
    seconds: float


def train(
    config: TrainingConfig,
    head: DraftHead,
    target: Target,
    samples: TrainingSamples,
    *,
    directory: str,
    world: World = World(),
    report: Report = lambda step, metrics: None,
    resume: bool = True,
) -> TrainResult:
    """Distil `head` from `target` on the target's own answers.

    Args:
        head: fp32 weights on the target's device; changed in place unless it is sharded.
        directory: where checkpoints go, and where a run that was broken off is taken up again.
        report: called on every rank at the same steps with the same metrics (rates apart).

    Raises:
        JetspecError: no usable samples, a cache beyond its limit, checkpoints of another run, or
            a loss that is not finite.
    """
    return Run(config, head, target, samples, directory, world, report).run(resume)


def freeze_backbone(head: DraftHead) -> None:
    """Leave only the path scores to be trained.

    Raises:
        JetspecError: the head has none with weights of their own.
    """
    kept = {id(parameter) for parameter in head.path_parameters()}
    if not kept:
        raise JetspecError(
            "training.freeze_backbone", True, "the head has no path scores of its own; set edges"
        )
    for parameter in head.parameters():
        parameter.requires_grad_(id(parameter) in kept)


class Run:
    """One training run: its parts, and the loop over its steps."""

    def __init__(
        self,
        config: TrainingConfig,
        head: DraftHead,
        target: Target,
        samples: TrainingSamples,
        directory: str,
        world: World,
        report: Report,
    ) -> None:
        self.config, self.head, self.target = config, head, target
        self.directory, self.world, self.report = directory, world, report
        self.device = target.device
        cuda = self.device.type == "cuda"
        corpus = Corpus.from_samples(samples, config.sequence_length)
        training, self.heldout = corpus.split(config.heldout_fraction)
        self.corpus = corpus
        self.counts = {
            "samples": len(training),
            "heldout": len(self.heldout),
            "cut": corpus.cut,
            "without_answer": len(samples) - len(training) - len(self.heldout),
        }
        self.schedule = Schedule(
            corpus.lengths, training, config, config.sequence_length if cuda else None
        )
        self.maker = BatchMaker(corpus, config, head.depth + 1, fixed_shape=cuda)
        self.plan = Planner(corpus, self.schedule, self.maker, config, world, pinned=cuda)
        self.states = self._hidden_states()
        self.config_hash = content_hash(
            {
                "training": config.shaping(),
                "head": head.config.model_dump(),
                "target": target.fingerprint,
                "samples": corpus.ids,
            }
        )
        if config.freeze_backbone:
            freeze_backbone(head)
        self.distiller = Distiller(head.train(), target, config.loss)
        if cuda and self.schedule.total_steps >= _COMPILED_STEPS:
            compile_parts(head)
        self.model = self._wrapped()
        self.optimizers = self._make_optimizers()
        self._clipped = clipped_apart(head, self.distiller)
        self.curve: list[dict[str, float]] = []
        self.window = self._new_window()
        self._peak = peak_flops(self.device, world.size)
        self.began = time.perf_counter()

    def run(self, resume: bool) -> TrainResult:
        done = self.take_steps(resume)
        head = full_head(self.distiller, self.head).to(self.device)
        return self.result(head, done, self.curve, self._seconds())

    def result(
        self, head: DraftHead, done: int, curve: list[dict[str, float]], seconds: float
    ) -> TrainResult:
        """Of a head that has all its steps; it is finished and put on the CPU."""
        taus = [entry["tau_estimate"] for entry in curve if "tau_estimate" in entry]
        chosen = self.heldout[: self.config.estimate_samples]
        head.eval().finish(self.target, self.corpus, chosen, self.states)
        tau = taus[-1] if taus else math.nan
        return TrainResult(head.cpu(), done, curve, tau, self.counts, seconds)

    def take_steps(self, resume: bool) -> int:
        """Take the steps that are left; returns how many there are in all."""
        total = self.schedule.total_steps
        done = self._resume() if resume else 0
        unchecked: Health | None = None
        with made_ahead(self.plan, range(done, total), self.device) as plans:
            for plan in plans:
                health = Health(done + 1, self._step(done, plan))
                done += 1
                if self.device.type == "cuda":
                    # A GPU's result is read one step late, so that it never waits for the host.
                    self._check(unchecked)
                    unchecked = health
                else:
                    self._check(health)
                logs, estimates = (
                    done % every == 0 or done == total
                    for every in (self.config.log_every, self.config.estimate_every)
                )
                saves = done % self.config.checkpoint_every == 0 or done == total
                if logs or estimates or saves:
                    self._check(unchecked)
                    unchecked = None
                if logs or estimates:
                    try:
                        self._report(done, health.values(), estimates)
                    except Stop:
                        if done < total:
                            self._save(done)
                            raise
                if saves:
                    self._save(done)
        return done

    def _step(self, step: int, plan: Plan) -> Tensor:
        """One optimizer step; returns [loss sum, gradient norm] without reading them."""
        config, world = self.config, self.world
        statistics = Statistics.zero(self.maker.depth, self.device)
        for count, made in enumerate(plan.batches, start=1):
            batch = made.to(self.device)
            taps, hidden = self.states(batch)
            with self._synchronised(count == len(plan.batches)), self._autocast():
                loss, sums = self.model(batch, taps, hidden)
                # Gradients are averaged over ranks, the loss is a mean over the whole step.
                (loss * (world.size / plan.weight)).backward()
            statistics += Statistics(sums)
        rate = learning_rate(config, step, self.schedule.total_steps)
        set_learning_rate(self.optimizers, rate)
        norm = self._clip()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        sums = world.sum(statistics.sums)
        self.window.add(sums, plan.weight, plan.tokens, plan.slots)
        return torch.stack([sums[..., 0], norm.to(sums.dtype)])

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        return make_optimizers(
            self.config,
            self.head,
            self.distiller,
            sharded=isinstance(self.model, FSDPModule),
            fused=self.device.type == "cuda",
        )

    def _clip(self) -> Tensor:
        return clip_gradients(self._clipped, self.config.clip_norm)

    def _check(self, health: Health | None) -> None:
        if health is not None and not bool(torch.isfinite(health.values()).all()):
            raise not_finite(health.step, *health.values().tolist())

    def _report(self, done: int, health: Tensor, estimate: bool) -> None:
        metrics = self._metrics(self.head, self.window, done, float(health[1]), estimate)
        self.window = self._new_window()
        self.curve.append(metrics)
        self.report(done, metrics)

    def _metrics(
        self, head: DraftHead, window: Window, done: int, norm: float, estimate: bool
    ) -> dict[str, float]:
        metrics = {
            "step": float(done),
            **window.metrics(),
            "learning_rate": learning_rate(self.config, done - 1, self.schedule.total_steps),
            "grad_norm": norm,
            "epoch": self.schedule.epoch(done),
        }
        share = utilisation(head, self.target, metrics, self.config, self._peak)
        if share is not None:
            metrics["mfu"] = share
        if not head.scores_paths:
            del metrics["edge_loss"]
        if estimate:
            metrics["tau_estimate"] = self._estimate_tau(head)
        return metrics

    def _estimate_tau(self, head: DraftHead) -> float:
        """tau of greedy chain rounds replayed on held-out samples, which the ranks share out."""
        if isinstance(self.model, FSDPModule):
            head = full_head(self.distiller, head).to(self.device)
        head.eval()
        chosen = self.heldout[: self.config.estimate_samples][self.world.rank :: self.world.size]
        replays = replay_corpus(self.target, head, self.corpus, chosen, self.states)
        head.train()
        totals = [sum(r.committed for r in replays), sum(r.rounds for r in replays)]
        committed, rounds = self.world.sum(torch.tensor(totals, device=self.device)).tolist()
        return committed / rounds

    def _save(self, done: int) -> None:
        save_checkpoint(
            self.directory,
            done,
            self.distiller,
            self.head,
            self.optimizers,
            {"curve": self.curve, "window": self.window.state(), "seconds": self._seconds()},
            world=self.world,
            config_hash=self.config_hash,
            target_fingerprint=self.target.fingerprint,
        )

    def _resume(self) -> int:
        checkpoint = latest_checkpoint(self.directory, self.config_hash)
        if checkpoint is None:
            return 0
        load_checkpoint(checkpoint, self.distiller, self.optimizers)
        self.curve = list(checkpoint.state["curve"])
        self.began -= checkpoint.state["seconds"]
        kept = dict(checkpoint.state["window"])
        kept["sums"] = torch.tensor(kept["sums"], device=self.device)
        self.window = Window(**kept)
        return checkpoint.step

    def _seconds(self) -> float:
        return time.perf_counter() - self.began

    def _new_window(self) -> Window:
        return Window(Statistics.zero(self.maker.depth, self.device).sums)

    def _hidden_states(self) -> HiddenStates:
        if self.config.hidden_states == "online":
            shape = self.config.micro_batch_size, self.config.sequence_length
            if RecordedTeacher.pays(self.target, math.prod(shape)):
                return RecordedTeacher(self.target, self.head.taps, shape)
            return OnlineTeacher(self.target, self.head.taps)
        return HiddenCache(
            self.corpus,
            self.target,
            self.head.taps,
            limit_gb=self.config.cache_limit_gb,
            copies=self.world.local_size,
        )

    def _wrapped(self) -> nn.Module:
        if self.world.size == 1:
            return self.distiller
        if self.config.strategy == "ddp":
            devices = [self.device] if self.device.type == "cuda" else None
            return DistributedDataParallel(self.distiller, device_ids=devices)
        # The compute dtype is autocast's affair on a GPU; sums over ranks stay fp32.
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if self.device.type == "cuda" else None,
            reduce_dtype=torch.float32,
        )
        for part in self.head.shards():
            fully_shard(part, mp_policy=policy)
        fully_shard(self.distiller, mp_policy=policy)
        return self.distiller

    def _synchronised(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Gradients cross ranks once a step, at its last micro batch."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
        elif isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        return contextlib.nullcontext()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.device.type != "cuda":
            return contextlib.nullcontext()
        return torch.autocast("cuda", dtype=torch.bfloat16)
