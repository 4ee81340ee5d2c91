"""Intervals of random figures at a stated false-alarm level, for tests whose noise differs every time.

A correct program must not fail a test by chance: every bound here comes from the exact law (or from a proven
inequality, where the law has no closed form), and `LEVEL` is the probability with which a right figure lies outside.
"""

from __future__ import annotations

import math

from scipy import stats

LEVEL = 1e-8
"""Of one assertion, both sides together: ten of them in one test stay at one false alarm in ten million."""


def energy_bounds(count: int, level: float = LEVEL) -> tuple[float, float]:
    """Return (low, high) for the mean of `count` squared standard normals: chi-square quantiles over `count`."""
    low, high = stats.chi2.ppf(level / 2, count), stats.chi2.isf(level / 2, count)
    return float(low) / count, float(high) / count


def mixed_energy_bounds(
    squares: float, largest: float, total: float, level: float = LEVEL
) -> tuple[float, float]:
    """Return (low, high) for sum_i l_i z_i^2 / sum_i l_i with z_i independent standard normals and any l_i >= 0.

    Args:
        squares: sum of l_i^2 (the squared Frobenius norm of the covariance whose eigenvalues are l).
        largest: the largest l_i, or a bound of it.
        total: sum of l_i.
        level: false-alarm level of both sides together.

    Source: Laurent and Massart, "Adaptive estimation of a quadratic functional by model selection", Annals of
        Statistics 28 (2000), Lemma 1: each side is left with probability at most exp(-x).
    """
    x = math.log(2.0 / level)
    spread = 2.0 * math.sqrt(squares * x)
    return 1.0 - spread / total, 1.0 + (spread + 2.0 * largest * x) / total


def most_deviations(places: int = 1, level: float = LEVEL) -> float:
    """Return what the largest |z| of `places` standard normals (dependent or not) exceeds with probability `level`."""
    return float(stats.norm.isf(level / (2 * places)))


def counts(trials: int, rate: float, level: float = LEVEL) -> tuple[int, int]:
    """Return (least, most) successes of `trials` independent coins of `rate`: binomial quantiles."""
    law = stats.binom(trials, rate)
    return int(law.ppf(level / 2)), int(law.isf(level / 2))


def most_product_sum(pairs: int, places: int = 1, level: float = LEVEL) -> float:
    """Return a bound of |x . y| for `places` pairs of independent standard normal vectors of length `pairs`.

    log E exp(t x . y) = -(pairs / 2) log(1 - t^2); Chernoff's bound at its best t, solved for the level.
    """
    wanted = math.log(2 * places / level)
    low, high = 0.0, 4.0 * (math.sqrt(pairs * wanted) + wanted)
    for _ in range(100):
        middle = (low + high) / 2
        t = (math.sqrt(pairs**2 + 4.0 * middle**2) - pairs) / (2.0 * middle)
        exponent = t * middle + pairs / 2.0 * math.log1p(-t * t)
        low, high = (middle, high) if exponent < wanted else (low, middle)
    return high
