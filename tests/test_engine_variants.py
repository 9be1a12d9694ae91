"""Variants that the benchmarks time: launches the kernel takes, rules that leave nothing behind."""

import pytest

from tests.test_kernels_setup import interpreted
from tests.tiny import tiny_head, tiny_target

variants = interpreted("kernels.benchmarks.variants")
attention = interpreted("kernels.tree_attention")

from jetspec.decode import decode  # noqa: E402
from jetspec.engine.benchmarks import variants as rounds  # noqa: E402
from jetspec.engine.engine import Engine  # noqa: E402
from jetspec.trees.config import TreeConfig  # noqa: E402


def test_launches_are_ones_that_the_kernel_takes_and_no_two_are_the_same() -> None:
    found = variants.launches()
    assert len({str(launch) for launch in found}) == len(found)
    assert len({(x.batch, x.nodes, x.plan, x.splits) for x in found}) == len(found)
    for launch in found:
        assert not launch.splits[0] % launch.plan.tile and launch.plan.rows in (0, 64)
        tiles, across = launch.plan.tiles(launch.nodes * variants.GROUP)
        assert tiles * launch.plan.rows + across >= launch.nodes * variants.GROUP
        if launch.name in ("present", "fixed"):
            even = launch.name == "present" and launch.batch == 16
            assert (launch.plan.joined, launch.plan.even, launch.plan.across) == (even, even, 0)
        if launch.plan.even:  # what is launched runs at once
            programs = tiles * variants.KV_HEADS * launch.batch * launch.splits[1]
            assert programs <= max(2 * 132, tiles * variants.KV_HEADS * launch.batch * 4)


def test_rows_are_timed_by_the_variants_that_change_them() -> None:
    for row in rounds.ROWS + rounds.ALIGNED_ROWS:
        config, batch = rounds.shape(row)
        names = rounds.wanted(row)
        assert names[0] == "present" and set(names) <= set(rounds.ROUNDS)
        if row in rounds.ALIGNED_ROWS:
            assert names == ["present", "even" if batch == 1 else "fixed"]
            continue
        left_over = config.budget in (16, 32, 64, 128) if config else True
        assert ("across" in names) == left_over, row
        assert ("fp8 drafts" in names) == (config is not None and batch == 1)


def test_a_rule_holds_for_the_launches_inside_alone() -> None:
    before = attention.plan_for, attention.splits_for
    usual = attention.plan_for(129, 4, 8, 64), attention.splits_for(72)
    with pytest.raises(KeyError), rounds.launched_by("across"):
        plan = rounds.tree_attention.plan_for(129, 4, 8, 64)
        assert (plan.across, plan.joined, plan.tiles(516)) == (16, True, (8, 16))
        assert rounds.tree_attention.splits_for(64, True) == (64, 4)
        assert rounds.tree_attention.plan_for(1, 4, 8, 64).rows == 0
        assert rounds.tree_attention.splits_for(8, True) == (128, 33)
        raise KeyError
    assert (attention.plan_for, attention.splits_for) == before
    assert usual == (attention.plan_for(129, 4, 8, 64), (512, 12))


def test_rounds_under_a_rule_write_the_same_text() -> None:
    """Draft, prompt and tree alike go across, in even splits that the last one merges."""
    target = tiny_target("llama", hidden_size=64, num_layers=1)
    head = tiny_head(target, block_size=4, num_layers=1, num_taps=1)
    tree = TreeConfig(builder="best_first", depth=2, budget=3, width=3)
    prompts = [[5, 9, 11]]
    plain = decode(target, prompts, max_new_tokens=3).generations
    with rounds.launched_by("across"):
        engine = Engine(target, head, tree=tree, slots=1, max_rows=64, page_size=16, kernels=True)
        ours = engine.decode(prompts, max_new_tokens=3).generations
    assert [g.tokens for g in ours] == [g.tokens for g in plain]
