"""What each part of a training step costs the host, and what it costs the GPU.

The real loop with its parts called one by one: the GPU is idle when a part begins, so that the
host's time is what it takes to enqueue the part, and the part's kernels are told from all others.
"""

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from jetspec.heads.config import HeadConfig
from jetspec.heads.parallel import new_head
from jetspec.targets.target import Target
from jetspec.training import step as step_module
from jetspec.training import together as together_module
from jetspec.training.config import TrainingConfig
from jetspec.training.corpus import TrainingSamples
from jetspec.training.loop import Run, freeze_backbone
from jetspec.training.plans import made_ahead
from jetspec.training.together import Member, RunTogether, share_backbone
from jetspec.training.world import World

PRODUCERS: dict[str, dict[str, Any]] = {
    "markov": {},
    "markov, other seed": {},
    "markov, projected rows": {"edge_rows": "projected"},
    "markov, no gate": {"edge_gate": False},
    "selector": {"edges": "selector"},
    "context": {"edges": "context"},
    "lattice": {"edges": "lattice", "edge_rows": "projected"},
    "whole vocabulary": {"edge_normaliser": "vocabulary"},
    "second pass": {"rescore": "own"},
}
"""The producers of a group, each as settings of the head beside a rank and learned rows."""

_PART = "part of a step: "  # marks a part in a profile
_REST = "the rest"
_PATHS = "path scores"
_PROFILED = 3  # steps

T = TypeVar("T")


def one_head(
    head: HeadConfig, config: TrainingConfig, target: Target, samples: TrainingSamples
) -> Run:
    """A run of a fresh head that is never saved."""
    made = new_head(head, target)
    return Run(config, made, target, samples, tempfile.gettempdir(), World(), _silent)


def group(
    heads: Mapping[str, HeadConfig],
    config: TrainingConfig,
    target: Target,
    samples: TrainingSamples,
) -> RunTogether:
    """A run of fresh path scores on one fresh frozen head, never saved."""
    config = config.model_copy(update={"freeze_backbone": True})
    members: list[Member] = []
    for name, settings in heads.items():
        head = new_head(settings, target)
        freeze_backbone(head)
        if members:
            share_backbone(members[0].head, head, name)
        members.append(Member(name, name, config, head))
    return RunTogether(members, "costs", target, samples, tempfile.gettempdir(), _silent)


def _silent(step: int, metrics: dict[str, float]) -> None:
    pass


def costs(run: Run, steps: int) -> dict[str, Any]:
    """Milliseconds a step, means over `steps` steps after as many that warm up.

    Returns:
        `step`: as the loop takes it; `host`, `device`: of all parts together, the latter None
        without a GPU; `parts`: {name: {`host`, `device`, `launches`}}, the most costly first.
    """
    _take(run, range(steps))
    began = time.perf_counter()
    _take(run, range(steps, 2 * steps))
    whole = (time.perf_counter() - began) / steps
    parts = Parts(run.device)
    with parts.of(run):
        _one_by_one(run, parts, steps)
    host = dict(parts.host)  # under the profiler it is another
    found: dict[str, dict[str, Any]] = {
        name: {"host": 1e3 * seconds / steps, "device": None, "launches": None}
        for name, seconds in host.items()
    }
    if run.device.type == "cuda":
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with parts.of(run), profile(activities=activities) as seen:
            _one_by_one(run, parts, _PROFILED)
        kernels = kernels_by_part(seen.events() or [])
        for name, values in found.items():
            device, launches = kernels.get(name, (0.0, 0))
            values |= {"device": device / 1e3 / _PROFILED, "launches": launches / _PROFILED}
    busy = [values["device"] for values in found.values() if values["device"] is not None]
    return {
        "step": 1e3 * whole,
        "host": 1e3 * sum(host.values()) / steps,
        "device": sum(busy) if busy else None,
        "parts": dict(sorted(found.items(), key=lambda item: -item[1]["host"])),
    }


def _take(run: Run, steps: range) -> None:
    """As the loop does, without looking at the results."""
    with made_ahead(run.plan, steps, run.device) as plans:
        for step, plan in zip(steps, plans, strict=True):
            run._step(step, plan)
    _wait(run.device)


def _one_by_one(run: Run, parts: "Parts", steps: int) -> None:
    for step in range(steps):
        parts.call(_REST, lambda step=step: run._step(step, run.plan(step)))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Parts:
    """Sums up the host's seconds in every part; what lies in a part of a part is not its own.

    Attributes:
        host: by name.
    """

    def __init__(self, device: torch.device) -> None:
        self.host: dict[str, float] = defaultdict(float)
        self._device = device
        self._open: list[str] = []
        self._inside: list[float] = []  # seconds of the parts in every open one

    def call(self, name: str, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """`function`'s result; path scores are one part with all that is in them."""
        if any(outer.startswith(_PATHS) for outer in self._open):
            return function(*args, **options)
        entered = time.perf_counter()
        _wait(self._device)
        with record_function(_PART + name):
            self._open.append(name)
            self._inside.append(0.0)
            began = time.perf_counter()
            result = function(*args, **options)
            self.host[name] += time.perf_counter() - began - self._inside.pop()
            self._open.pop()
            _wait(self._device)
        if self._inside:
            self._inside[-1] += time.perf_counter() - entered
        return result

    @contextmanager
    def of(self, run: Run) -> Iterator[None]:
        """The parts of `run` are counted while the body runs."""
        lead, names = run.head, {id(run.head): ""}
        if isinstance(run, RunTogether):
            lead = run.members[0].head
            names = {id(member.head): f": {member.name}" for member in run.members}
        replaced: list[tuple[Any, str, str]] = [
            (run, "plan", "batch"),
            (run, "states", "teacher"),
            (run, "model", "loss, the rest"),
            (run, "_clip", "clipping"),
            (lead, "forward", "head"),
            (step_module, "attention_mask", "mask"),
            (step_module, "distil", "distillation"),
            (torch.Tensor, "backward", "backward"),
            *((optimizer, "step", "optimizers") for optimizer in run.optimizers),
        ]
        with ExitStack() as stack:
            for owner, attribute, name in replaced:
                stack.enter_context(self._counted(owner, attribute, lambda *_, name=name: name))
            for module in (step_module, together_module):
                stack.enter_context(
                    self._counted(module, "path_loss", lambda head, *_: _PATHS + names[id(head)])
                )
            yield

    @contextmanager
    def _counted(self, owner: Any, attribute: str, name: Callable[..., str]) -> Iterator[None]:
        own = attribute in vars(owner)
        function = getattr(owner, attribute)

        def counted(*args: Any, **options: Any) -> Any:
            return self.call(name(*args), function, *args, **options)

        setattr(owner, attribute, counted)
        try:
            yield
        finally:
            if own:
                setattr(owner, attribute, function)
            else:
                delattr(owner, attribute)


def kernels_by_part(events: Iterable[Any]) -> dict[str, tuple[float, int]]:
    """(microseconds, launches) of the kernels and copies of every part, from a profile's events.

    A kernel belongs to the innermost part that was open when it began.
    """
    parts, kernels = [], []
    for event in events:
        span = event.time_range
        if event.device_type == DeviceType.CUDA:
            if not event.is_user_annotation:
                kernels.append((span.start, span.end))
        elif event.name.startswith(_PART):
            parts.append((span.start, span.end, event.name.removeprefix(_PART)))
    parts.sort(key=lambda part: (part[0], -part[1]))
    found: dict[str, tuple[float, int]] = {}
    open_parts: list[tuple[float, float, str]] = []
    following = 0
    for begin, end in sorted(kernels):
        while following < len(parts) and parts[following][0] <= begin:
            open_parts.append(parts[following])
            following += 1
        open_parts = [part for part in open_parts if part[1] > begin]
        name = open_parts[-1][2] if open_parts else _REST
        spent, launches = found.get(name, (0.0, 0))
        found[name] = spent + end - begin, launches + 1
    return found


def table(found: Mapping[str, Any]) -> Iterator[str]:
    """Lines for a reader, of what `costs` gives."""
    rows: list[tuple[str, Mapping[str, Any]]]
    rows = [("a step, as the loop takes it", {"host": found["step"]})]
    rows += [("all parts, one by one", found), *found["parts"].items()]
    for name, values in rows:
        numbers = [values.get(key) for key in ("host", "device", "launches")]
        shown = ["" if number is None else f"{number:.2f}" for number in numbers]
        yield f"{name:36} host {shown[0]:>8} ms  device {shown[1]:>8} ms  launches {shown[2]:>8}"
