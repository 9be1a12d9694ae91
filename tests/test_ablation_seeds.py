"""Several training seeds of one variant: how they are made, paired, pooled and judged."""

import itertools
import random

import numpy as np
import pytest

from jetspec.ablation.claims import (
    FAILS,
    HOLDS,
    OPEN,
    Outcome,
    _verdict,
    compare,
    judge,
    matching,
    pooled,
    ratio,
    rows_by_seed,
    seed_pairs,
    tau,
)
from jetspec.ablation.config import AblationConfig, Side
from jetspec.ablation.report import findings, markdown, ratio_rows, table_rows
from jetspec.errors import JetspecError

DRAWS = {"samples": 4000, "seed": 0}
A, B = {"variant": "a"}, {"variant": "b"}


def plan_of(ours=(0, 1), theirs=(0, 1), **changes) -> AblationConfig:
    raw = {
        "base": {"evaluation": {"bootstrap_samples": 300}},
        "cell": {"variant": "", "method": "tree", "builder": "best_first", "budget": 16},
        "variants": {"a": {"seeds": list(ours)}, "b": {"seeds": list(theirs)}},
        "tables": [
            {
                "title": "Seeds",
                "rows": {"first": A, "second": B},
                "ratios": {"a over b": {"better": A, "than": B}},
                "claims": [{"text": "a beats b", "better": A, "than": B}],
            }
        ],
    }
    return AblationConfig.model_validate({**raw, **changes})


def rows(level: float, seed: int, count=10, slices=("math", "chat"), **more):
    """`count` prompts a slice whose taus scatter around `level`."""
    scatter = random.Random(seed)
    found = []
    for name in slices:
        for number in range(count):
            rounds = scatter.randint(15, 25)
            tokens = round(rounds * level * scatter.uniform(0.97, 1.03))
            found.append(
                {"prompt_id": f"{name}{number}", "slice": name, "tokens": tokens, "rounds": rounds}
                | more
            )
    return found


def record(per_prompt, scores=None, **more):
    cell = {"method": "tree", "builder": "best_first", "budget": 16, "temperature": 0.0}
    speedup = {"vs_plain": {"value": None, "ci": None}}
    scored = {} if scores is None else {"scores": scores}
    return {
        **cell, **scored, "status": "ok", "slice": "all", "batch_size": 1,
        "per_prompt": per_prompt, "speedup": speedup, **more,
    }  # fmt: skip


def outcomes_of(**levels) -> dict[str, Outcome]:
    """One outcome a member, e.g. a0=3.0 is variant a's seed 0 with tau about 3."""
    return {
        f"{name[0]}.seed{name[1]}": Outcome([record(rows(level, int(name[1])))], {"head_uri": name})
        for name, level in levels.items()
    }


def test_every_seed_is_a_run_and_shares_all_but_its_seed() -> None:
    plan = plan_of(variants={"a": {"seeds": [0, 5]}, "b": {}})
    runs = plan.runs()
    assert list(runs) == ["a.seed0", "a.seed5", "b"]
    assert runs["a.seed5"].training.seed == 5
    assert runs["a.seed0"] == runs["b"] == plan.base_run()
    update = {"seed": 5}
    same = runs["b"].training.model_copy(update=update)
    assert runs["a.seed5"] == runs["b"].model_copy(update={"training": same})


def test_a_variant_that_starts_from_another_starts_from_its_own_seed() -> None:
    raw = {"a": {"seeds": [0, 1]}, "b": {"start": "a", "seeds": [1]}, "c": {}, "d": {"start": "c"}}
    tables = [{"title": "t", "rows": {"r": A}}]
    plan = plan_of(variants=raw, tables=tables)
    assert [plan.start_of(m) for m in plan.runs()] == [None, None, "a.seed1", None, "c"]
    for wrong in ({"start": "a"}, {"start": "a", "seeds": [2]}):
        with pytest.raises(ValueError, match="give it seeds of 'a'"):
            plan_of(variants={"a": {"seeds": [0, 1]}, "b": wrong})


def test_a_file_without_seeds_dumps_as_it_did() -> None:
    plan = plan_of(variants={"a": {}, "b": {}})
    dumped = plan.model_dump(mode="json")
    assert "measure" not in dumped and "seeds" not in dumped["variants"]["a"]
    assert "scores" not in dumped["cell"] and "ratios" in dumped["tables"][0]


def test_equal_seeds_meet_each_other_and_unequal_ones_all_of_the_others() -> None:
    assert seed_pairs([0, 1], [1, 0]) == [(0, 0), (1, 1)]
    assert seed_pairs([0, 1], [None]) == [(0, None), (1, None)]
    assert seed_pairs([0, 1], [0, 2]) == [(0, 0), (0, 2), (1, 0), (1, 2)]


def test_pooling_keeps_a_prompts_rounds_together() -> None:
    first = {"p": {"tokens": 6, "rounds": 2}, "q": {"tokens": 9, "rounds": 4}}
    second = {"p": {"tokens": 4, "rounds": 3}, "r": {"tokens": 1, "rounds": 1}}
    assert pooled([first, second]) == {"p": {"tokens": 10, "rounds": 5}}
    assert pooled([]) == {}


def test_pooled_interval_equals_enumerating_every_resample_of_prompts() -> None:
    """Brute force: with four prompts there are 4^4 equally likely resamples."""
    prompts = "pqrs"
    maker = random.Random(3)
    seeds = {
        side: [
            {p: {"tokens": maker.randint(20, 60), "rounds": maker.randint(8, 20)} for p in prompts}
            for _ in range(2)
        ]
        for side in "ab"
    }
    ours, theirs = (pooled(seeds[side]) for side in "ab")
    values = []
    for drawn in itertools.product(prompts, repeat=4):
        sums = {
            side: [
                sum(part[p][name] for part in seeds[side] for p in drawn)
                for name in ("tokens", "rounds")
            ]
            for side in "ab"
        }
        values.append((sums["a"][0] / sums["a"][1]) / (sums["b"][0] / sums["b"][1]))
    estimate, count = ratio(ours, theirs, DRAWS)
    assert count == 4
    whole = [
        sum(part[p][name] for part in seeds[side] for p in prompts)
        for side in "ab"
        for name in ("tokens", "rounds")
    ]
    assert estimate.value == pytest.approx((whole[0] / whole[1]) / (whole[2] / whole[3]))
    from jetspec.evaluation.statistics import expanded_tail

    tail = expanded_tail(4)
    low, high = np.quantile(values, [tail, 1 - tail])
    assert estimate.ci == pytest.approx((low, high), rel=0.02)


@pytest.mark.parametrize(
    ("levels", "verdict"),
    [
        ((3.0, 3.0, 2.0, 2.0), HOLDS),
        ((2.0, 2.0, 3.0, 3.0), FAILS),
        ((3.0, 2.0, 2.0, 3.0), OPEN),
        ((3.0, 2.0, 2.0, 2.0), OPEN),
    ],
)
def test_a_claim_holds_where_it_holds_for_every_seed(levels, verdict) -> None:
    plan = plan_of()
    made = outcomes_of(**dict(zip(("a0", "a1", "b0", "b1"), levels, strict=True)))
    found = judge(plan.tables[0].claims[0], made, plan)
    assert found["verdict"] == verdict
    assert [part["seeds"] for part in found["by_seed"]] == [[0, 0], [1, 1]]
    each = []
    for seed, part in enumerate(found["by_seed"]):
        ours, theirs = (
            {r["prompt_id"]: r for r in made[f"{v}.seed{seed}"].records[0]["per_prompt"]}
            for v in "ab"
        )
        estimate, _ = ratio(ours, theirs, {"samples": 300, "seed": 0})
        assert part["ci"] == pytest.approx(estimate.ci, abs=1e-4)
        each.append(HOLDS if estimate.ci[0] > 1 else FAILS if estimate.ci[1] < 1 else OPEN)
    assert verdict == (each[0] if len(set(each)) == 1 else OPEN)
    if verdict == OPEN:
        assert found["reason"] == "seeds disagree"


def test_seeds_that_agree_to_decide_nothing_do_not_disagree() -> None:
    plan = plan_of()
    made = outcomes_of(a0=3.0, a1=2.0, b0=3.0, b1=2.0)
    found = judge(plan.tables[0].claims[0], made, plan)
    assert (found["verdict"], found["reason"]) == (OPEN, "the interval contains 1")


def test_one_seed_that_was_not_made_leaves_the_claim_open() -> None:
    plan = plan_of()
    made = outcomes_of(a0=3.0, b0=2.0, b1=2.0) | {"a.seed1": Outcome((), {}, failure="cut")}
    found = judge(plan.tables[0].claims[0], made, plan)
    assert found["verdict"] == OPEN and found["reason"] == "not measured for every seed"
    one, other = found["by_seed"]
    assert found["ratio"] == one["ratio"] > 1 and other == {
        "seeds": [1, 1], "ratio": None, "ci": None,
    }  # fmt: skip
    first, second = table_rows(plan.tables[0], made, plan)
    assert first["failure"] == "cut" and first["by_seed"]["1"] is None
    assert first["cells"]["all"]["tau"] == pytest.approx(first["by_seed"]["0"])
    assert second["cells"]["all"]["tau"] == pytest.approx(2, rel=0.05)
    none = judge(plan.tables[0].claims[0], {k: v for k, v in made.items() if k[0] == "b"}, plan)
    assert none["ratio"] is None and none["reason"] == "not measured: a (tree 16)"


def test_scores_choose_between_the_two_drafts_of_one_head() -> None:
    slot, path = rows(2.0, 0), rows(3.0, 0)
    both = Outcome([record(slot, "slot"), record(path, "path")], {})
    side = Side(variant="a", method="tree", builder="best_first", budget=16)

    def found(scores, outcome=both):
        return matching(outcome, side.model_copy(update={"scores": scores}))

    assert found("slot")[0]["per_prompt"] is slot and found("path")[0]["per_prompt"] is path
    assert found(None) == found("path")  # the head as it is
    bare = Outcome([record(slot)], {})
    assert found(None, bare)[0]["per_prompt"] is slot and found("path", bare) == []
    assert found(None, Outcome([record(slot, "slot")], {}))[0]["per_prompt"] is slot


def test_a_side_is_its_own_good_cells_at_the_lowest_temperature() -> None:
    own = record(rows(2.0, 0), temperature=0.6)
    others = [
        record(rows(9.0, 0), temperature=1.0),
        record(rows(9.0, 0), temperature=0.6, status="failed"),
        record([], temperature=0.0, status="failed"),
        record(rows(9.0, 0), temperature=0.6, budget=64),
        record(rows(9.0, 0), temperature=0.6, builder="static"),
        record(rows(9.0, 0), temperature=0.6, method="chain"),
    ]
    side = Side(variant="a", method="tree", builder="best_first", budget=16)
    assert matching(Outcome([*others, own], {}), side) == [own]
    assert matching(Outcome(others[1:3], {}), side) == []


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(1.31, 1.5, HOLDS), (1.1, 1.29, FAILS), (1.1, 1.31, OPEN), (1.3, 1.5, OPEN), (1.1, 1.3, OPEN)],
)
def test_the_whole_interval_must_lie_beyond_the_claims_factor(low, high, verdict) -> None:
    assert _verdict([low, high], 1.3) == verdict
    assert _verdict(None, 1.3) == OPEN


def test_looping_answers_are_left_out_of_every_figure() -> None:
    plan = plan_of(variants={"a": {}, "b": {}})
    quiet, looping = rows(2.0, 0), rows(9.0, 1, slices=("code",), looping=True)
    made = {"a": Outcome([record(quiet + looping)], {}), "b": Outcome([record(quiet)], {})}
    found = rows_by_seed(plan.fill(Side(variant="a")), made, plan)[None]
    assert found.keys() == {row["prompt_id"] for row in quiet}
    compared = compare(plan.tables[0].ratios["a over b"], made, plan, None)
    assert compared["ratio"] == 1 and compared["prompts"] == 20


def test_tables_pool_seeds_and_show_each(capsys) -> None:
    plan = plan_of()
    made = outcomes_of(a0=3.0, a1=3.4, b0=2.0, b1=2.0)
    first, _ = table_rows(plan.tables[0], made, plan)
    parts = [
        {r["prompt_id"]: r for r in made[f"a.seed{s}"].records[0]["per_prompt"]} for s in (0, 1)
    ]
    whole = tau(pooled(parts), {"samples": 300, "seed": 0})
    assert first["cells"]["all"]["tau"] == pytest.approx(whole.value, abs=1e-4)
    assert first["by_seed"] == {
        str(s): pytest.approx(tau(part, DRAWS).value, abs=1e-4) for s, part in enumerate(parts)
    }
    (pair,) = ratio_rows(plan.tables[0], made, plan)
    assert list(pair["cells"]) == ["chat", "math", "all"] and pair["cells"]["math"]["prompts"] == 10
    found = findings(plan, made)
    assert len(found["per_prompt"]["a (tree 16)"]) == 40
    assert {row["seed"] for row in found["per_prompt"]["a (tree 16)"]} == {0, 1}
    text = markdown(plan, found, {"versions": {}, "gpus": [], "cpus": 2})
    assert "| method | cell | chat | math | all | seeds |" in text
    assert "| ratio of taus | chat | math | all |" in text and "; seed by seed 1." in text
    assert " / " not in text.split("## Variants")[0].split("Cells:")[0].split("## Seeds")[1]


def test_a_table_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="give at least one"):
        plan_of(tables=[{"title": "nothing"}])
    with pytest.raises(JetspecError, match=r"variants\.a: training\.seed"):
        plan_of(base={"training": {"seed": "x"}}, variants={"a": {}, "b": {}}).runs()
