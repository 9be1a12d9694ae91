"""Chi-square tests of decoded tokens against the target's own distribution."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from jetspec.decode import decode
from jetspec.sampling import SamplingParams, target_distribution

LOSSLESS = 1e-3  # p-values of a lossless rule lie above, with seeds that are fixed
BIASED = 1e-6  # and those of a biased one far below


def p_value(counts: Tensor, expected: Tensor) -> float:
    """Of counts [n] against expected counts [n]; rare outcomes are pooled.

    An outcome that must not occur and does has p-value 0.
    """
    if counts[expected == 0].sum() > 0:
        return 0.0
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]]).double()
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) < 2:
        return 1.0
    return float(stats.chisquare(observed.numpy(), wanted.numpy(), sum_check=False).pvalue)


def decoded_p_value(
    target: Any, prompt: Sequence[int], params: SamplingParams, draws: int, **settings: Any
) -> float:
    """The smaller of the p-values of tokens (1, 2) and (2, 3) over `draws` seeded requests.

    Token 1 comes from the prefill, so (2, 3) are the first two that a verification rule commits.
    """
    size = target.vocab_size
    result = decode(
        target,
        [list(prompt)] * draws,
        sampling=params,
        max_new_tokens=3,
        stop_token_ids=(),
        **settings,
    )
    tokens = torch.tensor([generation.tokens for generation in result.generations])
    p = joint_distribution(target, prompt, params).double()
    values = []
    for pair, expected in ((tokens[:, :2], p.sum(2)), (tokens[:, 1:], p.sum(0))):
        counts = torch.bincount(pair[:, 0] * size + pair[:, 1], minlength=size**2)
        values.append(p_value(counts, expected.flatten() * draws))
    return min(values)


@torch.no_grad()
def joint_distribution(target: Any, prompt: Sequence[int], params: SamplingParams) -> Tensor:
    """p [V, V, V] of the three tokens that plain sampling writes after `prompt`."""
    size = target.vocab_size
    triples = torch.tensor(list(itertools.product(range(size), repeat=3)))
    text = torch.cat([torch.tensor(prompt).expand(len(triples), -1), triples], 1)
    joint = torch.ones(len(triples))
    all_logits = target.model(text).logits
    for place in range(len(prompt), len(prompt) + 3):
        seen = torch.zeros(len(text), size, dtype=torch.bool).scatter_(1, text[:, :place], True)
        log_p = target_distribution(all_logits[:, place - 1], params, seen)
        joint *= log_p.exp().gather(1, text[:, place : place + 1])[:, 0]
    return joint.view(size, size, size)
