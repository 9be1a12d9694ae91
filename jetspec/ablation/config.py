"""The file of an ablation: what all variants share, how they differ, and what is asked of them."""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from jetspec.config import RunConfig, parse_config
from jetspec.errors import JetspecError
from jetspec.evaluation.cells import cell_label
from jetspec.settings import Settings, first_mistake

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Variant(Settings):
    """One way of making or using a head.

    Attributes:
        set: settings laid over the base, written `section.key: value`.
        start: another variant, whose head training starts from.
        text: `regenerated` trains on the target's own answers, `corpus` on those that the
            training prompts' files bring along.
        seeds: made once with each of these as `training.seed`, which draws its weights and its
            batches; empty is once with the run's own.
    """

    optional: ClassVar[frozenset[str]] = frozenset({"seeds"})

    set: dict[str, Any] = {}
    start: str | None = None
    text: Literal["regenerated", "corpus"] = "regenerated"
    seeds: tuple[int, ...] = ()


class Side(Settings):
    """A variant at one cell of its matrix; what is left at None is the ablation's default cell.

    Attributes:
        scores: `slot` takes the head's path scores out, `path` is the head with them; None is the
            head as it is.
    """

    optional: ClassVar[frozenset[str]] = frozenset({"scores"})

    variant: str
    method: Literal["chain", "tree", "lookup"] | None = None
    builder: str | None = None
    budget: int | None = Field(None, ge=1)
    scores: Literal["slot", "path"] | None = None


class Ratio(Settings):
    """A row of a table of ratios: tau of `better` over tau of `than`, paired."""

    better: Side
    than: Side


class Claim(Settings):
    """A sentence that tau decides.

    Attributes:
        text: the claim, as a sentence.
        better, than: the sides; it holds where tau of `better` is above `factor` times the other's.
        factor: 1 for "better than".
        slice: the slice it speaks of; None is all of them.
        paper: what its source measured, for the report.
    """

    text: str
    better: Side
    than: Side
    factor: float = Field(1.0, gt=0)
    slice: str | None = None
    paper: str | None = None


class Table(Settings):
    """One table of the report: its rows, and the claims that it decides.

    Attributes:
        rows: taus; ratios: of two taus each, by slice with paired intervals.
    """

    optional: ClassVar[frozenset[str]] = frozenset({"ratios"})

    title: str
    source: str | None = None
    rows: dict[str, Side] = {}
    ratios: dict[str, Ratio] = {}
    claims: tuple[Claim, ...] = ()

    @model_validator(mode="after")
    def _has_rows(self) -> "Table":
        if not self.rows and not self.ratios:
            raise ValueError("rows: give at least one, or ratios")
        return self

    def sides(self) -> Iterator[Side]:
        """Every side that is looked at."""
        yield from self.rows.values()
        for ratio in self.ratios.values():
            yield from (ratio.better, ratio.than)
        for claim in self.claims:
            yield from (claim.better, claim.than)


class AblationConfig(Settings):
    """An ablation.

    Attributes:
        base: sections of a run file.
        measure: `decode` decodes every cell of the evaluation matrix, with speeds; `replay` walks
            the rounds of every tree along the target's own greedy answers: the same tau at
            temperature 0, many times faster, and no speeds.
        cell: the cell that a side means where it does not say.
        variants: by name, in the order they are made.
    """

    optional: ClassVar[frozenset[str]] = frozenset({"measure"})

    base: dict[str, Any]
    measure: Literal["decode", "replay"] = "decode"
    cell: Side = Side(variant="", method="tree", builder="best_first", budget=64)
    variants: dict[_Name, Variant] = Field(min_length=1)
    tables: tuple[Table, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_exist(self) -> "AblationConfig":
        for side in self.sides():
            if side.variant not in self.variants:
                raise ValueError(f"no variant is called {side.variant!r}")
        made: set[str] = set()
        for name, variant in self.variants.items():
            if variant.start is not None and variant.start not in made:
                raise ValueError(f"{name} starts from {variant.start!r}, which is not made before")
            if variant.start is not None:
                begun = self.variants[variant.start].seeds
                if begun and not (variant.seeds and set(variant.seeds) <= set(begun)):
                    raise ValueError(f"{name}: give it seeds of {variant.start!r}, its start")
            made.add(name)
        return self

    def sides(self) -> Iterator[Side]:
        """Every side that a table or a claim looks at."""
        for table in self.tables:
            yield from table.sides()

    def members(self, variant: str) -> dict[int | None, str]:
        """By seed the names of a variant's runs; the seed is None where it has none of its own."""
        seeds = self.variants[variant].seeds
        return {seed: f"{variant}.seed{seed}" for seed in seeds} if seeds else {None: variant}

    def variant_of(self, member: str) -> Variant:
        """The variant that a run belongs to."""
        return self.variants[self._owners()[member][0]]

    def start_of(self, member: str) -> str | None:
        """The run whose head this one starts from: of its own seed, where that has several."""
        name, seed = self._owners()[member]
        start = self.variants[name].start
        if start is None:
            return None
        begun = self.members(start)
        return begun[seed if seed in begun else None]

    def _owners(self) -> dict[str, tuple[str, int | None]]:
        return {
            member: (name, seed)
            for name in self.variants
            for seed, member in self.members(name).items()
        }

    def fill(self, side: Side) -> Side:
        """The side with what it leaves open; a chain has its own builder."""
        given = {name: value for name, value in side.model_dump().items() if value is not None}
        full = {**self.cell.model_dump(), **given}
        if full["method"] != "tree":
            full["builder"] = "chain"
        return Side(**full)

    def base_run(self) -> RunConfig:
        return parse_config(self.base)

    def runs(self) -> dict[str, RunConfig]:
        """The runs of every variant, by name; see `members`.

        Raises:
            JetspecError: a setting is unknown or out of range, named with its variant.
        """
        found = {}
        for name, variant in self.variants.items():
            for seed, member in self.members(name).items():
                raw = copy.deepcopy(self.base)
                for key, value in variant.set.items():
                    _lay(raw, key, value, f"variants.{name}.set")
                if seed is not None:
                    _lay(raw, "training.seed", seed, f"variants.{name}.seeds")
                try:
                    found[member] = parse_config(raw)
                except JetspecError as error:
                    field = f"variants.{name}: {error.field}"
                    raise JetspecError(field, error.value, error.mend) from error
        return found


def side_label(side: Side) -> str:
    """A filled side's cell as tables name it, e.g. `tree 64`."""
    return cell_label(side.model_dump())


def is_ablation(path: Path) -> bool:
    """Whether a YAML file describes an ablation and not a run."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return False  # whoever reads it as a run says what is wrong
    return isinstance(raw, dict) and "variants" in raw


def load_ablation(path: Path, overrides: Sequence[str] = ()) -> AblationConfig:
    """The ablation of a YAML file, with `section.key=value` laid over its base.

    Raises:
        JetspecError: the file is missing or is no ablation, or a field is unknown or wrong.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise JetspecError("ablation", path, "not found; give the path of its file") from error
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise JetspecError("ablation", path, f"cannot be read ({error})") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("base"), dict):
        raise JetspecError("ablation", path, "must have the sections base, variants and tables")
    for override in overrides:
        key, sign, text = override.partition("=")
        if not sign:
            raise JetspecError("--set", override, "write it as section.key=value")
        _lay(raw["base"], key, yaml.safe_load(text), "--set")
    try:
        return AblationConfig.model_validate(raw)
    except ValidationError as error:
        raise first_mistake(error, "ablation", str(path)) from error


def _lay(raw: dict[str, Any], key: str, value: Any, field: str) -> None:
    *sections, last = key.split(".")
    for section in sections:
        raw = raw.setdefault(section, {})
        if not isinstance(raw, dict):
            raise JetspecError(field, key, f"{section} is not a section")
    raw[last] = value
