"""What a text agrees with in many trees at once, against each tree built and walked by itself."""

import pytest
import torch
import torch.nn.functional as F

from jetspec.decode import decode
from jetspec.evaluation import everywhere
from jetspec.evaluation.agreement import Shape, agreed
from jetspec.evaluation.everywhere import replay_everywhere
from jetspec.evaluation.replay import replay_tau
from jetspec.evaluation.scoring import scored_head
from jetspec.heads import layers
from jetspec.heads.dspark import DSparkConfig, DSparkHead
from jetspec.heads.eagle import EagleConfig, EagleHead
from jetspec.heads.parallel import ParallelHead
from jetspec.targets.load import from_model
from jetspec.trees.build import build_tree, built_in_one_launch, scored_best_first
from jetspec.trees.config import TreeConfig
from jetspec.trees.draft import Draft, _read_once, _summed_once, best_tokens, log_sums
from jetspec.trees.levels import draft_levels
from jetspec.trees.scores import order_edges
from jetspec.trees.tree import Tree
from tests.answers import sample
from tests.tiny import random_draft, tiny_head, tiny_model, tiny_target, tiny_tokenizer

ROWS, DEPTH, WIDTH = 10, 4, 5
RATES = (0.5, 0.3, 0.1)
SHAPES = [
    *(TreeConfig(builder="chain", budget=budget, width=WIDTH) for budget in (1, 3, 9)),
    TreeConfig(builder="chain", budget=9, width=WIDTH, depth=2),
    TreeConfig(builder="chain", budget=9, width=1),
    *(TreeConfig(budget=budget, width=WIDTH) for budget in (1, 2, 6, 17, 200)),
    *(TreeConfig(budget=budget, width=3, depth=3, widths=(2, 1)) for budget in (4, 9)),
    *(TreeConfig(budget=budget, width=WIDTH, score="hybrid") for budget in (2, 6, 17)),
    *(TreeConfig(budget=budget, width=WIDTH, score="entropy") for budget in (2, 6, 17)),
    *(
        TreeConfig(budget=budget, width=WIDTH, score="survival", calibration=(2.0, 0.5))
        for budget in (2, 6, 17)
    ),
    *(TreeConfig(builder="algorithm1", budget=budget, width=WIDTH) for budget in (6, 12)),
    TreeConfig(builder="static", budget=8, width=WIDTH, rank_rates=RATES),
]


def walked(tree: Tree, text: torch.Tensor) -> list[int]:
    """Of every row the tokens of the text that some path from the root has."""
    found = []
    for row, tokens in enumerate(text.tolist()):
        node, depth = 0, 0
        while depth < len(tokens):
            below = [
                child
                for child in range(int(tree.sizes[row]))
                if tree.parents[row, child] == node and tree.tokens[row, child] == tokens[depth]
            ]
            if not below:
                break
            node, depth = below[0], depth + 1
        found.append(depth)
    return found


def text_near(draft: Draft, seed: int = 1) -> torch.Tensor:
    """Candidates, good ones mostly, then tokens that are none, then the answer's end."""
    generator = torch.Generator().manual_seed(seed)
    likely = torch.tensor([0.5, 0.25, 0.15, 0.1])
    chosen = torch.multinomial(likely, ROWS * DEPTH, True, generator=generator)
    order = draft.edge_scores[:, :, 0].argsort(-1, descending=True)
    chosen = order.gather(2, chosen.view(ROWS, DEPTH, 1))
    text = draft.tokens.gather(2, chosen)[..., 0]
    text[0, 2], text[1, 0] = 99, 99
    text[2, 3:], text[3, 1:], text[4, :] = -1, -1, -1
    return text


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("path", [False, True])
def test_every_shape_agrees_as_its_own_tree_does(path, coarse) -> None:
    draft = random_draft(3, ROWS, DEPTH, WIDTH, path=path, coarse=coarse)
    edges = draft.edge_scores.clone() if path else draft.edge_scores
    if path:
        edges[5, 1, 2] = -torch.inf  # candidates that do not exist
        edges[6, 0, :, 1:] = -torch.inf
    generator = torch.Generator().manual_seed(2)
    confidence = torch.rand(ROWS, DEPTH, WIDTH, generator=generator)
    draft = Draft(draft.tokens, edges, confidence, slot_scores=draft.edge_scores[:, :, 0])
    anchors, text = torch.zeros(ROWS, dtype=torch.long), text_near(draft)
    shapes = [Shape(tree, scores) for tree in SHAPES for scores in ("slot", "path")]
    found = agreed(draft, anchors, text, shapes)
    for shape, depths in zip(shapes, found, strict=True):
        own = draft if shape.scores == "path" else draft.without_edges()
        tree = build_tree(own, anchors, shape.tree)
        assert depths.tolist() == walked(tree, text), shape
    assert found.unique().tolist() == list(range(DEPTH + 1))
    assert len({tuple(depths.tolist()) for depths in found}) > 8


def test_a_scored_tree_agrees_as_its_pruned_self_does() -> None:
    """What heads hand over that score nodes by all of their ancestors."""
    generator = torch.Generator().manual_seed(0)
    anchors = torch.zeros(ROWS, dtype=torch.long)

    def expand(tokens, parents, mask):
        return (torch.randn(*tokens.shape, 9, generator=generator) * 2).log_softmax(-1)

    tree = draft_levels(expand, anchors, depth=3, width=3, beam=4)
    text = torch.full((ROWS, 4), 5)
    for row in range(ROWS):  # along one of the tree's own paths
        node = 4 + 2 * row
        while node > 0:
            text[row, tree.depths[row, node] - 1] = tree.tokens[row, node]
            node = int(tree.parents[row, node])
    shapes = [TreeConfig(budget=budget, width=3) for budget in (1, 4, 9, 30)]
    shapes += [TreeConfig(builder="chain", budget=n, width=3) for n in (1, 3)]
    shapes += [TreeConfig(builder="algorithm1", budget=7, width=2)]
    found = agreed(tree, anchors, text, [Shape(shape) for shape in shapes])
    for shape, depths in zip(shapes, found, strict=True):
        assert depths.tolist() == walked(build_tree(tree, anchors, shape), text), shape
    assert found.unique().tolist() == [0, 1, 2, 3]


def heads(target):
    for edges in ("markov", "selector", "lattice", "context"):
        yield edges, tiny_head(target, edges=edges, edge_rank=4, edge_width=32, num_layers=1)
    whole = {"edge_rank": 4, "edge_normaliser": "vocabulary"}
    yield "vocabulary", tiny_head(target, num_layers=1, **whole)
    rescored = {"rescore": "own", "rescore_nodes": 14, "edge_rank": 4}
    yield "second pass", tiny_head(target, num_layers=1, **rescored)
    yield "eagle", EagleHead.new(EagleConfig(block_size=5, beam=3, num_taps=2), target)
    shape = {"block_size": 4, "num_layers": 1, "num_taps": 2, "markov_rank": 4}
    yield "dspark", DSparkHead.new(DSparkConfig(**shape), target)


def test_all_heads_replay_as_one_by_one_along_ragged_answers() -> None:
    """Answers of one token and of many, several in a sample, and one that fills the text."""
    target = tiny_target("llama", vocab_size=12, num_layers=1)
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(4, 12, (n,), generator=generator).tolist() for n in (17, 4, 11, 9, 6)]
    turns = [[2], [3], [2, 5, 6], [1], [6]]
    samples = [sample(i, text, turns[i]) for i, text in enumerate(texts)]
    trees = [TreeConfig(budget=budget, width=6) for budget in (7, 12)]
    trees += [TreeConfig(builder="chain", budget=3, depth=3, width=6)]
    kinds = [Shape(tree, scores) for tree in trees for scores in (None, "slot")]
    for name, head in heads(target):
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.normal_(0, 0.4, generator=torch.Generator().manual_seed(1))
        shapes = kinds if isinstance(head, ParallelHead) else kinds[::2]
        found = replay_everywhere(target, head, samples, shapes, rows=4)
        for shape, replays in zip(shapes, found, strict=True):
            own = scored_head(head, shape.scores)
            assert replays == replay_tau(target, own, samples, shape.tree), (name, shape)
        rounds = [n for replays in found for replay in replays for n in replay.accepted]
        assert 0 in rounds and max(rounds) > 0, name
        assert [replay.rounds for replay in found[0]][-1] == 0, "no answer, no round"


def test_a_second_pass_replays_the_rounds_that_decoding_has() -> None:
    """It scores what the slots of one depth propose: a shorter chain has another draft."""
    target = tiny_target("llama", spread=0.3, vocab_size=14, num_layers=1)
    prompts = [[5, 6, 7], [4, 9], [10] * 4]
    answers = decode(target, prompts, max_new_tokens=16).generations
    samples = [
        sample(i, prompt + answer.tokens, [len(prompt)])
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    head = tiny_head(target, num_layers=1, edge_rank=4, rescore="own", rescore_nodes=12)
    with torch.no_grad():
        head.edges.child_proj.weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(0))
        head.rescorer.out_proj.weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(1))
    trees = [TreeConfig(builder="chain", budget=2, depth=2, width=4)]
    trees += [TreeConfig(budget=budget, width=4) for budget in (3, 10)]
    shapes = [Shape(tree, scores) for tree in trees for scores in ("slot", "path")]
    together = replay_everywhere(target, head, samples, shapes, rows=8)
    assert max(n for replays in together for found in replays for n in found.accepted) > 1
    for shape, replays in zip(shapes, together, strict=True):
        own = scored_head(head, shape.scores)
        drafter = own.drafter(target, width=4, depth=shape.tree.depth)
        decoded = decode(target, prompts, drafter=drafter, tree=shape.tree, max_new_tokens=16)
        for answer, found in zip(decoded.generations, replays, strict=True):
            assert (found.rounds, found.committed) == (len(answer.rounds), sum(answer.rounds))
            assert list(found.accepted)[:-1] == list(answer.accepted)[:-1], shape


@pytest.mark.parametrize("score", ["cumulative", "survival"])
@pytest.mark.parametrize("path", [False, True])
def test_one_launch_builds_the_same_trees_and_sums(path, score) -> None:
    draft = random_draft(7, 3, 3, 4, path=path, coarse=True)
    draft.edge_scores[0, 1, :, 2:] = -torch.inf if path else draft.edge_scores[0, 1, :, 2:]
    config = TreeConfig(budget=7, width=4, score=score, calibration=(1.5,))
    edges = order_edges(draft.edge_scores, config)
    (ours, sums), (theirs, expected) = (
        built_in_one_launch(edges, config.budget),
        scored_best_first(draft, config),
    )
    real = torch.arange(8) < ours.sizes[:, None]
    assert torch.equal(ours.sizes, theirs.sizes) and real.all()
    for one, other in zip(ours[:3], theirs[:3], strict=True):
        assert torch.equal(one, other)
    assert torch.equal(sums, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_best_tokens_are_the_same_where_the_vocabulary_is_read_once(dtype) -> None:
    order = torch.stack(
        [torch.randperm(41, generator=torch.Generator().manual_seed(i)) for i in (1, 2)]
    )
    logits = (order.to(dtype) / 4)[:, None]
    (tokens, log_q), (ours, sums) = best_tokens(logits, 6), _read_once(logits, 6)
    assert torch.equal(ours, tokens)
    torch.testing.assert_close(sums, log_q)
    assert torch.equal(best_tokens(logits.float(), 6)[1], log_q)
    torch.testing.assert_close(_summed_once(logits), torch.logsumexp(logits.float(), -1))
    assert torch.equal(log_sums(logits), torch.logsumexp(logits.float(), -1))


def test_grouped_attention_is_the_attention_of_repeated_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 3, 8, generator=generator)
    key, value = torch.randn(2, 2, 2, 5, 8, generator=generator)
    mask = torch.rand(2, 3, 5, generator=generator) < 0.6
    mask[..., 0] = True
    wanted = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask[:, None], enable_gqa=True
    )
    torch.testing.assert_close(layers._grouped(query, key, value, mask), wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_replays_the_same_rounds_and_waits_for_none_of_them() -> None:
    def replayed(device):
        model = tiny_model(vocab_size=40, num_layers=1).to(device)
        target = from_model(model, tiny_tokenizer(40), "tiny")
        head = tiny_head(target, edge_rank=4, num_layers=1)
        with torch.no_grad():
            head.edges.child_proj.weight.copy_(bias)
        return target, head, replay_everywhere(target, head, samples, shapes, rows=16)

    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(4, 32, generator=generator) * 0.3
    texts = [torch.randint(4, 40, (n,), generator=generator).tolist() for n in (40, 25, 31)]
    samples = [sample(i, text, [3]) for i, text in enumerate(texts)]
    trees = [TreeConfig(builder="chain", budget=7, width=8)]
    trees += [TreeConfig(budget=budget, width=8) for budget in (4, 16, 60)]
    shapes = [Shape(tree, scores) for tree in trees for scores in ("slot", "path")]
    target, head, found = replayed("cuda")
    assert found == replayed("cpu")[2]
    cache, places = head.new_cache(2), torch.zeros(2, dtype=torch.long, device="cuda")
    passes = everywhere._passes(head, shapes)
    tokens = torch.tensor([text[:20] for text in texts[:2]], device="cuda")
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everywhere._step(target, passes, cache, tokens, places, places + 19)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
