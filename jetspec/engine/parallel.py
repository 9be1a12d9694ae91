"""One target over several GPUs: what each rank holds, and how the parts are joined.

Attention is split by heads with their pages of keys and values, the MLP by its inner columns, the
output projection by rows of the vocabulary. A rank's sum over its share of a product's inputs goes
to every rank, and every rank adds the shares in the order of ranks: what follows has the same bits
everywhere, so trees, positions and accepted paths agree without a word about them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jetspec.engine.layers import Products, product
from jetspec.errors import JetspecError
from jetspec.targets.fp8 import Fp8Linear
from jetspec.targets.target import Target
from jetspec.training.world import World
from kernels.ranks import merge_packed, pack_best
from kernels.topk import topk_logsumexp

SPLIT_BYTES = 128 << 20
"""An output projection from so many bytes on is split: half of them take as long to read as the
ranks' best tokens take to cross (docs/parallel.md)."""
MOST_CANDIDATES = 32


@dataclass(frozen=True)
class Ranks:
    """How a target and its draft head lie over the processes that decode together.

    Attributes:
        world: every one of them decodes the same prompts in the same order.
        split_head: the draft head's layers are split as the target's; otherwise every rank holds
            and runs them whole.
        split_output: the output projection is split by rows; None decides by its bytes.
    """

    world: World = World()
    split_head: bool = True
    split_output: bool | None = None

    @property
    def of_head(self) -> World:
        return self.world if self.split_head else World()


@dataclass(frozen=True)
class Output:
    """This rank's rows of the output projection.

    Attributes:
        weight: [V / size, d], a view of the target's own.
        first: token id of its first row.
        world: of size 1 where every rank has all rows.
    """

    weight: Tensor
    first: int
    world: World

    @classmethod
    def of(cls, weight: Tensor, ranks: Ranks) -> "Output":
        """Of the whole projection [V, d].

        Raises:
            JetspecError: the vocabulary was to be split and does not divide.
        """
        world = ranks.world
        rows = len(weight) // world.size
        fits = not len(weight) % world.size and rows >= MOST_CANDIDATES
        split = ranks.split_output
        if split is None:
            split = fits and weight.numel() * weight.element_size() >= SPLIT_BYTES
        if world.size == 1 or not split:
            return cls(weight, 0, World())
        if not fits:
            mend = f"do not divide the vocabulary of {len(weight)}; leave ranks.split_output off"
            raise JetspecError("ranks", world.size, mend)
        first = world.rank * rows
        return cls(weight[first : first + rows], first, world)

    def logits(self, hidden: Tensor, products: Products) -> Tensor:
        """hidden [T, d] -> [T, V] on every rank, in the model's type."""
        own = product(hidden, self.weight, products, whole=True)
        if self.world.size == 1:
            return own
        return self.world.gather(own).transpose(0, 1).flatten(1)

    def best(
        self, hidden: Tensor, width: int, products: Products, *, sums: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The `width` best tokens of every row, as `topk_logsumexp` over all logits."""
        own = product(hidden, self.weight, products, whole=True)
        found = topk_logsumexp(own, width, sums=sums)
        if self.world.size == 1:
            return found
        message = pack_best(*found, self.first, sums=sums)
        return merge_packed(self.world.gather(message), sums=sums)


@torch.no_grad()
def split_layers(layers: Iterable[Any], world: World, *, heads: int, kv_heads: int) -> None:
    """Leave every decoder layer with this rank's heads and inner columns, in place.

    The layers still run as modules: what their two closing products give is added up over the
    ranks. Layers that are already split so stay as they are.

    Args:
        layers: with `self_attn` and a gated `mlp`, of a target or a parallel head.
        heads, kv_heads: of the whole.

    Raises:
        JetspecError: heads or columns that do not divide, a mixture of experts, or layers that
            were split for other ranks.
    """
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        if not hasattr(attention, "q_proj"):
            raise JetspecError("ranks", world.size, "its layers are fused; decode on one rank")
        width = attention.head_dim * heads
        if attention.q_proj.out_features * world.size == width and world.size > 1:
            continue
        if attention.q_proj.out_features != width:
            mend = "the weights lie split over other ranks; load them again"
            raise JetspecError("ranks", world.size, mend)
        if world.size == 1:
            continue
        if hasattr(mlp, "experts"):
            raise JetspecError("ranks", world.size, "mixtures of experts run on one rank alone")
        inner = mlp.down_proj.in_features
        for count, what in ((heads, "heads"), (kv_heads, "KV heads"), (inner, "MLP columns")):
            if count % world.size:
                raise JetspecError("ranks", world.size, f"do not divide {count} {what}")
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
            _keep_rows(linear, world)
        for linear in (mlp.gate_proj, mlp.up_proj):
            _keep_rows(linear, world)
        for linear in (attention.o_proj, mlp.down_proj):
            _keep_columns(linear, world)
            linear.register_forward_hook(lambda module, given, out: world.gather(out).sum(0))


def split_target(target: Target, world: World) -> None:
    """Split a target's decoder layers in place; embedding and output projection stay whole.

    Raises:
        JetspecError: as `split_layers`.
    """
    config = target.config
    split_layers(
        target.model.base_model.layers, world, heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
    )  # fmt: skip


def _keep_rows(linear: Any, world: World) -> None:
    size = linear.out_features // world.size
    part = slice(world.rank * size, (world.rank + 1) * size)
    linear.out_features = size
    if isinstance(linear, Fp8Linear):
        linear.codes, linear.exponents = linear.codes[part].clone(), linear.exponents[part].clone()
    else:
        linear.weight.data = linear.weight.data[part].clone()
    if linear.bias is not None:
        linear.bias.data = linear.bias.data[part].clone()


def _keep_columns(linear: Any, world: World) -> None:
    size = linear.in_features // world.size
    part = slice(world.rank * size, (world.rank + 1) * size)
    linear.in_features = size
    if isinstance(linear, Fp8Linear):
        linear.codes = linear.codes[:, part].contiguous()
    else:
        linear.weight.data = linear.weight.data[:, part].contiguous()
    if linear.bias is not None and world.rank:
        linear.bias.data = torch.zeros_like(linear.bias.data)  # the sum has it once
