"""Diagnosing a head: the log predicts what replay measures, and every figure means what it says."""

import copy
import dataclasses

import pytest
import torch

from jetspec import storage
from jetspec.diagnostics.diagnose import diagnose
from jetspec.diagnostics.gap import branch_log_p, gap_summary, rank1_gaps, top_branches
from jetspec.diagnostics.log import DraftLog, log_drafts
from jetspec.diagnostics.measures import (
    after_sibling,
    by_depth,
    calibration,
    fitted_settings,
    reliability,
    walk,
)
from jetspec.diagnostics.paths import groups, path_gain
from jetspec.diagnostics.proposals import stored
from jetspec.diagnostics.report import diagnosis_view, glance_rows, write_figures
from jetspec.diagnostics.simulate import agreed_depth, beaten_by, oracle, simulate
from jetspec.errors import JetspecError
from jetspec.evaluation.cells import Cell
from jetspec.evaluation.config import EvaluationConfig
from jetspec.evaluation.methods import Request, make_runner
from jetspec.evaluation.replay import replay_tau
from jetspec.evaluation.statistics import paired_ratio_interval
from jetspec.heads.registry import new_head, parse_head
from jetspec.training.config import TrainingConfig
from jetspec.training.loop import train
from jetspec.trees.build import build_tree
from jetspec.trees.config import TreeConfig
from jetspec.trees.draft import Draft
from jetspec.trees.scores import fit_calibration
from tests.answers import greedy_samples, sample
from tests.tiny import random_draft, tiny_head, tiny_target
from tests.workspace import Workspace, one_line

WIDTH = 8
TREES = [
    TreeConfig(builder="chain", budget=7, width=WIDTH),
    TreeConfig(builder="chain", budget=3, width=WIDTH),
    TreeConfig(builder="best_first", budget=12, width=WIDTH),
    TreeConfig(builder="best_first", budget=16, width=4, depth=2, score="hybrid", alpha=0.3),
    TreeConfig(builder="algorithm1", budget=12, width=4),
]
DRAWS = {"samples": 100, "seed": 0}


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama", spread=0.08, vocab_size=56)


@pytest.fixture(scope="module")
def samples(target):
    """Answers, one of them a second turn of its conversation."""
    answers = greedy_samples(target, count=8, tokens=16)
    first, second = answers[0], answers[1]
    turn = first.input_ids + second.input_ids[:4] + [5, 6, 7]
    turns = [first.loss_mask.index(1), len(first.input_ids), len(first.input_ids) + 4]
    return [*answers, sample(8, turn, turns), sample(9, [4, 5, 6], [2])]


@pytest.fixture(scope="module")
def heads(target, samples, tmp_path_factory):
    """One trained head with its path scores, and without them."""
    config = TrainingConfig(
        anchors=16, sequence_length=48, batch_size=9, micro_batch_size=9, epochs=45,
        learning_rate=1e-2, log_every=100, estimate_every=100, checkpoint_every=100,
    )  # fmt: skip
    directory = str(tmp_path_factory.mktemp("head"))
    path = train(config, tiny_head(target, edge_rank=4), target, samples, directory=directory).head
    slot = copy.deepcopy(path)
    slot.edges = None
    return {"path": path, "slot": slot}


KINDS = {
    "parallel": {"num_layers": 1, "block_size": 4, "num_taps": 2},
    "rescore": {"num_layers": 1, "block_size": 4, "num_taps": 2, "rescore": "shared"},
    "lattice": {
        "num_layers": 1, "block_size": 4, "num_taps": 2,
        "edges": "lattice", "edge_rank": 4, "edge_layers": 1, "edge_width": 32,
    },
    "eagle3": {"kind": "eagle3", "block_size": 4, "num_taps": 2, "beam": 3},
    "dspark": {"kind": "dspark", "block_size": 3, "num_layers": 1, "num_taps": 2, "markov_rank": 4},
}  # fmt: skip


class TreeHead:
    """A head that hands over a scored tree, as one does whose scores need all ancestors."""

    def __init__(self, head):
        self._head = head

    def __getattr__(self, name):
        return getattr(self._head, name)

    def draft(self, cache, anchors, embed, logits, width, depth=None):
        draft = self._head.draft(cache, anchors, embed, logits, WIDTH, depth)
        return build_tree(draft, anchors, TreeConfig(budget=60, width=WIDTH))


@pytest.fixture(scope="module")
def logs(target, heads, samples):
    return {
        kind: log_drafts(target, head, samples, width=WIDTH, batch_size=4)
        for kind, head in heads.items()
    }


@pytest.mark.parametrize("kind", ["slot", "path"])
@pytest.mark.parametrize("tree", TREES)
def test_a_simulated_round_is_a_replayed_round(target, heads, samples, logs, tree, kind):
    if kind == "path":  # its scores are normalised over the candidates that were logged
        tree = tree.model_copy(update={"width": WIDTH})
    simulated = simulate(logs[kind], tree)
    replayed = replay_tau(target, heads[kind], samples, tree)
    assert list(simulated.replays) == replayed
    assert 0 in simulated.accepted and max(simulated.accepted) > 1, "a trivial head tests nothing"


@pytest.mark.parametrize("tree", TREES)
def test_a_log_without_edges_is_the_log_of_the_head_without_them(
    target, heads, samples, logs, tree, tmp_path
):
    logs["path"].save(str(tmp_path / "drafts.npz"))
    bare = DraftLog.load(str(tmp_path / "drafts.npz")).without_edges()
    assert bare.scoring == "slot" and logs["slot"].without_edges() is None
    assert list(simulate(bare, tree).replays) == replay_tau(target, heads["slot"], samples, tree)
    narrow = logs["path"].propose(torch.arange(5)).narrow(3, 2)
    ours, theirs = narrow.without_edges(), logs["slot"].propose(torch.arange(5)).narrow(3, 2)
    assert torch.equal(ours.tokens, theirs.tokens)
    assert torch.equal(ours.edge_scores, theirs.edge_scores)


def test_what_path_scores_add_is_the_ratio_of_two_replays(target, heads, samples, logs):
    trees = [TREES[0], TREES[2], TREES[4].model_copy(update={"width": WIDTH})]
    slices = {s.prompt_id: "math" if place < 4 else "chat" for place, s in enumerate(samples)}
    simulations = [simulate(logs["path"], tree) for tree in trees]
    asked = {"reference": TREES[2], **DRAWS}
    found = path_gain(logs["path"], simulations, slices, **asked)
    replays = {
        (kind, tree.builder): replay_tau(target, head, samples, tree)
        for kind, head in heads.items()
        for tree in trees
    }

    def columns(kind, builder, prompts):
        own = [r for r in replays[kind, builder] if r.prompt_id in prompts]
        return [r.committed for r in own], [r.rounds for r in own]

    def same(told, ours, theirs):
        value = paired_ratio_interval(*ours, *theirs, **DRAWS).rounded()
        return (told["value"], told["ci"]) == value

    members = groups(slices)
    assert list(members) == ["all", "chat", "math"] and len(members["chat"]) == 6
    assert len(found["scores"]) == 9 and len(found["versus"]) == 6
    for row in found["scores"]:
        slot, path = (
            columns(kind, row["builder"], members[row["slice"]]) for kind in ("slot", "path")
        )
        assert same(row["ratio"], path, slot)
        for kind, (tokens, rounds) in {"slot": slot, "path": path}.items():
            assert row[kind]["value"] == pytest.approx(sum(tokens) / sum(rounds), abs=1e-6)
            assert row[kind]["ci"][0] <= row[kind]["value"] <= row[kind]["ci"][1]
    for row in found["versus"]:
        for kind in ("slot", "path"):
            ours, theirs = (
                columns(kind, builder, members[row["slice"]])
                for builder in ("best_first", row["over"])
            )
            assert same(row[kind], ours, theirs)
    assert any(row["ratio"]["value"] != 1 for row in found["scores"]), "the two must differ"
    bare = simulate(logs["slot"], TREES[2])
    looked = after_sibling(logs["slot"], bare, walk(logs["slot"], bare.rows), **DRAWS)
    assert found["next_depth"] == looked
    assert path_gain(logs["slot"], simulations, slices, **asked) is None


@pytest.mark.parametrize("kind", ["slot", "path"])
def test_a_predicted_chain_is_the_chain_that_the_matrix_measures(
    target, heads, samples, logs, kind
):
    config = EvaluationConfig(methods=("chain",), budgets=(7,), width=WIDTH, max_new_tokens=16)
    run = make_runner(Cell("chain", "chain", 7, 1, "chat", 0.0), target, heads[kind], config)
    answers = samples[:8]
    requests = [Request(s.input_ids[: s.loss_mask.index(1)], s.id) for s in answers]
    measured = run(requests, 16)
    predicted = simulate(logs[kind], TREES[0]).replays[:8]
    assert [len(rounds) for rounds in measured.rounds] == [r.rounds for r in predicted]
    other = "slot" if kind == "path" else "path"
    assert predicted != simulate(logs[other], TREES[0]).replays[:8], "the two must differ"


def test_a_head_that_drafts_trees_is_diagnosed_alike(target, heads, samples, logs, tmp_path):
    head = TreeHead(heads["path"])
    log = log_drafts(target, head, samples, width=WIDTH, batch_size=4)
    assert log.scoring == "tree"
    log.save(str(tmp_path / "drafts.npz"))
    log = DraftLog.load(str(tmp_path / "drafts.npz"))
    for tree in (TREES[0], TREES[2]):
        simulated = simulate(log, tree)
        assert list(simulated.replays) == replay_tau(target, head, samples, tree)
    # Twelve nodes of sixty: the budget's best are the same, and so is what was walked of them.
    edges = simulate(logs["path"], TREES[2])
    assert simulated.replays == edges.replays
    theirs, ours = walk(logs["path"], edges.rows), walk(log, edges.rows)
    inside = edges.accepted[:, None] > torch.arange(log.depth)
    inside[:, 1:] &= edges.accepted[:, None] > torch.arange(1, log.depth)
    assert (ours.ranks == theirs.ranks)[inside].all() and inside.any()
    told = diagnose(
        target, head, samples, budgets=(4,), width=WIDTH, branches=8, replay_all=False,
        bootstrap=100, seed=0, batch_size=4,
    ).facts  # fmt: skip
    assert told["gap"]["median"] is not None and told["next_depth"]["spine"]["asked"]
    assert list(told["settings"]) == ["rank_rates"]


def test_slot_scores_are_logged_once_and_path_scores_by_parent(logs):
    assert (logs["slot"].scoring, logs["path"].scoring) == ("slot", "path")
    assert stored(logs["slot"].proposals)["edge_scores"].shape[2] == 1
    assert stored(logs["path"].proposals)["edge_scores"].shape[2] == WIDTH


def test_a_saved_log_predicts_the_same(logs, tmp_path):
    uri = str(tmp_path / "drafts.npz")
    logs["path"].save(uri)
    again = DraftLog.load(uri)
    assert simulate(again, TREES[2]).replays == simulate(logs["path"], TREES[2]).replays
    (tmp_path / "not.npz").write_text("nothing")
    with pytest.raises(JetspecError, match="not a log"):
        DraftLog.load(str(tmp_path / "not.npz"))


def test_a_log_is_refused_beyond_its_limit_and_beyond_its_depth(target, heads, samples, logs):
    with pytest.raises(JetspecError, match="GB"):
        log_drafts(target, heads["path"], samples, width=WIDTH, limit_gb=1e-6)
    with pytest.raises(JetspecError, match="depth 7"):
        simulate(logs["slot"], TreeConfig(budget=12, depth=9, width=WIDTH))
    with pytest.raises(JetspecError, match="two tokens"):
        log_drafts(target, heads["path"], samples[-1:], width=WIDTH)


def test_the_oracle_is_never_below_any_chain_and_needs_only_the_candidates(logs):
    for log in logs.values():
        best, (chain, rounds) = oracle(log), simulate(log, TREES[0]).columns()
        tokens, fewer = best.columns()
        assert sum(tokens) == sum(chain) and sum(fewer) < sum(rounds)
    known = logs["slot"].proposals
    blind = Draft(torch.full_like(known.tokens, 99), known.edge_scores)
    assert oracle(dataclasses.replace(logs["slot"], proposals=blind)).accepted.max() == 0


def test_greedy_answers_are_recognised_and_others_too(target, heads, samples, logs):
    drawn = samples[0].input_ids[:-3] + [7, 9, 11]
    odd = sample(0, drawn, [samples[0].loss_mask.index(1)])
    assert logs["slot"].target_first[: int(logs["slot"].offsets[8])].all()
    assert not log_drafts(target, heads["slot"], [odd], width=4).target_first.all()


def test_walks_and_shares_equal_counting_by_hand(logs):
    log = logs["path"]
    simulation = simulate(log, TREES[2])
    walks = walk(log, simulation.rows)
    right = {"spine": [0, 0], "sibling": [0, 0]}
    for r, row in enumerate(simulation.rows.tolist()):
        parent, ranks = 0, []
        for depth, token in enumerate(log.truth[row].tolist()):
            if token < 0 or parent is None:
                assert not walks.asked[r, depth]
                continue
            scores = log.proposals.edge_scores[row, depth, parent].tolist()
            order = sorted(range(WIDTH), key=lambda k: (-scores[k], k))
            found = [k for k in order if int(log.proposals.tokens[row, depth, k]) == token]
            rank = order.index(found[0]) if found else WIDTH
            assert walks.asked[r, depth] and int(walks.ranks[r, depth]) == rank
            assert float(walks.best[r, depth]) == pytest.approx(
                min(1.0, float(torch.tensor(scores).exp().max()))
            )
            if depth and int(simulation.accepted[r]) >= depth:
                kind = "spine" if not any(ranks) else "sibling" if ranks[-1] else None
                if kind:
                    right[kind][0] += rank == 0
                    right[kind][1] += 1
            ranks.append(rank)
            parent = found[0] if found else None
    told = after_sibling(log, simulation, walks, **DRAWS)
    assert right["sibling"][1] > 3 and right["spine"][1] > 3
    for kind, (hits, asked) in right.items():
        assert told[kind]["asked"] == asked
        assert told[kind]["right"] == pytest.approx(hits / asked, abs=1e-4)


def test_ranks_of_a_depth_add_up_and_acceptance_falls_with_depth(logs):
    simulation = simulate(logs["slot"], TREES[2])
    rows = by_depth(logs["slot"], simulation, walk(logs["slot"], simulation.rows))
    assert list(rows[0]["ranks"]) == ["1", "2", "3-4", "5-8", "none"]
    assert all(sum(row["ranks"].values()) == pytest.approx(1, abs=1e-3) for row in rows)
    assert rows[0]["asked"] == len(simulation.rows)
    assert rows[0]["accepted"] == pytest.approx(
        float((simulation.accepted > 0).float().mean()), abs=1e-4
    )
    assert all(a["asked"] >= b["asked"] for a, b in zip(rows, rows[1:], strict=False))


def test_calibration_error_is_zero_for_honest_probabilities_and_the_bias_for_others():
    generator = torch.Generator().manual_seed(0)
    q = torch.rand(40_000, generator=generator)
    hits = torch.rand(40_000, generator=generator) < q
    assert reliability(q, hits)["ece"] < 0.01
    low = q * 0.6
    assert reliability(low + 0.3, torch.rand(40_000, generator=generator) < low)["ece"] == (
        pytest.approx(0.3, abs=0.01)
    )
    exact = reliability(torch.tensor([0.05, 0.95, 1.0]), torch.tensor([False, True, False]))
    assert exact["ece"] == pytest.approx((0.05 + 2 * abs(0.975 - 0.5)) / 3, abs=1e-3)
    assert [row["count"] for row in exact["bins"]] == [1, 2]


def test_path_calibration_counts_every_node_that_the_answer_reaches(logs):
    log = logs["path"]
    simulation = simulate(log, TREES[2])
    curves = calibration(log, simulation, walk(log, simulation.rows))
    tree = build_tree(log.propose(simulation.rows), log.anchors[simulation.rows], TREES[2])
    reached = (tree.depths > 0) & (tree.depths <= log.remaining[simulation.rows, None])
    hits = sum(row["count"] * row["accepted"] for row in curves["path"]["bins"])
    assert curves["path"]["count"] == int(reached.sum())
    assert hits == pytest.approx(int(simulation.accepted.sum()), abs=0.05)
    parents = sum(
        min(int(a) + 1, log.depth, int(left))
        for a, left in zip(simulation.accepted, log.remaining[simulation.rows], strict=True)
    )
    assert curves["step"]["count"] == parents


def test_branch_probabilities_equal_one_branch_at_a_time(target, logs, samples):
    log = logs["path"]
    rows = torch.tensor([0, 3, 9])
    tokens, lengths, drafted = top_branches(log, rows)
    text = torch.tensor(samples[0].input_ids)
    together = branch_log_p(target, text, log.places[rows], tokens, lengths)
    for place, branch, joint in zip(log.places[rows], tokens, together, strict=True):
        ids = torch.cat([text[: int(place) + 1], branch])[None]
        length = ids.shape[1]
        mask = torch.ones(1, length, length, dtype=torch.bool).tril()
        hidden = target.forward(ids, position_ids=torch.arange(length)[None], mask=mask).hidden[0]
        log_p = target.logits(hidden[int(place) : -1]).log_softmax(-1)
        alone = log_p.gather(1, branch[:, None]).sum()
        assert float(joint) == pytest.approx(float(alone), abs=1e-4)
    first = log.proposals.edge_scores[rows, 0, 0].amax(-1)
    assert (drafted <= first + 1e-5).all()
    shorter = branch_log_p(target, text, log.places[rows], tokens, lengths - 2)
    cut = branch_log_p(target, text, log.places[rows], tokens[:, :-2], lengths - 2)
    assert torch.allclose(shorter, cut, atol=1e-4) and (shorter > together).all()


def test_the_gap_is_the_drafts_certainty_less_the_targets(target, logs, samples):
    log = logs["slot"]
    every = rank1_gaps(target, log, samples, torch.arange(len(log)), branches=10_000)
    assert len(every) == int((log.remaining >= log.depth).sum())
    some = rank1_gaps(target, log, samples, torch.arange(len(log)), branches=5)
    assert len(some) == 5 and all((every - gap).abs().min() < 1e-4 for gap in some)
    surer = Draft(log.proposals.tokens, log.proposals.edge_scores + 1.0)
    surer = dataclasses.replace(log, proposals=surer)
    raised = rank1_gaps(target, surer, samples, torch.arange(len(log)), branches=10_000)
    assert torch.allclose(raised, every + log.depth, atol=1e-3)
    told = gap_summary(torch.tensor([-1.0, 4.0, 5.0, 80.0]), log.depth)
    assert (told["below_5"], told["at_least_80"]) == (0.5, 0.25)
    assert gap_summary(torch.zeros(0), log.depth)["median"] is None


def test_fitted_rates_are_how_often_a_rank_was_right_below_accepted_nodes(logs):
    log = logs["slot"]
    simulation = simulate(log, TREES[2])
    walks = walk(log, simulation.rows)
    fitted = fitted_settings(log, simulation)
    where = walks.asked & (simulation.accepted[:, None] >= torch.arange(log.depth))
    first = float((walks.ranks[where] == 0).float().mean())
    assert fitted["rank_rates"][0] == pytest.approx(first, abs=1e-4)
    tree = TreeConfig(builder="static", budget=12, width=WIDTH, rank_rates=fitted["rank_rates"])
    assert simulate(log, tree).tau(**DRAWS).value > 1
    edges = log.proposals.edge_scores[simulation.rows, 0, 0].flatten()
    truth = log.truth[simulation.rows, 0]
    hits = (log.proposals.tokens[simulation.rows, 0] == truth[:, None]).flatten()
    alone = fit_calibration(edges, hits, torch.ones_like(hits, dtype=torch.long))
    assert fitted["calibration"][0] == pytest.approx(alone[0], abs=1e-3)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_of_head_can_be_diagnosed(target, samples, kind, tmp_path):
    head = new_head(parse_head(KINDS[kind]), target)
    log = log_drafts(target, head, samples[:3], width=4)
    tree = TreeConfig(builder="best_first", budget=6, width=4)
    assert list(simulate(log, tree).replays) == replay_tau(target, head, samples[:3], tree)
    log.save(str(tmp_path / "drafts.npz"))
    again = DraftLog.load(str(tmp_path / "drafts.npz"))
    assert simulate(again, tree).replays == simulate(log, tree).replays
    kept, loaded = stored(log.proposals), stored(again.proposals)
    assert all(torch.equal(kept[name], loaded[name]) for name in kept)


def test_a_beaten_tree_never_beats_what_beats_it(logs):
    simulations = [simulate(logs["path"], tree) for tree in (*TREES[:3], TREES[4])]
    verdicts = beaten_by(simulations, **DRAWS)
    assert any(verdicts) and not all(verdicts)
    for theirs, ours in zip(simulations, verdicts, strict=True):
        if ours is not None:
            assert ours.tree.budget <= theirs.tree.budget
            assert sum(ours.columns()[1]) <= sum(theirs.columns()[1])


def test_agreement_needs_the_whole_path():
    draft = random_draft(3, batch=4, depth=4, width=3, path=True, coarse=False)
    tree = build_tree(draft, torch.tensor([60] * 4), TreeConfig(budget=30, width=3))
    truth = draft.tokens[:, :, 0].clone()
    truth[0, 1] = 77  # right at depth 1, 3 and 4 only
    truth[1, 2:] = -1
    assert agreed_depth(tree, truth)[:2].tolist() == [1, 2]


def test_a_diagnosis_is_a_page_with_a_meaning_for_every_figure(
    target, heads, samples, tmp_path, capsys
):
    found = diagnose(
        target, heads["path"], samples, budgets=(4, 12), width=WIDTH, branches=8,
        replay_all=True, bootstrap=100, seed=0, batch_size=4,
    ).facts  # fmt: skip
    for row in found["predictions"]:
        assert row["tau"] == pytest.approx(row["replayed"], abs=1e-5)
    assert [row["tree"] for row in found["predictions"]] == [
        "chain 7", "tree 4", "tree 12", "algorithm 1 4", "algorithm 1 12",
        "static 4", "static 12", "survival 4", "survival 12",
    ]  # fmt: skip
    assert found["scoring"] == "path" and found["reference"]["tree"] == "tree 4"
    from rich.console import Console

    Console(width=80).print(diagnosis_view(found))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "path / slot" in shown and "all (10)" in shown and "/ Algorithm 1" in shown
    assert "  slot scores" in [row[0] for row in glance_rows(found)]
    for name, value, meaning in glance_rows(found):
        assert name.strip() in shown and value in shown and meaning
    for path in write_figures(found, tmp_path):
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on disk with samples and a head of it."""
    workspace = Workspace.create(tmp_path_factory.mktemp("project"))
    samples = workspace.stage("regenerate", workspace.run)["uri"]
    return workspace, workspace.stage("train", workspace.run, samples)["uri"], samples


def test_a_head_is_diagnosed_on_what_it_was_not_trained_on(trained, tmp_path):
    workspace, head, samples = trained
    out = str(tmp_path / "out")
    facts = workspace.stage("diagnose", head, workspace.run, "--out", out, "--budgets", "2,4")
    assert facts["held_out"] and 0 < facts["answers"] < 10
    assert facts["looping"]["answers"] == 10
    assert {row["budget"] for row in facts["predictions"]} == {2, 3, 4}
    assert sorted(storage.read_manifest(out, kind="diagnosis")["files"]) == [
        "calibration.png", "diagnosis.json", "drafts.npz", "ranks.png",
    ]  # fmt: skip
    shown = workspace.library("diagnose", head, "--samples", samples, "--answers", "1")
    assert shown.exit_code == 0 and "rank-1 gap" in shown.output


def test_mistakes_in_diagnosing_are_one_line(trained, tmp_path):
    workspace, head, _ = trained
    (tmp_path / "kept").write_text("mine")
    assert "not empty" in one_line(workspace.library("diagnose", head, "--out", str(tmp_path)))
    assert "16,64,256" in one_line(workspace.library("diagnose", head, "--budgets", "4;0"))
    assert "give RUN" in one_line(workspace.library("diagnose", head, "--set", "a.b=1"))
    assert "nowhere" in one_line(workspace.library("diagnose", head, "--samples", "nowhere"))
