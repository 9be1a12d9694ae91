"""Drafted decoding of the real SmolLM2 is token-identical to plain decoding, in fp32."""

import pytest
import torch

from jetspec.decode import decode
from jetspec.drafters import HeadDrafter, LookupDrafter
from jetspec.heads.config import HeadConfig
from jetspec.heads.parallel import new_head
from jetspec.targets.config import TargetConfig
from jetspec.targets.load import load_target
from jetspec.trees.config import TreeConfig
from tests.tiny import NoisyOracle

pytestmark = pytest.mark.slow

# Twenty short questions of all slices; some ask for repetition, where lookup has work to do.
QUESTIONS = [
    "What is 17 times 23? Show the steps.",
    "A train leaves at 9:40 and arrives at 11:05. How long is the journey?",
    "Find x if 4x - 7 = 21.",
    "Write a Python function that reverses a list.",
    "Write a SQL query that counts the rows of a table named orders.",
    "Explain what a hash map is in two sentences.",
    "Write a bash command that lists the ten largest files.",
    "Give three tips for sleeping better.",
    "Say this five times: peter piper picked a peck of pickled peppers.",
    "Why is the sky blue?",
    "Copy this line four times: 3.14159 2.71828 1.41421 1.61803",
    "Repeat this code three times: for i in range(10): print(i * i)",
    "List the planets of the solar system in order.",
    "Translate 'good morning' into French, Spanish and German.",
    "What should I pack for two days in the mountains?",
    "Write an email that asks for a day off.",
    "小明有12个苹果，吃了5个，还剩几个？",
    "用Python写一个函数，判断一个数是否为质数。",
    "介绍一下长城。",
    "Repeat this list three times: red, green, blue, yellow.",
]
NEW = 64


@pytest.fixture(scope="module")
def target():
    return load_target(TargetConfig(dtype="fp32", device="cpu"))


@pytest.fixture(scope="module")
def prompts(target):
    return [target.render([{"role": "user", "content": question}]) for question in QUESTIONS]


@pytest.fixture(scope="module")
def plain(target, prompts):
    return answers(target, prompts, 10)


def answers(target, prompts, batch_size, drafter_of=None, tree=None):
    """Answers of all prompts in batches; drafter_of: first prompt's number -> drafter."""
    found = []
    for start in range(0, len(prompts), batch_size):
        result = decode(
            target,
            prompts[start : start + batch_size],
            drafter=drafter_of(start) if drafter_of else None,
            tree=tree,
            max_new_tokens=NEW,
            stop_token_ids=target.eos_token_ids,
        )
        found += [generation.tokens for generation in result.generations]
    return found


def test_plain_decoding_is_transformers_own(target, prompts, plain):
    for row in (0, 8, 16):
        prompt = torch.tensor([prompts[row]])
        output = target.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=NEW,
            eos_token_id=sorted(target.eos_token_ids),
            pad_token_id=0,
        )
        assert plain[row] == output[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(
    ("method", "tree"),
    [
        ("lookup", TreeConfig(builder="chain", budget=3)),
        ("chain", TreeConfig(builder="chain", budget=7)),
        ("tree", TreeConfig(builder="best_first", budget=12)),
    ],
    ids=["lookup", "chain", "tree"],
)
def test_drafted_decoding_is_token_identical(target, prompts, plain, method, tree, batch_size):
    def drafter_of(start):
        if method == "lookup":
            return LookupDrafter(depth=3)
        rows = slice(start, start + batch_size)
        return NoisyOracle(
            prompts[rows],
            plain[rows],
            target.vocab_size,
            miss=0.03,
            sure=0.95 if method == "chain" else 0.85,
            seed=start,
        )

    assert answers(target, prompts, batch_size, drafter_of, tree) == plain


def test_an_untrained_head_changes_no_token(target, prompts, plain):
    head = new_head(HeadConfig(num_layers=2, block_size=8), target, seed=0)
    result = decode(
        target,
        prompts[:2],
        drafter=HeadDrafter(head, target, width=4),
        tree=TreeConfig(budget=16, width=4),
        max_new_tokens=12,
    )
    assert [generation.tokens for generation in result.generations] == [
        answer[:12] for answer in plain[:2]
    ]
