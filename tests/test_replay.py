import pytest
import torch

from jetspec.decode import decode
from jetspec.drafters import HeadDrafter
from jetspec.evaluation.replay import mean_tau, replay_tau
from jetspec.trees.config import TreeConfig
from tests.answers import greedy_samples, sample
from tests.tiny import tiny_head, tiny_target

TREES = [
    None,
    TreeConfig(builder="chain", budget=3),
    TreeConfig(builder="best_first", budget=12, width=8),
    TreeConfig(builder="algorithm1", budget=12, width=4),
    TreeConfig(builder="best_first", budget=6, width=4, depth=2),
]


@pytest.fixture(scope="module")
def target():
    # Nearly the plain embedding: drafts of a random head are right now and then.
    return tiny_target("llama", spread=0.08, vocab_size=56)


def accepting_head(target, **settings):
    """A head whose slots often guess right: it repeats what the target likes best anyway."""
    head = tiny_head(target, **settings)
    torch.nn.init.normal_(head.fc.weight, std=0.3)
    if head.edges is not None:
        for parameter in head.edges.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return head


@pytest.mark.parametrize("tree", TREES)
def test_replay_equals_real_decoding(target, tree):
    samples = greedy_samples(target, count=10, tokens=20)
    head = accepting_head(target)
    prompts = [s.input_ids[: s.loss_mask.index(1)] for s in samples]
    width = tree.width if tree else TreeConfig().width
    drafter = HeadDrafter(head, target, width=width)
    decoded = decode(target, prompts, drafter=drafter, tree=tree, max_new_tokens=20).generations
    replays = replay_tau(target, head, samples, tree, batch_size=4)
    for answer, replay, original in zip(decoded, replays, samples, strict=True):
        assert original.input_ids[original.loss_mask.index(1) :] == answer.tokens
        assert (replay.rounds, replay.committed) == (len(answer.rounds), sum(answer.rounds))
    accepted = sum(sum(r.accepted) for r in replays)
    assert accepted > 0, "a head that is never right tests nothing"


def test_every_answer_of_a_conversation_is_replayed(target):
    head = accepting_head(target)
    first, second = greedy_samples(target, count=2, tokens=9)
    turns = [first.loss_mask.index(1), len(first.input_ids), len(first.input_ids) + 4]
    tokens = first.input_ids + second.input_ids[:4] + [5, 6, 7]
    (replay,) = replay_tau(target, head, [sample(0, tokens, turns)])
    answers = len(first.input_ids) - turns[0] + 3
    assert replay.committed == answers - 2  # each answer's first token is the prefill's
    (alone,) = replay_tau(target, head, [first])
    assert replay.rounds > alone.rounds


def test_answers_of_one_token_have_no_round(target):
    (replay,) = replay_tau(target, accepting_head(target), [sample(0, [4, 5, 6], [2])])
    assert (replay.rounds, replay.committed) == (0, 0)
    assert mean_tau([replay]) != mean_tau([replay])  # nan


def test_order_of_samples_and_batching_do_not_matter(target):
    head = accepting_head(target)
    samples = greedy_samples(target, count=7, tokens=12)
    alone = replay_tau(target, head, samples, batch_size=1)
    assert replay_tau(target, head, samples[::-1], batch_size=3) == alone[::-1]
