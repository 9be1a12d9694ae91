from collections import Counter

import torch

from jetspec.decode import decode
from jetspec.drafters import HeadDrafter
from jetspec.evaluation.selection import select_head
from jetspec.heads.registry import load_head, save_head
from jetspec.prompts import load_prompts
from jetspec.storage import write_manifest
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
    assert not select_head(config, [head_uri]).reused
    assert select_head(config, [head_uri]).reused


def test_only_prompts_of_the_measured_slices_decide(tmp_path):
    config, head_uri = tiny_run(tmp_path)
    by_slice = Counter(prompt.slice for prompt in load_prompts(config.prompts).eval)
    one = min(by_slice)
    assert len(by_slice) > 1
    for slices, expected in (((one,), by_slice[one]), (("all",), by_slice.total())):
        settings = config.evaluation.model_copy(update={"slices": slices})
        chosen = select_head(config.model_copy(update={"evaluation": settings}), [head_uri])
        assert chosen.facts["prompts"] == expected
