"""Intervals against enumeration, tables and synthetic data whose truth is known."""

import itertools
import math

import numpy as np
import pytest

from jetspec.evaluation.statistics import (
    Estimate,
    _resampled_sums,
    expanded_tail,
    independent_ratio_interval,
    paired_ratio_interval,
    ratio_interval,
    student_quantile,
)


def test_tau_is_the_ratio_of_sums_not_the_mean_of_ratios():
    estimate = ratio_interval([10, 90], [10, 30], samples=200, seed=0)
    assert estimate.value == pytest.approx(100 / 40)


def test_resampling_matches_the_enumeration_of_every_possible_draw():
    tokens, rounds = np.array([4.0, 9.0, 20.0]), np.array([2.0, 3.0, 4.0])
    exact = [
        tokens[list(draw)].sum() / rounds[list(draw)].sum()
        for draw in itertools.product(range(3), repeat=3)
    ]
    sums = _resampled_sums(np.stack([tokens, rounds], 1), 40_000, seed=3)
    drawn = sums[:, 0] / sums[:, 1]
    for atom in set(exact):
        share = np.mean(np.isclose(drawn, atom))
        assert share == pytest.approx(np.mean(np.isclose(exact, atom)), abs=0.01)
    assert drawn.mean() == pytest.approx(np.mean(exact), abs=0.02)


@pytest.mark.parametrize(
    ("freedom", "table"), [(1, 12.7062), (2, 4.3027), (5, 2.5706), (10, 2.2281), (29, 2.0452)]
)
def test_student_quantile_equals_the_printed_table(freedom, table):
    assert student_quantile(0.975, freedom) == pytest.approx(table, abs=1e-4)


def test_small_samples_are_widened_and_large_ones_are_not():
    assert expanded_tail(6) < 0.01
    assert expanded_tail(2000) == pytest.approx(0.025, abs=2e-4)


@pytest.mark.parametrize("prompts", [8, 40])
def test_interval_covers_the_truth_about_95_times_in_100(prompts):
    # Prompts differ (a prompt-level tau), and rounds of one prompt share it: tau = E[t] / E[r].
    generator = np.random.default_rng(11)
    hits, trials = 0, 400
    for trial in range(trials):
        rounds = generator.integers(10, 30, prompts)
        tau = 1 + generator.gamma(4.0, 0.5, prompts)
        tokens = rounds * tau + generator.normal(0, 2, prompts)
        low, high = ratio_interval(tokens, rounds, samples=400, seed=trial).ci
        hits += low <= 3.0 <= high
    assert 0.91 <= hits / trials <= 0.985


def test_resampling_rounds_instead_of_prompts_would_cover_far_too_little():
    # The reason for the unit: the naive interval over rounds misses the truth most of the time.
    generator = np.random.default_rng(5)
    hits = 0
    for trial in range(60):
        tau = 1 + generator.gamma(4.0, 0.5, 12)
        rounds = np.repeat(tau, 50) + generator.normal(0, 0.5, 600)
        low, high = ratio_interval(rounds, np.ones(600), samples=200, seed=trial).ci
        hits += low <= 3.0 <= high
    assert hits / 60 < 0.6


def test_pairing_removes_what_two_methods_share():
    # Slow prompts are slow for both: the paired ratio is exact although the prompts differ widely.
    seconds = np.array([1.0, 5.0, 20.0, 3.0, 9.0])
    tokens = np.full(5, 100.0)
    paired = paired_ratio_interval(tokens, seconds / 2, tokens, seconds, samples=500, seed=0)
    assert paired.value == pytest.approx(2.0)
    assert paired.ci == pytest.approx((2.0, 2.0))


def every_draw(columns):
    """Sums of the columns over every way to draw as many units with replacement: [draws, 2]."""
    table = np.stack([np.asarray(column, dtype=float) for column in columns], 1)
    draws = np.array(list(itertools.product(range(len(table)), repeat=len(table))))
    return table[draws].sum(1)


@pytest.mark.parametrize("paired", [True, False])
def test_each_end_leaves_out_its_tail_of_every_possible_draw(paired):
    ours = [31, 8, 55, 20, 14], [10, 4, 12, 9, 3]
    base = [9, 11, 30, 12, 7], [8, 4, 16, 9, 7]
    sides = [every_draw(side) for side in (ours, base)]
    taus = [sums[:, 0] / sums[:, 1] for sums in sides]
    exact = taus[0] / taus[1] if paired else (taus[0][:, None] / taus[1]).ravel()
    interval = paired_ratio_interval if paired else independent_ratio_interval
    low, high = interval(*ours, *base, samples=60_000, seed=2).ci
    tail = expanded_tail(5)
    for end, side in ((low, exact), (-high, -exact)):
        assert np.mean(side < end - 1e-9) < 1.3 * tail
        assert np.mean(side < end + 1e-9) > 0.7 * tail


def test_sides_that_are_resampled_by_themselves_do_not_cancel_out():
    """Equal figures on both sides: paired they are equal in every draw, apart they are not."""
    tokens, rounds = [10.0, 20.0, 60.0, 25.0], [5.0, 6.0, 9.0, 10.0]
    sides = (tokens, rounds, tokens, rounds)
    assert paired_ratio_interval(*sides, samples=400, seed=0).ci == (1.0, 1.0)
    low, high = independent_ratio_interval(*sides, samples=400, seed=0).ci
    assert low < 0.7 and high > 1.4


def test_two_prompts_have_an_interval_from_the_one_to_the_other():
    tau = ratio_interval([6, 20], [3, 4], samples=200, seed=0)
    assert tau.ci == pytest.approx((2.0, 5.0))
    apart = independent_ratio_interval([6, 20], [3, 4], [4, 1], [2, 1], samples=200, seed=0)
    assert apart.ci == pytest.approx((1.0, 5.0))


def test_same_seed_gives_the_same_interval():
    one, two = (ratio_interval([1, 2, 9], [1, 1, 3], samples=300, seed=4) for _ in range(2))
    assert one == two


def test_one_prompt_gives_a_value_and_no_interval():
    estimate = ratio_interval([6], [3], samples=100, seed=0)
    assert (estimate.value, estimate.ci) == (2.0, None)


def test_an_estimate_as_json_is_rounded_and_its_ends_with_it():
    assert Estimate(1.23456789, (1.1111111, 1.9999999)).rounded() == (1.234568, [1.111111, 2.0])
    assert Estimate(1.23456789, None).rounded(2) == (1.23, None)


def test_no_rounds_gives_no_estimate_instead_of_a_division_by_zero():
    assert ratio_interval([], [], samples=100, seed=0) is None
    assert ratio_interval([0.0], [0.0], samples=100, seed=0) is None


def test_many_prompts_are_resampled_in_pieces_without_changing_the_shape():
    sums = _resampled_sums(np.ones((5000, 2)), 900, seed=0)
    assert sums.shape == (900, 2)
    assert math.isclose(sums.min(), 5000) and math.isclose(sums.max(), 5000)


def test_sides_of_different_prompts_are_resampled_by_themselves():
    """Truth 3 / 1.5: many prompts against few; the interval covers it about 95 times in 100."""
    generator = np.random.default_rng(5)
    hits, trials = 0, 300
    for trial in range(trials):
        ours, base = 3 + generator.normal(0, 0.6, 30), 1.5 + generator.normal(0, 0.1, 10)
        estimate = independent_ratio_interval(
            ours, np.ones(30), base, np.ones(10), samples=300, seed=trial
        )
        hits += estimate.ci[0] <= 2.0 <= estimate.ci[1]
    assert 0.91 <= hits / trials <= 0.99


def test_a_side_of_one_unit_is_taken_as_it_is():
    ours = ([2.0, 4.0, 6.0], [1.0, 1.0, 1.0])
    estimate = independent_ratio_interval(*ours, [3.0], [1.0], samples=300, seed=0)
    alone = ratio_interval(*ours, samples=300, seed=0)
    assert estimate.value == pytest.approx(alone.value / 3)
    assert estimate.ci == pytest.approx([bound / 3 for bound in alone.ci])
    single = independent_ratio_interval([6.0], [2.0], [1.5], [1.0], samples=9, seed=0)
    assert (single.value, single.ci) == (2.0, None)
    assert independent_ratio_interval([2.0], [0.0], [1.0], [1.0], samples=9, seed=0) is None
