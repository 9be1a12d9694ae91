"""The whole matrix: which cells are still to be measured, measuring them, and closing the output.

A cell's record appears whole or not at all in `cell-<key>.json`; the manifest comes last. A run
that was cut measures only what is missing. Rows that failed are tried again by the next run of an
unfinished matrix, and by `retry_failed` in a finished one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetspec import __version__
from jetspec.config import RunConfig
from jetspec.errors import JetspecError
from jetspec.evaluation.answers import plain_answers
from jetspec.evaluation.bench import CellRecord, open_engines, run_group
from jetspec.evaluation.budgets import serving_document
from jetspec.evaluation.cells import ALL_SLICES, Cell, Group, cells, grouped
from jetspec.evaluation.config import EvaluationConfig
from jetspec.evaluation.draft_models import draft_model_key
from jetspec.evaluation.pooling import as_served, pooled_tau
from jetspec.evaluation.report import markdown_table
from jetspec.evaluation.scoring import scored_head
from jetspec.evaluation.turns import Turns
from jetspec.heads.doctor import require_fit
from jetspec.heads.eight_bits import drafting_head
from jetspec.heads.registry import load_head
from jetspec.peers import Peers
from jetspec.prompts import Prompt, load_prompts
from jetspec.stages import StageResult
from jetspec.storage import (
    atomic_write,
    content_hash,
    exists,
    is_complete,
    join,
    list_files,
    read_json,
    read_manifest,
    stage_uri,
    write_json,
    write_manifest,
)
from jetspec.targets.load import load_target, target_directory, target_fingerprint

if TYPE_CHECKING:
    from jetspec.evaluation.engines import Engines

STAGE = "evaluation"
SERVING_TABLE = "serving_table.json"
OnProgress = Callable[[int, int, CellRecord], None]
# Where a matrix runs and how often it is tried again do not change what it measures.
_NOT_IN_KEY = {"workers", "max_attempts"}
# In the key only of a matrix whose methods draft with it.
_DRAFT_MODEL = {"draft_model", "draft_model_depth"}


@dataclass(frozen=True)
class Plan:
    """A matrix to be measured: everything but the models.

    Attributes:
        uri: the output directory; its name is the hash of all that shapes the records.
        prompts: evaluation prompts by slice.
        facts: what every record carries beside its figures.
    """

    uri: str
    key: str
    cells: tuple[Cell, ...]
    prompts: dict[str, list[Prompt]]
    facts: dict[str, Any]

    def cell_uri(self, cell: Cell) -> str:
        return join(self.uri, f"cell-{cell.key}.json")

    def turns(self, group: Group) -> Turns:
        """What a group has decoded without having its records yet."""
        return Turns(join(self.uri, "turns", content_hash(list(group))[:16]))


def evaluate(
    config: RunConfig,
    head_uri: str | None,
    on_progress: OnProgress | None = None,
    *,
    retry_failed: bool = False,
    other_target: bool = False,
    peers: Peers | None = None,
) -> StageResult:
    """Measure the matrix in this process.

    Args:
        head_uri: the head's directory; None measures methods that need no head.
        on_progress: called with (cells done, cells in all, record) after every cell.
        retry_failed: measure the failed rows of a finished matrix again.
        other_target: accept a head that was distilled for another target's fingerprint, as when
            an old champion is measured on a changed target.
        peers: processes that make the same call and share out the groups, whose cells take turns
            and so stay on one GPU.

    Raises:
        JetspecError: the head is incomplete or for another target, or there are no prompts.
    """
    peers = peers or Peers()

    def begin() -> tuple[Plan, StageResult | None, dict[Group, list[Cell]]]:
        plan = make_plan(config, head_uri, other_target=other_target)
        reused = finished(plan, retry_failed=retry_failed)
        return plan, reused, {} if reused else pending(plan)

    plan, reused, todo = peers.same(begin)
    if reused:
        return reused
    if todo:
        target, head = load_models(config, head_uri)
        engines = open_engines(target, head, config.evaluation)
        if config.evaluation.reference_batch is not None and peers.size > 1:
            fingerprint = plan.facts["target_fingerprint"]
            for temperature in sorted({group.temperature for group in todo}):
                plain_answers(
                    config, plan.prompts, fingerprint, target, temperature, engines, peers
                )
        before = len(plan.cells) - sum(map(len, todo.values()))
        for group_cells in peers.taken(list(todo.values())):
            for record in measure_group(plan, group_cells, target, head, config, engines):
                done = before + peers.add("cells", 1)
                if on_progress:
                    on_progress(done, len(plan.cells), record)
        peers.wait()
    return peers.same(lambda: finish(plan, config))


def make_plan(config: RunConfig, head_uri: str | None, *, other_target: bool = False) -> Plan:
    """What is to be measured and where it goes; see `evaluate` for the arguments."""
    settings = config.evaluation
    if head_uri is None and settings.needs_head:
        raise JetspecError("evaluation.methods", "chain, tree", "need a head; give its directory")
    fingerprint = target_fingerprint(config.target)
    head_hash, depth = None, None
    if head_uri is not None:
        manifest = read_manifest(head_uri, kind="head")
        trained_on = manifest.get("target_fingerprint")
        if trained_on != fingerprint and not other_target:
            raise JetspecError(
                "head",
                head_uri,
                f"was distilled for target {str(trained_on)[:12]}, this one is "
                f"{fingerprint[:12]}; give a head of this target",
            )
        head_hash, depth = content_hash(manifest["files"]), head_depth(head_uri)
    found = load_prompts(config.prompts)
    if not found.eval:
        raise JetspecError("prompts.eval", "empty", "give at least one evaluation prompt")
    by_slice: dict[str, list[Prompt]] = {}
    for prompt in found.eval:
        by_slice.setdefault(prompt.slice, []).append(prompt)
    shape = {
        "evaluation": settings.model_dump(mode="json", exclude=_NOT_IN_KEY | _DRAFT_MODEL),
        "dtype": config.target.dtype,
        "device": config.target.device,
        "target_fingerprint": fingerprint,
        "prompts_hash": found.hash,
        "head": head_hash,
        "code_version": __version__,
    }
    if model := draft_model_key(settings):
        shape["draft_model"] = model
    key = content_hash(shape)
    facts = {
        "target_name": target_directory(config.target)[1],
        "target_fingerprint": fingerprint,
        "prompts_hash": found.hash,
        "head_uri": head_uri,
        "head_hash": head_hash,
        "evaluation_key": key,
    }
    matrix = tuple(cells(settings, sorted(by_slice), head_depth=depth))
    return Plan(stage_uri(config.storage, STAGE, key), key, matrix, by_slice, facts)


def head_depth(head_uri: str) -> int:
    """Tokens that the head at `head_uri` drafts in a round: its block, less the anchor's place
    where that predicts nothing."""
    config = read_json(join(head_uri, "config.json"))
    size = config.get("block_size") or config.get("dflash_config", {}).get("block_size")
    if not isinstance(size, int) or size < 2:
        raise JetspecError("head.block_size", size, f"set it in {join(head_uri, 'config.json')}")
    return size if config.get("sample_from_anchor") else size - 1


def load_models(config: RunConfig, head_uri: str | None) -> tuple[Any, Any | None]:
    """The target, and the head on the target's device in the target's type.

    Raises:
        JetspecError: the head does not fit the target.
    """
    target = load_target(config.target)
    head = None if head_uri is None else load_fitting_head(head_uri, target)
    for scores in config.evaluation.scores or ():
        scored_head(head, scores)  # refuses what the head does not have
    return target, drafting_head(head, target, config.evaluation.draft_weights)


def load_fitting_head(head_uri: str, target: Any) -> Any:
    """A head ready to draft for `target`; refused when it does not fit."""
    head = load_head(head_uri)
    require_fit(head, target, head_uri)
    return head.to(device=target.device, dtype=target.dtype).eval()


def group_prompts(plan: Plan, group: Group, settings: EvaluationConfig) -> list[Prompt]:
    """A group's prompts: the first of its slice, or of every slice in turn for `all`."""
    limit = settings.prompts_per_slice
    most = settings.max_batches and settings.max_batches * group.batch_size
    if group.slice != ALL_SLICES:
        return plan.prompts[group.slice][:limit][:most]
    columns = [plan.prompts[name][:limit] for name in sorted(plan.prompts)]
    longest = max(map(len, columns))
    mixed = [column[i] for i in range(longest) for column in columns if i < len(column)]
    return mixed[:most]


def pending(plan: Plan) -> dict[Group, list[Cell]]:
    """Cells without a good record, by group."""
    return grouped(cell for cell in plan.cells if not _is_good(read_record(plan, cell)))


def measure_group(
    plan: Plan,
    group_cells: Sequence[Cell],
    target: Any,
    head: Any | None,
    config: RunConfig,
    engines: "Engines | None" = None,
) -> list[CellRecord]:
    """Measure cells of one group and write their records.

    Baselines that were measured before are read from their records.

    Args:
        engines: from `open_engines`, kept from group to group.
    """
    group = group_cells[0].group
    settings = config.evaluation
    baselines = {}
    for cell in plan.cells:
        if cell.group == group and cell.method in ("plain", "hf_eager"):
            record = read_record(plan, cell)
            if cell not in group_cells and record is not None:
                baselines[cell.method] = record
    prompts = group_prompts(plan, group, settings)
    facts, reference = plan.facts, None
    if settings.reference_batch is not None:
        fingerprint = facts["target_fingerprint"]
        reference = plain_answers(
            config, plan.prompts, fingerprint, target, group.temperature, engines
        )
        facts = {**facts, "reference_uri": reference["uri"]}
    turns = plan.turns(group)
    records = run_group(
        group_cells, target, head, prompts, settings, baselines, engines=engines,
        reference=reference, turns=turns, **facts,
    )  # fmt: skip
    for cell, record in zip(group_cells, records, strict=True):
        write_record(plan, cell, record)
    turns.clear()
    return records


def write_record(plan: Plan, cell: Cell, record: CellRecord) -> None:
    write_json(plan.cell_uri(cell), record)


def finished(plan: Plan, *, retry_failed: bool) -> StageResult | None:
    """The result of a matrix that is already complete, or None."""
    if not is_complete(plan.uri):
        return None
    manifest = read_manifest(plan.uri, kind=STAGE)
    if retry_failed and pending(plan):
        return None
    return StageResult(STAGE, plan.uri, plan.key, reused=True, facts=_facts(manifest))


def finish(plan: Plan, config: RunConfig) -> StageResult:
    """Write what follows from all records (serving table, report), then the manifest."""
    records = [read_json(plan.cell_uri(cell)) for cell in plan.cells]
    document = serving_document(records, config.promotion.hysteresis)
    write_json(join(plan.uri, SERVING_TABLE), document)
    with atomic_write(join(plan.uri, "report.md"), "w") as file:
        file.write(markdown_table(records))
    manifest = write_manifest(
        plan.uri,
        kind=STAGE,
        config_hash=plan.key,
        **plan.facts,
        cells=[cell.key for cell in plan.cells],
        summary=summarise(records, config),
    )
    return StageResult(STAGE, plan.uri, plan.key, reused=False, facts=_facts(manifest))


def read_records(uri: str, kind: str = STAGE) -> list[CellRecord]:
    """Records of a complete matrix, in its order; kind: what its manifest says it is.

    Raises:
        JetspecError: the matrix is incomplete, or a record is missing or altered.
    """
    manifest = read_manifest(uri, kind=kind)
    return [read_json(join(uri, f"cell-{key}.json")) for key in manifest["cells"]]


def read_partial(uri: str) -> list[CellRecord]:
    """The records that exist so far, complete matrix or not."""
    names = [n for n in list_files(uri) if n.startswith("cell-") and n.endswith(".json")]
    return [read_json(join(uri, name)) for name in names]


def summarise(records: Sequence[CellRecord], config: RunConfig) -> dict[str, Any]:
    """Counts of cells by how they ended, and tau of the budget the gates look at."""
    statuses = [record["status"] for record in records]
    checks = [record["output_check"] for record in records if record["output_check"]]
    gate = config.promotion
    gated = [
        record
        for record in as_served(records)
        if record["status"] == "ok"
        and record["method"] == "tree"
        and (record["budget"], record["batch_size"]) == (gate.budget, gate.batch_size)
        and record["temperature"] == 0
    ]
    tau = pooled_tau(
        gated, samples=config.evaluation.bootstrap_samples, seed=config.evaluation.seed
    )
    value, ci = tau.rounded() if tau else (None, None)
    return {
        "cells": len(records),
        **{name: statuses.count(name) for name in ("ok", "failed", "out_of_memory")},
        "output_checks": {
            "passed": sum(check["passed"] for check in checks),
            "failed": sum(not check["passed"] for check in checks),
            "differing": sum(check["differing"] for check in checks),
            "near_ties": sum(check["near_ties"] for check in checks),
        },
        "tau": {"budget": gate.budget, "batch_size": gate.batch_size, "value": value, "ci": ci},
    }


def _facts(manifest: dict[str, Any]) -> dict[str, Any]:
    names = ("head_uri", "target_fingerprint", "prompts_hash", "summary")
    return {name: manifest.get(name) for name in names}


def read_record(plan: Plan, cell: Cell) -> CellRecord | None:
    """A cell's record; None when it is missing or damaged."""
    uri = plan.cell_uri(cell)
    if not exists(uri):
        return None
    try:
        record = read_json(uri)
    except JetspecError:
        return None
    return record if isinstance(record, dict) and record.get("key") == cell.key else None


def _is_good(record: CellRecord | None) -> bool:
    return record is not None and record["status"] == "ok"
