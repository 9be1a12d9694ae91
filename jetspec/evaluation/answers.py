"""The target's own answers to the evaluation prompts, decoded once and used by every matrix.

They are what replay walks along and what decoded cells are checked against. Decoding them with many
sequences side by side costs a fraction of what the `plain` cells cost, whose clock asks for small
batches.
"""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jetspec import __version__
from jetspec.config import RunConfig
from jetspec.evaluation.cells import ALL_SLICES, Cell
from jetspec.evaluation.config import EvaluationConfig
from jetspec.evaluation.methods import Request, make_runner
from jetspec.peers import Peers
from jetspec.prompts import Prompt
from jetspec.records import environment
from jetspec.sampling_settings import SamplingSettings
from jetspec.storage import (
    content_hash,
    is_complete,
    join,
    read_json,
    read_manifest,
    stage_uri,
    write_json,
    write_manifest,
)

if TYPE_CHECKING:
    from jetspec.evaluation.engines import Engines

STAGE = "answers"
ANSWERS = "answers.json"


def plain_answers(
    config: RunConfig,
    prompts: Mapping[str, Sequence[Prompt]],
    fingerprint: str,
    target: Any,
    temperature: float,
    engines: "Engines | None" = None,
    peers: Peers | None = None,
) -> dict[str, Any]:
    """Plain decoding's text of every prompt; read where it was decoded before.

    Args:
        prompts: by slice; at most `evaluation.prompts_per_slice` of each are answered.
        fingerprint: the target's.
        engines: decode them where they can; None leaves them to the reference loop. Without
            `evaluation.reference_batch`, `regeneration.batch_size` decode side by side.
        peers: processes that make the same call and share out the prompts.

    Returns:
        {uri, decoder, outputs: token ids by prompt id}.
    """
    settings = config.evaluation
    asked = asked_prompts(prompts, settings)
    batch_size = settings.reference_batch or config.regeneration.batch_size
    decodes = engines is not None and engines.decodes(_cell(batch_size, temperature))
    shape = {
        "prompts": [prompt.id for prompt in asked],
        "target_fingerprint": fingerprint,
        "dtype": config.target.dtype,
        "device": config.target.device,
        "decoder": "engine" if decodes else "reference",
        "batch_size": batch_size,
        "max_new_tokens": settings.max_new_tokens,
        "sampling": settings.model_dump(
            mode="json", include={*SamplingSettings.model_fields, "seed", "rule"}
        ),
        "temperature": temperature,
        **({"exact": True} if settings.exact else {}),
        "code_version": __version__,
    }
    key = content_hash(shape)
    uri = stage_uri(config.storage, STAGE, key)
    peers = peers or Peers()
    if not peers.same(lambda: is_complete(uri)):
        _decode(uri, key, shape, asked, target, settings, engines, peers)
        peers.wait()
    read_manifest(uri, kind=STAGE)
    return {"uri": uri, **read_json(join(uri, ANSWERS))}


def asked_prompts(
    prompts: Mapping[str, Sequence[Prompt]], settings: EvaluationConfig
) -> list[Prompt]:
    """The matrix's prompts: the first few of every slice."""
    return [p for name in sorted(prompts) for p in prompts[name][: settings.prompts_per_slice]]


def _cell(batch_size: int, temperature: float) -> Cell:
    return Cell("plain", None, 0, batch_size, ALL_SLICES, temperature)


def _decode(
    uri: str,
    key: str,
    shape: dict[str, Any],
    prompts: Sequence[Prompt],
    target: Any,
    settings: EvaluationConfig,
    engines: "Engines | None",
    peers: Peers,
) -> None:
    requests = [Request(target.render(list(prompt.messages)), prompt.id) for prompt in prompts]
    order = sorted(requests, key=lambda request: len(request.input_ids))
    order = order[peers.rank :: peers.size]
    run = make_runner(
        _cell(shape["batch_size"], shape["temperature"]), target, None, settings, engines
    )
    started = time.perf_counter()
    # The engine keeps its slots filled by itself; the reference loop takes one batch at a time.
    size = max(len(order), 1) if shape["decoder"] == "engine" else shape["batch_size"]
    outputs: dict[str, list[int]] = {}
    decoder = shape["decoder"]
    for begin in range(0, len(order), size):
        part = order[begin : begin + size]
        decoded = run(part, settings.max_new_tokens)
        outputs |= {r.request_id: t for r, t in zip(part, decoded.outputs, strict=True)}
        decoder = decoded.decoder
    for other in peers.all(outputs):
        outputs |= other
    if peers.rank:
        return
    seconds = time.perf_counter() - started
    write_json(join(uri, ANSWERS), {"decoder": decoder, "outputs": outputs})
    tokens = sum(len(answer) for answer in outputs.values())
    write_manifest(
        uri,
        kind=STAGE,
        config_hash=key,
        temperature=shape["temperature"],
        answers=len(outputs),
        tokens=tokens,
        seconds=seconds,
        environment=environment(),
    )
