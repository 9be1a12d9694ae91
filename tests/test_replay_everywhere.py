"""tau of many trees in one pass: the same rounds as replay one by one."""

import pytest
import torch

from jetspec.decode import decode
from jetspec.drafters import LookupDrafter
from jetspec.errors import JetspecError
from jetspec.evaluation import replayed
from jetspec.evaluation.agreement import Shape, agreed
from jetspec.evaluation.cells import Cell
from jetspec.evaluation.everywhere import replay_everywhere
from jetspec.evaluation.matrix import evaluate, read_partial, read_records
from jetspec.evaluation.replay import replay_tau
from jetspec.evaluation.replayed import replay, replay_lookup
from jetspec.evaluation.scoring import scored_head
from jetspec.samples import Sample
from jetspec.trees.build import build_tree
from jetspec.trees.config import TreeConfig
from tests.answers import greedy_samples, sample
from tests.tiny import random_draft, tiny_head, tiny_target
from tests.tiny_run import tiny_run

TREES = [
    TreeConfig(builder="chain", budget=3, width=6),
    *(TreeConfig(budget=budget, width=6) for budget in (1, 5, 12, 40)),
    TreeConfig(builder="algorithm1", budget=9, width=6),
    TreeConfig(budget=12, width=6, depth=2),
    TreeConfig(budget=12, width=6, depth=9),
]


@pytest.fixture(scope="module")
def target():
    """So few tokens that a random head is right now and then."""
    return tiny_target("llama", vocab_size=12, num_layers=1)


def samples_of_any_text(seed: int = 0) -> list[Sample]:
    """Replay asks whether drafts agree with the text, whoever wrote it."""
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(4, 12, (n,), generator=generator).tolist() for n in (20, 9, 14, 5)]
    return [sample(i, text, [3, 8, 10] if i == 2 else [3]) for i, text in enumerate(texts)]


@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
def test_one_pass_gives_every_tree_the_rounds_of_its_own_replay(target, mask) -> None:
    samples = samples_of_any_text()
    head = tiny_head(target, mask, edge_rank=4, num_layers=1)
    with torch.no_grad():
        head.edges.child_proj.weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(0))
    shapes = [Shape(tree, scores) for tree in TREES for scores in ("slot", "path")]
    found = replay_everywhere(target, head, samples, shapes, rows=6)
    for shape, replays in zip(shapes, found, strict=True):
        own = scored_head(head, shape.scores)
        assert replays == replay_tau(target, own, samples, shape.tree, batch_size=3), shape
    accepted = [n for r in found[8] for n in r.accepted]
    assert 0 in accepted and max(accepted) > 1, "a head that is never or always right tests nothing"
    by_scores = [[r.accepted for r in found[8 + i]] for i in range(2)]
    assert by_scores[0] != by_scores[1], "edges that change nothing test nothing"


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("path", [False, True])
def test_smaller_budgets_are_the_beginning_of_the_largest_tree(path, coarse) -> None:
    """Brute force: every budget's own tree is built. Coarse scores are full of ties."""
    draft = random_draft(3, 12, 4, 5, path=path, coarse=coarse)
    anchors = torch.zeros(12, dtype=torch.long)
    budgets = [1, 2, 3, 5, 8, 13, 30]
    chosen = torch.randint(0, 3, (12, 4, 1), generator=torch.Generator().manual_seed(1))
    text = draft.tokens.gather(2, chosen)[..., 0]
    shapes = [Shape(TreeConfig(budget=b, width=5)) for b in budgets]
    together = agreed(draft, anchors, text, shapes)
    for budget, depths in zip(budgets, together, strict=True):
        tree = build_tree(draft, anchors, TreeConfig(budget=budget, width=5))
        for row in range(12):
            node, depth = 0, 0
            while depth < 4:
                below = [
                    child
                    for child in range(int(tree.sizes[row]))
                    if tree.parents[row, child] == node
                    and tree.tokens[row, child] == text[row, depth]
                ]
                if not below:
                    break
                node, depth = below[0], depth + 1
            assert depth == depths[row], (budget, row)
    assert len({tuple(d.tolist()) for d in together}) > 3


def test_lookup_is_replayed_without_a_model() -> None:
    target = tiny_target("llama", spread=0.08, vocab_size=56)
    samples = greedy_samples(target, count=4, tokens=18)
    for known in samples:
        prompt = known.input_ids[: known.loss_mask.index(1)]
        drafter = LookupDrafter(max_ngram=2, depth=4)
        (answer,) = decode(target, [prompt], drafter=drafter, max_new_tokens=18).generations
        found = replay_lookup(known, 2, 4)
        assert (found.rounds, found.committed) == (len(answer.rounds), sum(answer.rounds))
        assert list(found.accepted)[:-1] == list(answer.accepted)[:-1]


def test_replay_writes_the_tau_that_decoding_has_and_a_rerun_nothing(tmp_path, monkeypatch) -> None:
    config, head = tiny_run(tmp_path, budgets=[3, 6], scores=["slot"], prompts_per_slice=2)
    result = replay(config, head)
    replays = {r["key"]: r for r in read_partial(result.uri)}
    decoded = {r["key"]: r for r in read_records(evaluate(config, head).uri)}
    assert set(replays) == {k for k, r in decoded.items() if r["method"] in replayed._METHODS}
    for key, record in replays.items():
        for name in ("tau", "tau_ci", "prompts", "rounds", "by_slice", "looping"):
            assert record[name] == decoded[key][name], (key, name)
        assert record["decoder"] == "replay" and record["tok_s_decode"] is None
        assert record["speedup"]["vs_plain"]["value"] is None
    monkeypatch.setattr(replayed, "load_models", lambda *_: pytest.fail("loaded the models"))
    loads = config.evaluation.model_copy(update={"batch_sizes": (1, 8), "max_batches": 1})
    again = replay(config.model_copy(update={"evaluation": loads}), head)
    assert again.reused and again.uri == result.uri, "loads change no round"


def test_a_cut_replay_goes_on_with_the_slices_that_are_missing(tmp_path, monkeypatch) -> None:
    config, head = tiny_run(tmp_path, budgets=[3], prompts_per_slice=1, methods=["tree"])
    whole = replayed._replays

    def cut(cells: list[Cell], *rest):
        if cells[0].slice == "math":
            raise KeyboardInterrupt
        return whole(cells, *rest)

    monkeypatch.setattr(replayed, "_replays", cut)
    with pytest.raises(KeyboardInterrupt):
        replay(config, head)
    seen = []
    monkeypatch.setattr(
        replayed, "_replays", lambda cells, *rest: seen.append(cells) or whole(cells, *rest)
    )
    monkeypatch.setattr("jetspec.evaluation.answers._decode", lambda *_: pytest.fail("decoded"))
    result = replay(config, head)
    assert [c.slice for cells in seen for c in cells] == ["math"]
    assert {r["slice"] for r in read_partial(result.uri)} == {"chat", "math"}


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"rule": "residual", "temperatures": [1.0], "methods": ["chain"]}, "evaluation.rule"),
        ({"logit_bias": {5: -1.0}}, "evaluation.logit_bias"),
        ({"methods": ["plain"]}, "evaluation.methods"),
        ({"scores": ["path"]}, "evaluation.scores"),
    ],
)
def test_what_cannot_be_replayed_is_refused(tmp_path, settings, field) -> None:
    config, head = tiny_run(tmp_path, **settings)
    with pytest.raises(JetspecError, match=field):
        replay(config, head)
