"""The file of an ablation: what all variants share, how they differ, and what is asked of them."""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

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
    """

    set: dict[str, Any] = {}
    start: str | None = None
    text: Literal["regenerated", "corpus"] = "regenerated"


class Side(Settings):
    """A variant at one cell of its matrix; what is left at None is the ablation's default cell."""

    variant: str
    method: Literal["chain", "tree", "lookup"] | None = None
    builder: str | None = None
    budget: int | None = Field(None, ge=1)


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
    """One table of the report: its rows, and the claims that it decides."""

    title: str
    source: str | None = None
    rows: dict[str, Side] = Field(min_length=1)
    claims: tuple[Claim, ...] = ()


class AblationConfig(Settings):
    """An ablation.

    Attributes:
        base: sections of a run file.
        cell: the cell that a side means where it does not say.
        variants: by name, in the order they are made.
    """

    base: dict[str, Any]
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
            made.add(name)
        return self

    def sides(self) -> Iterator[Side]:
        """Every side that a table or a claim looks at."""
        for table in self.tables:
            yield from table.rows.values()
            for claim in table.claims:
                yield from (claim.better, claim.than)

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
        """The run of every variant.

        Raises:
            JetspecError: a setting is unknown or out of range, named with its variant.
        """
        found = {}
        for name, variant in self.variants.items():
            raw = copy.deepcopy(self.base)
            for key, value in variant.set.items():
                _lay(raw, key, value, f"variants.{name}.set")
            try:
                found[name] = parse_config(raw)
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
