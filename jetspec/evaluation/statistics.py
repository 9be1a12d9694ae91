"""Bootstrap intervals that resample prompts.

Rounds of one prompt are correlated, so the unit that is drawn with replacement is the prompt, or
the batch of prompts where several share one clock. The percentile interval is widened for small
samples (Hesterberg 2015, "What teachers should know about the bootstrap", section 3.3), which
otherwise covers too little below some thirty prompts.
"""

import functools
import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

LEVEL = 0.95
# Rows drawn at one time, so that many prompts and many resamples do not fill the memory.
_CHUNK_CELLS = 4_000_000


@dataclass(frozen=True)
class Estimate:
    """A value with its interval; the interval is None where fewer than two units were measured."""

    value: float
    ci: tuple[float, float] | None

    def rounded(self, digits: int = 6) -> tuple[float, list[float] | None]:
        """Plain JSON values: (value, [low, high] or None)."""
        ci = [round(x, digits) for x in self.ci] if self.ci else None
        return round(self.value, digits), ci


def ratio_interval(
    numerators: ArrayLike, denominators: ArrayLike, *, samples: int, seed: int
) -> Estimate | None:
    """sum(numerators) / sum(denominators) over prompts, e.g. tau = tokens / rounds.

    Args:
        numerators, denominators: one value a prompt.

    Returns:
        None where the denominators sum to zero.
    """
    ones = np.ones_like(np.asarray(numerators, dtype=np.float64))
    return paired_ratio_interval(numerators, denominators, ones, ones, samples=samples, seed=seed)


def paired_ratio_interval(
    a_numerators: ArrayLike,
    a_denominators: ArrayLike,
    b_numerators: ArrayLike,
    b_denominators: ArrayLike,
    *,
    samples: int,
    seed: int,
) -> Estimate | None:
    """(sum a_num / sum a_den) / (sum b_num / sum b_den), both sides resampled together.

    With tokens over seconds on each side this is a speed-up; with tokens over rounds it is the
    ratio of two taus. Index i of all four is the same prompt, which is what pairs them.

    Returns:
        None where a side is undefined (no unit, or a sum that is zero).
    """
    table = np.stack(
        [
            np.asarray(column, dtype=np.float64)
            for column in (a_numerators, a_denominators, b_numerators, b_denominators)
        ],
        axis=1,
    )  # [units, 4]
    value = _ratio(table.sum(0, keepdims=True))[0]
    if not math.isfinite(value):
        return None
    units = len(table)
    if units < 2:
        return Estimate(float(value), None)
    draws = _ratio(_resampled_sums(table, samples, seed))
    draws = draws[np.isfinite(draws)]
    tail = expanded_tail(units)
    low, high = np.quantile(draws, [tail, 1 - tail])
    return Estimate(float(value), (float(low), float(high)))


def independent_ratio_interval(
    a_numerators: ArrayLike,
    a_denominators: ArrayLike,
    b_numerators: ArrayLike,
    b_denominators: ArrayLike,
    *,
    samples: int,
    seed: int,
) -> Estimate | None:
    """As `paired_ratio_interval`, for sides of different units: each is resampled by itself.

    A side of one unit is taken as it is; the interval then is the other side's alone.

    Returns:
        None where a side is undefined.
    """
    sides = [
        np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1)
        for columns in ((a_numerators, a_denominators), (b_numerators, b_denominators))
    ]  # two of [units, 2]
    value = _ratio(np.concatenate([side.sum(0) for side in sides])[None])[0]
    if not math.isfinite(value):
        return None
    counts = [len(side) for side in sides if len(side) > 1]
    if not counts:
        return Estimate(float(value), None)
    sums = [_resampled_sums(side, samples, seed + i) for i, side in enumerate(sides)]
    draws = _ratio(np.concatenate(sums, axis=1))
    draws = draws[np.isfinite(draws)]
    tail = expanded_tail(min(counts))
    low, high = np.quantile(draws, [tail, 1 - tail])
    return Estimate(float(value), (float(low), float(high)))


def expanded_tail(units: int, level: float = LEVEL) -> float:
    """Probability left out at each end: Phi(-sqrt(n / (n - 1)) * t), t = Student's quantile.

    It tends to (1 - level) / 2 as the number of units grows.
    """
    t = student_quantile((1 + level) / 2, units - 1)
    return NormalDist().cdf(-math.sqrt(units / (units - 1)) * t)


@functools.lru_cache(maxsize=256)
def student_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t for an integer number of degrees of freedom, by bisection."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        if 0.5 + _student_central(middle, freedom) / 2 < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _student_central(t: float, freedom: int) -> float:
    """P(|T| <= t): the finite sums of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    term = cosine if freedom % 2 else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + freedom % 2, freedom, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if freedom % 2 else sine * total


def _resampled_sums(table: np.ndarray, samples: int, seed: int) -> np.ndarray:
    """Column sums of `samples` tables, each of rows drawn with replacement: [samples, columns]."""
    units = len(table)
    if units * samples <= _CHUNK_CELLS:
        return _counts(units, samples, seed) @ table
    generator = np.random.default_rng(seed)
    step = max(1, _CHUNK_CELLS // units)
    sums = [
        _draw(generator, units, min(step, samples - start)) @ table
        for start in range(0, samples, step)
    ]
    return np.concatenate(sums)


@functools.lru_cache(maxsize=8)
def _counts(units: int, samples: int, seed: int) -> np.ndarray:
    """How often each row is drawn: drawing costs far more than the sums, and a report of many
    figures draws from few numbers of prompts."""
    return _draw(np.random.default_rng(seed), units, samples)


def _draw(generator: np.random.Generator, units: int, samples: int) -> np.ndarray:
    """float64 [samples, units], rows drawn with replacement, counted."""
    drawn = generator.multinomial(units, np.full(units, 1 / units), size=samples)
    return drawn.astype(np.float64)


def _ratio(sums: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3])
