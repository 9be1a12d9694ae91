"""The cells of the matrix: one method at one budget, batch size, slice and temperature."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from jetspec.errors import JetspecError
from jetspec.evaluation.config import EvaluationConfig
from jetspec.storage import content_hash

BASELINES = ("plain", "hf_eager")
_BUILDERS = {"best_first": "tree", "algorithm1": "algorithm 1", "static": "static tree"}
ALL_SLICES = "all"


class Group(NamedTuple):
    """What cells must share to be compared: they decode the same prompts in the same batches."""

    slice: str
    batch_size: int
    temperature: float


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        method: `plain`, `hf_eager`, `lookup`, `draft_model`, `chain` or `tree`.
        builder: the tree builder; None where no tree is built.
        budget: draft nodes a round, the root not counted; 0 for the two baselines.
    """

    method: str
    builder: str | None
    budget: int
    batch_size: int
    slice: str
    temperature: float

    @property
    def group(self) -> Group:
        return Group(self.slice, self.batch_size, self.temperature)

    @property
    def label(self) -> str:
        """The method as tables and figures name it, e.g. `tree 64`."""
        return cell_label(asdict(self))

    @property
    def key(self) -> str:
        """A readable file name, unique by the hash at its end."""
        fields = asdict(self)
        words = (f"{self.label} b{self.batch_size} {self.slice} t{self.temperature:g}").lower()
        return f"{re.sub('[^a-z0-9.]+', '-', words).strip('-')}-{content_hash(fields)[:8]}"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "key": self.key}


def cell_label(fields: dict[str, Any]) -> str:
    """The method's name from a cell's or a record's fields."""
    if fields["method"] in BASELINES:
        return str(fields["method"])
    name = fields["method"].replace("_", " ") if fields["builder"] in (None, "chain") else ""
    builder = _BUILDERS.get(fields["builder"], "")
    return f"{name or builder} {fields['budget']}"


def cells(
    config: EvaluationConfig, slices: Sequence[str], *, head_depth: int | None = None
) -> list[Cell]:
    """Every cell of the matrix, those of one group together and the baselines first.

    Args:
        slices: the slices that the evaluation prompts have.
        head_depth: tokens the head drafts in a round; longer chains are cut to it unless
            `config.depth` asks for more.

    Raises:
        JetspecError: a slice that no prompt has.
    """
    chosen = tuple(config.slices or slices)
    for name in chosen:
        if name != ALL_SLICES and name not in slices:
            have = ", ".join((*slices, ALL_SLICES))
            raise JetspecError("evaluation.slices", name, f"no prompt has it; choose from {have}")
    return [
        Cell(method, builder, budget, batch_size, slice_, temperature)
        for temperature in _unique(config.temperatures)
        for batch_size in _unique(config.batch_sizes)
        for slice_ in _unique(chosen)
        for method, builder, budget in _methods(config, head_depth)
    ]


def grouped(cells: Iterable[Cell]) -> dict[Group, list[Cell]]:
    """The cells by group, in their order."""
    groups: dict[Group, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.group, []).append(cell)
    return groups


def _methods(config: EvaluationConfig, head_depth: int | None) -> list[tuple[str, str | None, int]]:
    rows: list[tuple[str, str | None, int]] = [(name, None, 0) for name in BASELINES]
    if "lookup" in config.methods:
        rows.append(("lookup", "chain", config.lookup_depth))
    if "draft_model" in config.methods:
        rows.append(("draft_model", "chain", config.draft_model_depth))
    if "chain" in config.methods:
        limits = [n for n in (config.depth or head_depth,) if n is not None]
        lengths = {min([budget, *limits]) for budget in config.budgets} or set(limits[:1])
        rows += [("chain", "chain", length) for length in sorted(lengths)]
    if "tree" in config.methods:
        rows += [
            ("tree", builder, budget)
            for builder in _unique(config.builders)
            for budget in _unique(config.budgets)
        ]
    return rows


def _unique(values: Iterable) -> list:
    return list(dict.fromkeys(values))
