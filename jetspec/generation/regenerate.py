"""Regeneration as a stage: deterministic shards, each whole or absent, and a manifest at the end.

A shard is a fixed run of prompts, whoever computes it. It is complete when its record
`shard-00007.json` exists; the record is written after the samples and holds their sha256, so a
process killed anywhere leaves complete shards and leftovers that look like none. A rerun computes
the missing shards alone. Which prompts share a batch depends on the shard alone, so an interrupted
run and an unbroken one write the same samples.
"""

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from jetspec import storage
from jetspec.config import RunConfig
from jetspec.errors import JetspecError
from jetspec.generation.backends import open_backend
from jetspec.generation.base import Backend, GenerationRequest, GenerationResult
from jetspec.generation.plan import (
    KIND,
    Plan,
    prepare,
    read_prompts,
    requests_of,
    samples_key,
    sampling_facts,
)
from jetspec.generation.progress import Listener, RegenerationProgress
from jetspec.peers import Peers
from jetspec.prompts import Prompt
from jetspec.records import environment
from jetspec.samples import Accounting, Sample, SampleWriter, Status
from jetspec.targets.load import resolve_device

__all__ = ["Plan", "ShardResult", "prepare", "regenerate", "regenerate_shard", "samples_key"]

DEAD_LETTER = "dead_letter.jsonl"


@dataclass(frozen=True)
class DeadLetter:
    """A request that has no sample, and why. `attempts` is 0 for one that was never tried."""

    id: str
    prompt_id: str
    slice: str
    status: str
    reason: str
    attempts: int


@dataclass(frozen=True)
class ShardResult:
    """The record of one complete shard.

    Attributes:
        counts: requests by status, and `in` of them all.
        tokens: written by the target and kept.
        seconds: one worker's wall time for the shard.
        gpus: held by that worker meanwhile.
        sha256: of the shard's samples.
    """

    counts: dict[str, int]
    tokens: int
    seconds: float
    gpus: int
    sha256: str
    dead_letters: list[DeadLetter]


def regenerate(
    config: RunConfig, on_progress: Listener | None = None, peers: Peers | None = None
) -> dict[str, Any]:
    """Have the target answer every training prompt, in this process; returns the manifest.

    A finished regeneration of the same content is returned as it is. Shards that are already
    complete are kept.

    Args:
        peers: processes that make the same call and share out the shards.

    Raises:
        JetspecError: a wrong setting, an unreachable target, a corrupt shard, or an output that
            cannot be written.
    """
    peers = peers or Peers()
    plan, missing = peers.same(lambda: _begin(config))
    if missing is None:
        return storage.read_manifest(plan.uri, kind=KIND)
    if missing:
        _run_here(plan, missing, on_progress, peers)
        peers.wait()
    return peers.same(lambda: finish(plan))


def _begin(config: RunConfig) -> tuple[Plan, list[int] | None]:
    """The plan, and the shards still to be computed; None where the stage is complete."""
    plan = prepare(config)
    return plan, None if storage.is_complete(plan.uri) else missing_shards(plan)


def _run_here(
    plan: Plan, missing: Sequence[int], on_progress: Listener | None, peers: Peers
) -> None:
    total = sum(plan.asked_in(shard) for shard in missing)
    started = time.monotonic()
    done = tokens = 0

    def count(written: int) -> None:
        nonlocal tokens
        tokens += written
        if on_progress is not None:
            elapsed = time.monotonic() - started
            on_progress(RegenerationProgress(done, total, tokens, elapsed))

    prompts = read_prompts(plan)
    backend: Backend | None = None
    try:
        for shard in peers.taken(missing):
            if backend is None:
                backend = open_for(plan)
                backend.on_tokens = count
            regenerate_shard(backend, plan, prompts, shard)
            done = peers.add("requests", plan.asked_in(shard))
            count(0)
    finally:
        if backend is not None:
            backend.close()


def open_for(plan: Plan) -> Backend:
    """The plan's backend, which must compute as the plan's ids say.

    Raises:
        JetspecError: this machine resolves the target's precision in another way.
    """
    backend = open_backend(plan.config.regeneration, plan.config.target)
    if backend.semantics != plan.semantics:
        backend.close()
        raise JetspecError(
            "target.dtype",
            plan.config.target.dtype,
            f"is {backend.semantics} for this worker, {plan.semantics} elsewhere; set fp32 or bf16",
        )
    return backend


def missing_shards(plan: Plan) -> list[int]:
    """Shards still to be computed.

    Raises:
        JetspecError: a shard is corrupt; nothing is repaired silently.
    """
    return [shard for shard in range(plan.shards) if read_record(plan, shard) is None]


def regenerate_shard(
    backend: Backend,
    plan: Plan,
    prompts: list[Prompt],
    shard: int,
    excluded: Mapping[int, str] | None = None,
) -> ShardResult:
    """Compute one shard and write it, its record last.

    Args:
        prompts: all of the plan's prompts.
        excluded: requests of this shard, by position, that kill their worker, with the reason.
    """
    started = time.monotonic()
    excluded = excluded or {}
    jobs = requests_of(plan, prompts, shard)
    attempts = plan.config.regeneration.max_attempts
    tried = [request for place, (_, request) in enumerate(jobs) if place not in excluded]
    results = {result.id: result for result in answer(backend, tried, attempts)}
    for place, reason in excluded.items():
        results[jobs[place][1].id] = _failed(jobs[place][1], reason)

    samples, dead = [], []
    for prompt, request in jobs:
        result = results[request.id]
        if result.status in ("failed", "skipped"):
            tries = attempts if result.status == "failed" else 0
            reason = result.error or "unknown"
            dead.append(
                DeadLetter(request.id, prompt.id, prompt.slice, result.status, reason, tries)
            )
        else:
            samples.append(_sample(prompt, request, result))

    writer = SampleWriter(plan.uri)
    _discard(writer.uri(shard))
    uri = writer.write(shard, samples)
    failed = sum(letter.status == "failed" for letter in dead)
    record = ShardResult(
        counts=Accounting.of(samples, failed, len(dead) - failed).facts(),
        tokens=sum(sum(sample.loss_mask) for sample in samples),
        seconds=time.monotonic() - started,
        gpus=_gpus(plan.config),
        sha256=storage.sha256_file(uri),
        dead_letters=dead,
    )
    storage.write_json(plan.record_uri(shard), asdict(record))
    return record


def answer(
    backend: Backend, requests: Sequence[GenerationRequest], max_attempts: int
) -> list[GenerationResult]:
    """Every request answered; those that fail are tried `max_attempts` times in all."""
    results: dict[str, GenerationResult] = {}
    pending = list(requests)
    for _ in range(max_attempts):
        results.update((result.id, result) for result in _generate_or_split(backend, pending))
        pending = [request for request in pending if results[request.id].status == "failed"]
    return [results[request.id] for request in requests]


def read_record(plan: Plan, shard: int) -> ShardResult | None:
    """The record of a complete shard, None while the shard is still to be computed.

    Raises:
        JetspecError: the shard or its record is damaged.
    """
    uri, record_uri = plan.shard_uri(shard), plan.record_uri(shard)
    if not storage.exists(record_uri):
        return None
    mend = f"corrupt shard; delete it and {record_uri.rsplit('/', 1)[-1]}, then run again"
    try:
        raw = storage.read_json(record_uri)
        letters = [DeadLetter(**letter) for letter in raw.pop("dead_letters")]
        record = ShardResult(**raw, dead_letters=letters)
        whole = storage.exists(uri) and storage.sha256_file(uri) == record.sha256
    except (JetspecError, TypeError, KeyError, AttributeError) as error:
        raise JetspecError("samples", uri, mend) from error
    if not whole:
        raise JetspecError("samples", uri, mend)
    return record


def finish(plan: Plan) -> dict[str, Any]:
    """Add the shards up and close the stage; returns the manifest.

    `tokens_per_second` is that of one worker: all tokens over all worker-seconds, the loading of
    the target left out.

    Raises:
        JetspecError: no prompt was answered.
    """
    records = [record for i in range(plan.shards) if (record := read_record(plan, i)) is not None]
    if len(records) != plan.shards:
        raise JetspecError("samples", plan.uri, "shards are missing; run the stage again")
    account = sum((Accounting.from_facts(record.counts) for record in records), Accounting())
    if account.check().in_ != plan.asked:
        raise JetspecError("samples", f"{account.in_} of {plan.asked} in", "delete and run again")
    dead = [letter for record in records for letter in record.dead_letters]
    if not account.ok + account.truncated:
        cause = f"the first: {dead[0].reason}" if dead else "all of them loop"
        raise JetspecError(
            "regeneration",
            f"0 of {plan.asked} prompts answered",
            f"{cause}; mend that, delete {plan.uri} and run again",
        )
    with storage.atomic_write(storage.join(plan.uri, DEAD_LETTER), "w") as file:
        file.writelines(json.dumps(asdict(letter), ensure_ascii=False) + "\n" for letter in dead)
    tokens = sum(record.tokens for record in records)
    seconds = sum(record.seconds for record in records)
    return storage.write_manifest(
        plan.uri,
        kind=KIND,
        config_hash=plan.key,
        target_fingerprint=plan.target_fingerprint,
        prompts_hash=plan.prompts_hash,
        semantics=plan.semantics,
        sampling=sampling_facts(plan.config),
        leaks=plan.leaks,
        accounting=account.facts(),
        tokens=tokens,
        worker_seconds=seconds,
        gpu_hours=sum(record.seconds * record.gpus for record in records) / 3600,
        tokens_per_second=tokens / max(seconds, 1e-9),
        environment=environment(),
    )


def _generate_or_split(
    backend: Backend, requests: Sequence[GenerationRequest]
) -> list[GenerationResult]:
    """All answers, though some request makes the backend raise: halve until it stands alone.

    A batch that is too big for the memory comes through the same way.
    """
    if not requests:
        return []
    try:
        return backend.generate(requests)
    except JetspecError:
        raise
    except Exception as error:  # whatever one prompt can do to a model must not end the run
        if len(requests) == 1:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            return [_failed(requests[0], reason)]
    middle = len(requests) // 2
    return [
        result
        for part in (requests[:middle], requests[middle:])
        for result in _generate_or_split(backend, part)
    ]


def _gpus(config: RunConfig) -> int:
    if config.regeneration.backend == "endpoint":
        return 0  # the server's, which are not counted here
    return int(resolve_device(config.target).type == "cuda")


def _failed(request: GenerationRequest, reason: str) -> GenerationResult:
    return GenerationResult(request.id, [], [], request.messages, "failed", reason)


def _sample(prompt: Prompt, request: GenerationRequest, result: GenerationResult) -> Sample:
    return Sample(
        id=request.id,
        prompt_id=prompt.id,
        slice=prompt.slice,
        status=cast(Status, result.status),
        messages=result.messages,
        input_ids=result.input_ids,
        loss_mask=result.loss_mask,
        sample_index=request.sample_index,
    )


def _discard(uri: str) -> None:
    """Remove a shard that a killed worker wrote without its record."""
    fs, path = storage.filesystem(uri)
    with contextlib.suppress(FileNotFoundError):
        fs.rm_file(path)
