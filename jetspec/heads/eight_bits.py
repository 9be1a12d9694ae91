"""A head that drafts with weights in eight bits: e4m3 times a power of two an output channel.

Drafting reads the head and the target's output projection once a round; half the bytes cost half
the time. A draft decides how much is accepted, never what: the text stays the target's own.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from jetspec.errors import JetspecError
from jetspec.heads.config import DraftWeights
from jetspec.heads.parallel import ParallelHead
from jetspec.targets.fp8 import quantise, written_out
from jetspec.targets.target import Target


@torch.no_grad()
def rounded_head(head: Any, target: Target) -> ParallelHead:
    """A copy of the head whose linear layers, and its own copy of the target's output projection,
    hold values of eight bits. Norms, edges and a second pass stay.

    The values are written out in the weights' own type, so that every backend drafts with them;
    the engine streams them in eight bits.

    Raises:
        JetspecError: a head of another kind.
    """
    if not isinstance(head, ParallelHead):
        kind = head.config.kind
        raise JetspecError("draft_weights", "fp8", f"a {kind} head has none; leave it out")
    if head.projection is not None:
        return head
    rounded = copy.deepcopy(head)
    for linear in _linears(rounded):
        linear.weight.copy_(_rounded(linear.weight))
    rounded.projection = _rounded(target.model.get_output_embeddings().weight)
    return rounded


def drafting_head(head: Any, target: Target, weights: DraftWeights) -> Any:
    """The head as it drafts with such weights; None stays None."""
    return rounded_head(head, target) if weights == "fp8" and head is not None else head


def _linears(head: ParallelHead) -> Iterator[nn.Linear]:
    yield head.fc
    for layer in head.layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                yield module


def _rounded(weight: Tensor) -> Tensor:
    return written_out(*quantise(weight.detach()), weight.dtype)
