import pytest
import torch

from jetspec.decode import decode
from jetspec.drafters import HeadDrafter
from jetspec.evaluation.agreement import Shape
from jetspec.evaluation.everywhere import replay_everywhere
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


DEPTH = 4


@pytest.fixture(scope="module")
def answered():
    """A target of so few tokens that a random head is right now and then, and its answers."""
    target = tiny_target("llama", spread=0.3, vocab_size=14, num_layers=1)
    prompts = [[5, 6, 7], [4, 9], [10] * 4]
    answers = decode(target, prompts, max_new_tokens=10, stop_token_ids=()).generations
    return target, [
        sample(i, prompt + answer.tokens, [len(prompt)])
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
@pytest.mark.parametrize("rescore", ["own", "shared"])
@pytest.mark.parametrize("deepest", [None, DEPTH + 2])
def test_tau_by_replay_is_tau_by_decoding_for_budgets_around_the_depth(
    answered, rescore, mask, deepest
):
    """What a second pass scores depends on the draft's depth: a budget that no deep path fits into
    must not make it shallower."""
    target, samples = answered
    shape = {"block_size": DEPTH + 1, "num_layers": 1, "rescore_nodes": 10, "edge_rank": 4}
    head = tiny_head(target, mask, rescore=rescore, **shape)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.4, generator=generator)
    trees = [
        TreeConfig(builder=builder, budget=budget, width=5, depth=deepest)
        for builder, budget in (("chain", 2), ("best_first", 2), ("best_first", DEPTH),
                                ("best_first", DEPTH + 5))
    ]  # fmt: skip
    at_once = replay_everywhere(target, head, samples, [Shape(tree) for tree in trees])
    prompts = [s.input_ids[: s.loss_mask.index(1)] for s in samples]
    for tree, together in zip(trees, at_once, strict=True):
        drafter = head.drafter(target, width=tree.width, depth=tree.depth)
        answers = decode(
            target, prompts, drafter=drafter, tree=tree, max_new_tokens=10, stop_token_ids=()
        ).generations
        replays = replay_tau(target, head, samples, tree)
        assert replays == together, tree
        for answer, replay in zip(answers, replays, strict=True):
            assert (replay.rounds, replay.committed) == (len(answer.rounds), sum(answer.rounds))
            assert list(replay.accepted)[:-1] == answer.accepted[:-1], tree
    accepted = [n for replays in at_once for replay in replays for n in replay.accepted]
    assert 0 in accepted and max(accepted) > 1, "a head that is never or always right tests nothing"


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
