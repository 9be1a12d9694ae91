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
        scores: `slot` or `path`, what of the head orders the draft; None is what the head has.
    """

    method: str
    builder: str | None
    budget: int
    batch_size: int
    slice: str
    temperature: float
    scores: str | None = None

    @property
    def group(self) -> Group:
        return Group(self.slice, self.batch_size, self.temperature)

    @property
    def label(self) -> str:
        """The method as tables and figures name it, e.g. `tree 64`."""
        return cell_label(self._fields())

    @property
    def key(self) -> str:
        """A readable file name, unique by the hash at its end."""
        fields = self._fields()
        words = (f"{self.label} b{self.batch_size} {self.slice} t{self.temperature:g}").lower()
        return f"{re.sub('[^a-z0-9.]+', '-', words).strip('-')}-{content_hash(fields)[:8]}"

    def as_json(self) -> dict[str, Any]:
        return {**self._fields(), "key": self.key}

    def _fields(self) -> dict[str, Any]:
        """Without `scores` where the head's own are meant: keys made before stay valid."""
        fields = asdict(self)
        return fields if self.scores else {k: v for k, v in fields.items() if k != "scores"}


def cell_label(fields: dict[str, Any]) -> str:
    """The method's name from a cell's or a record's fields."""
    if fields["method"] in BASELINES:
        return str(fields["method"])
    name = fields["method"].replace("_", " ") if fields["builder"] in (None, "chain") else ""
    builder = _BUILDERS.get(fields["builder"], "")
    scores = f" {fields['scores']}" if fields.get("scores") else ""
    return f"{name or builder} {fields['budget']}{scores}"


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
        Cell(method, builder, budget, batch_size, slice_, temperature, scores)
        for temperature in _unique(config.temperatures)
        for batch_size in _unique(config.batch_sizes)
        for slice_ in _unique(chosen)
        for method, builder, budget, scores in _methods(config, head_depth)
    ]


def grouped(cells: Iterable[Cell]) -> dict[Group, list[Cell]]:
    """The cells by group, in their order."""
    groups: dict[Group, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.group, []).append(cell)
    return groups


def _methods(
    config: EvaluationConfig, head_depth: int | None
) -> list[tuple[str, str | None, int, str | None]]:
    rows: list[tuple[str, str | None, int, str | None]] = [
        (name, None, 0, None) for name in BASELINES if config.batches_of(name) != 0
    ]
    if "lookup" in config.methods:
        rows.append(("lookup", "chain", config.lookup_depth, None))
    if "draft_model" in config.methods:
        rows.append(("draft_model", "chain", config.draft_model_depth, None))
    for scores in _unique(config.scores or (None,)):
        rows += [(*drafted, scores) for drafted in _drafted(config, head_depth)]
    return rows


def _drafted(config: EvaluationConfig, head_depth: int | None) -> list[tuple[str, str, int]]:
    """The methods that draft with the head."""
    rows: list[tuple[str, str, int]] = []
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
