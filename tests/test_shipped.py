"""The head that comes with the package is whole, fits its target, and drafts well."""

import pytest

from flows.presets import resolve_run
from flows.registry import warm_start_uri
from jetspec.decode import decode
from jetspec.drafters import HeadDrafter
from jetspec.heads.doctor import check_head
from jetspec.heads.registry import load_head
from jetspec.heads.shipped import SHIPPED, head_directory
from jetspec.storage import list_files, read_manifest
from jetspec.targets.config import TargetConfig
from jetspec.targets.load import load_target
from jetspec.training.stage import starting_head
from jetspec.trees.config import TreeConfig

QUESTIONS = [
    "What is 17 times 23? Show the steps.",
    "Write a Python function that reverses a list.",
    "Give three tips for sleeping better.",
]


@pytest.fixture(scope="module")
def target():
    return load_target(TargetConfig(dtype="fp32", device="cpu"))


def test_its_files_are_those_of_its_manifest_and_small():
    directory = head_directory(SHIPPED)
    files = read_manifest(directory, kind="head")["files"]  # checks every checksum
    assert set(files) == {name for name in list_files(directory) if name != "manifest.json"}
    assert sum(entry["size"] for entry in files.values()) <= 20_000_000


def test_any_other_name_is_a_directory_of_its_own():
    assert head_directory("runs/heads/abc") == "runs/heads/abc"


def test_the_quickstart_starts_from_it_and_has_its_shape(target):
    run = resolve_run("quickstart", ())
    start = warm_start_uri(run)
    assert start == head_directory(SHIPPED)
    starting_head(run.head, target, start, seed=0)  # raises if a size differs


@pytest.mark.slow
def test_the_doctor_finds_nothing(target):
    assert [f for f in check_head(head_directory(SHIPPED), target) if not f.ok] == []


@pytest.mark.slow
def test_it_drafts_more_than_one_token_a_round_and_changes_none(target):
    prompts = [target.render([{"role": "user", "content": text}]) for text in QUESTIONS]
    settings = {"max_new_tokens": 32, "stop_token_ids": target.eos_token_ids}
    plain = decode(target, prompts, **settings)
    head = load_head(head_directory(SHIPPED))
    drafted = decode(
        target,
        prompts,
        drafter=HeadDrafter(head, target, width=10),
        tree=TreeConfig(budget=16, width=10),
        **settings,
    )
    assert [g.tokens for g in drafted.generations] == [g.tokens for g in plain.generations]
    rounds = [count for generation in drafted.generations for count in generation.rounds]
    assert sum(rounds) / len(rounds) > 2
