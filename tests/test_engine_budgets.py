"""Budgets far above one tile of rows: the engine equals the reference loop."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from jetspec.decode import decode
from jetspec.drafters import HeadDrafter
from jetspec.errors import JetspecError
from jetspec.trees.config import TreeConfig
from tests.test_kernels_setup import interpreted
from tests.tiny import tiny_head, tiny_target, tiny_tokenizer

interpreted("kernels.tree_attention")  # before the engine imports the kernels

from jetspec.engine.engine import Engine  # noqa: E402
from jetspec.targets.load import from_model  # noqa: E402
from kernels import tree_attention  # noqa: E402


@pytest.mark.slow
def test_a_budget_beyond_256_equals_the_reference_round_by_round(monkeypatch) -> None:
    monkeypatch.setattr(tree_attention, "MERGE", 1)  # one split there; the interpreter is slow
    torch.manual_seed(16)  # one whose first round commits three tokens
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=16, initializer_range=0.4,
        max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    target = from_model(LlamaForCausalLM(config).eval(), tiny_tokenizer(32), "one head")
    head = tiny_head(target, block_size=4, num_layers=1, num_taps=1)
    tree = TreeConfig(builder="best_first", depth=3, budget=260, width=12)
    engine = Engine(target, head, tree=tree, slots=1, max_rows=512, page_size=64, kernels=True)
    ours = engine.decode([[5, 9]], max_new_tokens=4).generations[0]
    drafter = HeadDrafter(head, target, width=12, depth=3)
    theirs = decode(target, [[5, 9]], drafter=drafter, tree=tree, max_new_tokens=4).generations[0]
    assert (ours.tokens, ours.rounds) == (theirs.tokens, theirs.rounds)
    assert engine.round.nodes == 261 and ours.rounds == [3]


def test_a_budget_above_the_largest_is_refused() -> None:
    target = tiny_target("llama", num_layers=1)
    with pytest.raises(JetspecError, match="trees of up to 1024 nodes"):
        Engine(target, tiny_head(target), tree=TreeConfig(budget=1025), kernels=True)
