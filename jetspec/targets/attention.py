"""Masked attention that shares keys and values between grouped heads instead of copying them.

Under a mask of its own, transformers' SDPA path repeats every key and value once a query head; for
a batch of long sequences that moves several times the bytes of the cache. Here the query heads of
a group become further rows of their shared head, which is the same arithmetic without the copy.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_NAME = "jetspec_grouped"
# Query rows of a group up to which the mask is repeated instead of keys and values.
_PACKED_ROWS = 4096


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it.

    Args:
        query: [B, H, T, d]; key, value: [B, H / groups, S, d].
        attention_mask: bool [B, 1, T, S].

    Returns:
        ([B, T, H, d], None).
    """
    batch, heads, rows, width = query.shape
    shared = key.shape[1]
    groups = heads // shared
    special = any(options.get(name) is not None for name in ("softcap", "position_bias", "s_aux"))
    if special or attention_mask is None or groups == 1 or groups * rows > _PACKED_ROWS:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    packed = query.reshape(batch, shared, groups * rows, width)
    mask = attention_mask.repeat(1, 1, groups, 1)
    out = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, rows, -1).transpose(1, 2), None


AttentionInterface.register(_NAME, grouped_attention)


@contextmanager
def grouped(config: Any) -> Iterator[None]:
    """Let a model whose attention is SDPA use `grouped_attention` while the body runs.

    The model is left as it was, so that its own `generate` stays the library's.
    """
    before = config._attn_implementation
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before
