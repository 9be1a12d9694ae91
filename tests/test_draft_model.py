"""A small language model as the drafter: lossless, and as good as its agreement with the target."""

import pytest
import torch

from jetspec.config import parse_config
from jetspec.decode import decode
from jetspec.drafters import DraftModelDrafter
from jetspec.drafters.model import require_same_tokens
from jetspec.errors import JetspecError
from jetspec.evaluation.cells import cell_label
from jetspec.evaluation.matrix import evaluate, make_plan, read_records
from jetspec.trees.build import build_tree
from jetspec.trees.config import TreeConfig
from tests.answers import save_target
from tests.tiny import tiny_target
from tests.tiny_run import tiny_run

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [3] * 9, [20, 4, 17, 33, 8, 9, 10]]
SETTINGS = {"max_new_tokens": 17, "stop_token_ids": ()}


def draft_model(seed=3, **shape):
    return tiny_target("llama", seed=seed, **{"hidden_size": 16, "num_layers": 2, **shape})


def tokens(result):
    return [generation.tokens for generation in result.generations]


def test_a_draft_model_equal_to_the_target_is_right_at_every_depth():
    target = tiny_target("qwen3")
    drafter = DraftModelDrafter(target, depth=3)
    tree = TreeConfig(builder="chain", budget=3)
    result = decode(target, PROMPTS, drafter=drafter, tree=tree, **SETTINGS)
    assert tokens(result) == tokens(decode(target, PROMPTS, **SETTINGS))
    assert all(generation.rounds == [4] * 4 for generation in result.generations)


@pytest.mark.parametrize(("builder", "width"), [("chain", 1), ("best_first", 4), ("algorithm1", 4)])
def test_decoding_is_token_identical_to_plain(builder, width):
    target = tiny_target("llama")
    plain = tokens(decode(target, PROMPTS, **SETTINGS))
    options = SETTINGS | {"stop_token_ids": (plain[1][5],)}
    near = tiny_target("llama")  # the target, slightly spoilt: rounds of every length
    with torch.no_grad():
        for index, parameter in enumerate(near.model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
            parameter += 0.02 * noise
    plain = tokens(decode(target, PROMPTS, **options))
    for model in (near, draft_model()):
        drafter = DraftModelDrafter(model, width=width, depth=4, beam=3)
        tree = TreeConfig(builder=builder, budget=12, width=width)
        result = decode(target, PROMPTS, drafter=drafter, tree=tree, **options)
        assert tokens(result) == plain
        lengths = {count for generation in result.generations for count in generation.accepted}
        assert model is not near or (0 in lengths and len(lengths) >= 4)


def observed(model, target, texts, **settings):
    """A drafter that has read all of each text but its last token, in pieces with padding."""
    drafter = DraftModelDrafter(model, **settings)
    drafter.begin(len(texts), target)
    longest = max(map(len, texts)) - 1
    for begin, end in ((0, 3), (3, longest)):
        here = [text[:-1][begin:end] for text in texts]
        padded = [row + [0] * (end - begin - len(row)) for row in here]
        valid = torch.tensor([[i < len(row) for i in range(end - begin)] for row in here])
        positions = torch.arange(begin, end).expand(len(texts), -1)
        drafter.observe(None, positions, valid, torch.tensor(padded))
    return drafter


@torch.no_grad()
def test_the_tree_holds_the_models_own_probabilities():
    target, model = tiny_target("llama"), draft_model()
    texts = [[5, 6, 7, 8, 9], [3, 20, 4, 17, 33, 8, 9, 10]]
    drafter = observed(model, target, texts, width=4, depth=3, beam=2)
    for _ in range(2):  # drafting leaves nothing behind
        tree = drafter.propose(torch.tensor([text[-1] for text in texts]), texts)
        tree.validate()
        for row, text in enumerate(texts):
            paths = {0: (0.0, list(text))}
            for node in range(1, int(tree.sizes[row])):
                score, before = paths[int(tree.parents[row, node])]
                log_q = model.model(torch.tensor([before])).logits[0, -1].log_softmax(-1)
                token = int(tree.tokens[row, node])
                assert token in log_q.topk(4).indices.tolist()
                paths[node] = (score + float(log_q[token]), [*before, token])
                assert float(tree.scores[row, node]) == pytest.approx(paths[node][0], abs=1e-4)
            assert tree.depths[row].bincount().tolist() == [1, 4, 8, 8]
    drafter.keep_sequences(torch.tensor([1]))
    alone = drafter.propose(torch.tensor([10]), texts[1:])
    assert torch.equal(alone.tokens[0], tree.tokens[1])


def test_a_width_of_one_drafts_the_greedy_continuation():
    target, model = tiny_target("llama"), draft_model()
    text = [5, 6, 7, 8, 9]
    tree = observed(model, target, [text], width=1, depth=4).propose(torch.tensor([9]), [text])
    wanted = tokens(decode(model, [text], max_new_tokens=4, stop_token_ids=()))
    assert tree.tokens[:, 1:].tolist() == wanted
    chain = build_tree(tree, torch.tensor([9]), TreeConfig(builder="chain", budget=3))
    assert chain.tokens[:, 1:].tolist() == [wanted[0][:3]]


@pytest.mark.parametrize("rows", [48, 80])
def test_padding_rows_of_either_vocabulary_do_not_matter(rows):
    """Model families pad their tables differently; the tokenizer is what they share."""
    target, model = tiny_target("llama"), draft_model(vocab_size=rows)
    drafter = DraftModelDrafter(model, width=4, depth=3)
    prompts = [[5, 60, 7], [9, 10, 63]]
    tree = TreeConfig(budget=12, width=4)
    result = decode(target, prompts, drafter=drafter, tree=tree, **SETTINGS)
    assert tokens(result) == tokens(decode(target, prompts, **SETTINGS))


def test_a_model_that_reads_other_tokens_is_refused_in_one_line():
    target, other = tiny_target("llama"), draft_model(vocab_size=60)
    require_same_tokens(draft_model(), target, "field")
    with pytest.raises(JetspecError, match="field: tiny-llama: its tokenizer differs .* in 4 ent"):
        require_same_tokens(other, target, "field")


def settings_of(config, **evaluation):
    return parse_config(config.model_dump(mode="json") | {"evaluation": evaluation})


def test_the_matrix_measures_a_draft_model_without_a_head(tmp_path):
    config, _ = tiny_run(tmp_path)
    own = {"source": config.target.source, "cache_dir": config.target.cache_dir}
    config = settings_of(
        config, methods=["draft_model"], draft_model=own, draft_model_depth=3, slices=["math"],
        max_new_tokens=9, warmup_prompts=0, bootstrap_samples=100,
    )  # fmt: skip
    records = read_records(evaluate(config, None).uri)
    assert [cell_label(r) for r in records] == ["plain", "hf_eager", "draft model 3"]
    assert records[-1]["status"] == "ok" and records[-1]["output_check"]["passed"]
    assert records[-1]["acceptance_by_depth"] == [1, 1, 1]


def test_a_draft_model_counts_in_a_matrixs_key_only_where_a_method_uses_it(tmp_path):
    config, _ = tiny_run(tmp_path)
    other = draft_model()
    save_target(other, tmp_path / "small")
    small = {"source": str(tmp_path / "small"), "cache_dir": config.target.cache_dir}
    with_it = {"methods": ["lookup", "draft_model"], "draft_model": small}
    key = {
        name: make_plan(settings_of(config, **evaluation), None).key
        for name, evaluation in {
            "plain": {"methods": ["lookup"]},
            "named": {"methods": ["lookup"], "draft_model": small},
            "used": with_it,
            "deeper": with_it | {"draft_model_depth": 4},
            "another": with_it | {"draft_model": config.target.model_dump(mode="json")},
        }.items()
    }
    assert key["plain"] == key["named"]
    assert len(set(key.values())) == 4


def test_mistakes_with_the_draft_model_are_one_line_errors(tmp_path):
    config, _ = tiny_run(tmp_path)
    with pytest.raises(JetspecError, match="needs draft_model.source"):
        settings_of(config, methods=["draft_model"])
    gone = {"methods": ["draft_model"], "draft_model": {"source": "/no/such"}}
    with pytest.raises(JetspecError, match="^evaluation.draft_model.source: /no/such: not found"):
        evaluate(settings_of(config, **gone), None)
