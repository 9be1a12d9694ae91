"""What the head cost and after how many served tokens it is paid for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jetspec.evaluation.costs import break_even, hours
from jetspec.results.cells import Subject
from jetspec.results.inputs import Inputs, Record
from jetspec.results.serving import Serving

FORMULA = (
    "tokens to break even = (GPU-hours of regeneration + GPU-hours of training) x 3,600 / "
    "(1 / plain tok/s - 1 / tok/s with the head), both decode-only, at one batch size on one GPU "
    "of the kind that trained"
)


@dataclass(frozen=True)
class Cost:
    """Hours spent, and what serving gives back.

    Attributes:
        regeneration: of all the samples that the head was trained on, summed; None where a
            manifest was not given.
        training: facts of the head's training; None where its manifest was not given.
        hours: their worker-hours together, None where one is not known.
        loads: by batch size {batch, tok_s, plain_tok_s, tokens, hours_of_serving}; none where the
            head was trained on a GPU and measured without one, or the other way round.
    """

    regeneration: Record | None
    training: Record | None
    hours: float | None
    loads: list[dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        kept = ("tokens", "tokens_per_second", "worker_seconds", "gpu_hours")
        parts = (self.regeneration, self.training)
        regeneration, training = (
            part and {name: part[name] for name in names if name in part}
            for part, names in zip(parts, (kept, TRAINING), strict=True)
        )
        return {
            "formula": FORMULA,
            "regeneration": regeneration,
            "training": training,
            "gpu_hours": self.hours,
            "break_even": self.loads,
        }


TRAINING = (
    "steps", "parameters", "seconds", "worker_seconds", "gpu_hours", "tau_estimate",
    "tokens_per_second", "mfu", "samples_key", "more_samples_keys", "counts", "warm_start",
    "earlier_steps", "earlier_worker_seconds",
)  # fmt: skip


def cost(subject: Subject, inputs: Inputs, served: Serving | None) -> Cost:
    """Cost of the subject's head, from the manifests among the inputs."""
    hashes = {r.get("head_hash") for r in [*subject.decoded, *subject.replayed]}
    training = next((head for head in inputs.heads if head["hash"] in hashes), None)
    if training is not None:
        training = {**training, **_last_rates(training["curve"])}
    regeneration = None
    if training is not None:
        keys = [training.get("samples_key"), *training.get("more_samples_keys", ())]
        known = {s["hash"]: s for s in inputs.samples}
        regeneration = _summed([known.get(key) for key in keys])
    spent = [hours(part) if part else None for part in (regeneration, training)]
    total = None if None in spent else sum(part for part in spent if part is not None)
    alike = training is not None and bool(training.get("gpu_hours")) == any(
        r["environment"].get("gpus") for r in subject.decoded
    )
    return Cost(regeneration, training, total, _loads(total, served) if alike else [])


def _summed(samples: Sequence[Record | None]) -> Record | None:
    """Tokens and seconds of several regenerations; None where one is not known."""
    known = [one for one in samples if one is not None]
    if not known or len(known) < len(samples):
        return None
    names = ("tokens", "worker_seconds", "gpu_hours")
    whole: Record = {n: sum(one[n] for one in known) for n in names if all(n in o for o in known)}
    if whole.get("worker_seconds"):
        whole["tokens_per_second"] = whole["tokens"] / whole["worker_seconds"]
    return whole


def _last_rates(curve: Sequence[Record]) -> dict[str, Any]:
    """Rates of a whole run, which its last report has."""
    last: dict[str, Any] = {}
    for row in curve:
        last |= {name: row[name] for name in ("tokens_per_second", "mfu") if name in row}
    return last


def _loads(total: float | None, served: Serving | None) -> list[dict[str, Any]]:
    if total is None or served is None:
        return []
    rows = []
    for load in served.loads:
        paid = break_even(total, load.plain_tok_s, load.tok_s)
        rows.append(
            {
                "batch": load.batch_size,
                "tok_s": load.tok_s,
                "plain_tok_s": load.plain_tok_s,
                "tokens": paid.tokens,
                "hours_of_serving": paid.tokens and paid.tokens / load.tok_s / 3600,
                "reason": paid.reason,
            }
        )
    return rows
