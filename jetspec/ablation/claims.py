"""What two sides of an ablation say about each other: paired ratios of tau, and verdicts.

A variant with several training seeds is compared seed by seed, on the prompts that both sides
measured: a claim holds where it holds for every seed. Pooled figures add up a prompt's rounds over
seeds and resample prompts, so that rounds of one prompt stay together.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jetspec.ablation.config import AblationConfig, Claim, Ratio, Side, side_label
from jetspec.evaluation.pooling import Record, prompt_rows
from jetspec.evaluation.statistics import Estimate, paired_ratio_interval, ratio_interval

HOLDS, FAILS, OPEN = VERDICTS = ("holds", "does not hold", "not decided here")
Seed = int | None
Rows = Mapping[str, Mapping[str, Any]]
"""Rows by prompt id, with `tokens` and `rounds`."""
_COLUMNS = ("tokens", "rounds")


@dataclass(frozen=True)
class Outcome:
    """What became of one run of a variant.

    Attributes:
        records: its evaluation's cells; none where it failed, and `failure` says why.
        facts: URIs and small figures of its stages.
    """

    records: Sequence[Record]
    facts: Mapping[str, Any]
    failure: str | None = None


Outcomes = Mapping[str, Outcome]


def matching(outcome: Outcome, side: Side) -> list[Record]:
    """The good cells of a run at a filled side, at its lowest temperature."""
    good = [r for r in outcome.records if r["status"] == "ok"]
    lowest = min((r["temperature"] for r in good), default=0)
    wanted = (side.method, side.builder, side.budget)
    found = [
        r
        for r in good
        if r["temperature"] == lowest and (r["method"], r["builder"], r["budget"]) == wanted
    ]
    known = {r.get("scores") for r in found}
    # A head as it is scores paths where it can.
    scores = side.scores or next((s for s in (None, "path", "slot") if s in known), None)
    return [r for r in found if r.get("scores") == scores]


def rows_by_seed(
    side: Side, outcomes: Outcomes, config: AblationConfig, slice: str | None = None
) -> dict[Seed, Rows]:
    """A filled side's prompts by seed. Answers that end in a loop are left out: they are easy to
    draft, and the same for every variant."""
    found: dict[Seed, Rows] = {}
    for seed, member in config.members(side.variant).items():
        rows = prompt_rows(matching(outcomes[member], side)) if member in outcomes else {}
        found[seed] = {
            prompt: row
            for prompt, row in rows.items()
            if slice in (None, row["slice"]) and not row.get("looping")
        }
    return found


def seed_pairs(ours: Iterable[Seed], theirs: Iterable[Seed]) -> list[tuple[Seed, Seed]]:
    """Which seeds are set against each other: equal ones, which drew the same batches, where both
    sides have the same; else every one of ours against every one of theirs."""
    mine, other = list(ours), list(theirs)
    if set(mine) == set(other):
        return [(seed, seed) for seed in mine]
    return [(a, b) for a in mine for b in other]


def pooled(parts: Sequence[Rows]) -> dict[str, dict[str, int]]:
    """Rows added up prompt by prompt, of the prompts that every part has."""
    shared = set.intersection(*(set(part) for part in parts)) if parts else set()
    return {
        prompt: {name: sum(part[prompt][name] for part in parts) for name in _COLUMNS}
        for prompt in sorted(shared)
    }


def tau(rows: Rows, draws: Mapping[str, int]) -> Estimate | None:
    """Tokens a round over the prompts of `rows`."""
    tokens, rounds = ([row[name] for row in rows.values()] for name in _COLUMNS)
    return ratio_interval(tokens, rounds, **draws)


def ratio(ours: Rows, theirs: Rows, draws: Mapping[str, int]) -> tuple[Estimate | None, int]:
    """(ratio of taus over the prompts that both sides measured, how many those are)."""
    shared = sorted(ours.keys() & theirs.keys())
    columns = [[rows[i][name] for i in shared] for rows in (ours, theirs) for name in _COLUMNS]
    return paired_ratio_interval(*columns, **draws), len(shared)


def compare(
    pair: Ratio | Claim, outcomes: Outcomes, config: AblationConfig, slice: str | None
) -> dict[str, Any]:
    """tau of one side over the other's: pooled over the seeds that were measured, and seed by seed.

    Returns:
        {ratio, ci, prompts, by_seed: [{seeds, ratio, ci}]}; ratio and ci are None where a side was
        not measured.
    """
    draws = draws_of(config)
    mine, other = (
        rows_by_seed(config.fill(side), outcomes, config, slice)
        for side in (pair.better, pair.than)
    )
    pairs = seed_pairs(mine, other)
    by_seed = []
    for a, b in pairs:
        value, ci = plain(ratio(mine[a], other[b], draws)[0])
        by_seed.append({"seeds": [a, b], "ratio": value, "ci": ci})
    pairs = [(a, b) for a, b in pairs if mine[a] and other[b]]
    estimate, prompts = ratio(
        pooled([mine[a] for a, _ in pairs]), pooled([other[b] for _, b in pairs]), draws
    )
    value, ci = plain(estimate)
    return {"ratio": value, "ci": ci, "prompts": prompts, "by_seed": by_seed}


def judge(claim: Claim, outcomes: Outcomes, config: AblationConfig) -> dict[str, Any]:
    """The verdict on one claim, with the figures it rests on.

    `holds` needs the whole interval of every pair of seeds above the factor, `does not hold` every
    one below; anything else, a missing side included, is not decided here.
    """
    found = compare(claim, outcomes, config, claim.slice)
    sides = [config.fill(side) for side in (claim.better, claim.than)]
    each = [_verdict(part["ci"], claim.factor) for part in found["by_seed"]]
    verdict = each[0] if len(set(each)) == 1 else OPEN
    reason = None
    if any(part["ci"] is None for part in found["by_seed"]):
        missing = [
            named(side) for side in sides if not all(rows_by_seed(side, outcomes, config).values())
        ]
        reason = f"not measured: {', '.join(missing)}" if missing else "too few prompts"
        if missing and found["ratio"] is not None:
            reason = "not measured for every seed"
    elif verdict == OPEN:
        apart = len(set(each)) > 1
        reason = "seeds disagree" if apart else f"the interval contains {claim.factor:g}"
    return {
        "claim": claim.text,
        "verdict": verdict,
        "reason": reason,
        **found,
        "factor": claim.factor,
        "slice": claim.slice,
        "better": named(sides[0]),
        "than": named(sides[1]),
        "paper": claim.paper,
    }


def _verdict(ci: Sequence[float] | None, factor: float) -> str:
    if ci is None:
        return OPEN
    return HOLDS if ci[0] > factor else FAILS if ci[1] < factor else OPEN


def draws_of(config: AblationConfig) -> dict[str, int]:
    """How bootstraps draw: `samples` and `seed`."""
    settings = config.base_run().evaluation
    return {"samples": settings.bootstrap_samples, "seed": settings.seed}


def plain(estimate: Estimate | None) -> tuple[float | None, list[float] | None]:
    """JSON values of an estimate."""
    return estimate.rounded(4) if estimate else (None, None)


def named(side: Side) -> str:
    """A filled side as sentences name it."""
    return f"{side.variant} ({side_label(side)})"
