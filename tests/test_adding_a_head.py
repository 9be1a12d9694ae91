"""The recipe of CONTRIBUTING.md, taken at its word: a head and a path producer from outside."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from jetspec.config import parse_config
from jetspec.decode import decode
from jetspec.errors import JetspecError
from jetspec.evaluation.replay import replay_tau
from jetspec.heads.base import HEADS, DraftHead, register
from jetspec.heads.cache import HeadCache
from jetspec.heads.config import HeadSettings
from jetspec.heads.doctor import check_head
from jetspec.heads.edges import EdgeProducer, Factors
from jetspec.heads.producers import EDGES
from jetspec.heads.registry import load_head
from jetspec.targets.load import load_target
from jetspec.training.stage import distil_head
from jetspec.training.step import Statistics, distil_slots
from jetspec.trees.config import TreeConfig
from jetspec.trees.draft import Draft
from tests.answers import greedy_samples, save_target, write_samples
from tests.tiny import tiny_target

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [20, 4, 17, 33, 8]]


def toy_head():
    """A head in under forty lines: every slot is a linear map of the anchor's embedding."""

    class ToyConfig(HeadSettings):
        kind: str = "toy"
        taps: tuple[int, ...] = (0,)

    @register
    class ToyHead(DraftHead):
        settings = ToyConfig

        def __init__(self, config, **sizes):
            super().__init__(config, **sizes)
            self.slots = nn.Linear(self.hidden_size, self.depth * self.hidden_size, bias=False)

        def states(self, embedded):
            return self.slots(embedded).unflatten(-1, (self.depth, -1))

        def loss(self, batch, taps, teacher_hidden, target, config):
            anchors = batch.input_ids.gather(1, batch.anchors)
            states = F.pad(self.states(target.embed(anchors)), (0, 0, 1, 0))  # row 0: the anchor
            result = distil_slots(batch, states.flatten(1, 2), teacher_hidden, target, config)
            none = torch.zeros_like(result.loss)
            return result.loss, Statistics.of(batch, result.loss, none, result.hits).sums

        def new_cache(self, batch):
            return HeadCache(batch, 0, 0, 0, like=self.slots.weight)

        def extend(self, cache, taps, positions, valid, tokens=None):
            cache.commit(valid)

        @torch.no_grad()
        def draft(self, cache, anchors, embed, logits, width, depth=None):
            return Draft.from_slot_logits(logits(self.states(embed(anchors))[:, :depth]), width)

    return ToyHead


class ToyEdges(EdgeProducer):
    """A path producer: one learnt number for a token that repeats its parent's embedding."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))

    @classmethod
    def of(cls, config, hidden_size, vocab_size):
        return cls()

    def reset(self):
        self.scale.data.zero_()

    def factors(self, tokens, log_q, anchors, hidden, embed):
        children = F.normalize(embed(tokens), dim=-1)
        root = F.normalize(embed(anchors), dim=-1)[:, None, None].expand_as(children[:, :1])
        return Factors(torch.cat([root, children[:, :-1]], dim=1) * self.scale, children)


@pytest.fixture(scope="module")
def added():
    """Both, under their names, for as long as this file runs."""
    toy_head()
    EDGES["toy"] = ToyEdges
    yield
    del HEADS["toy"], EDGES["toy"]


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    root = tmp_path_factory.mktemp("stage")
    source = save_target(tiny_target("llama", spread=0.08), root / "target")
    raw = {
        "storage": str(root / "runs"),
        "target": {"source": source, "cache_dir": str(root / "cache")},
        "training": {
            "anchors": 8, "sequence_length": 48, "batch_size": 6, "micro_batch_size": 6,
            "epochs": 20, "learning_rate": 1e-2, "heldout_fraction": 0.2, "log_every": 1,
        },
    }  # fmt: skip
    target = load_target(parse_config(raw).target)
    samples = greedy_samples(target, count=15, tokens=16, stop_token_ids=())
    write_samples(samples, str(root / "samples"))
    return raw, str(root / "samples"), target, samples


ADDED = {
    "head": {"kind": "toy", "block_size": 4},
    "producer": {"num_layers": 1, "block_size": 4, "num_taps": 2, "edges": "toy", "edge_rank": 1},
}


@pytest.mark.parametrize("name", ADDED)
def test_what_was_added_trains_saves_loads_and_decodes_losslessly(added, stage, name):
    raw, samples_uri, target, samples = stage
    config = parse_config(raw | {"head": ADDED[name]})
    assert parse_config(config.model_dump(mode="json")).head == config.head
    curve = []
    done = distil_head(config, samples_uri, report=lambda step, metrics: curve.append(metrics))
    loss = "loss" if name == "head" else "edge_loss"
    assert curve[-1][loss] < curve[0][loss]
    assert ("edge_loss" in curve[0]) is (name == "producer")
    head = load_head(done.uri)
    assert head.config.kind == config.head.kind
    assert [f for f in check_head(done.uri, target) if not f.ok] == []
    plain = decode(target, PROMPTS, max_new_tokens=12, stop_token_ids=())
    for builder in ("chain", "algorithm1", "best_first"):
        drafter = head.drafter(target, width=8)
        tree = TreeConfig(builder=builder, budget=12)
        drafted = decode(
            target, PROMPTS, drafter=drafter, tree=tree, max_new_tokens=12, stop_token_ids=()
        )
        for ours, theirs in zip(drafted.generations, plain.generations, strict=True):
            assert ours.tokens == theirs.tokens
    replays = replay_tau(target, head, samples, TreeConfig(budget=12))
    assert any(count for replay in replays for count in replay.accepted)


def test_the_head_of_the_recipe_stays_short():
    assert len(inspect.getsource(toy_head).splitlines()) < 40


def test_keys_tell_kinds_apart(added):
    plain, toy = parse_config({}), parse_config({"head": ADDED["head"]})
    assert "kind" not in plain.head.model_dump() and toy.head.model_dump()["kind"] == "toy"


def test_a_kind_nobody_registered_is_refused():
    with pytest.raises(JetspecError, match=r"head\.kind: nope: choose from .*parallel"):
        parse_config({"head": {"kind": "nope"}})


@pytest.mark.parametrize(
    ("head", "named"),
    [({"kind": "toy", "num_layers": 2}, "num_layers"), ({"kind": "toy", "block_size": 1}, "block")],
)
def test_settings_of_an_added_head_are_checked_like_all_others(added, head, named):
    with pytest.raises(JetspecError, match=rf"^head\.{named}"):
        parse_config({"head": head})
