"""What holds and what does not, said by the figures."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jetspec.ablation.report import sentences
from jetspec.evaluation.cells import ALL_SLICES
from jetspec.evaluation.pooling import prompt_rows
from jetspec.evaluation.statistics import Estimate, independent_ratio_interval
from jetspec.results.cells import Subject, cell_key
from jetspec.results.compare import (
    BOOTSTRAP,
    FAILS,
    HOLDS,
    UNMEASURED,
    Claim,
    find,
    judge,
    tau_ratio,
    words,
)
from jetspec.results.goals import over_chain, served_trees
from jetspec.results.inputs import Record

DEEPER = "Drafting beyond the depth that the head was trained for is accepted more"
SAME_TAU = 0.02  # near ties and rounding of a decoded text may move tau by so much
_CHINESE = "_zh"  # ends the name of a set whose prompts are Chinese
# What the papers leave open, and the words by which an ablation's claim answers it.
QUESTIONS: dict[str, tuple[str, ...]] = {
    "depth beyond the trained block": ("depth that", "deep"),
    "regenerated against corpus text": ("corpus",),
    "forward KL against hard labels": ("hard labels",),
    "mask against depth weight": ("bidirectional", "gamma"),
    "Chinese against English": ("chinese", "zh"),
}


def claims(subject: Subject, others: Sequence[Subject] = ()) -> list[Claim]:
    """Claims about one head. tau comes from replayed cells where there are any: they are exact for
    greedy decoding and cover all budgets on the same prompts.

    Args:
        others: whatever else was measured, the same head at another depth among it.
    """
    greedy = _tau_source(subject)
    return [
        _scores_at_all_budgets(greedy),
        _chain_scores(greedy),
        _fewer_nodes(greedy),
        _tree_over_chain(greedy),
        _rising(greedy),
        _over_lookup(greedy),
        _languages(greedy),
        _deeper(subject, others),
        _same_tau(subject),
        _lossless(subject),
        _sampling(subject),
        _tree_speed(subject),
    ]


def _tau_source(subject: Subject) -> list[Record]:
    def alone(records: Sequence[Record]) -> list[Record]:
        found = find(records, batch_size=1, temperature=0.0)
        return [r for r in found if r["slice"] != ALL_SLICES] or found

    return alone(subject.replayed) or alone(subject.decoded)


def _budgets(records: Sequence[Record], **fields: Any) -> list[int]:
    return sorted(
        {r["budget"] for r in find(records, method="tree", builder="best_first", **fields)}
    )


def _judged(text: str, ratios: Mapping[str, Estimate | None]) -> Claim:
    shown = "; ".join(f"{name}: {words(ratio)}" for name, ratio in ratios.items())
    return Claim(text, judge(list(ratios.values())), shown or "no cells")


def _scores_at_all_budgets(records: Sequence[Record]) -> Claim:
    trees = find(records, method="tree", builder="best_first")
    slot, path = find(trees, scores="slot"), find(trees, scores="path")
    shared = sorted({r["budget"] for r in slot} & {r["budget"] for r in path})
    ratios = {f"{b} nodes": tau_ratio(find(path, budget=b), find(slot, budget=b)) for b in shared}
    return _judged("Path scores beat slot scores in trees of every budget (ratio of taus)", ratios)


def _chain_scores(records: Sequence[Record]) -> Claim:
    chains = find(records, method="chain")
    ratios = {}
    for budget in sorted({r["budget"] for r in find(chains, scores="path")}):
        own = find(chains, budget=budget)
        ratios[f"chain of {budget}"] = tau_ratio(find(own, scores="path"), find(own, scores="slot"))
    return _judged("Path scores beat slot scores in a chain (ratio of taus)", ratios)


def _fewer_nodes(records: Sequence[Record]) -> Claim:
    path, slot = (
        find(records, method="tree", builder="best_first", scores=s) for s in ("path", "slot")
    )
    small = 64
    large = max((r["budget"] for r in slot if r["budget"] > small), default=256)
    ratio = tau_ratio(find(path, budget=small), find(slot, budget=large))
    text = f"{small} nodes on path scores reach more than {large} on slot scores"
    return _judged(text, {"ratio of taus": ratio})


def _tree_over_chain(records: Sequence[Record]) -> Claim:
    chains = find(records, method="chain")
    paths = find(chains, scores="path") or find(chains, scores=None)
    longest = find(paths, budget=max((r["budget"] for r in paths), default=0))
    ratios = {
        f"{b} nodes": tau_ratio(served_trees(records, budget=b), longest) for b in _budgets(records)
    }
    text = "An exact tree accepts more than the chain on the same scores, at every budget"
    return _judged(text, ratios if longest else {})


def _rising(records: Sequence[Record]) -> Claim:
    budgets = _budgets(records)
    ratios = {
        f"{b} over {a}": tau_ratio(served_trees(records, budget=b), served_trees(records, budget=a))
        for a, b in zip(budgets, budgets[1:], strict=False)
    }
    return _judged("tau rises with every step of the budget, all sets together", ratios)


def _over_lookup(records: Sequence[Record]) -> Claim:
    lookup = find(records, method="lookup")
    budgets = _budgets(records)
    ratios = {}
    for name in dict.fromkeys(r["slice"] for r in lookup):
        trees = served_trees(records, slice=name, budget=budgets[0]) if budgets else []
        ratios[name] = tau_ratio(trees, find(lookup, slice=name))
    least = f"{budgets[0]} nodes" if budgets else "its trees"
    return _judged(f"The head at {least} accepts more than prompt lookup on every set", ratios)


def _languages(records: Sequence[Record]) -> Claim:
    """Sets `NAME_zh` against `NAME`: other prompts, so each side is resampled by itself."""
    names = {r["slice"] for r in records}
    pairs = sorted(name for name in names if f"{name}{_CHINESE}" in names)
    ratios = {}
    for budget in _budgets(records):
        trees = served_trees(records, budget=budget)
        sides = [
            prompt_rows(r for r in trees if r["slice"] in [f"{name}{tail}" for name in pairs])
            for tail in ("", _CHINESE)
        ]
        columns = [
            [row[field] for row in side.values()]
            for side in sides
            for field in ("tokens", "rounds")
        ]
        if pairs and all(sides):
            ratios[f"{budget} nodes"] = independent_ratio_interval(*columns, **BOOTSTRAP)
    text = "English text is accepted more than Chinese text on prompts of the same kinds"
    return _judged(text, ratios)


def _deeper(subject: Subject, others: Sequence[Subject]) -> Claim:
    text = f"{DEEPER} (ratio of taus)"
    ratios = {}
    for other in others:
        if (other.target, other.head) != (subject.target, subject.head) or not other.depth:
            continue
        here, there = _tau_source(subject), _tau_source(other)
        for budget in _budgets(there):
            ratio = tau_ratio(served_trees(there, budget=budget), served_trees(here, budget=budget))
            ratios[f"depth {other.depth}, {budget} nodes"] = ratio
    return _judged(text, ratios)


def _same_tau(subject: Subject) -> Claim:
    text = f"tau replayed along the target's answers is the tau of decoding, within {SAME_TAU:.0%}"
    replayed = {cell_key(r): r for r in subject.replayed}
    offsets = {}
    for record in subject.decoded:
        other = replayed.get(cell_key(record))
        if other is None:
            continue
        ratio = tau_ratio([record], [other])  # on the prompts of both
        if ratio is not None:
            offsets[f"{record['key']}"] = abs(ratio.value - 1)
    if not offsets:
        return Claim(text, UNMEASURED, "no cell was both decoded and replayed")
    worst = max(offsets, key=lambda key: offsets[key])
    shown = f"largest of {len(offsets)} differences: {offsets[worst]:.2%} ({worst})"
    return Claim(text, HOLDS if offsets[worst] <= SAME_TAU else FAILS, shown)


def _lossless(subject: Subject) -> Claim:
    text = "Every decoded cell gives plain decoding's text"
    checked = [r for r in subject.decoded if r["output_check"]]
    if not checked:
        return Claim(text, UNMEASURED, "no output was compared")
    checks = [r["output_check"] for r in checked]
    failed = sum(not check["passed"] for check in checks)
    compared, differing, near = (
        sum(check[name] for check in checks) for name in ("compared", "differing", "near_ties")
    )
    shown = [
        f"{len(checks) - failed} of {len(checks)} cells pass; {compared} outputs compared, "
        f"{differing} differ, {near} of them at a near tie of the target's own logits"
    ]
    gaps = sum((Counter(check.get("gaps", {})) for check in checks), Counter[str]())
    if gaps:
        apart = [
            f"{count} by {ulps}" if ulps.isdigit() else f"{count} {ulps}"
            for ulps, count in sorted(gaps.items(), key=_gap)
        ]
        shown.append(f"first differences by ulps: {', '.join(apart)}")
    plain = [r["output_check"] for r in checked if r["method"] == "plain"]
    if differing and plain:  # the share that rounding alone brings, without any draft
        own, of = (sum(check[name] for check in plain) for name in ("differing", "compared"))
        shown.append(f"of plain decoding's own outputs in other batches {own} of {of} differ")
    return Claim(text, FAILS if failed else HOLDS, "; ".join(shown))


def _gap(item: tuple[str, int]) -> float:
    return float(item[0]) if item[0].isdigit() else math.inf


def _sampling(subject: Subject) -> Claim:
    ratios = {}
    hot = max((r["temperature"] for r in subject.decoded), default=0.0)
    cells = find(subject.decoded, batch_size=1)
    budgets = _budgets(cells, temperature=hot) if hot else []
    for budget in budgets:
        cold, warm = (served_trees(cells, budget=budget, temperature=t) for t in (0.0, hot))
        ratios[f"{budget} nodes"] = tau_ratio(cold, warm)
    return _judged(f"Greedy text is accepted more than text drawn at temperature {hot:g}", ratios)


def _tree_speed(subject: Subject) -> Claim:
    text = "At batch 1 the fastest tree decodes faster than the path-scored chain"
    records = subject.one_run()
    ratios = {
        batch: over_chain(records, batch, None)
        for batch in sorted({r["batch_size"] for r in records})
    }
    known = {batch: ratio for batch, ratio in ratios.items() if ratio is not None}
    shown = "; ".join(f"batch {batch}: {words(ratio)}" for batch, ratio in known.items())
    if 1 not in known:
        return Claim(text, UNMEASURED, shown or "no cells")
    slower = [batch for batch, ratio in known.items() if ratio.value <= 1]
    end = f"from batch {slower[0]} on it is not" if slower else "so it is at every measured batch"
    return Claim(text, judge([known[1]]), f"{shown}; {end}")


def ablation_sentences(findings: Sequence[Record]) -> list[str]:
    """The claims of every ablation, as its own report says them."""
    return [text for found in findings for text in sentences(_of(found))]


def unanswered(
    findings: Sequence[Record], sets: Sequence[str], said: Sequence[Claim] = ()
) -> list[str]:
    """Open questions that neither an ablation nor one of the page's own claims decides."""
    texts = [
        str(claim["claim"]).lower()
        for found in findings
        for claim in _of(found)
        if claim["verdict"] in (HOLDS, FAILS)
    ]
    texts += [name.lower() for name in sets]
    texts += [claim.text.lower() for claim in said if claim.verdict in (HOLDS, FAILS)]
    return [
        question
        for question, keys in QUESTIONS.items()
        if not any(key in text for text in texts for key in keys)
    ]


def _of(found: Record) -> list[Record]:
    return [claim for table in found["tables"] for claim in table["claims"]]
