"""The smallest valid bound: never above the Gaussian, the published bound or the moments, and each cover is valid."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import fedlora.accounting as acct
from fedlora.accounting import floor, gaussian, pld, theorem5, truncation

ADD, REPLACE = acct.Adjacency.ADD_OR_REMOVE, acct.Adjacency.REPLACE_ONE
ROWS = [  # width, rank, noise, rate, steps, delta
    (768, 8, 1.0, 0.01, 10, 1e-5),
    (1113, 12, 1.9, 0.0021, 6, 2.2e-8),
    (4979, 1024, 0.597, 0.00708, 1, 3.5e-7),
    (41, 37, 6.02, 0.166, 16, 4.2e-9),
    (300, 1, 0.2, 0.3, 40, 1e-6),
    (64, 64, 0.7, 0.05, 5, 1e-5),
    (2000, 16, 0.5, 1.0, 1, 1e-5),
]


def _random_rows(seed: int, count: int) -> list[tuple[int, int, float, float, int, float]]:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        width = round(10 ** rng.uniform(1.2, 4))
        rank = max(1, round(width ** rng.uniform(0, 1)))
        noise, rate, steps = 10 ** rng.uniform(-1, 1), 10 ** rng.uniform(-3, -0.3), 10 ** rng.uniform(0, 2.5)
        rows.append((width, rank, noise, rate, round(steps), 10 ** rng.uniform(-10, -3)))
    return rows


@pytest.mark.parametrize("adjacency", [ADD, REPLACE])
@pytest.mark.parametrize("row", ROWS + _random_rows(11, 3))
def test_default_and_best_are_never_above_gaussian_theorem5_or_moments(
    row: tuple[int, int, float, float, int, float], adjacency: acct.Adjacency
) -> None:
    width, rank, noise, rate, steps, delta = row
    event = acct.NoisyProjectionEvent.single(width, rank, noise, None if rate == 1.0 else rate, width)
    plain: acct.Event = acct.GaussianEvent(noise) if rate == 1.0 else acct.PoissonGaussianEvent(noise, rate)
    limits = [
        acct.epsilon_of(plain.times(steps), delta, adjacency=adjacency).epsilon,
        acct.epsilon_of(event.times(steps), delta, adjacency=adjacency, accountant="rdp").epsilon,
        theorem5.composed(event, steps, delta, adjacency=adjacency),
    ]
    if rate == 1.0 and steps == 1:
        limits.append(theorem5.one_shot(event, delta, adjacency=adjacency))
    for name in ("moment", "best"):
        report = acct.epsilon_of(event.times(steps), delta, adjacency=adjacency, accountant=name)
        assert report.epsilon <= min(limits) * (1 + 1e-8)
        assert report.epsilon <= min(report.alternatives.values(), default=math.inf)


def test_extreme_projection_is_charged_as_the_gaussian() -> None:
    event = acct.NoisyProjectionEvent.single(16, 16, 0.01, 0.5).times(10**6)
    plain = acct.PoissonGaussianEvent(0.01, 0.5).times(10**6)
    spread = acct.NoisyProjectionEvent.single(64, 60, 0.01, 0.5).times(10**6)
    limit = acct.epsilon_of(plain, 1e-12).epsilon
    for one in (event, spread):
        for name in ("moment", "best"):
            assert acct.epsilon_of(one, 1e-12, accountant=name).epsilon <= limit * (1 + 1e-8)


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 5000), st.floats(0, 1), st.floats(-9, -0.5))
def test_level_covers_the_beta_tail_and_is_near_it(width: int, share: float, log_failure: float) -> None:
    """Exact quantile <= our level <= the published level for three or more directions."""
    rank = max(1, min(width - 1, int(width**share)))
    failure = 10.0**log_failure
    event = acct.NoisyProjectionEvent.single(width, rank, 1.0)
    level = truncation.squared_distance(event, failure)
    exact = float(stats.beta.isf(failure, rank / 2, (width - rank) / 2))
    published = theorem5.smallest_alpha(acct.ProjectionGroup("g", width, rank, 1.0, 3), failure)
    assert exact * (1 - 1e-9) <= level <= published * (1 + 1e-9)


@pytest.mark.parametrize("clip", ["shared", "separate"])
def test_level_covers_spread_differences_over_layers(clip: str) -> None:
    """Real projections of several layers, energy spread over directions and groups; a 5 % twin is caught."""
    rng = np.random.default_rng(3)
    groups = (acct.ProjectionGroup("a", 24, 4, 1.0), acct.ProjectionGroup("b", 12, 2, 1.3))
    event = acct.NoisyProjectionEvent(groups, None, clip)
    failure, runs = 0.05, 20_000
    level = truncation.squared_distance(event, failure)
    for split in ([1.0, 0.0], [0.0, 1.0], [0.5, 0.5]):
        total = np.zeros(runs)
        for group, own in zip(groups, split, strict=True):
            weight = 1.0 if clip == "separate" else own
            x = rng.beta((group.rank or 0) / 2, ((group.width or 0) - (group.rank or 0)) / 2, size=runs)
            total += group.kappa**2 * weight * x
        assert np.mean(total > level) <= failure + 4 * math.sqrt(failure / runs)
    one = acct.NoisyProjectionEvent((groups[1],))
    x = rng.beta(1.0, 5.0, size=200_000) * 1.69
    exact = float(np.quantile(x, 1 - failure))
    mean_excess = float(np.mean(np.maximum(x - exact, 0.0))) / failure
    assert truncation.squared_distance(one, failure) == pytest.approx(exact + mean_excess, rel=0.02)
    assert not 0.95 * truncation.squared_distance(one, failure) >= exact + mean_excess


def test_replaced_and_sampled_records_pay_for_two_rare_sets() -> None:
    event = acct.NoisyProjectionEvent.single(768, 8, 1.0, 0.01, 768)
    one, two = (truncation.gaussians(((event, 10),), 1e-6, relation)[0][0] for relation in (ADD, REPLACE))
    halved = truncation.gaussians(((event, 10),), 0.5e-6, ADD)[0][0]
    assert isinstance(one, acct.PoissonGaussianEvent)
    assert isinstance(two, acct.PoissonGaussianEvent)
    assert isinstance(halved, acct.PoissonGaussianEvent)
    assert two.noise_multiplier == pytest.approx(halved.noise_multiplier, rel=1e-12)
    assert two.noise_multiplier < one.noise_multiplier
    published = [
        theorem5.composed_gaussian(event, 10, 1e-5, adjacency=relation) for relation in (ADD, REPLACE)
    ]
    assert published[0][1] == pytest.approx(published[1][1])
    assert [e.leaves() for e, _ in published]
    noises = [next(e.leaves())[0].noise_multiplier for e, _ in published]  # type: ignore[attr-defined]
    assert noises[1] < noises[0]


@pytest.mark.parametrize("adjacency", [ADD, REPLACE])
@pytest.mark.parametrize(
    ("sigma", "rate", "steps"),
    [(1.0, 0.01, 1000), (0.3, 0.02, 200), (5.0, 0.2, 50), (0.8, 0.3, 1), (2.0, 1.0, 9)],
)
def test_floor_lies_below_the_distribution_and_is_useful(
    sigma: float, rate: float, steps: int, adjacency: acct.Adjacency
) -> None:
    parts: pld.Parts = ((acct.PoissonGaussianEvent(sigma, rate), steps),)
    truth = acct.epsilon_of(parts, 1e-5, adjacency=adjacency).epsilon
    low = floor.epsilon_floor(parts, 1e-5, adjacency)
    assert 0.1 * truth <= low <= truth * (1 + 1e-9)


@pytest.mark.parametrize("adjacency", [ADD, REPLACE])
@pytest.mark.parametrize(
    "row", [(768, 8, 0.2, 0.01, 1000), (768, 8, 1.0, 0.01, 10), (300, 200, 2.0, 0.05, 20)]
)
def test_delta_of_uses_every_bound_that_epsilon_of_uses(
    row: tuple[int, int, float, float, int], adjacency: acct.Adjacency
) -> None:
    width, rank, noise, rate, steps = row
    event = acct.NoisyProjectionEvent.single(width, rank, noise, rate).times(steps)
    epsilon = acct.epsilon_of(event, 1e-5, adjacency=adjacency).epsilon
    back = acct.delta_of(event, epsilon, adjacency=adjacency)
    assert back <= 1.3e-5
    moments_only = acct.epsilon_of(event, 1e-5, adjacency=adjacency, accountant="rdp").epsilon
    assert acct.delta_of(event, moments_only, adjacency=adjacency) <= 1e-5 * (1 + 1e-6)
    plain = acct.delta_of(acct.PoissonGaussianEvent(noise, rate).times(steps), epsilon, adjacency=adjacency)
    assert back <= plain * (1 + 1e-6) + 1e-12


def test_delta_of_lies_above_the_exact_value_of_one_release() -> None:
    event = acct.NoisyProjectionEvent.single(768, 8, 0.5)
    x = np.random.default_rng(5).beta(4.0, 380.0, size=100_000)
    for epsilon in (0.2, 0.6):
        values = np.array([gaussian.delta_of_gaussian(epsilon, math.sqrt(v) / 0.5) for v in x[:20_000]])
        mean, error = float(np.mean(values)), float(np.std(values) / math.sqrt(values.size))
        ours = acct.delta_of(event, epsilon)
        assert mean - 4 * error <= ours <= 1.2 * mean + 4 * error
        assert not mean - 4 * error <= 0.8 * ours


def test_compositions_with_plain_gaussians_take_the_minimum_too() -> None:
    mixed = [
        (acct.NoisyProjectionEvent.single(768, 8, 1.0, 0.01), 10),
        (acct.PoissonGaussianEvent(2.0, 0.01), 5),
    ]
    plain = [(acct.PoissonGaussianEvent(1.0, 0.01), 10), (acct.PoissonGaussianEvent(2.0, 0.01), 5)]
    for adjacency in (ADD, REPLACE):
        ours = acct.epsilon_of(mixed, 1e-5, adjacency=adjacency)
        limit = acct.epsilon_of(plain, 1e-5, adjacency=adjacency).epsilon
        floor_ = acct.epsilon_of(plain[1:], 1e-5, adjacency=adjacency).epsilon
        assert floor_ * (1 - 1e-6) <= ours.epsilon <= limit * (1 + 1e-8)
