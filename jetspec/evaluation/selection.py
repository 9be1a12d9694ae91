"""Which of several heads goes on to the matrix: tau of each on the evaluation prompts.

The target answers the evaluation prompts once, greedily; every head's rounds are then replayed
along those answers (evaluation/replay.py), which gives the tau that decoding would.
"""

from collections.abc import Sequence
from typing import Any

from jetspec import __version__
from jetspec.config import RunConfig
from jetspec.decode import decode
from jetspec.evaluation.cells import ALL_SLICES
from jetspec.evaluation.matrix import load_fitting_head
from jetspec.evaluation.replay import Replay, replay_tau
from jetspec.evaluation.statistics import paired_ratio_interval, ratio_interval
from jetspec.prompts import Prompt, load_prompts
from jetspec.samples import Sample
from jetspec.stages import StageResult
from jetspec.storage import (
    content_hash,
    is_complete,
    join,
    read_manifest,
    stage_uri,
    write_json,
    write_manifest,
)
from jetspec.targets.load import load_target, target_fingerprint
from jetspec.targets.target import Target
from jetspec.trees.config import TreeConfig

STAGE = "selection"


def select_head(config: RunConfig, head_uris: Sequence[str]) -> StageResult:
    """Compare heads of one target by tau at the promotion budget.

    Args:
        head_uris: complete head directories; at a tie the earlier one is kept.

    Returns:
        facts: `chosen` (a URI), `heads` (per head its tau with interval, over the first head's).
    """
    hashes = [content_hash(read_manifest(uri, kind="head")["files"]) for uri in head_uris]
    found = load_prompts(config.prompts)
    shape = {
        "heads": hashes,
        "target_fingerprint": target_fingerprint(config.target),
        "prompts_hash": found.hash,
        "evaluation": config.evaluation.model_dump(
            mode="json", include={"prompts_per_slice", "max_new_tokens", "width", "slices"}
        ),
        "promotion": config.promotion.model_dump(mode="json", include={"budget", "builder"}),
        "code_version": __version__,
    }
    key = content_hash(shape)
    uri = stage_uri(config.storage, STAGE, key)
    if is_complete(uri):
        manifest = read_manifest(uri, kind=STAGE)
        return StageResult(STAGE, uri, key, True, _facts(manifest))
    target = load_target(config.target)
    samples = _answers(target, _prompts(config, found.eval), config)
    tree = TreeConfig(
        builder=config.promotion.builder,
        budget=config.promotion.budget,
        width=config.evaluation.width,
    )
    replays = [
        replay_tau(target, load_fitting_head(uri, target), samples, tree) for uri in head_uris
    ]
    facts = _compare(config, list(head_uris), replays)
    write_json(join(uri, "selection.json"), facts)
    write_manifest(uri, kind=STAGE, config_hash=key, **facts)
    return StageResult(STAGE, uri, key, False, facts)


def _prompts(config: RunConfig, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The matrix's own prompts: the first few of every slice that it measures."""
    by_slice: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_slice.setdefault(prompt.slice, []).append(prompt)
    wanted = set(config.evaluation.slices or by_slice)
    if ALL_SLICES in wanted:
        wanted = set(by_slice)
    limit = config.evaluation.prompts_per_slice
    return [p for name in sorted(wanted & set(by_slice)) for p in by_slice[name][:limit]]


def _answers(target: Target, prompts: Sequence[Prompt], config: RunConfig) -> list[Sample]:
    """The target's greedy answers to the prompts, as samples to replay."""
    rendered = [target.render(list(prompt.messages)) for prompt in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(rendered[i]))
    size = max(config.regeneration.batch_size, 1)
    samples = []
    for begin in range(0, len(order), size):
        chosen = order[begin : begin + size]
        result = decode(
            target,
            [rendered[i] for i in chosen],
            max_new_tokens=config.evaluation.max_new_tokens,
        )
        for i, generation in zip(chosen, result.generations, strict=True):
            prompt = prompts[i]
            samples.append(
                Sample(
                    id=prompt.id,
                    prompt_id=prompt.id,
                    slice=prompt.slice,
                    status="ok",
                    messages=prompt.messages,
                    input_ids=rendered[i] + generation.tokens,
                    loss_mask=[0] * len(rendered[i]) + [1] * len(generation.tokens),
                    sample_index=0,
                )
            )
    return samples


def _compare(
    config: RunConfig, head_uris: list[str], replays: Sequence[Sequence[Replay]]
) -> dict[str, Any]:
    """tau of every head, and the ratio to the first head's over the same prompts."""
    interval = {"samples": config.evaluation.bootstrap_samples, "seed": config.evaluation.seed}
    columns = [([r.committed for r in rows], [r.rounds for r in rows]) for rows in replays]
    rows = []
    for uri, (committed, rounds) in zip(head_uris, columns, strict=True):
        tau = ratio_interval(committed, rounds, **interval)
        ratio = paired_ratio_interval(committed, rounds, *columns[0], **interval)
        value, ci = tau.rounded() if tau else (None, None)
        over, over_ci = ratio.rounded() if ratio else (None, None)
        rows.append({"head": uri, "tau": value, "ci": ci, "ratio": over, "ratio_ci": over_ci})
    best = max(range(len(rows)), key=lambda i: (rows[i]["tau"] or 0.0, -i))
    return {
        "chosen": head_uris[best],
        "budget": config.promotion.budget,
        "prompts": len(replays[0]),
        "heads": rows,
    }


def _facts(manifest: dict[str, Any]) -> dict[str, Any]:
    return {name: manifest[name] for name in ("chosen", "budget", "prompts", "heads")}
