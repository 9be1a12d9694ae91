"""Measure the cells of one group: the same prompts, in the same batches, through every method.

Cells of a group take turns batch by batch, in an order that rotates, so that a machine that slows
down slows all of them: ratios come from one run. A method that fails drops out and leaves a record
with its reason; the others go on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from jetspec.errors import JetspecError
from jetspec.evaluation.cells import BASELINES, Cell
from jetspec.evaluation.config import EvaluationConfig
from jetspec.evaluation.methods import Decoded, Request, Runner, make_runner
from jetspec.evaluation.record import Trace, failed_record, make_record, with_speedups
from jetspec.evaluation.turns import Turns

if TYPE_CHECKING:
    from jetspec.evaluation.engines import Engines
    from jetspec.prompts import Prompt

CellRecord = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """A prompt's place in a batch; `filler` repeats an earlier prompt to fill the last batch."""

    prompt_id: str
    slice: str
    request: Request
    filler: bool = False


@dataclass
class _Run:
    """What one cell has shown so far."""

    decoded: list[list[Decoded]] = field(default_factory=list)  # [batch][repeat]
    error: BaseException | None = None


def run_cell(
    cell: Cell,
    target: Any,
    head: Any | None,
    prompts: Sequence["Prompt"],
    config: EvaluationConfig,
    baselines: Mapping[str, CellRecord] | None = None,
    **facts: Any,
) -> CellRecord:
    """One cell by itself; see `run_group`."""
    return run_group([cell], target, head, prompts, config, baselines, **facts)[0]


def run_group(
    cells: Sequence[Cell],
    target: Any,
    head: Any | None,
    prompts: Sequence["Prompt"],
    config: EvaluationConfig,
    baselines: Mapping[str, CellRecord] | None = None,
    *,
    runners: Mapping[Cell, Runner] | None = None,
    engines: "Engines | None" = None,
    reference: CellRecord | None = None,
    turns: Turns | None = None,
    **facts: Any,
) -> list[CellRecord]:
    """The records of `cells`, in their order.

    Args:
        cells: cells of one group.
        head: a draft head; needed by `chain` and `tree`.
        prompts: the group's prompts, decoded in this order.
        baselines: records of `plain` and `hf_eager` of the same group, for those not in `cells`.
        runners: how each cell decodes; by default as its method says.
        engines: those of an earlier group, from `open_engines`; None opens them where needed.
        reference: plain text of the prompts, {outputs, decoder}, that every cell is checked
            against; None checks against the `plain` cell.
        turns: keeps what was decoded, and holds what was decoded before.
        facts: what else every record carries (fingerprint, hashes).
    """
    if len({cell.group for cell in cells}) != 1:
        raise ValueError("the cells of one run must share slice, batch size and temperature")
    batches = make_batches(prompts, target, cells[0].batch_size)
    engines = engines or open_engines(target, head, config)

    def runner(cell: Cell) -> Runner:
        return runners[cell] if runners else make_runner(cell, target, head, config, engines)

    runs = _take_turns(cells, runner, batches, config, turns)
    names = [cell.label for cell in cells]
    known: dict[str, CellRecord] = dict(baselines or {})
    records: dict[Cell, CellRecord] = {}
    for cell in sorted(cells, key=_reference_first):
        run = runs[cell]
        if run.error is None:
            own = batches[: len(run.decoded)]
            trace = Trace(cell, own, run.decoded, interleaved_with=names)
            plain = reference or known.get("plain")
            record = make_record(trace, target, config, plain, **facts)
        else:
            record = failed_record(cell, *describe_failure(run.error), **facts)
        records[cell] = record
        if cell.method in BASELINES:
            known[cell.method] = record
    return [with_speedups(records[cell], known) for cell in cells]


def open_engines(
    target: Any, head: Any | None, config: EvaluationConfig, *, at_once: bool = True
) -> "Engines | None":
    """What decodes the cells that the engine can; None where the reference loop decodes all.

    Args:
        at_once: False fuses weights, and refuses what the engine does not run, only when a cell
            decodes.

    Raises:
        JetspecError: the engine does not run this target or this head.
    """
    if config.backend != "engine":
        return None
    from jetspec.evaluation.engines import Engines

    return Engines(target, head, config) if at_once else Engines(target, head, config, least_rows=0)


def make_batches(prompts: Sequence["Prompt"], target: Any, batch_size: int) -> list[list[Item]]:
    """Full batches of prompts; the last one is filled up with prompts from the beginning.

    A smaller last batch would be a measurement at another batch size.

    Raises:
        JetspecError: there are no prompts.
    """
    if not prompts:
        raise JetspecError("prompts.eval", "empty", "give at least one evaluation prompt")
    items = [
        Item(prompt.id, prompt.slice, Request(target.render(prompt.messages), prompt.id))
        for prompt in prompts
    ]
    missing = -len(items) % batch_size
    fillers = [items[i % len(items)] for i in range(missing)]
    items += [Item(f.prompt_id, f.slice, f.request, filler=True) for f in fillers]
    return [items[i : i + batch_size] for i in range(0, len(items), batch_size)]


def describe_failure(error: BaseException) -> tuple[str, str]:
    """(status, reason): running out of memory is told apart from other failures."""
    text = " ".join(str(error).split()) or "no message"
    words = ("out of memory", "can't allocate memory", "cannot allocate memory")
    exhausted = isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        word in text.lower() for word in words
    )
    reason = text if isinstance(error, JetspecError) else f"{type(error).__name__}: {text}"
    return ("out_of_memory" if exhausted else "failed"), reason[:300]


def _take_turns(
    cells: Sequence[Cell],
    runner: Callable[[Cell], Runner],
    batches: list[list[Item]],
    config: EvaluationConfig,
    turns: Turns | None,
) -> dict[Cell, _Run]:
    """Decode every batch with every cell that takes part and still stands, warm-up first."""
    runs = {cell: _Run() for cell in cells}
    calls: dict[Cell, Runner] = {}

    def attempt(cell: Cell, requests: Sequence[Request], limit: int) -> Decoded | None:
        try:
            if cell not in calls:
                calls[cell] = runner(cell)
            return calls[cell](requests, limit)
        except Exception as error:  # whatever breaks a cell becomes its row
            runs[cell].error = error
            # The traceback's frames would keep the tensors that did not fit.
            error.__traceback__ = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None

    left = _unfinished(cells, len(batches), config, turns)
    for cell in cells:
        if cell not in left:
            continue
        warm = [item.request for item in batches[0]]
        for _ in range(-(-config.warmup_prompts // len(warm))):
            attempt(cell, warm, min(config.warmup_tokens, config.max_new_tokens))
    for number, batch in enumerate(batches):
        requests = [item.request for item in batch]
        present = [cell for cell in cells if _takes_part(cell, number, config)]
        for cell in present:
            runs[cell].decoded.append([])
        for repeat in range(config.repeats):
            turn = number * config.repeats + repeat
            kept = turns.read(turn) if turns else {}
            shift = turn % len(present) if present else 0
            found: dict[Cell, Decoded] = {}
            for cell in [*present[shift:], *present[:shift]]:
                if runs[cell].error is not None:
                    continue
                decoded = kept.get(cell.key) or attempt(cell, requests, config.max_new_tokens)
                if decoded is not None:
                    found[cell] = decoded
                    runs[cell].decoded[-1].append(decoded)
            if turns and any(cell.key not in kept for cell in found):
                turns.write(turn, found)
    return runs


def _unfinished(
    cells: Sequence[Cell], batches: int, config: EvaluationConfig, turns: Turns | None
) -> set[Cell]:
    """Cells that something is left to decode for; the others need no warm-up."""
    if turns is None:
        return set(cells)
    left: set[Cell] = set()
    for turn in range(batches * config.repeats):
        kept = turns.read(turn)
        present = (c for c in cells if _takes_part(c, turn // config.repeats, config))
        left |= {cell for cell in present if cell.key not in kept}
    return left


def _takes_part(cell: Cell, batch: int, config: EvaluationConfig) -> bool:
    """Whether a cell decodes the batch of this number: baselines may have fewer than all."""
    most = config.batches_of(cell.method)
    return most is None or batch < most


def _reference_first(cell: Cell) -> int:
    return BASELINES.index(cell.method) if cell.method in BASELINES else len(BASELINES)
