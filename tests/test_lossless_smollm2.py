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

# Twenty short questions of all slices. Some answers copy or go in circles, where lookup has work
# to do. Answers of equal pace stand together, for a batch lasts as long as its slowest row.
QUESTIONS = [
    "Translate 'good morning' into French, Spanish and German.",
    "解释什么是递归。",
    "Write an HTML list with six items.",
    "Write a CSV with ten rows of id,name,age.",
    "一本书有120页，每天读8页，几天读完？",
    "Print the multiplication table of 9 from 9 x 1 to 9 x 12.",
    "List the planets of the solar system in order.",
    "一个长方形长8米，宽5米，面积是多少？",
    "Copy this line six times: red green blue red green blue",
    "Explain what a hash map is in two sentences.",
    "请用三句话介绍北京。",
    "Write the numbers 1 to 30 separated by commas.",
    "What is 17 times 23? Show the steps.",
    "A train leaves at 9:40 and arrives at 11:05. How long is the journey?",
    "小明有12个苹果，吃了5个，还剩几个？",
    "请写一首关于春天的诗。",
    "小红有24支铅笔，分给6个同学，每人几支？",
    "水的沸点是多少度？",
    "Copy this line four times: 3.14159 2.71828 1.41421 1.61803",
    "Say this five times: peter piper picked a peck of pickled peppers.",
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
    return answers(target, prompts, len(prompts))


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
    rows = (9, 12, 17)  # two that stop by themselves, one that does not
    longest = max(len(prompts[row]) for row in rows)
    padding = [longest - len(prompts[row]) for row in rows]
    output = target.model.generate(
        torch.tensor([[0] * pad + prompts[row] for pad, row in zip(padding, rows, strict=True)]),
        attention_mask=torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding]),
        do_sample=False,
        max_new_tokens=NEW,
        eos_token_id=sorted(target.eos_token_ids),
        pad_token_id=0,
    )
    for row, answer in zip(rows, output[:, longest:].tolist(), strict=True):
        length = len(plain[row])
        assert plain[row] == answer[:length] and not any(answer[length:])


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(
    ("method", "tree"),
    [
        ("lookup", TreeConfig(builder="chain", budget=7)),
        ("chain", TreeConfig(builder="chain", budget=15)),
        ("tree", TreeConfig(builder="best_first", budget=10)),
    ],
    ids=["lookup", "chain", "tree"],
)
def test_drafted_decoding_is_token_identical(target, prompts, plain, method, tree, batch_size):
    def drafter_of(start):
        if method == "lookup":
            return LookupDrafter(depth=7)
        rows = slice(start, start + batch_size)
        return NoisyOracle(
            prompts[rows],
            plain[rows],
            target.vocab_size,
            depth=15 if method == "chain" else 10,
            miss=0.02,
            sure=0.98 if method == "chain" else 0.92,
            steep=20.0,
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
