"""A real target and its trained head: builders on real drafts, and the residual rule at work."""

import pytest
import torch

from jetspec.decode import decode
from jetspec.evaluation.methods import Request
from jetspec.evaluation.output_check import check_distribution
from jetspec.heads.registry import load_head
from jetspec.heads.shipped import SHIPPED, head_directory
from jetspec.sampling import SamplingParams
from jetspec.targets.config import TargetConfig
from jetspec.targets.load import load_target
from jetspec.trees.build import build_tree
from jetspec.trees.config import TreeConfig

pytestmark = pytest.mark.slow
QUESTIONS = (
    "What is 17 times 23? Show the steps.",
    "Write a Python function that reverses a list.",
)
WIDTH = 32


@pytest.fixture(scope="module")
def models():
    target = load_target(TargetConfig(dtype="fp32", device="cpu"))
    prompts = [target.render([{"role": "user", "content": text}]) for text in QUESTIONS]
    return target, load_head(head_directory(SHIPPED)), prompts


class Recorder:
    """Keeps every draft that passes by."""

    def __init__(self, drafter):
        self._drafter, self.drafts = drafter, []

    def __getattr__(self, name):
        return getattr(self._drafter, name)

    def propose(self, anchors, histories):
        self.drafts.append((self._drafter.propose(anchors, histories), anchors))
        return self.drafts[-1][0]


def test_best_first_is_never_worse_than_algorithm1_on_the_drafts_of_a_trained_head(models):
    target, head, prompts = models
    recorder = Recorder(head.drafter(target, width=WIDTH))
    tree = TreeConfig(budget=16, width=WIDTH)
    decode(target, prompts, drafter=recorder, tree=tree, max_new_tokens=14)
    assert len(recorder.drafts) > 2
    for budget in (16, 64, 256, 1024):
        gains = []
        for draft, anchors in recorder.drafts:
            exact, printed = (
                build_tree(draft, anchors, TreeConfig(builder=b, budget=budget, width=WIDTH))
                for b in ("best_first", "algorithm1")
            )
            gains.append(exact.surrogate() - printed.surrogate())
        gain = torch.cat(gains)
        assert torch.all(gain >= -1e-4)
        assert gain.mean() > 0.01  # the printed algorithm leaves something on the table


def test_drawn_trees_of_a_trained_head_are_accepted_and_their_text_is_the_targets(models):
    target, head, prompts = models
    params = SamplingParams(temperature=1.0, top_p=0.95, repetition_penalty=1.05, seed=2)
    result = decode(
        target,
        prompts,
        drafter=head.drafter(target, width=WIDTH),
        tree=TreeConfig(builder="static", budget=16, width=WIDTH),
        sampling=params,
        rule="residual",
        max_new_tokens=16,
    )
    rounds = [count for generation in result.generations for count in generation.accepted]
    assert sum(rounds) / len(rounds) > 0.3
    requests = {str(row): Request(prompt, str(row)) for row, prompt in enumerate(prompts)}
    outputs = {str(row): g.tokens for row, g in enumerate(result.generations)}
    check = check_distribution(target, requests, outputs, params)
    assert check["passed"], check
