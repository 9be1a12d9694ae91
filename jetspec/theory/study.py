"""Costs of this machine, and what they predict for an evaluation or a diagnosis."""

from collections.abc import Sequence
from typing import Any

from jetspec.config import RunConfig
from jetspec.errors import JetspecError
from jetspec.evaluation.budgets import serving_table
from jetspec.evaluation.matrix import load_fitting_head, read_records
from jetspec.records import environment
from jetspec.storage import exists, join, read_json
from jetspec.targets.load import load_target
from jetspec.theory.costs import CostTable, Listener, measure_costs
from jetspec.theory.predict import best_budgets, compare, taus_of


def study(
    config: RunConfig,
    *,
    evaluation: str | None = None,
    diagnosis: str | None = None,
    head: str | None = None,
    costs: str | None = None,
    budgets: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
    context: int = 256,
    repeats: int = 5,
    listen: Listener = lambda done, total: None,
) -> dict[str, Any]:
    """Measure c(N, L), or take a table that was measured, and predict from it.

    Args:
        evaluation: a finished evaluation, whose speed-ups stand beside the predicted ones.
        diagnosis: a directory of `jetspec diagnose --out`, whose taus are used instead.
        head: whose drafts are timed; by default the evaluation's or the diagnosis's.
        costs: a JSON file with a cost table, as `jetspec theory --json` prints it.
        budgets, batches: by default the run's.
        context: L, tokens that each sequence holds.

    Returns:
        plain JSON values {costs, comparison, best, serving, taus_from, environment}.
    """
    settings = config.evaluation
    records = read_records(evaluation) if evaluation else []
    looked_at = _diagnosis(diagnosis) if diagnosis else None
    if head is None:
        found = [r.get("head_uri") for r in records] + [looked_at and looked_at["head"]]
        head = next((uri for uri in found if uri), None)
    sizes = tuple(batches or settings.batch_sizes)
    if costs is not None:
        known = read_json(costs)
        table = CostTable.from_json(known.get("costs", known))
    else:
        target = load_target(config.target)
        table = measure_costs(
            target,
            None if head is None else load_fitting_head(head, target),
            tokens=[budget + 1 for budget in budgets or settings.budgets],
            batches=sizes,
            context=context,
            repeats=repeats,
            width=settings.width,
            listen=listen,
        )
    taus = looked_at["predictions"] if looked_at else taus_of(records)
    serving = serving_table(records, config.promotion.hysteresis)
    return {
        "costs": table.as_json(),
        "comparison": [row.as_json() for row in compare(records, table)],
        "best": [choice.as_json() for choice in best_budgets(taus, table, sizes)] if taus else [],
        "serving": serving,
        "taus_from": diagnosis or evaluation,
        "environment": environment(),
    }


def _diagnosis(directory: str) -> dict[str, Any]:
    uri = join(directory, "diagnosis.json")
    if not exists(uri):
        raise JetspecError("--diagnosis", directory, "holds no diagnosis; see jetspec diagnose")
    return dict(read_json(uri))
