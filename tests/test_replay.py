import pytest

from jetspec.decode import decode
from jetspec.drafters import HeadDrafter
from jetspec.evaluation.replay import mean_tau, replay_tau
from jetspec.training.config import TrainingConfig
from jetspec.training.loop import train
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
    return tiny_target("llama", spread=0.08, vocab_size=56)


@pytest.fixture(scope="module")
def heads(target, tmp_path_factory):
    """By edge rank, heads that learnt the answers below well enough to be right now and then."""
    config = TrainingConfig(
        anchors=20, sequence_length=48, batch_size=10, micro_batch_size=10, epochs=80,
        learning_rate=1e-2, log_every=100, estimate_every=100, checkpoint_every=100,
    )  # fmt: skip
    samples = greedy_samples(target, count=12, tokens=20)
    trained = {}
    for rank in (0, 4):
        directory = str(tmp_path_factory.mktemp(f"rank-{rank}"))
        head = tiny_head(target, edge_rank=rank)
        trained[rank] = train(config, head, target, samples, directory=directory).head
    return trained


@pytest.mark.parametrize("edge_rank", [0, 4])
@pytest.mark.parametrize("tree", TREES)
def test_replay_equals_real_decoding(target, heads, tree, edge_rank):
    samples = greedy_samples(target, count=12, tokens=20)
    head = heads[edge_rank]
    prompts = [s.input_ids[: s.loss_mask.index(1)] for s in samples]
    width = tree.width if tree else TreeConfig().width
    drafter = HeadDrafter(head, target, width=width)
    decoded = decode(target, prompts, drafter=drafter, tree=tree, max_new_tokens=20).generations
    replays = replay_tau(target, head, samples, tree, batch_size=4)
    for answer, replay, original in zip(decoded, replays, samples, strict=True):
        assert original.input_ids[original.loss_mask.index(1) :] == answer.tokens
        assert (replay.rounds, replay.committed) == (len(answer.rounds), sum(answer.rounds))
    rounds = [count for replay in replays for count in replay.accepted]
    assert 0 in rounds and max(rounds) > 1, "a head that is never or always right tests nothing"


def test_every_answer_of_a_conversation_is_replayed(target, heads):
    head = heads[0]
    first, second = greedy_samples(target, count=2, tokens=9)
    turns = [first.loss_mask.index(1), len(first.input_ids), len(first.input_ids) + 4]
    tokens = first.input_ids + second.input_ids[:4] + [5, 6, 7]
    (replay,) = replay_tau(target, head, [sample(0, tokens, turns)])
    answers = len(first.input_ids) - turns[0] + 3
    assert replay.committed == answers - 2  # each answer's first token is the prefill's
    (alone,) = replay_tau(target, head, [first])
    assert replay.rounds > alone.rounds


def test_answers_of_one_token_have_no_round(target, heads):
    (replay,) = replay_tau(target, heads[0], [sample(0, [4, 5, 6], [2])])
    assert (replay.rounds, replay.committed) == (0, 0)
    assert mean_tau([replay]) != mean_tau([replay])  # nan


def test_order_of_samples_and_batching_do_not_matter(target, heads):
    head = heads[4]
    samples = greedy_samples(target, count=7, tokens=12)
    alone = replay_tau(target, head, samples, batch_size=1)
    assert replay_tau(target, head, samples[::-1], batch_size=3) == alone[::-1]
