"""Muon over matrices whose rows are spread over ranks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

Pieces = list[list[Tensor]]


class ShardedMuon(torch.optim.Muon):
    """torch's Muon over parameters that `fully_shard` has split by rows; its steps are the same.

    Weights and momentum stay where their rows are. Only what is orthogonalised must be whole, and
    only on one rank: the others send it their rows in bf16, the type the iteration rounds to
    anyway, and get the orthogonalised rows back. The ranks share the matrices out.

    A step sends 4 P (W - 1) / W^2 bytes from each of W ranks in two all-to-alls, P being the
    matrices' entries, where an all-gather of every matrix would bring 2 P (W - 1) / W to each: as
    much on two ranks, a quarter on eight. It holds up to 10 P / W bytes in passing. Both count
    on shares of one size; one matrix is never split between ranks.

    Each parameter must be a DTensor on a mesh of one dimension, and have a gradient on all ranks
    or on none.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            params: list[Any] = []
            grads: list[Any] = []
            buffers: list[Any] = []
            self._init_group(group, params, grads, buffers)
            if not params:
                continue
            updates = []
            for grad, buffer in zip(grads, buffers, strict=True):
                own, kept = grad.to_local(), buffer.to_local()
                kept.lerp_(own, 1 - group["momentum"])
                update = own.lerp(kept, group["momentum"]) if group["nesterov"] else kept
                updates.append(update.bfloat16())
            settings = {key: group[key] for key in ("ns_coefficients", "ns_steps", "eps")}
            turned = on_whole_matrices(
                partial(_zeropower_via_newtonschulz, **settings),
                updates,
                [p.shape for p in params],
                params[0].device_mesh.get_group(),
            )
            for p, update in zip(params, turned, strict=True):
                own = p.to_local()
                own.mul_(1 - group["lr"] * group["weight_decay"])
                # A DTensor's shape is the whole matrix's.
                own.add_(update, alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], p.shape))
        return loss


def on_whole_matrices(
    function: Callable[[Tensor], Tensor],
    shards: Sequence[Tensor],
    shapes: Sequence[torch.Size],
    group: dist.ProcessGroup,
) -> list[Tensor]:
    """This rank's rows of `function(matrix)`, called once a matrix, on one of the ranks.

    Args:
        function: returns a matrix of the same shape and type.
        shards: this rank's rows of every matrix, cut as `torch.chunk` cuts them; of one type.
        shapes: of the whole matrices.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    owners = share_out(shapes, size)
    owned = [[i for i, owner in enumerate(owners) if owner == r] for r in range(size)]
    rows = [_rows(shape[0], size) for shape in shapes]
    mine = owned[rank]
    none = shards[0].new_empty(0)
    given = _exchange(
        [[shards[i] for i in owned[r]] for r in range(size)],
        [[rows[i][r] * shapes[i][1] for i in mine] for r in range(size)],
        none,
        group,
    )
    made = [
        function(torch.cat(parts).view(shapes[i])).split(rows[i])
        for i, parts in zip(mine, zip(*given, strict=True), strict=True)
    ]
    back = _exchange(
        [[parts[r] for parts in made] for r in range(size)],
        [[shards[i].numel() for i in owned[r]] for r in range(size)],
        none,
        group,
    )
    found = {i: part for r in range(size) for i, part in zip(owned[r], back[r], strict=True)}
    return [found[i].view_as(shard) for i, shard in enumerate(shards)]


def share_out(shapes: Sequence[torch.Size], size: int) -> list[int]:
    """The rank of each matrix, so that all have about as much to multiply."""
    costs = [rows * columns * min(rows, columns) for rows, columns in shapes]
    loads, owners = [0] * size, [0] * len(shapes)
    for i in sorted(range(len(shapes)), key=lambda i: -costs[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += costs[i]
    return owners


def _rows(count: int, size: int) -> list[int]:
    """Of `count`, what each rank holds."""
    most = -(-count // size)
    return [max(0, min(most, count - r * most)) for r in range(size)]


def _exchange(
    given: Pieces, sizes: list[list[int]], none: Tensor, group: dist.ProcessGroup
) -> Pieces:
    """Give rank r the tensors `given[r]`; returns those of each rank, flat, `sizes[r]` long."""
    sent = torch.cat([none, *(part.flatten() for parts in given for part in parts)])
    counts = [sum(part.numel() for part in parts) for parts in given]
    expected = [sum(parts) for parts in sizes]
    found = none.new_empty(sum(expected))
    dist.all_to_all_single(found, sent, expected, counts, group=group)
    flat = found.split(expected)
    return [list(parts.split(cut)) for parts, cut in zip(flat, sizes, strict=True)]
