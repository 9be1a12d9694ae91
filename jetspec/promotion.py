"""Gates: pure functions from measured records to a verdict with reasons in plain words."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import Field

from jetspec.evaluation.cells import cell_label
from jetspec.evaluation.pooling import (
    Record,
    as_served,
    paired_tau_ratio,
    pooled_tau,
    prompt_rows,
    select,
    speedup,
)
from jetspec.evaluation.statistics import Estimate
from jetspec.settings import Settings


class PromotionConfig(Settings):
    """What a challenger must show before it becomes champion.

    Attributes:
        budget: the tree budget whose cells are compared.
        builder: the tree builder whose cells are compared.
        max_slice_loss: a slice's tau may fall below the champion's by at most this fraction.
        hysteresis: a larger batch keeps its neighbour's budget unless another is this much faster.
        bootstrap_samples: resamples behind the gates' intervals.
    """

    budget: int = Field(16, ge=1)
    builder: Literal["best_first", "algorithm1"] = "best_first"
    batch_size: int = Field(1, ge=1)
    max_slice_loss: float = Field(0.05, ge=0, lt=1)
    hysteresis: float = Field(0.03, ge=0)
    bootstrap_samples: int = Field(2000, ge=100)
    seed: int = 0


@dataclass(frozen=True)
class Reason:
    """One gate's answer; `detail` is a sentence with the figures behind it."""

    gate: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Verdict:
    """Whether the challenger becomes champion, and every gate's reason."""

    promote: bool
    reasons: tuple[Reason, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def gates(
    records: Sequence[Record],
    champion_records: Sequence[Record] | None,
    doctor: Iterable[Any],
    config: PromotionConfig,
) -> Verdict:
    """Judge a challenger. Every gate is asked, so that a refusal gives all its reasons.

    Args:
        records: the challenger's cells.
        champion_records: the champion's cells on the same prompts, or None when there is no
            champion. Cells measured on another target are told apart by their fingerprint.
        doctor: findings of heads/doctor.py, each with `ok`, `check` and `detail`.
    """
    champion, aside = _comparable(records, champion_records)
    reasons = (
        _measured(records, config),
        _lossless(records),
        _healthy(doctor),
        _accepts_more(records, champion, aside, config),
        _no_slice_worse(records, champion, aside, config),
        _faster(records, config),
    )
    return Verdict(all(reason.passed for reason in reasons), reasons)


def compared_cells(records: Iterable[Record], config: PromotionConfig) -> list[Record]:
    """The good cells that gates compare: greedy trees at the configured budget and batch size."""
    return [record for record in _compared(records, config) if record["status"] == "ok"]


def _compared(records: Iterable[Record], config: PromotionConfig) -> list[Record]:
    return select(
        as_served(records),
        method="tree",
        builder=config.builder,
        budget=config.budget,
        batch_size=config.batch_size,
        temperature=0,
    )


def _comparable(
    records: Sequence[Record], champion_records: Sequence[Record] | None
) -> tuple[Sequence[Record] | None, str]:
    """The champion's records if they are of the same target, else None and why."""
    if champion_records is None:
        return None, "there is no champion"
    ours = {record.get("target_fingerprint") for record in records}
    theirs = {record.get("target_fingerprint") for record in champion_records}
    if not champion_records:
        return None, "the champion has no records"
    if ours != theirs:
        names = [", ".join(sorted(str(f)[:12] for f in side)) for side in (theirs, ours)]
        return None, (
            f"the champion was measured on target {names[0]}, not on {names[1]}, "
            "so its tau says nothing here"
        )
    return champion_records, ""


def _measured(records: Sequence[Record], config: PromotionConfig) -> Reason:
    cells = _compared(records, config)
    where = f"{config.builder} trees of {config.budget} nodes at batch {config.batch_size}"
    if not cells:
        return Reason("measured", False, f"no cell with {where}: nothing to judge")
    broken = [record for record in cells if record["status"] != "ok"]
    if broken:
        return Reason(
            "measured",
            False,
            f"{len(broken)} of {len(cells)} cells with {where} have no figures; "
            f"slice {broken[0]['slice']}: {broken[0]['reason']}",
        )
    prompts = len(prompt_rows(cells))
    return Reason("measured", True, f"{len(cells)} cells with {where} over {prompts} prompts")


def _lossless(records: Sequence[Record]) -> Reason:
    methods = ("lookup", "draft_model", "chain", "tree")
    drafted = [r for r in records if r["method"] in methods and r["status"] == "ok"]
    wrong = [r for r in drafted if not (r["output_check"] or {}).get("passed")]
    if not any(r["method"] in ("chain", "tree") for r in drafted):
        return Reason("lossless", False, "no cell of the head has an output check")
    if wrong:
        worst = wrong[0]
        where = f"{cell_label(dict(worst))} on {worst['slice']} at batch {worst['batch_size']}"
        check = worst["output_check"]
        shown = (
            f"{check['differing']} of {check['compared']} outputs differ"
            if check
            else "there is no plain output to compare with"
        )
        return Reason(
            "lossless",
            False,
            f"{len(wrong)} of {len(drafted)} cells fail the output check; {where}: {shown}",
        )
    compared = sum(r["output_check"]["compared"] for r in drafted)
    ties = sum(r["output_check"]["near_ties"] for r in drafted)
    tail = f", {ties} of them up to near ties of the target's logits" if ties else ""
    return Reason(
        "lossless",
        True,
        f"{compared} outputs in {len(drafted)} cells equal plain decoding's{tail}",
    )


def _healthy(doctor: Iterable[Any]) -> Reason:
    findings = [f if isinstance(f, Mapping) else vars(f) for f in doctor]
    bad = [f for f in findings if not f["ok"]]
    if not findings:
        return Reason("doctor", False, "the head was not examined")
    if bad:
        said = "; ".join(f"{f['check']}: {f['detail']}" for f in bad)
        return Reason("doctor", False, f"{len(bad)} of {len(findings)} checks failed: {said}")
    return Reason("doctor", True, f"{len(findings)} checks passed")


def _accepts_more(
    records: Sequence[Record],
    champion: Sequence[Record] | None,
    aside: str,
    config: PromotionConfig,
) -> Reason:
    """tau's lower bound above the champion's on the prompts both saw, or above 1 without one."""
    ours = compared_cells(records, config)
    draws = {"samples": config.bootstrap_samples, "seed": config.seed}
    if champion is None:
        tau = pooled_tau(ours, **draws)
        return Reason(
            "tau",
            _above_one(tau),
            f"{aside}; tau {_words(tau)} must have its lower bound above 1",
        )
    theirs = compared_cells(champion, config)
    ratio, shared = paired_tau_ratio(ours, theirs, **draws)
    if not shared:
        return Reason("tau", False, "the champion was not measured on any of the same prompts")
    return Reason(
        "tau",
        _above_one(ratio),
        f"tau is {_words(ratio)} times the champion's on {shared} shared prompts "
        f"({_words(pooled_tau(ours, **draws))} against {_words(pooled_tau(theirs, **draws))}); "
        "the lower bound must be above 1",
    )


def _no_slice_worse(
    records: Sequence[Record],
    champion: Sequence[Record] | None,
    aside: str,
    config: PromotionConfig,
) -> Reason:
    if champion is None:
        return Reason("slices", True, f"{aside}: no slice to compare")
    ours = prompt_rows(compared_cells(records, config))
    theirs = prompt_rows(compared_cells(champion, config))
    shared = ours.keys() & theirs.keys()
    ratios = {}
    for name in sorted({ours[i]["slice"] for i in shared}):
        own = [i for i in shared if ours[i]["slice"] == name]
        mine, other = (
            sum(rows[i]["tokens"] for i in own) / max(1, sum(rows[i]["rounds"] for i in own))
            for rows in (ours, theirs)
        )
        ratios[name] = mine / other if other else 1.0
    if not ratios:
        return Reason("slices", False, "the champion was not measured on any of the same prompts")
    worst = min(ratios, key=lambda name: ratios[name])
    return Reason(
        "slices",
        ratios[worst] >= 1 - config.max_slice_loss,
        f"the worst of {len(ratios)} slices is {worst} at {ratios[worst]:.3f} times the "
        f"champion's tau; at least {1 - config.max_slice_loss:.3f} is asked",
    )


def _faster(records: Sequence[Record], config: PromotionConfig) -> Reason:
    """The speed-up's interval lies above 1, asked only of figures from a GPU."""
    cells = compared_cells(records, config)
    if not any(str(record.get("device", "")).startswith("cuda") for record in cells):
        return Reason("speed", True, "not measured on a GPU: speed is not asked")
    base = {
        (r["slice"], r["batch_size"], r["temperature"]): r
        for r in select(records, method="plain", status="ok")
    }
    keys = [(r["slice"], r["batch_size"], r["temperature"]) for r in cells]
    withheld = next((r for r in cells if r["speedup"]["vs_plain"]["value"] is None), None)
    if withheld is not None:
        why = withheld["speedup"]["vs_plain"]["reason"]
        return Reason("speed", False, f"withheld on {withheld['slice']}: {why}")
    estimate = speedup(
        cells,
        [base[key] for key in keys],
        samples=config.bootstrap_samples,
        seed=config.seed,
        clock="decode",
    )
    return Reason(
        "speed",
        _above_one(estimate),
        f"{_words(estimate)} times as fast as plain decoding; the lower bound must be above 1",
    )


def _above_one(estimate: Estimate | None) -> bool:
    return estimate is not None and estimate.ci is not None and estimate.ci[0] > 1


def _words(estimate: Estimate | None) -> str:
    if estimate is None:
        return "unknown"
    if estimate.ci is None:
        return f"{estimate.value:.3f} (one prompt: no interval)"
    return f"{estimate.value:.3f} [{estimate.ci[0]:.3f}, {estimate.ci[1]:.3f}]"
