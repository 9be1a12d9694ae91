"""Edge producers whose tokens have learned rows: `head.edge_rows: learned`.

What holds for every producer is tested in test_paths.py.
"""

import pytest
import torch

from jetspec.heads.doctor import check_head
from jetspec.heads.registry import save_head
from jetspec.training.config import LossConfig, TrainingConfig
from jetspec.training.corpus import BatchMaker, Corpus
from jetspec.training.hidden_cache import OnlineTeacher
from jetspec.training.loop import freeze_backbone
from jetspec.training.optimizers import make_optimizers, set_learning_rate
from jetspec.training.stage import starting_head
from jetspec.training.step import Distiller
from tests.answers import sample
from tests.test_paths import PRODUCERS, context, stirred
from tests.tiny import tiny_head, tiny_target

LEARNED = {"edge_rank": 4, "edge_rows": "learned"}


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3", spread=0.08)


@pytest.mark.parametrize("rank", [16, 256])
def test_fresh_learned_rows_are_of_unit_length_and_a_step_moves_scores_little(target, rank):
    edges = tiny_head(target, edge_rank=rank, edge_rows="learned").edges
    rows = edges.parent_proj.weight.detach()
    assert float(rows.square().sum(-1).mean()) == pytest.approx(1, rel=0.1)
    assert not edges.child_proj.weight.any()
    # A first step of AdamW moves every weight of a child's row by the rate: at most, they add up.
    assert 1e-3 * float(rows.abs().sum(-1).max()) < 0.05


def test_learned_rows_learn_a_bigram_language(target):
    """The next token is decided by the one before: slots cannot know it, edges can."""
    follows = torch.randperm(50, generator=torch.Generator().manual_seed(0)) + 4
    answers = []
    for index in range(40):
        tokens = [4 + (7 * index) % 50]
        for _ in range(12):
            tokens.append(int(follows[tokens[-1] - 4]))
        answers.append(sample(index, tokens, [1]))
    head = tiny_head(
        target, block_size=4, num_layers=1, num_taps=1, edge_rank=16, edge_rows="learned",
        edge_gate=False,
    )  # fmt: skip
    states = OnlineTeacher(target, head.taps)
    corpus = Corpus.from_samples(answers, 32)
    config = TrainingConfig(anchors=12, sequence_length=32)
    maker = BatchMaker(corpus, config, head.depth + 1, fixed_shape=False)
    rows = [(index,) for index in range(40)]
    batch = maker.make(rows, [maker.draw(0, row) for row in rows])
    loss = LossConfig(kind="hard_labels", edge_candidates=64)
    freeze_backbone(head)
    distiller = Distiller(head, target, loss)
    optimizers = make_optimizers(
        TrainingConfig(learning_rate=0.05), head, distiller, sharded=False, fused=False
    )
    taps, hidden = states(batch)
    for _ in range(40):
        distiller(batch, taps, hidden)[0].backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    cache, _ = context(target, head, rows=2)
    anchors = torch.tensor([9, 30])
    draft = head.draft(cache, anchors, target.embed, target.logits, 64)
    best = draft.tokens[:, 0].gather(1, draft.edge_scores[:, 0, :1].argmax(-1))
    assert best[:, 0].tolist() == follows[anchors - 4].tolist()
    for parent in (5, 17, 44):  # at the second slot, behind any parent
        row = int((draft.tokens[0, 0] == parent).nonzero())
        child = draft.tokens[0, 1, draft.edge_scores[0, 1, row].argmax()]
        assert int(child) == int(follows[parent - 4])


def test_muon_leaves_learned_rows_to_adamw_at_their_own_rate(target):
    head = tiny_head(target, **LEARNED)
    config = TrainingConfig(optimizer="muon", path_learning_rate=3e-3, weight_decay=0.1)
    adam, muon = make_optimizers(
        config, head, Distiller(head, target, LossConfig()), sharded=False, fused=False
    )
    own = {id(p) for p in head.edges.parameters()}
    assert not own & {id(p) for group in muon.param_groups for p in group["params"]}
    set_learning_rate([adam], config.learning_rate)
    (group,) = (g for g in adam.param_groups if own & {id(p) for p in g["params"]})
    assert own == {id(p) for p in group["params"]}
    assert group["lr"] == pytest.approx(3e-3) and group["weight_decay"] == 0.1


def test_learned_rows_fit_one_vocabulary_only(target, tmp_path):
    head = stirred(tiny_head(target, **LEARNED))
    save_head(head, str(tmp_path), target_fingerprint=target.fingerprint)
    assert all(finding.ok for finding in check_head(str(tmp_path), target))
    wider = check_head(str(tmp_path), tiny_target("qwen3", vocab_size=70))
    assert "vocabulary" in {finding.check for finding in wider if not finding.ok}


def test_a_head_with_projected_rows_lends_its_backbone_and_says_so(target, tmp_path):
    start = stirred(tiny_head(target, edge_rank=4))
    save_head(start, str(tmp_path), target_fingerprint=target.fingerprint)
    fresh, lines = tiny_head(target, seed=1, **LEARNED), []
    head = starting_head(fresh.config, target, str(tmp_path), seed=1, tell=lines.append)
    for key, tensor in head.state_dict().items():
        source = fresh if key.startswith("edges.") else start
        assert torch.equal(tensor, source.state_dict()[key])
    (line,) = lines
    assert "(markov, projected rows) are left behind" in line and "\n" not in line
    starting_head(start.config, target, str(tmp_path), seed=1, tell=lines.append)
    assert len(lines) == 1  # nothing was left behind


@pytest.mark.parametrize("name", [name for name in PRODUCERS if "learned" in name])
def test_tables_are_used_as_they_are(target, name):
    edges = tiny_head(target, **PRODUCERS[name]).edges
    tokens = torch.tensor([[3, 5], [5, 60]])
    rows, places = edges.child_proj.holding(tokens, target.embed, target.vocab_size)
    assert rows is edges.child_proj.weight and places is tokens
    assert edges.child_proj.table(target.embed, target.vocab_size) is rows
    assert rows.shape == (target.vocab_size, 4)
    sides = edges.parent_proj.weight.shape == rows.shape
    assert sides is (name != "learned context")  # the control's parent side is the context


def test_the_setting_is_in_no_key_unless_it_is_used(target):
    plain, learned = (
        tiny_head(target, **{"edge_rank": 4, **more}).config for more in ({}, LEARNED)
    )
    assert "edge_rows" not in plain.model_dump()
    assert learned.model_dump()["edge_rows"] == "learned"
