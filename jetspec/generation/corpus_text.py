"""Samples from the answers that training prompts' files bring along, instead of the target's own.

They exist to be compared with: a head learns the target's distribution on text that the target
would not have written, which the papers report to cost more than half of the speed-up.
"""

from collections.abc import Sequence
from typing import Any

from jetspec import __version__, storage
from jetspec.config import RunConfig
from jetspec.errors import JetspecError
from jetspec.prompt_files import messages_of, read_rows
from jetspec.prompt_presets import PRESETS
from jetspec.prompts import Prompt, PromptSource, load_prompts, make_prompt
from jetspec.samples import Accounting, Sample, SampleWriter, sample_id
from jetspec.stages import StageResult
from jetspec.targets.load import load_target
from jetspec.targets.target import Target

KIND = "samples"
_SEMANTICS = "corpus-text/1"


def corpus_samples(config: RunConfig) -> StageResult:
    """The samples stage of a run whose text is the corpus's: one sample a prompt with an answer.

    Prompts, their limit and their leak check are those of regeneration, so that both train on the
    same prompts. An answer is cut at `regeneration.max_new_tokens`; a prompt without one, or one
    longer than `regeneration.max_prompt_tokens`, is skipped.

    Raises:
        JetspecError: no training prompt brings an answer.
    """
    found = load_prompts(config.prompts)
    answers = corpus_answers(config.prompts.train)
    if not any(prompt.id in answers for prompt in found.train):
        raise JetspecError(
            "prompts.train",
            "no answers",
            "corpus text needs files whose conversations end with an assistant turn",
        )
    target = load_target(config.target)
    settings = config.regeneration
    limits = {
        "max_new_tokens": settings.max_new_tokens,
        "max_prompt_tokens": settings.max_prompt_tokens,
        "enable_thinking": settings.enable_thinking,
    }
    shape = {
        "text": _SEMANTICS,
        "target": target.fingerprint,
        "prompts": found.hash,
        "answers": storage.content_hash(sorted(answers.items())),
        "limits": limits,
        "code_version": __version__,
    }
    key = storage.content_hash(shape)
    uri = storage.stage_uri(config.storage, KIND, key)
    if storage.is_complete(uri):
        return StageResult(KIND, uri, key, True, _facts(storage.read_manifest(uri, kind=KIND)))
    made = [_sample(p, answers[p.id], target, limits) for p in found.train if p.id in answers]
    samples = [sample for sample in made if sample is not None]
    account = Accounting.of(samples, skipped=len(found.train) - len(samples)).check()
    if not samples:
        raise JetspecError(
            "regeneration.max_prompt_tokens", limits["max_prompt_tokens"], "raise it"
        )
    SampleWriter(uri).write(0, samples)
    manifest = storage.write_manifest(
        uri,
        kind=KIND,
        config_hash=key,
        target_fingerprint=target.fingerprint,
        prompts_hash=found.hash,
        semantics=_SEMANTICS,
        sampling=limits,
        accounting=account.facts(),
        tokens=sum(sum(sample.loss_mask) for sample in samples),
    )
    return StageResult(KIND, uri, key, False, _facts(manifest))


def corpus_answers(sources: Sequence[PromptSource]) -> dict[str, str]:
    """The last assistant turn of every conversation that ends with one, by its prompt's id."""
    answers: dict[str, str] = {}
    for source in sources:
        if source.source == "bundled" or source.source in PRESETS:
            continue  # these keep prompts alone
        for row in read_rows(source.source, "prompts.train"):
            if source.split not in (None, row.get("split")):
                continue
            turns = row.get("messages") or row.get("conversations")
            text = _last_answer(turns)
            if text:
                answers[make_prompt(messages_of(row, row["where"]), "", "").id] = text
    return answers


def _last_answer(turns: Any) -> str | None:
    if not isinstance(turns, list) or not turns or not isinstance(turns[-1], dict):
        return None
    last = turns[-1]
    if (last.get("role") or last.get("from")) not in ("assistant", "gpt"):
        return None
    text = last.get("content", last.get("value"))
    return text.strip() or None if isinstance(text, str) else None


def _sample(prompt: Prompt, answer: str, target: Target, limits: dict[str, Any]) -> Sample | None:
    asked = target.render(list(prompt.messages), enable_thinking=limits["enable_thinking"])
    if len(asked) > limits["max_prompt_tokens"]:
        return None
    told = list(target.tokenizer(answer, add_special_tokens=False)["input_ids"])
    stop = getattr(target.tokenizer, "eos_token_id", None)
    told += [stop] if stop is not None else []
    most = limits["max_new_tokens"]
    return Sample(
        id=sample_id(prompt.messages, None, target.fingerprint, limits, 0, _SEMANTICS),
        prompt_id=prompt.id,
        slice=prompt.slice,
        status="truncated" if len(told) > most else "ok",
        messages=(*prompt.messages, {"role": "assistant", "content": answer}),
        input_ids=asked + told[:most],
        loss_mask=[0] * len(asked) + [1] * len(told[:most]),
        sample_index=0,
    )


def _facts(manifest: dict[str, Any]) -> dict[str, Any]:
    return {name: manifest[name] for name in ("accounting", "tokens", "prompts_hash")}
