"""tau of every budget and method along the target's own greedy answers, as records of a matrix.

Nothing is decoded but the answers themselves, once: `everywhere.py` has the head's methods, prompt
lookup needs no model at all. The records look like those of decoded cells; their speeds are empty
and their decoder is `replay`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from jetspec.config import RunConfig
from jetspec.drafters.lookup import LookupDrafter
from jetspec.errors import JetspecError
from jetspec.evaluation.agreement import Shape
from jetspec.evaluation.answers import asked_prompts, plain_answers
from jetspec.evaluation.bench import open_engines
from jetspec.evaluation.cells import ALL_SLICES, BASELINES, Cell
from jetspec.evaluation.config import EvaluationConfig
from jetspec.evaluation.everywhere import replay_everywhere
from jetspec.evaluation.matrix import Plan, load_models, make_plan, read_record, write_record
from jetspec.evaluation.methods import cell_tree
from jetspec.evaluation.record import acceptance_by_depth, by_slice, tau_of, withheld
from jetspec.evaluation.replay import Replay
from jetspec.evaluation.scoring import scored_head
from jetspec.generation.loops import is_looping
from jetspec.peers import Peers
from jetspec.prompts import Prompt
from jetspec.records import environment
from jetspec.samples import Sample
from jetspec.stages import StageResult
from jetspec.storage import is_complete, read_manifest, stage_uri, write_manifest
from jetspec.trees.config import TreeConfig

STAGE = "replay"
DECODER = "replay"
_WHY = "replayed along the target's own answers: nothing was decoded"
_METHODS = ("lookup", "chain", "tree")
# Greedy rounds are the same at every load; what says how clocks run has no say here.
_ALONE: dict[str, Any] = {
    "batch_sizes": (1,),
    "temperatures": (0.0,),
    "max_batches": None,
    "method_batches": {"hf_eager": 0},
}
OnProgress = Callable[[int, int, dict[str, Any]], None]


def replay(
    config: RunConfig,
    head_uri: str | None,
    on_progress: OnProgress | None = None,
    peers: Peers | None = None,
) -> StageResult:
    """tau of the matrix's drafting cells at temperature 0, on all of its prompts.

    A rerun measures the slices that are missing. The run's batch sizes and temperatures are not
    looked at.

    Args:
        on_progress: called with (cells done, cells in all, record) after every cell.
        peers: processes that make the same call and share out the answers and the slices.

    Raises:
        JetspecError: as `matrix.evaluate`; or a method or setting that cannot be replayed.
    """
    peers, original = peers or Peers(), config
    config, plan, todo = peers.same(lambda: _begin(original, head_uri))
    settings = config.evaluation
    if todo is None:
        return _result(plan, read_manifest(plan.uri, kind=STAGE), reused=True)
    if todo:
        target, head = load_models(config, head_uri)
        bare = settings.model_copy(update={"methods": ("plain",)})
        plain = open_engines(target, None, bare, at_once=False)
        fingerprint = plan.facts["target_fingerprint"]
        answers = plain_answers(config, plan.prompts, fingerprint, target, 0.0, plain, peers)
        del plain  # its pages: the drafts need the memory
        facts = {
            **plan.facts,
            "reference_uri": answers["uri"],
            "device": str(target.device),
            "dtype": str(target.dtype).removeprefix("torch."),
            "environment": environment(),
        }
        before = len(plan.cells) - sum(map(len, todo.values()))
        for name, own in peers.taken(list(todo.items())):
            prompts = asked_prompts({name: plan.prompts[name]}, settings)
            samples = [_sample(target, prompt, answers["outputs"][prompt.id]) for prompt in prompts]
            texts = [_text_row(sample, target) for sample in samples]
            for cell, replays in _replays(own, target, head, samples, settings).items():
                record = _record(cell, replays, texts, settings, facts)
                write_record(plan, cell, record)
                done = before + peers.add("cells", 1)
                if on_progress:
                    on_progress(done, len(plan.cells), record)
        peers.wait()
    return peers.same(lambda: _finish(plan))


def _begin(
    config: RunConfig, head_uri: str | None
) -> tuple[RunConfig, Plan, dict[str, list[Cell]] | None]:
    """What is to be replayed, and the cells without a record by slice; None where all is done."""
    config, plan = replay_plan(config, head_uri)
    if is_complete(plan.uri):
        return config, plan, None
    todo: dict[str, list[Cell]] = {}
    for cell in plan.cells:
        if read_record(plan, cell) is None:
            todo.setdefault(cell.slice, []).append(cell)
    return config, plan, todo


def _finish(plan: Plan) -> StageResult:
    keys = [cell.key for cell in plan.cells]
    manifest = write_manifest(
        plan.uri, kind=STAGE, config_hash=plan.key, cells=keys, environment=environment(),
        **plan.facts,
    )  # fmt: skip
    return _result(plan, manifest, reused=False)


def replay_plan(config: RunConfig, head_uri: str | None) -> tuple[RunConfig, Plan]:
    """The run without what replay does not look at, and what is to be replayed."""
    settings = config.evaluation
    shaped = {
        "logit_bias": bool(settings.logit_bias),
        "repetition_penalty": settings.repetition_penalty != 1,
        "rule": settings.rule == "residual",
    }
    for name, wrong in shaped.items():
        if wrong:
            value = getattr(settings, name)
            raise JetspecError(f"evaluation.{name}", value, "replay is greedy; leave it out")
    slices = settings.slices if settings.slices and ALL_SLICES not in settings.slices else None
    alone = settings.model_copy(update={**_ALONE, "slices": slices})
    config = config.model_copy(update={"evaluation": alone})
    whole = make_plan(config, head_uri)
    drafted = tuple(cell for cell in whole.cells if cell.method in _METHODS)
    if len(drafted) < sum(cell.method not in BASELINES for cell in whole.cells) or not drafted:
        given = ", ".join(settings.methods)
        raise JetspecError("evaluation.methods", given, f"replay has {', '.join(_METHODS)} alone")
    uri = stage_uri(config.storage, STAGE, whole.key)
    return config, Plan(uri, whole.key, drafted, whole.prompts, whole.facts)


def _result(plan: Plan, manifest: dict[str, Any], *, reused: bool) -> StageResult:
    facts = {name: manifest.get(name) for name in ("head_uri", "target_fingerprint")}
    return StageResult(STAGE, plan.uri, plan.key, reused, {**facts, "cells": len(plan.cells)})


def _sample(target: Any, prompt: Prompt, answer: list[int]) -> Sample:
    rendered = target.render(list(prompt.messages))
    return Sample(
        id=prompt.id,
        prompt_id=prompt.id,
        slice=prompt.slice,
        status="ok",
        messages=prompt.messages,
        input_ids=rendered + answer,
        loss_mask=[0] * len(rendered) + [1] * len(answer),
        sample_index=0,
    )


def _replays(
    cells: Sequence[Cell],
    target: Any,
    head: Any | None,
    samples: Sequence[Sample],
    settings: EvaluationConfig,
) -> dict[Cell, list[Replay]]:
    """Every cell's rounds, the head's all in one pass."""
    copied = {
        cell: [replay_lookup(sample, settings.lookup_ngram, cell.budget) for sample in samples]
        for cell in cells
        if cell.method == "lookup"
    }
    drafted = [cell for cell in cells if cell not in copied]
    if not drafted:
        return copied
    assert head is not None
    shapes = [Shape(_tree(cell, head, settings), cell.scores) for cell in drafted]
    return copied | dict(
        zip(drafted, replay_everywhere(target, head, samples, shapes), strict=True)
    )


def _tree(cell: Cell, head: Any, settings: EvaluationConfig) -> TreeConfig:
    tree = cell_tree(cell, scored_head(head, cell.scores), settings)
    assert tree is not None
    return tree


def replay_lookup(sample: Sample, max_ngram: int, depth: int) -> Replay:
    """The rounds of prompt lookup along one sample's answer."""
    drafter = LookupDrafter(max_ngram=max_ngram, depth=depth)
    text, at = sample.input_ids, sample.loss_mask.index(1) if 1 in sample.loss_mask else None
    rounds: list[tuple[int, int]] = []
    last = len(text) - 1
    while at is not None and at < last:
        draft = drafter.propose(torch.tensor([text[at]]), [text[: at + 1]])
        exists = (draft.edge_scores[0, :, 0, 0] > -torch.inf).tolist()
        copied = draft.tokens[0, :, 0].tolist()
        ahead = text[at + 1 : last + 1]
        right = [e and c == t for e, c, t in zip(exists, copied, ahead, strict=False)]
        count = right.index(False) if False in right else len(right)
        rounds.append((count, min(count + 1, last - at)))
        at += rounds[-1][1]
    return Replay(
        id=sample.id,
        prompt_id=sample.prompt_id,
        rounds=len(rounds),
        committed=sum(committed for _, committed in rounds),
        accepted=tuple(count for count, _ in rounds),
    )


def _record(
    cell: Cell,
    replays: Sequence[Replay],
    texts: Sequence[dict[str, Any]],
    settings: EvaluationConfig,
    facts: dict[str, Any],
) -> dict[str, Any]:
    rows = [
        {**text, "rounds": found.rounds, "tokens": found.committed}
        for found, text in zip(replays, texts, strict=True)
    ]
    quiet = [row for row in rows if not row["looping"]]
    tau, tau_ci = tau_of(rows, settings)
    tau_quiet, tau_quiet_ci = tau_of(quiet, settings)
    return {
        **cell.as_json(),
        "status": "ok",
        "reason": None,
        "decoder": DECODER,
        "prompts": len(rows),
        "tau": tau,
        "tau_ci": tau_ci,
        "tau_not_looping": tau_quiet,
        "tau_not_looping_ci": tau_quiet_ci,
        "looping": len(rows) - len(quiet),
        "by_slice": by_slice(rows, settings),
        "rounds": sum(row["rounds"] for row in rows),
        "tokens": sum(row["tokens"] for row in rows),
        "tok_s_decode": None,
        "tok_s_total": None,
        "speedup": {f"vs_{base}": withheld(_WHY) for base in BASELINES},
        "acceptance_by_depth": acceptance_by_depth([n for r in replays for n in r.accepted]),
        "output_check": None,
        "per_prompt": rows,
        "batches": [],
        "settings": settings.model_dump(mode="json"),
        "interleaved_with": [],
        **facts,
    }


def _text_row(sample: Sample, target: Any) -> dict[str, Any]:
    """What a prompt's row says whatever drafted."""
    prompt = len(sample.loss_mask) - sum(sample.loss_mask)
    text = [token for token in sample.input_ids[prompt:] if token not in target.eos_token_ids]
    return {
        "prompt_id": sample.prompt_id,
        "slice": sample.slice,
        "prompt_tokens": prompt,
        "looping": is_looping(text),
    }
