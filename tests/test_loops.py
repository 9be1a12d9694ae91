"""The loop filter."""

import random

import pytest

from jetspec.generation.loops import MIN_LOOP_TOKENS, MIN_REPEATS, is_looping


@pytest.mark.parametrize("period", [1, 2, 5, 40])
@pytest.mark.parametrize("start", [0, 30])
def test_a_tail_that_repeats_one_cycle_is_a_loop(period: int, start: int) -> None:
    cycle = list(range(100, 100 + period))
    repeats = max(MIN_REPEATS, -(-MIN_LOOP_TOKENS // period))
    assert is_looping([*range(start), *cycle * repeats])
    assert is_looping([*range(start), *cycle * repeats, *cycle[: period // 2]])


def test_one_repeat_less_is_no_loop() -> None:
    cycle = list(range(100, 110))
    assert not is_looping([1, 2, 3, *cycle * (MIN_REPEATS - 1)])
    assert is_looping([1, 2, 3, *cycle * (MIN_REPEATS - 1)], min_repeats=MIN_REPEATS - 1)


def test_a_short_run_of_one_token_is_ordinary_text() -> None:
    assert not is_looping([1, 2, 3, *[7] * (MIN_LOOP_TOKENS - 1)])
    assert is_looping([1, 2, 3, *[7] * MIN_LOOP_TOKENS])


def test_a_loop_that_was_left_again_is_no_loop() -> None:
    assert not is_looping([*[5, 6, 7] * 20, 8, 9])


def test_text_without_repeats_is_no_loop() -> None:
    generator = random.Random(0)
    for length in (0, 1, 3, 50, 400):
        assert not is_looping([generator.randrange(1000) for _ in range(length)])


def test_the_filter_agrees_with_counting_cycles_one_by_one() -> None:
    """Brute force: some cycle, laid end to end, covers a long enough tail."""
    generator = random.Random(1)
    seen = set()
    for _ in range(2000):
        cycle = [generator.randrange(2) for _ in range(generator.randint(1, 6))]
        head = [generator.randrange(2) for _ in range(generator.randint(0, 6))]
        tokens = (head + cycle * generator.randint(1, 8))[: generator.randint(1, 40)]
        expected = False
        for period in range(1, len(tokens) + 1):
            covered = period
            while covered < len(tokens) and tokens[-1 - covered] == tokens[-1 - covered + period]:
                covered += 1
            expected |= covered >= max(period * MIN_REPEATS, MIN_LOOP_TOKENS)
        assert is_looping(tokens) == expected
        seen.add(expected)
    assert seen == {True, False}
