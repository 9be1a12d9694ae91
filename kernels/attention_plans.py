"""Launch shapes of tree attention, and where it cuts a context into splits."""

from dataclasses import dataclass

import triton

FEW_PROGRAMS = 48
PROGRAMS = 2 * 132
"""What runs at once on a Hopper card: two programs a multiprocessor."""


@dataclass(frozen=True)
class Plan:
    """Launch shape. Only `tile` is part of the reduction order; keep it equal to compare bits.

    Attributes:
        rows: query rows (nodes x group) a program; 0 takes all of them across.
        tile: KV rows a step; at most the page size.
        warps, stages: Triton's.
        descriptors: read tiles with the bulk copy engine instead of per-thread copies.
        across: up to so many rows that fill no tile go beside the last one, over the same loads,
            as the matrix instruction's narrow operand; 0 gives them a tile of their own.
        joined: the last program of a tile of rows merges its splits: no second launch.
        even: cut every length into equally many splits, multiples of `split` as short as
            `max_splits` allow, instead of at multiples of a size that doubles.
    """

    rows: int
    tile: int
    warps: int
    stages: int
    descriptors: bool = False
    across: int = 0
    joined: bool = False
    even: bool = False

    def tiles(self, rows: int) -> tuple[int, int]:
        """(programs a KV head and split for so many query rows, rows across in the last)."""
        if not self.rows:
            return triton.cdiv(rows, self.across), self.across
        if self.across and rows > self.rows and 0 < rows % self.rows <= self.across:
            return rows // self.rows, self.across
        return triton.cdiv(rows, self.rows), 0


def plan_for(nodes: int, group: int, programs: int, page_size: int, item_bytes: int = 2) -> Plan:
    """The measured choice (docs/kernels.md) for a launch of `nodes` rows a sequence.

    Args:
        programs: KV heads x sequences. A launch that fills the card has more to gain from two
            programs a multiprocessor than from a fourth stage, and from splits that all end
            together than from fixed ones.
    """
    if item_bytes > 2:  # no matrix instruction: unrolled products of wide tiles compile for minutes
        return Plan(rows=16, tile=min(page_size, 32), warps=4, stages=2)
    tile = min(page_size, 64)
    if nodes * group <= 64 and programs <= FEW_PROGRAMS:
        return Plan(rows=64, tile=tile, warps=4, stages=4)
    full = programs > FEW_PROGRAMS
    return Plan(rows=64, tile=tile, warps=4, stages=3, descriptors=True, joined=full, even=full)


def splits_for(programs: int, even: bool = False) -> tuple[int, int]:
    """(shortest split in rows of KV, most splits of a prefix).

    A split doubles with the context until that many cover the prefix. Few programs need many
    splits to fill the card; with many, partial results and short loops cost more than they bring.
    Even splits are as many as run at once.

    Args:
        programs: of one split: tiles of query rows x KV heads x sequences.
        even: as `Plan.even`.
    """
    if even:
        most = max(1, PROGRAMS // programs)
        return (64 if most <= 8 else 128), most
    if programs <= FEW_PROGRAMS:
        return 256, 24
    return (512, 12) if programs <= 96 else (1024, 12)


def splits_needed(
    nodes: int, max_context: int, split: int, max_splits: int, even: bool = False
) -> int:
    """Splits to launch when no sequence's prefix plus rows exceeds `max_context`."""
    if even:
        return min(-(-max_context // split), max_splits)
    return min(-(-max_context // split), max_splits + -(-nodes // split))
