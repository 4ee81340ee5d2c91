"""How often a sound trainer is refused at its start by chance: every self-check's level, from the exact laws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedlora.training import batchcheck, lawcheck, releasecheck, scalecheck, selfcheck

COORDINATES = 1e9
BLOCKS = 1e4
"""Of the largest model that is thought of."""
PAIRS = math.comb(64, 2)
"""Of more releases than a start draws."""
GROUPS = 32
"""Groups of releases whose noise is measured (each client, step, round), more than there are."""


def coincide(times: int) -> float:
    """Probability that so many standard normals, rounded to float32, are one and the same number.

    Where |x| lies in [2^e, 2^(e+1)) neighbours are 2^(e-23) apart: the integral of density^times spacing^(times-1).
    """
    total = 0.0
    for exponent in range(-80, 5):
        x = np.linspace(2.0**exponent, 2.0 ** (exponent + 1), 1001)
        total += 2.0 * np.trapezoid(stats.norm.pdf(x) ** times * (x[0] * 2.0**-23) ** (times - 1), x)
    return float(total)


def test_rounded_normals_coincide_as_the_sum_over_a_coarse_grid_says() -> None:
    """The integral against the sum over every number of a grid, at 2^-7 in the place of 2^-23."""
    x = np.arange(-8.0, 8.0, 2.0**-7)
    mass = stats.norm.cdf(x + 2.0**-8) - stats.norm.cdf(x - 2.0**-8)
    assert float((mass**3).sum()) == pytest.approx(
        stats.norm.pdf(0.0) ** 2 / math.sqrt(3.0) * 2.0**-14, rel=1e-3
    )
    rounded = torch.randn(
        200_000, generator=torch.Generator().manual_seed(1)
    ).half()  # 2^-10 instead of 2^-23
    counts = np.unique(rounded.numpy(), return_counts=True)[1].astype(float)
    seen = float((counts * (counts - 1)).sum()) / (200_000 * 199_999)
    assert seen == pytest.approx(coincide(2) * 2.0**13, rel=0.05)


class Alternating:
    """A source whose numbers have one known deviation, and another order each time."""

    private = True

    def __init__(self, scale: float) -> None:
        self.scale, self.sign = scale * math.sqrt(511.0 / 512.0), 1.0

    def gaussians(self, count: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        self.sign = -self.sign
        return self.sign * self.scale * torch.tensor([1.0, -1.0], dtype=dtype).repeat(count // 2)


@pytest.mark.parametrize(
    ("scale", "passes"), [(0.799, False), (0.801, True), (1.199, True), (1.201, False), (0.5, False)]
)
def test_the_noise_checks_deviation_is_held_to_these_bounds(scale: float, passes: bool) -> None:
    assert selfcheck.check_noise(Alternating(scale)).passed is passes


def correlated(count: int, limit: float) -> float:
    """Bound of the probability that the mean of x_i y_i (or of x_i x_{i+k}) leaves -limit to limit.

    A quadratic form of normals whose matrix has norm 1 at most and squared Frobenius norm count / 2: Laurent and
    Massart (see `chance.mixed_energy_bounds`), P(S >= 2 F sqrt(x) + 2 x) <= exp(-x).
    """
    frobenius, wanted = math.sqrt(count / 2.0), limit * count
    root = (math.sqrt(frobenius**2 + 2.0 * wanted) - frobenius) / 2.0
    return 2.0 * math.exp(-(root**2))


def test_a_sound_trainer_is_not_refused_by_chance() -> None:
    """All checks together: less than once in 4 * 10^8 starts of a trainer."""
    numbers = 2 * 256 - 1
    fewest_releases = releasecheck._CLIENTS * releasecheck._ROUNDS  # where a round has one step
    assert fewest_releases >= 4
    levels = {
        "the deviation of 512 numbers is outside .8 to 1.2": float(
            stats.chi2.cdf(numbers * 0.8**2, numbers) + stats.chi2.sf(numbers * 1.2**2, numbers)
        ),
        "a coordinate is the same in all releases": COORDINATES * coincide(fewest_releases),
        "two releases of a block are correlated": BLOCKS
        * PAIRS
        * float(stats.beta.sf(releasecheck._ALIKE**2, 0.5, (releasecheck._LARGE - 1) / 2)),
        "two releases of a few numbers are equal up to signs": PAIRS
        * (2.0 * coincide(2)) ** releasecheck._FEWEST,
        "signs of a block of one number coincide in every empty draw": BLOCKS
        * 2.0 ** -(selfcheck._EMPTY_DRAWS - 1),
        "a client, a step, a round or an empty draw has too little noise": BLOCKS
        * (releasecheck._CLIENTS + releasecheck._STEPS + releasecheck._MOST_ROUNDS + 1)
        * scalecheck._CHANCE,
        "a group of releases has too little noise in a block": GROUPS * BLOCKS * scalecheck._CHANCE,
        "draws are taken for no Poisson draws": batchcheck._CHANCE,
        "noise is taken for no Gaussian one": (1 + len(lawcheck._ENDS)) * lawcheck._CHANCE,
        "numbers of noise are correlated": 38 * correlated(lawcheck._NUMBERS, lawcheck._LIKE),
        "numbers of noise stand twice": float(
            stats.poisson.sf(
                (1.0 - lawcheck._ONCE) * 4 * lawcheck._NUMBERS / 2.0,
                math.comb(4 * lawcheck._NUMBERS, 2) * 2.0 * coincide(2),
            )
        ),
    }
    assert sum(levels.values()) < 2.5e-9, levels
