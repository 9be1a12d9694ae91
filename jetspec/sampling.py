"""Sampling that depends on seed, request and position, never on how tokens were drafted.

The token at a position is argmax(log p + g), g being Gumbel noise from a counter-based generator
keyed by (seed, request, position); logits do for log p. That is a draw from p (the Gumbel-max
trick), and it is a function of p and the key alone: plain, chain and tree decoding give the same
tokens for one seed, and the drafter's choice of candidates cannot bias the result.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from jetspec.errors import JetspecError

_WORD = 0xFFFFFFFF
_ONE = 2.0**44
"""Of a whole share: 2^18 tokens' shares add up in 63 bits."""


@dataclass(frozen=True)
class SamplingParams:
    """How the target's logits become tokens.

    Applied in this order, transformers' own: bias, penalty, temperature, top-k, top-p, min-p. Bias
    and penalty count when greedy too.

    Attributes:
        temperature: 0 is greedy.
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: keep this many tokens (and ties with the last of them); 0 keeps all.
        seed: with the request id it fixes every token.
        min_p: drop tokens below this share of the likeliest one's probability; 0 drops none.
        repetition_penalty: logits of tokens that stand in the prompt or in what was written after
            it are divided by this where positive and multiplied where negative; 1 changes none.
        logit_bias: (token, what is added to its logit); -inf forbids the token.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise JetspecError("temperature", self.temperature, "must be 0 or more")
        if not 0 < self.top_p <= 1:
            raise JetspecError("top_p", self.top_p, "must be above 0 and at most 1")
        if self.top_k < 0:
            raise JetspecError("top_k", self.top_k, "must be 0 (off) or more")
        if not 0 <= self.min_p <= 1:
            raise JetspecError("min_p", self.min_p, "must be 0 (off) to 1")
        if not self.repetition_penalty > 0:
            raise JetspecError("repetition_penalty", self.repetition_penalty, "must be above 0")
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise JetspecError("logit_bias", self.logit_bias, "name a token once")
        for token, bias in self.logit_bias:
            if token < 0 or not bias < float("inf"):
                raise JetspecError(
                    "logit_bias", f"{token}: {bias}", "give a token id and a number or -inf"
                )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def remembers(self) -> bool:
        """Whether the tokens of a sequence change the logits of its next one."""
        return self.repetition_penalty != 1

    @property
    def edits_logits(self) -> bool:
        """Whether the argmax may be another than the target's own."""
        return self.remembers or bool(self.logit_bias)


def seen_tokens(
    params: SamplingParams, histories: Sequence[Sequence[int]], vocab_size: int, device: Any
) -> Tensor | None:
    """bool [B, V]: tokens that stand in each history; None where `params` does not ask."""
    if not params.remembers:
        return None
    seen = torch.zeros(len(histories), vocab_size, dtype=torch.bool, device=device)
    for row, history in zip(seen, histories, strict=True):
        row[torch.as_tensor(history, dtype=torch.long, device=device)] = True
    return seen


def edited_logits(logits: Tensor, params: SamplingParams, seen: Tensor | None = None) -> Tensor:
    """Logits [..., V] in fp32 after bias and penalty.

    Args:
        seen: bool [..., V], see `seen_tokens`; must be given where `params` remembers.
    """
    logits = logits.float()
    if params.logit_bias:
        tokens, bias = zip(*params.logit_bias, strict=True)
        where = torch.tensor(tokens, device=logits.device)
        logits = logits.index_add(
            -1, where, logits.new_tensor(bias).expand(*logits.shape[:-1], len(bias))
        )
    if params.remembers:
        if seen is None:
            raise ValueError("a repetition penalty needs the tokens seen so far")
        penalty = params.repetition_penalty
        logits = torch.where(
            seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits
        )
    return logits


def allowed_logits(logits: Tensor, params: SamplingParams, seen: Tensor | None = None) -> Tensor:
    """Logits [..., V] in fp32 over the temperature; -inf for tokens that `params` drops.

    No fraction is summed, so a row has its bits wherever it lies and whatever lies beside it: on a
    GPU a float sum's order may follow the number of rows and a row's alignment.

    Args:
        logits, seen: as in `target_distribution`.
    """
    scaled = edited_logits(logits, params, seen) / params.temperature
    if 0 < params.top_k < scaled.shape[-1]:
        smallest = scaled.topk(params.top_k, dim=-1).values[..., -1:]
        scaled = scaled.masked_fill(scaled < smallest, -torch.inf)
    if params.top_p < 1:
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        shares = ((ordered - ordered[..., :1]).double().exp() * _ONE).long()  # the best one's is 1
        mass = shares.cumsum(-1)
        reached = mass - shares >= params.top_p * mass[..., -1:]  # those before hold top_p already
        scaled = scaled.masked_fill(reached.scatter(-1, order, reached), -torch.inf)
    if params.min_p > 0:
        smallest = scaled.amax(-1, keepdim=True) + math.log(params.min_p)
        scaled = scaled.masked_fill(scaled < smallest, -torch.inf)
    return scaled


def target_distribution(
    logits: Tensor, params: SamplingParams, seen: Tensor | None = None
) -> Tensor:
    """log p [..., V] of the tokens that `params` lets through; -inf for the others.

    Args:
        logits: [..., V] of the target. `params.temperature` must be above 0.
        seen: as in `edited_logits`.
    """
    return allowed_logits(logits, params, seen).log_softmax(-1)


def sample(
    logits: Tensor,
    params: SamplingParams,
    request_keys: Tensor,
    positions: Tensor,
    seen: Tensor | None = None,
) -> Tensor:
    """Tokens [R] from logits [R, V]: the argmax when greedy, else a draw.

    Args:
        request_keys: long [R], from `request_keys`.
        positions: long [R], each token's own position in its sequence (prompt included).
        seen: bool [R, V], as in `edited_logits`.
    """
    if params.greedy:
        if params.edits_logits:
            logits = edited_logits(logits, params, seen)
        return logits.argmax(-1)
    noise = gumbel_noise(params.seed, request_keys, positions, logits.shape[-1])
    return (allowed_logits(logits, params, seen).double() + noise).argmax(-1)


def request_keys(request_ids: Sequence[int | str], device: torch.device | str = "cpu") -> Tensor:
    """Long [B] keys below 2**62 from any mix of integer and string ids."""
    digests = (hashlib.sha256(repr(request).encode()).digest() for request in request_ids)
    keys = [int.from_bytes(digest[:8], "big") >> 2 for digest in digests]
    return torch.tensor(keys, dtype=torch.long, device=device)


class Stream(IntEnum):
    """What noise is for; streams of one key are independent."""

    TOKENS = 0
    ACCEPTANCE = 1
    CANDIDATES = 2


def gumbel_noise(
    seed: int, keys: Tensor, positions: Tensor, count: int, stream: Stream = Stream.TOKENS
) -> Tensor:
    """Standard Gumbel noise, float64 [R, count], the same on every device and in every batch.

    Args:
        keys, positions: long [R].
        count: values a key, such as one a token of the vocabulary.
    """
    return -torch.log(-torch.log(uniform_noise(seed, keys, positions, count, stream)))


def uniform_noise(
    seed: int, keys: Tensor, positions: Tensor, count: int, stream: Stream = Stream.TOKENS
) -> Tensor:
    """Uniform noise strictly between 0 and 1, float64 [R, count]; see `gumbel_noise`."""
    words: list[int | Tensor] = [seed, seed >> 32, keys, keys >> 32, positions]
    if stream:
        words.append(int(stream))
    # Two 32-bit lanes make a 64-bit key: one would repeat after some 65,000 draws (birthdays).
    first, second = (
        _absorb(lane, words)
        for lane in (torch.full_like(keys, 0x9E3779B9), torch.full_like(keys, 0x85EBCA6B))
    )
    columns = torch.arange(count, device=keys.device)
    bits = _mix(_mix(columns ^ first[:, None]) ^ second[:, None])  # [R, count]
    return (bits.double() + 0.5) / 2.0**32


def _absorb(lane: Tensor, words: Sequence[int | Tensor]) -> Tensor:
    for word in words:
        lane = _mix(lane ^ (word & _WORD))
    return lane


def _mix(word: Tensor) -> Tensor:
    """A bijective 32-bit finaliser (two multiply-xorshift rounds) in int64 arithmetic.

    The product wraps in int64, which leaves its low 32 bits right.
    """
    word = word ^ (word >> 16)
    word = (word * 0x7FEB352D) & _WORD
    word = word ^ (word >> 15)
    word = (word * 0x846CA68B) & _WORD
    return word ^ (word >> 16)
