"""Samples that a tiny target really answered, for tests of training and replay."""

from pathlib import Path
from typing import Any

import torch

from jetspec.decode import decode
from jetspec.samples import Sample, SampleWriter
from jetspec.storage import write_manifest
from jetspec.targets.target import Target


def greedy_samples(
    target: Target, count: int = 16, tokens: int = 24, seed: int = 0, **options: Any
) -> list[Sample]:
    """`count` random prompts of 3 to 12 tokens with the target's greedy answers."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(3, 13, (count,), generator=generator).tolist()
    prompts = [torch.randint(4, 54, (n,), generator=generator).tolist() for n in sizes]
    result = decode(target, prompts, max_new_tokens=tokens, **options)
    samples = []
    for index, (prompt, answer) in enumerate(zip(prompts, result.generations, strict=True)):
        samples.append(sample(index, prompt + answer.tokens, [len(prompt)]))
    return samples


def sample(index: int, tokens: list[int], turns: list[int]) -> Sample:
    """A sample whose loss mask flips at every place in `turns`, beginning with a prompt."""
    mask = [sum(place >= turn for turn in turns) % 2 for place in range(len(tokens))]
    return Sample(
        id=f"sample-{index:04d}",
        prompt_id=f"prompt-{index:04d}",
        slice="chat",
        status="ok",
        messages=({"role": "user", "content": "x"},),
        input_ids=list(tokens),
        loss_mask=mask,
        sample_index=0,
    )


def write_samples(samples: list[Sample], directory: str) -> str:
    """A complete samples stage with one shard."""
    SampleWriter(directory).write(0, samples)
    write_manifest(directory, kind="samples", config_hash="test")
    return directory


def save_target(target: Target, directory: Path) -> str:
    """The target as a Hugging Face directory that `load_target` reads."""
    target.model.save_pretrained(directory)
    target.tokenizer.save_pretrained(directory)
    return str(directory)
