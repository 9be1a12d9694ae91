"""Sampling that depends on seed, request and position, never on how tokens were drafted.

The token at a position is argmax(log p + g), g being Gumbel noise from a counter-based generator
keyed by (seed, request, position). That is a draw from p (the Gumbel-max trick), and it is a
function of p and the key alone: plain, chain and tree decoding give the same tokens for one seed,
and the drafter's choice of candidates cannot bias the result.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jetspec.errors import JetspecError

_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class SamplingParams:
    """How the target's distribution becomes tokens.

    Attributes:
        temperature: 0 is greedy.
        top_p: keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: keep this many tokens (and ties with the last of them); 0 keeps all. Applied
            before top_p.
        seed: with the request id it fixes every token.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise JetspecError("temperature", self.temperature, "must be 0 or more")
        if not 0 < self.top_p <= 1:
            raise JetspecError("top_p", self.top_p, "must be above 0 and at most 1")
        if self.top_k < 0:
            raise JetspecError("top_k", self.top_k, "must be 0 (off) or more")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def target_distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """log p [..., V] of the tokens that `params` lets through; -inf for the others.

    Args:
        logits: [..., V] of the target. `params.temperature` must be above 0.
    """
    log_p = (logits.float() / params.temperature).log_softmax(-1)
    if 0 < params.top_k < log_p.shape[-1]:
        smallest = log_p.topk(params.top_k, dim=-1).values[..., -1:]
        log_p = log_p.masked_fill(log_p < smallest, -torch.inf).log_softmax(-1)
    if params.top_p < 1:
        ordered, order = log_p.sort(dim=-1, descending=True, stable=True)
        p = ordered.exp()
        reached = p.cumsum(-1) - p >= params.top_p  # the tokens before already hold top_p
        outside = reached.scatter(-1, order, reached)
        log_p = log_p.masked_fill(outside, -torch.inf).log_softmax(-1)
    return log_p


def sample(
    logits: Tensor, params: SamplingParams, request_keys: Tensor, positions: Tensor
) -> Tensor:
    """Tokens [R] from logits [R, V]: the argmax when greedy, else a draw.

    Args:
        request_keys: long [R], from `request_keys`.
        positions: long [R], each token's own position in its sequence (prompt included).
    """
    if params.greedy:
        return logits.argmax(-1)
    noise = gumbel_noise(params.seed, request_keys, positions, logits.shape[-1])
    return (target_distribution(logits, params).double() + noise).argmax(-1)


def request_keys(request_ids: Sequence[int | str], device: torch.device | str = "cpu") -> Tensor:
    """Long [B] keys below 2**62 from any mix of integer and string ids."""
    digests = (hashlib.sha256(repr(request).encode()).digest() for request in request_ids)
    keys = [int.from_bytes(digest[:8], "big") >> 2 for digest in digests]
    return torch.tensor(keys, dtype=torch.long, device=device)


def gumbel_noise(seed: int, keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, float64 [R, V], the same on every device and in every batch.

    Args:
        keys, positions: long [R].
    """
    # Two 32-bit lanes make a 64-bit key: one would repeat after some 65,000 draws (birthdays).
    first, second = (
        _absorb(lane, (seed, seed >> 32, keys, keys >> 32, positions))
        for lane in (torch.full_like(keys, 0x9E3779B9), torch.full_like(keys, 0x85EBCA6B))
    )
    tokens = torch.arange(vocab_size, device=keys.device)
    bits = _mix(_mix(tokens ^ first[:, None]) ^ second[:, None])  # [R, V]
    uniform = (bits.double() + 0.5) / 2.0**32
    return -torch.log(-torch.log(uniform))


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
