"""What a regeneration will write: resolved once, then the same for every worker."""

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jetspec import storage
from jetspec.config import RunConfig
from jetspec.errors import JetspecError
from jetspec.generation.backends import semantics
from jetspec.generation.base import GenerationRequest
from jetspec.generation.config import RegenerationConfig
from jetspec.prompts import Prompt, load_prompts
from jetspec.samples import sample_id, shard_count, shard_name
from jetspec.targets.load import target_fingerprint

KIND = "samples"
_PROMPTS = "prompts.jsonl"
_BATCHES_PER_SHARD = 4


@dataclass(frozen=True)
class Plan:
    """One regeneration: its settings, its output directory, and what its ids are made of.

    Small enough to hand to every worker; the prompts lie in the output directory.
    """

    config: RunConfig
    uri: str
    key: str
    target_fingerprint: str
    prompts_hash: str
    semantics: str
    leaks: dict[str, Any]
    prompts: int

    @property
    def shard_size(self) -> int:
        return shard_size(self.config)

    @property
    def shards(self) -> int:
        return shard_count(self.prompts, self.shard_size)

    @property
    def asked(self) -> int:
        """Samples asked for in all."""
        return self.prompts * self.config.regeneration.samples_per_prompt

    def asked_in(self, shard: int) -> int:
        prompts = min(self.shard_size, self.prompts - shard * self.shard_size)
        return prompts * self.config.regeneration.samples_per_prompt

    def shard_uri(self, shard: int) -> str:
        return storage.join(self.uri, shard_name(shard))

    def record_uri(self, shard: int) -> str:
        return storage.join(self.uri, shard_name(shard).replace(".parquet", ".json"))


def shard_size(config: RunConfig) -> int:
    settings = config.regeneration
    return settings.shard_size or _BATCHES_PER_SHARD * settings.batch_size


def samples_key(config: RunConfig, target_fingerprint: str, prompts_hash: str) -> str:
    """Hash of everything that shapes the samples and their files; who computes them does not."""
    settings = config.regeneration
    return storage.content_hash(
        {
            "target": target_fingerprint,
            "prompts": prompts_hash,
            "semantics": semantics(settings, config.target),
            "sampling": sampling_facts(config),
            "max_prompt_tokens": settings.max_prompt_tokens,
            "samples_per_prompt": settings.samples_per_prompt,
            "loop_min_repeats": settings.loop_min_repeats,
            "shard_size": shard_size(config),
        }
    )


def sampling_facts(config: RunConfig) -> dict[str, Any]:
    """The settings that decide which tokens are written, part of every sample's id."""
    names = {"max_new_tokens", "temperature", "top_p", "seed", "turns", "enable_thinking"}
    # Optional ones are in the dump only where they are set.
    return config.regeneration.model_dump(mode="json", include=names | RegenerationConfig.optional)


def prepare(config: RunConfig) -> Plan:
    """Resolve what will be written, and make its directory ready.

    Raises:
        JetspecError: settings that contradict each other, no target, no prompts, or no place.
    """
    settings = config.regeneration
    if settings.samples_per_prompt > 1 and settings.temperature == 0:
        raise JetspecError(
            "regeneration.samples_per_prompt",
            settings.samples_per_prompt,
            "greedy answers are all equal; ask for 1 or set a temperature above 0",
        )
    config = _with_absolute_paths(config)
    fingerprint = target_fingerprint(config.target)
    prompts = load_prompts(config.prompts)
    key = samples_key(config, fingerprint, prompts.hash)
    plan = Plan(
        config=config,
        uri=storage.stage_uri(config.storage, KIND, key),
        key=key,
        target_fingerprint=fingerprint,
        prompts_hash=prompts.hash,
        semantics=semantics(settings, config.target),
        leaks=prompts.leaks.facts(),
        prompts=len(prompts.train),
    )
    if not storage.is_complete(plan.uri):
        remove_leftovers(plan)
        if not storage.exists(storage.join(plan.uri, _PROMPTS)):
            with storage.atomic_write(storage.join(plan.uri, _PROMPTS), "w") as file:
                file.writelines(
                    json.dumps(asdict(prompt), ensure_ascii=False) + "\n"
                    for prompt in prompts.train
                )
    return plan


def read_prompts(plan: Plan) -> list[Prompt]:
    """The plan's prompts in their order.

    Raises:
        JetspecError: the file is missing or damaged.
    """
    uri = storage.join(plan.uri, _PROMPTS)
    fs, path = storage.filesystem(uri)
    try:
        with fs.open(path, "rb") as file:
            rows = [json.loads(line) for line in file]
        prompts = [Prompt(**{**row, "messages": tuple(row["messages"])}) for row in rows]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise JetspecError("prompts", uri, f"cannot be read ({error}); delete it") from error
    if len(prompts) != plan.prompts:
        raise JetspecError("prompts", uri, f"{len(prompts)} of {plan.prompts} prompts; delete it")
    return prompts


def requests_of(
    plan: Plan, prompts: list[Prompt], shard: int
) -> list[tuple[Prompt, GenerationRequest]]:
    """The requests of one shard, the samples of one prompt side by side."""
    config, size = plan.config, plan.shard_size
    return [
        (prompt, _request(plan, prompt, index))
        for prompt in prompts[shard * size : (shard + 1) * size]
        for index in range(config.regeneration.samples_per_prompt)
    ]


def remove_leftovers(plan: Plan) -> None:
    """Delete what a killed writer left: `*.part` files, and shards without their record."""
    fs, path = storage.filesystem(plan.uri)
    names = storage.list_files(plan.uri)
    shards = {shard_name(i) for i in range(plan.shards) if not storage.exists(plan.record_uri(i))}
    for name in names:
        if name.endswith(".part") or name in shards:
            with contextlib.suppress(FileNotFoundError):
                fs.rm_file(f"{path}/{name}")


def _request(plan: Plan, prompt: Prompt, index: int) -> GenerationRequest:
    seed = f"{plan.config.regeneration.seed}:{prompt.id}:{index}"
    return GenerationRequest(
        id=sample_id(
            prompt.messages,
            None,
            plan.target_fingerprint,
            sampling_facts(plan.config),
            index,
            plan.semantics,
        ),
        messages=prompt.messages,
        sample_index=index,
        # Below 2**62, as the counter-based noise of jetspec/sampling.py takes its keys.
        seed=int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big") >> 2,
    )


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    """Workers run in directories of their own."""
    target = config.target
    source = Path(target.source).expanduser()
    update = {"cache_dir": str(Path(target.cache_dir).expanduser().absolute())}
    if target.source != "embedded" and source.exists():
        update["source"] = str(source.absolute())
    return config.model_copy(
        update={
            "target": target.model_copy(update=update),
            "storage": storage.absolute(config.storage),
        }
    )
