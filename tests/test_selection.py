from collections import Counter
from dataclasses import replace

import pytest
import torch

from jetspec.config import parse_config
from jetspec.decode import decode
from jetspec.drafters import HeadDrafter
from jetspec.evaluation.replay import Replay
from jetspec.evaluation.selection import _answers, _compare, _prompts, select_head
from jetspec.heads.registry import load_head, save_head
from jetspec.prompts import Prompt, load_prompts
from jetspec.storage import join, read_json, write_manifest
from jetspec.targets.load import load_target, target_fingerprint
from jetspec.trees.config import TreeConfig
from tests.tiny_run import tiny_run


def another_head(head_uri: str, directory: str, config) -> str:
    """The head with every weight drawn anew."""
    head = load_head(head_uri)
    torch.manual_seed(5)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    mark = target_fingerprint(config.target)
    save_head(head, directory, target_fingerprint=mark)
    write_manifest(directory, kind="head", config_hash="other", target_fingerprint=mark)
    return directory


def test_the_head_with_the_higher_tau_is_chosen_whatever_its_place(tmp_path):
    config, first = tiny_run(tmp_path)
    second = another_head(first, str(tmp_path / "second"), config)
    there = select_head(config, [first, second]).facts
    back = select_head(config, [second, first]).facts
    taus = {row["head"]: row["tau"] for row in there["heads"]}
    assert taus == {row["head"]: row["tau"] for row in back["heads"]}
    if taus[first] != taus[second]:
        assert there["chosen"] == back["chosen"] == max(taus, key=lambda uri: taus[uri])
    else:
        assert (there["chosen"], back["chosen"]) == (first, second)


def test_selection_measures_the_tau_of_real_decoding(tmp_path):
    config, head_uri = tiny_run(tmp_path)
    measured = select_head(config, [head_uri, head_uri]).facts["heads"][0]["tau"]
    target = load_target(config.target)
    prompts = [target.render(list(p.messages)) for p in load_prompts(config.prompts).eval]
    width = config.evaluation.width
    result = decode(
        target,
        prompts,
        drafter=HeadDrafter(load_head(head_uri).eval(), target, width=width),
        tree=TreeConfig(budget=config.promotion.budget, width=width),
        max_new_tokens=config.evaluation.max_new_tokens,
    )
    rounds = sum(len(g.rounds) for g in result.generations)
    assert measured == round(sum(sum(g.rounds) for g in result.generations) / rounds, 6)


def test_a_finished_selection_is_reused(tmp_path):
    config, head_uri = tiny_run(tmp_path)
    first = select_head(config, [head_uri])
    again = select_head(config, [head_uri])
    assert (first.reused, again.reused) == (False, True)
    assert (first.key, first.uri) == (again.key, again.uri)
    assert read_json(join(first.uri, "selection.json")) == first.facts == again.facts


@pytest.mark.parametrize("size", [1, 2, 100])
def test_every_prompt_is_answered_whatever_the_batch(tmp_path, size):
    config, _ = tiny_run(tmp_path)
    batches = config.regeneration.model_copy(update={"batch_size": size})
    target, found = load_target(config.target), load_prompts(config.prompts).eval
    prompts = [*found, *(replace(p, id=f"{p.id} again") for p in reversed(found))]
    samples = _answers(target, prompts, config.model_copy(update={"regeneration": batches}))
    by_id = {sample.id: sample for sample in samples}
    assert len(samples) == len(prompts) > 2 and by_id.keys() == {p.id for p in prompts}
    for prompt in prompts:
        text = target.render(list(prompt.messages))
        limit = config.evaluation.max_new_tokens
        (answer,) = decode(target, [text], max_new_tokens=limit).generations
        sample = by_id[prompt.id]
        assert sample.input_ids == text + answer.tokens and sample.slice == prompt.slice
        assert sample.loss_mask == [0] * len(text) + [1] * len(answer.tokens)


def test_only_prompts_of_the_measured_slices_decide(tmp_path):
    config, head_uri = tiny_run(tmp_path)
    by_slice = Counter(prompt.slice for prompt in load_prompts(config.prompts).eval)
    one = min(by_slice)
    assert len(by_slice) > 1
    for slices, expected in (((one,), by_slice[one]), (("all",), by_slice.total())):
        settings = config.evaluation.model_copy(update={"slices": slices})
        chosen = select_head(config.model_copy(update={"evaluation": settings}), [head_uri])
        assert chosen.facts["prompts"] == expected


def test_prompts_are_the_first_of_every_measured_slice():
    prompts = [
        Prompt(id=f"{name}{i}", slice=name, source="test", messages=())
        for i in range(3)
        for name in ("code", "math", "chat")
    ]

    def chosen(**evaluation):
        config = parse_config({"evaluation": evaluation})
        return [prompt.id for prompt in _prompts(config, prompts)]

    two = ["chat0", "chat1", "code0", "code1", "math0", "math1"]
    assert chosen(prompts_per_slice=2) == two
    assert chosen(prompts_per_slice=2, slices=["math", "code"]) == two[2:]
    assert chosen(prompts_per_slice=2, slices=["all"]) == two
    assert chosen(prompts_per_slice=1, slices=["chat", "all"]) == two[::2]


def test_heads_are_compared_with_the_first_on_the_same_prompts():
    def replays(*pairs):
        return [Replay("id", "math", rounds, committed, ()) for committed, rounds in pairs]

    config = parse_config({"promotion": {"budget": 9}})
    rows = [replays((20, 10), (60, 20)), replays((30, 10), (90, 20)), replays((30, 20), (90, 10))]
    facts = _compare(config, ["a", "b", "c"], rows)
    assert [row["head"] for row in facts["heads"]] == ["a", "b", "c"]
    assert [row["tau"] for row in facts["heads"]] == pytest.approx([80 / 30, 4.0, 4.0], abs=1e-6)
    assert [row["ratio"] for row in facts["heads"]] == pytest.approx([1.0, 1.5, 1.5], abs=1e-6)
    assert facts["heads"][1]["ratio_ci"] == pytest.approx([1.5, 1.5]), "paired, prompt by prompt"
    assert facts["heads"][2]["ratio_ci"][0] < 1.5 < facts["heads"][2]["ratio_ci"][1]
    assert (facts["chosen"], facts["budget"], facts["prompts"]) == ("b", 9, 2)
    nothing = _compare(config, ["a", "b"], [replays((0, 0), (0, 0)), rows[0]])
    assert nothing["chosen"] == "b" and nothing["heads"][0]["tau"] is None
