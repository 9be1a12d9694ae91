"""Each claim of the page of results reads the cells that it names, decoys beside them."""

from dataclasses import replace

import pytest

from jetspec.results.cells import Subject
from jetspec.results.claims import claims
from jetspec.results.compare import FAILS, HOLDS, OPEN, UNMEASURED

BUILDERS = {"chain": "chain", "tree": "best_first", "lookup": "chain"}
CHECKED = {"passed": True, "compared": 3, "differing": 0, "near_ties": 0}


def cell(method, budget, tau, scores=None, *, name="math", batch=1, temperature=0.0, **more):
    """A cell of three prompts whose rounds all commit `tau` tokens, so that ratios are exact."""
    rows = [
        {"prompt_id": f"{name}-{i}", "tokens": rounds * tau, "rounds": rounds}
        for i, rounds in enumerate((10, 20, 40))
    ]
    return {
        "method": method, "builder": BUILDERS.get(method), "budget": budget, "scores": scores,
        "slice": name, "batch_size": batch, "temperature": temperature, "per_prompt": rows,
        "output_check": CHECKED, "key": f"{method}{budget}{scores}{name}", "tau": tau, **more,
    }  # fmt: skip


def subject(decoded=(), replayed=(), **more):
    fields = {"target": "toy", "head": "abc", "depth": None, "failed": [], "runs": list(decoded)}
    return Subject(decoded=list(decoded), replayed=list(replayed), **{**fields, **more})


def said(words, decoded=(), replayed=(), others=(), **more):
    found = claims(subject(decoded, replayed, **more), others)
    (one,) = [claim for claim in found if words in claim.text]
    return one.verdict, one.evidence


def exact(**ratios):
    return "; ".join(f"{name}: {r:.2f} [{r:.2f}, {r:.2f}]" for name, r in ratios.items())


def test_chains_are_compared_budget_by_budget():
    cells = [
        cell("chain", 7, 4.0, "path"), cell("chain", 7, 2.0, "slot"),
        cell("chain", 15, 3.0, "path"), cell("chain", 15, 2.0, "slot"),
        cell("tree", 7, 9.0, "slot"), cell("chain", 3, 9.0, "slot"),
    ]  # fmt: skip
    verdict = said("slot scores in a chain", cells)
    assert verdict == (HOLDS, exact(**{"chain of 7": 2.0, "chain of 15": 1.5}))
    lost = [*cells[:3], cell("chain", 15, 6.0, "slot")]
    assert said("slot scores in a chain", lost)[0] == FAILS
    assert said("slot scores in a chain", cells[:3])[0] == UNMEASURED


def test_trees_are_compared_at_the_budgets_of_both_scores():
    cells = [
        cell("tree", 16, 4.0, "path"), cell("tree", 16, 2.0, "slot"), cell("tree", 64, 9.0, "path"),
        cell("tree", 128, 9.0, "slot"), cell("tree", 16, 9.0, "slot", builder="algorithm1"),
        cell("chain", 64, 9.0, "slot"),
    ]  # fmt: skip
    cells[4]["builder"] = "algorithm1"
    verdict = said("trees of every budget", cells)
    assert verdict == (HOLDS, exact(**{"16 nodes": 2.0}))


def test_few_nodes_meet_the_largest_slot_tree():
    cells = [
        cell("tree", 64, 6.0, "path"), cell("tree", 64, 1.0, "slot"),
        cell("tree", 128, 5.0, "slot"), cell("tree", 512, 4.0, "slot"),
        cell("tree", 1024, 9.0, "path"),
    ]  # fmt: skip
    assert said("64 nodes on path scores reach more than 512", cells) == (
        HOLDS,
        exact(**{"ratio of taus": 1.5}),
    )
    assert said("64 nodes on path scores reach more than 256", cells[:2])[0] == UNMEASURED


def test_every_tree_meets_the_longest_chain_on_the_scores_that_serve():
    cells = [
        cell("tree", 16, 4.5, "path"), cell("tree", 64, 6.0, "path"), cell("tree", 16, 1.0, "slot"),
        cell("chain", 7, 9.0, "path"), cell("chain", 15, 3.0, "path"),
        cell("chain", 15, 9.0, "slot"),
    ]  # fmt: skip
    ratios = exact(**{"16 nodes": 1.5, "64 nodes": 2.0})
    assert said("more than the chain on the same scores", cells) == (HOLDS, ratios)
    bare = [{**c, "scores": None} for c in cells if c["scores"] == "path"]
    assert said("more than the chain on the same scores", bare) == (HOLDS, ratios)
    trees = [c for c in cells if c["method"] == "tree"]
    assert said("more than the chain on the same scores", trees) == (UNMEASURED, "no cells")


def test_tau_rises_step_by_step():
    cells = [cell("tree", b, tau, "path") for b, tau in ((128, 9.0), (16, 3.0), (64, 6.0))]
    cells += [{**cell("tree", b, 1.0, "path"), "builder": "algorithm1"} for b in (32, 64)]
    steps = {"64 over 16": 2.0, "128 over 64": 1.5}
    assert said("tau rises", cells) == (HOLDS, exact(**steps))
    assert said("tau rises", [*cells, cell("tree", 256, 8.0, "path")])[0] == FAILS
    assert said("tau rises", [*cells, cell("tree", 256, 9.0, "path")])[0] == OPEN


def test_lookup_is_met_by_the_smallest_tree_set_by_set():
    cells = [
        cell("lookup", 10, 2.0, name="math"), cell("lookup", 10, 4.0, name="code"),
        cell("tree", 16, 3.0, "path", name="math"), cell("tree", 16, 5.0, "path", name="code"),
        cell("tree", 64, 9.0, "path", name="math"), cell("tree", 64, 9.0, "path", name="code"),
    ]  # fmt: skip
    assert said("head at 16 nodes", cells) == (HOLDS, exact(math=1.5, code=1.25))
    assert said("head at its trees", cells[:2])[0] == UNMEASURED


def test_languages_are_compared_at_every_budget_on_the_sets_that_both_have():
    cells = [
        cell("tree", budget, share * budget, "path", name=name)
        for budget in (16, 64)
        for name, share in (("math", 2.0), ("math_zh", 1.0), ("code", 0.1), ("chat_zh", 9.0))
    ]
    found = said("English text is accepted more", cells)
    assert found == (HOLDS, exact(**{"16 nodes": 2.0, "64 nodes": 2.0}))


def test_only_the_same_head_at_another_depth_answers_for_depth():
    whole = [cell("tree", 16, 4.0, "path"), cell("tree", 64, 5.0, "path")]
    deep = subject([cell("tree", 16, 5.0, "path")], depth=31)
    decoys = [
        replace(deep, target="other"), replace(deep, head="other"), replace(deep, depth=None)
    ]  # fmt: skip
    assert said("beyond the depth", whole, others=decoys) == (UNMEASURED, "no cells")
    found = said("beyond the depth", whole, others=[*decoys, deep])
    assert found == (HOLDS, exact(**{"depth 31, 16 nodes": 1.25}))


def test_replay_is_as_good_as_its_worst_cell():
    decoded = [cell("tree", b, 4.0, "path") for b in (16, 64)]
    for off, verdict in ((4.07, HOLDS), (4.09, FAILS), (3.93, HOLDS), (3.91, FAILS)):
        again = [cell("tree", 16, 4.0, "path"), cell("tree", 64, off, "path")]
        found = said("is the tau of decoding", decoded, again)
        worst = abs(4.0 / off - 1)
        assert found == (verdict, f"largest of 2 differences: {worst:.2%} (tree64pathmath)")
    apart = [cell("tree", 128, 4.0, "path"), cell("tree", 16, 4.0, "path", batch=4)]
    assert said("is the tau of decoding", decoded, apart)[0] == UNMEASURED


def test_one_failed_check_is_a_text_that_differs():
    checks = [
        {"passed": True, "compared": 8, "differing": 1, "near_ties": 1},
        {"passed": False, "compared": 6, "differing": 3, "near_ties": 1},
        None,
    ]
    cells = [cell("tree", 16, 4.0, "path", output_check=check) for check in checks]
    verdict, evidence = said("plain decoding's text", cells)
    assert verdict == FAILS
    assert evidence.startswith("1 of 2 cells pass; 14 outputs compared, 4 differ, 2 of them")
    assert said("plain decoding's text", cells[:1])[0] == HOLDS
    assert said("plain decoding's text", cells[2:])[0] == UNMEASURED


def test_texts_that_differ_are_told_by_how_far_apart_and_beside_what_rounding_alone_does():
    own = {"passed": True, "compared": 8, "differing": 6, "near_ties": 6, "gaps": {"0": 4, "1": 2}}
    check = {
        "passed": False, "compared": 9, "differing": 8, "near_ties": 7,
        "gaps": {"0": 5, "11": 1, "2": 1, "ended": 1},
    }  # fmt: skip
    cells = [
        cell("plain", 0, 1.0, output_check=own, prompts=8, tok_s_decode=None),
        cell("tree", 16, 4.0, output_check=check, prompts=9, tok_s_decode=None),
    ]
    _, evidence = said("plain decoding's text", cells)
    assert evidence.endswith(
        "first differences by ulps: 9 by 0, 2 by 1, 1 by 2, 1 by 11, 1 ended; "
        "of plain decoding's own outputs in other batches 6 of 8 differ"
    )


def test_greedy_text_is_set_against_the_hottest_at_batch_1():
    cells = [
        cell("tree", 16, 4.0, "path"), cell("tree", 16, 3.0, "path", temperature=0.5),
        cell("tree", 16, 2.0, "path", temperature=1.0), cell("tree", 64, 9.0, "path"),
        cell("tree", 16, 9.0, "path", temperature=1.0, batch=4),
    ]  # fmt: skip
    assert said("drawn at temperature 1", cells) == (HOLDS, exact(**{"16 nodes": 2.0}))
    assert said("drawn at temperature 0", cells[:1])[0] == UNMEASURED


@pytest.mark.parametrize("where", ["batch", "temperature", "all"])
def test_tau_is_that_of_greedy_cells_at_batch_1_set_by_set(where):
    """Cells beside them would turn both steps round."""
    cells = [cell("tree", 16, 3.0, "path"), cell("tree", 64, 6.0, "path")]
    decoy = {"batch": {"batch": 4}, "temperature": {"temperature": 1.0}, "all": {"name": "all"}}
    others = [cell("tree", b, tau, "path", **decoy[where]) for b, tau in ((16, 90.0), (64, 1.0))]
    expected = (HOLDS, exact(**{"64 over 16": 2.0}))
    assert said("tau rises", [*cells, *others]) == expected
    assert said("tau rises", others, cells) == expected, "replayed cells come first"
    if where == "all":
        assert said("tau rises", others)[0] == FAILS, "where nothing else was measured"


def timed(method, budget, seconds, *, batch=1, scores="path", **more):
    clocks = [
        {"decode_tokens": 100, "decode_seconds": seconds * (1 + i), "prompts": 1} for i in range(3)
    ]
    facts = {"batches": clocks, "prompts": 3, "tok_s_decode": 100 / seconds, "evaluation_key": "r"}
    return cell(method, budget, 4.0, scores, batch=batch, **{**facts, **more})


def test_the_fastest_tree_meets_the_longest_chain_by_the_clock():
    cells = []
    for batch, tree in ((1, 2.0), (4, 5.0), (8, 2.0)):
        cells += [
            timed("plain", 0, 8.0, batch=batch, scores=None),
            timed("chain", 7, 1.0, batch=batch), timed("chain", 15, 4.0, batch=batch),
            timed("chain", 15, 0.1, batch=batch, scores="slot"),
            timed("tree", 16, tree, batch=batch), timed("tree", 64, tree * 2, batch=batch),
        ]  # fmt: skip
    verdict, evidence = said("the fastest tree decodes faster", cells)
    ratios = exact(**{"batch 1": 2.0, "batch 4": 0.8, "batch 8": 2.0})
    assert (verdict, evidence) == (HOLDS, f"{ratios}; from batch 4 on it is not")
    later = [c for c in cells if c["batch_size"] > 1]
    shown = said("the fastest tree decodes faster", later)
    assert shown == (UNMEASURED, exact(**{"batch 4": 0.8, "batch 8": 2.0}))
    faster = [c for c in cells if c["batch_size"] != 4]
    assert said("the fastest tree decodes faster", faster)[1].endswith("at every measured batch")
    wrong = [
        {**c, "output_check": {**CHECKED, "passed": False}} if c["method"] == "tree" else c
        for c in cells
    ]
    assert said("the fastest tree decodes faster", wrong) == (UNMEASURED, "no cells")
