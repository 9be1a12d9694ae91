"""Filling Triton's cache from several processes, and the launch shapes that are tried."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kernels import tree_attention
from kernels.tree_attention import Plan

TRACED = ("ar_b1", "chain_b16", "tree_b1_128", "tree_b1_255", "tree_b16_32")
KIND_ROWS = {
    "attention": [
        "ar_b16", "chain_b16", "tree_b1_16", "tree_b1_64", "tree_b1_255", "tree_b16_16",
        "tree_b16_32",
    ],
    "exact": ["ar_b1", "ar_b16", "tree_b1_64", "tree_b1_128"],
    "growth": [
        "tree_b1_32", "tree_b1_512", "tree_b1_1023", "ar_b4", "ar_b64", "tree_b4_16", "tree_b64_16",
    ],
}  # fmt: skip
RULES: dict[str, tuple[Plan, tuple[int, int]]] = {
    "64 rows, (256, 24)": (Plan(64, 64, 4, 3, True), (256, 24)),
    "64 rows, (512, 12)": (Plan(64, 64, 4, 3, True), (512, 12)),
    "64 rows, (1024, 12)": (Plan(64, 64, 4, 3, True), (1024, 12)),
    "128 rows, (1024, 12)": (Plan(128, 64, 8, 2, True), (1024, 12)),
}


@contextmanager
def ruled(name: str) -> Iterator[None]:
    """Launches inside take a rule's shapes, whatever their size."""
    plan, splits = RULES[name]
    usual = tree_attention.plan_for, tree_attention.splits_for
    tree_attention.plan_for = lambda *args: plan
    tree_attention.splits_for = lambda *args: splits
    try:
        yield
    finally:
        tree_attention.plan_for, tree_attention.splits_for = usual


def attempt(job: tuple[str, str]) -> None:
    try:
        compile_row(*job)
    except Exception as error:  # the table itself will say so
        print("does not run:", *job, str(error).splitlines()[:1], flush=True)


def compile_row(name: str, kind: str) -> None:
    """Run what a row of a table needs once, on fewer layers of the same shapes."""
    from jetspec.engine.benchmarks.models import random_head, random_target
    from jetspec.engine.benchmarks.rows import engine_for

    target = random_target(layers=5)
    head = random_head(target)
    if kind in ("plain", "growth"):
        engine_for(name, target, head).round.run()
    elif kind == "attention":
        for rule in RULES:
            with ruled(rule):
                engine_for(name, target, head).round.run()
    else:
        engine_for(name, target, head, exact=True).round.run()
    torch.cuda.synchronize()
