"""The output check of a cell: is the text what plain decoding gives?

In fp32 every token must be equal. In bf16 a row of logits rounds differently beside other rows, so
a first difference between two tokens whose logits lie within rounding of the best one is a near
tie and not an error; both numbers are reported.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from jetspec.evaluation.cells import Cell
from jetspec.evaluation.config import EvaluationConfig
from jetspec.evaluation.methods import Request, sampling_params
from jetspec.sampling import SamplingParams, gumbel_noise, request_keys, target_distribution

# Hugging Face's padded batch adds in another order than our loop; in fp32 its logits then differ by
# some hundred units in the last place, where ours must be equal token by token.
_OTHER_KERNELS_ULPS = 512.0


def check_outputs(
    target: Any,
    requests: Mapping[str, Request],
    reference: Mapping[str, Sequence[int]],
    outputs: Mapping[str, Sequence[int]],
    cell: Cell,
    config: EvaluationConfig,
) -> dict[str, Any]:
    """Compare a cell's outputs with plain decoding's, prompt by prompt.

    Args:
        requests, reference, outputs: by prompt id.

    Returns:
        passed; compared, differing and near_ties as numbers of prompts; the rule; and the first
        differing prompts with the position of their first difference.
    """
    exact = target.dtype == torch.float32
    ulps = config.near_tie_ulps
    if exact and cell.method == "hf_eager":
        exact, ulps = False, _OTHER_KERNELS_ULPS
    sampling = sampling_params(config, cell.temperature)
    compared = [prompt_id for prompt_id in outputs if prompt_id in reference]
    differences: list[dict[str, Any]] = []
    for prompt_id in compared:
        ours, plain = outputs[prompt_id], reference[prompt_id]
        at = first_difference(plain, ours)
        if at is None:
            continue
        near = at < min(len(ours), len(plain)) and is_near_tie(
            target, requests[prompt_id], plain[:at], (plain[at], ours[at]), ulps, sampling
        )
        differences.append({"prompt_id": prompt_id, "position": at, "near_tie": near})
    near_ties = sum(d["near_tie"] for d in differences)
    errors = len(differences) - (0 if exact else near_ties)
    return {
        "passed": bool(compared) and errors == 0 and len(compared) == len(outputs),
        "compared": len(compared),
        "differing": len(differences),
        "near_ties": near_ties,
        "rule": "identical" if exact else f"near ties within {ulps:g} ulps allowed",
        "differences": differences[:5],
    }


def first_difference(plain: Sequence[int], ours: Sequence[int]) -> int | None:
    """Index of the first token that differs or that only one of the two has; None when equal."""
    for i, (a, b) in enumerate(zip(plain, ours, strict=False)):
        if a != b:
            return i
    return None if len(plain) == len(ours) else min(len(plain), len(ours))


@torch.no_grad()
def is_near_tie(
    target: Any,
    request: Request,
    prefix: Sequence[int],
    tokens: tuple[int, int],
    ulps: float,
    sampling: SamplingParams,
) -> bool:
    """Whether both tokens lie within rounding of the best one after the common prefix.

    The logits come from one uncached forward over prompt and prefix. Above temperature 0 a token
    wins by log p plus its noise, so those sums are compared, and rounding is scaled alike.
    """
    ids = torch.tensor([[*request.input_ids, *prefix]], device=target.device)
    length = ids.shape[1]
    causal = torch.ones(1, length, length, dtype=torch.bool, device=target.device).tril()
    positions = torch.arange(length, device=target.device)[None]
    hidden = target.forward(ids, position_ids=positions, mask=causal).hidden[:, -1]
    logits = target.logits(hidden)  # [1, V]
    scores = logits[0].double()
    largest = float(torch.stack([scores.max(), *scores[list(tokens)]]).abs().max())
    tolerance = ulps * unit_in_last_place(largest, target.dtype)
    if not sampling.greedy:
        keys = request_keys([request.request_id], target.device)
        place = torch.tensor([length], device=target.device)
        noise = gumbel_noise(sampling.seed, keys, place, logits.shape[-1])
        scores = (target_distribution(logits, sampling).double() + noise)[0]
        tolerance /= sampling.temperature
    gaps = scores.max() - scores[list(tokens)]
    return bool((gaps <= tolerance).all())


def unit_in_last_place(value: float, dtype: torch.dtype) -> float:
    """Distance between neighbouring numbers of `dtype` around `value`."""
    if value == 0:
        return float(torch.finfo(dtype).tiny)
    return float(torch.finfo(dtype).eps) * 2.0 ** math.floor(math.log2(abs(value)))
