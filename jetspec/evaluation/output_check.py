"""The output check of a cell: is the text what plain decoding gives?

In fp32, and in the engine's bitwise mode, every token must be equal. In bf16 otherwise a row of
logits rounds differently beside other rows, so a first difference between two tokens whose logits
lie within rounding of the best one is a near tie and not an error; both numbers are reported.

The residual rule writes another draw from the target's distribution. There the text is asked
whether it is one: the sum of its tokens' log-probabilities must lie where the target expects it.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from jetspec.evaluation.cells import BASELINES, Cell
from jetspec.evaluation.config import EvaluationConfig
from jetspec.evaluation.methods import Request, sampling_params
from jetspec.sampling import (
    SamplingParams,
    edited_logits,
    gumbel_noise,
    request_keys,
    seen_tokens,
    target_distribution,
)

# Hugging Face's padded batch adds in another order than our loop, and the engine in a third; in
# fp32 their logits differ by some hundred units in the last place, where those of one decoder must
# give equal tokens.
_OTHER_KERNELS_ULPS = 512.0
_LARGEST_Z = 4.0  # one lossless cell in sixteen thousand lies beyond
_FILTER_EDGE = 1e-3  # share of tokens that rounding may put outside top-p, top-k or min-p


def check_outputs(
    target: Any,
    requests: Mapping[str, Request],
    reference: Mapping[str, Sequence[int]],
    outputs: Mapping[str, Sequence[int]],
    cell: Cell,
    config: EvaluationConfig,
    *,
    other_kernels: bool = False,
) -> dict[str, Any]:
    """Compare a cell's outputs with plain decoding's, prompt by prompt.

    Args:
        requests, reference, outputs: by prompt id.
        other_kernels: something else decoded the cell than decoded plainly.

    Returns:
        passed; compared, differing and near_ties as numbers of prompts; the rule; gaps, how many
        prompts' first differences lie so many ulps apart, rounded up (`ended`: one text ended
        there); and the five widest of them.
    """
    other_kernels = other_kernels or cell.method == "hf_eager"
    fp32 = target.dtype == torch.float32
    exact = (fp32 or config.exact) and not other_kernels
    ulps = _OTHER_KERNELS_ULPS if fp32 and other_kernels else config.near_tie_ulps
    sampling = sampling_params(config, cell.temperature)
    if config.rule == "residual" and cell.method not in BASELINES:
        return check_distribution(target, requests, outputs, sampling)
    compared = [prompt_id for prompt_id in outputs if prompt_id in reference]
    differences: list[dict[str, Any]] = []
    for prompt_id in compared:
        ours, plain = outputs[prompt_id], reference[prompt_id]
        at = first_difference(plain, ours)
        if at is None:
            continue
        gap = None
        if at < min(len(ours), len(plain)):
            pair = (plain[at], ours[at])
            gap = gap_in_ulps(target, requests[prompt_id], plain[:at], pair, sampling)
        near = gap is not None and gap <= ulps
        gap = None if gap is None else round(gap, 2)
        differences.append({"prompt_id": prompt_id, "position": at, "near_tie": near, "ulps": gap})
    near_ties = sum(d["near_tie"] for d in differences)
    errors = len(differences) - (0 if exact else near_ties)
    differences.sort(key=lambda d: math.inf if d["ulps"] is None else d["ulps"], reverse=True)
    gaps = Counter("ended" if d["ulps"] is None else str(math.ceil(d["ulps"])) for d in differences)
    return {
        "passed": bool(compared) and errors == 0 and len(compared) == len(outputs),
        "compared": len(compared),
        "differing": len(differences),
        "near_ties": near_ties,
        "rule": "identical" if exact else f"near ties within {ulps:g} ulps allowed",
        "gaps": dict(sorted(gaps.items())),
        "differences": differences[:5],
    }


def first_difference(plain: Sequence[int], ours: Sequence[int]) -> int | None:
    """Index of the first token that differs or that only one of the two has; None when equal."""
    for i, (a, b) in enumerate(zip(plain, ours, strict=False)):
        if a != b:
            return i
    return None if len(plain) == len(ours) else min(len(plain), len(ours))


@torch.no_grad()
def check_distribution(
    target: Any,
    requests: Mapping[str, Request],
    outputs: Mapping[str, Sequence[int]],
    sampling: SamplingParams,
) -> dict[str, Any]:
    """Whether the outputs look drawn from the target: one number over all of their tokens.

    Under plain sampling log p of a token, less its expectation given the text before, sums to zero
    on average, with the sum of the variances; z is the sum in standard deviations. A rule that
    favours what the draft likes, or shuns it, moves z.

    Returns:
        as `check_outputs`, and `z`.
    """
    excess, variance, outside, tokens = 0.0, 0.0, 0, 0
    for prompt_id, output in outputs.items():
        prompt = requests[prompt_id].input_ids
        logits = _logits(target, [*prompt, *output[:-1]])[len(prompt) - 1 :]  # [n, V]
        seen = seen_tokens(sampling, [prompt], logits.shape[-1], target.device)
        for row, token in zip(logits, output, strict=True):
            log_p = target_distribution(row[None], sampling, seen)[0].double()
            if seen is not None:
                seen[0, token] = True
            tokens += 1
            if log_p[token] == -math.inf:
                outside += 1
                continue
            p, surprise = log_p.exp(), log_p.clamp(min=-1e9)
            mean = (p * surprise).sum()
            excess += float(log_p[token] - mean)
            variance += float((p * (surprise - mean) ** 2).sum())
    z = excess / math.sqrt(variance) if variance else 0.0
    return {
        "passed": bool(outputs) and abs(z) <= _LARGEST_Z and outside <= _FILTER_EDGE * tokens,
        "compared": len(outputs),
        "differing": 0,
        "near_ties": 0,
        "rule": f"drawn from the target's distribution: |z| up to {_LARGEST_Z:g} allowed",
        "z": round(z, 3),
        "differences": [],
    }


def _logits(target: Any, text: Sequence[int]) -> torch.Tensor:
    """The target's logits [T, V] over one text, from one uncached forward."""
    ids = torch.tensor([text], device=target.device)
    length = ids.shape[1]
    causal = torch.ones(1, length, length, dtype=torch.bool, device=target.device).tril()
    positions = torch.arange(length, device=target.device)[None]
    return target.logits(target.forward(ids, position_ids=positions, mask=causal).hidden[0])


@torch.no_grad()
def gap_in_ulps(
    target: Any,
    request: Request,
    prefix: Sequence[int],
    tokens: tuple[int, int],
    sampling: SamplingParams,
) -> float:
    """How far the worse of two tokens lies below the best one after the common prefix, in units in
    the last place of the largest logit, in the target's type.

    The logits come from one uncached forward over prompt and prefix. Above temperature 0 a token
    wins by log p plus its noise, so those sums are compared, and rounding is scaled alike.
    """
    text = [*request.input_ids, *prefix]
    length = len(text)
    logits = _logits(target, text)[-1:]  # [1, V]
    seen = seen_tokens(sampling, [text], logits.shape[-1], target.device)
    scores = edited_logits(logits, sampling, seen)[0].double()
    largest = float(torch.stack([scores.max(), *scores[list(tokens)]]).abs().max())
    unit = unit_in_last_place(largest, target.dtype)
    if not sampling.greedy:
        keys = request_keys([request.request_id], target.device)
        place = torch.tensor([length], device=target.device)
        noise = gumbel_noise(sampling.seed, keys, place, logits.shape[-1])
        scores = (target_distribution(logits, sampling, seen).double() + noise)[0]
        unit /= sampling.temperature
    return float((scores.max() - scores[list(tokens)]).max()) / unit


def unit_in_last_place(value: float, dtype: torch.dtype) -> float:
    """Distance between neighbouring numbers of `dtype` around `value`."""
    if value == 0:
        return float(torch.finfo(dtype).tiny)
    return float(torch.finfo(dtype).eps) * 2.0 ** math.floor(math.log2(abs(value)))
