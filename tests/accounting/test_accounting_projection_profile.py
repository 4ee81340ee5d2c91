"""Projection profile: a curve above every pair, a distribution above the curve, smaller than the moments."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import fedlora.accounting as acct
from fedlora.accounting import gaussian, tilted
from fedlora.accounting import projection_profile as profile

ADD, REPLACE = acct.Adjacency.ADD_OR_REMOVE, acct.Adjacency.REPLACE_ONE


def _beta_mean(width: int, rank: int, values: object) -> float:
    """E values(X), X ~ Beta(rank/2, (width-rank)/2), by quantile quadrature independent of the module."""
    law = stats.beta(rank / 2, (width - rank) / 2)
    edges = np.concatenate(
        [[0.0], law.ppf(np.geomspace(1e-8, 0.5, 60)), law.isf(np.geomspace(0.49, 1e-15, 120)), [1.0]]
    )
    points, weights = np.polynomial.legendre.leggauss(8)
    half = np.diff(edges)[:, None] / 2
    x = ((edges[:-1] + edges[1:])[:, None] / 2 + half * points).ravel()
    w = (half * weights).ravel() * law.pdf(x)
    return float(np.sum(w * np.array([values(v) for v in x])))  # type: ignore[operator]


def _exact_remove(width: int, rank: int, sigma: float, rate: float, epsilon: float) -> float:
    """The rank-one pair with the record against without it, averaged over projections."""
    inner = (math.expm1(epsilon) + rate) / rate
    if inner <= 0:
        return -math.expm1(epsilon)
    tilt = math.log(inner)

    def one(x: float) -> float:
        mu = math.sqrt(x) / sigma
        if tilt >= 0:
            return gaussian.delta_of_gaussian(tilt, mu)
        return -math.expm1(tilt) + math.exp(tilt) * gaussian.delta_of_gaussian(-tilt, mu)

    return rate * _beta_mean(width, rank, one)


_CASES = [
    (64, 4, 0.5, 0.05),
    (768, 8, 0.2, 0.01),
    (300, 1, 0.3, 0.5),
    (40, 30, 1.0, 0.2),
    (2000, 16, 0.5, 1.0),
]


@pytest.mark.parametrize(("width", "rank", "sigma", "rate"), _CASES)
def test_curve_lies_above_the_exact_pair_and_near_it(
    width: int, rank: int, sigma: float, rate: float
) -> None:
    event = acct.NoisyProjectionEvent.single(width, rank, sigma, None if rate == 1.0 else rate)
    thresholds = np.array([-0.3, -0.02, -0.001, 0.001, 0.02, 0.1, 0.5, 1.0, 2.0])
    if rate < 1.0:
        thresholds = thresholds[thresholds > math.log1p(-rate) if rate < 0.9 else thresholds > -1]
    ours = profile.remove_curve(event, thresholds, 1.0)
    other = profile.add_curve(event, thresholds, 1.0)
    for epsilon, up, down in zip(thresholds, ours, other, strict=True):
        exact = _exact_remove(width, rank, sigma, rate, float(epsilon))
        assert up >= exact * (1 - 1e-6) - 1e-12
        reverse = -math.expm1(epsilon) + math.exp(epsilon) * _exact_remove(
            width, rank, sigma, rate, float(-epsilon)
        )
        assert down >= reverse * (1 - 1e-6) - 1e-9
        if epsilon >= 0.5 and exact > 1e-12 and rank > 1:
            assert up <= exact * 1.6


def test_power_twin_a_curve_five_percent_too_small_is_caught() -> None:
    """Where f is convex over the bulk of the law the bound is attained by rank-one differences."""
    event = acct.NoisyProjectionEvent.single(768, 8, 1.0)
    ours = float(profile.remove_curve(event, np.array([0.3]), 1.0)[0])
    exact = _exact_remove(768, 8, 1.0, 1.0, 0.3)
    assert exact <= ours
    assert not exact <= 0.95 * ours


@settings(max_examples=15, deadline=None)
@given(
    st.integers(10, 60), st.integers(1, 6), st.floats(0.3, 3.0), st.floats(-1.0, 2.0), st.integers(0, 10**6)
)
def test_spread_differences_stay_below(
    width: int, rank: int, sigma: float, epsilon: float, seed: int
) -> None:
    """Real projections, differences of rank up to 4 with total energy at most one: mean minus 5 errors <= curve."""
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.ones(int(rng.integers(1, 5)))) * rng.uniform(0.5, 1.0)
    basis = np.linalg.qr(rng.normal(size=(width, len(weights))))[0]
    frames = np.linalg.qr(rng.normal(size=(400, width, rank)))[0]
    energy = np.sum(np.einsum("nwr,wk->nrk", frames, basis) ** 2, axis=1) @ weights
    mu = np.sqrt(energy) / sigma
    size = abs(epsilon)
    values = np.array([gaussian.delta_of_gaussian(size, float(m)) for m in mu])
    if epsilon < 0:
        values = -math.expm1(epsilon) + math.exp(epsilon) * values
    event = acct.NoisyProjectionEvent.single(width, rank, sigma)
    bound = float(profile.remove_curve(event, np.array([epsilon]), 1.0)[0])
    assert np.mean(values) - 5 * np.std(values) / 20 <= bound + 1e-12


def _hockey_stick(masses: np.ndarray, losses: np.ndarray, epsilon: float) -> float:
    return float(np.sum(masses * np.maximum(0.0, -np.expm1(np.minimum(epsilon - losses, 0.0)))))


@pytest.mark.parametrize("rate", [None, 0.05])
@pytest.mark.parametrize("adjacency", [ADD, REPLACE])
def test_distribution_lies_above_the_curve_between_grid_points(
    rate: float | None, adjacency: acct.Adjacency
) -> None:
    event = acct.NoisyProjectionEvent.single(200, 8, 0.6, rate)
    found = profile.distribution(event, 0.01, adjacency)
    assert found is not None
    thresholds = np.array([0.0033, 0.0171, 0.1049, 0.333, 0.777])
    curve = profile.remove_curve(event, thresholds, 4.0 if adjacency is REPLACE else 1.0)
    losses = (found[0].first + np.arange(found[0].masses.size)) * 0.01
    read = np.array([_hockey_stick(found[0].masses, losses, float(t)) for t in thresholds])
    # the pair's divergence is convex in e^eps and the distribution meets its hull on the grid
    assert np.all(read >= curve * (1 - 1e-3) - 1e-12)
    assert np.all(read <= curve * 1.2 + 1e-4)


@pytest.mark.parametrize(("sigma", "rate", "steps"), [(1.0, 0.01, 1000), (3.0, None, 10)])
def test_without_projection_it_is_the_gaussian_accountant(
    sigma: float, rate: float | None, steps: int
) -> None:
    from dp_accounting.pld import privacy_loss_distribution

    event = acct.NoisyProjectionEvent((acct.ProjectionGroup("head", None, None, 1 / sigma),), rate)
    found = profile.distribution(event, 1e-3, ADD)
    assert found is not None
    ours = max(tilted.epsilon([(law, steps)], 1e-3, 1e-5) for law in found)
    plain = privacy_loss_distribution.from_gaussian_mechanism(sigma, sampling_prob=rate or 1.0)
    assert ours == pytest.approx(plain.self_compose(steps).get_epsilon_for_delta(1e-5), rel=1e-3)
    replaced = profile.distribution(event, 1e-3, REPLACE)
    tight = acct.epsilon_of(
        (acct.PoissonGaussianEvent(sigma, rate or 1.0)).times(steps), 1e-5, adjacency=REPLACE
    ).epsilon
    assert replaced is not None
    assert max(tilted.epsilon([(law, steps)], 1e-3, 1e-5) for law in replaced) >= tight * (1 - 1e-3)


def test_composition_beats_the_moments_and_stays_above_simulated_losses() -> None:
    event = acct.NoisyProjectionEvent.single(768, 8, 0.2, 0.01)
    best = acct.epsilon_of(event.times(1000), 1e-5)
    moment = acct.epsilon_of(event.times(1000), 1e-5, accountant="moment").epsilon
    assert best.accountant.startswith("projection profile")
    assert best.epsilon < 0.5 * moment
    # lower bound: simulated losses of the rank-one pair over all steps, delta large enough to be seen
    delta = 0.02
    ours = acct.epsilon_of(event.times(1000), delta).epsilon
    rng = np.random.default_rng(9)
    runs, total = 4000, np.zeros(4000)
    for _ in range(1000):
        x = rng.beta(4.0, 380.0, size=runs)
        mu = np.sqrt(x) / 0.2
        y = rng.normal(size=runs) + mu * (rng.random(runs) < 0.01)
        total += np.logaddexp(math.log(0.99), math.log(0.01) + mu * y - mu * mu / 2)
    reached = np.maximum(0.0, 1 - np.exp(ours - total))
    mean, error = float(np.mean(reached)), float(np.std(reached) / math.sqrt(runs))
    assert mean - 4 * error <= delta
    smaller = np.maximum(0.0, 1 - np.exp(0.6 * ours - total))
    assert float(np.mean(smaller)) > delta  # the simulation would catch an epsilon far too small


def _exact_separate(event: acct.NoisyProjectionEvent, epsilon: float, rate: float) -> float:
    """Rank-one differences in both groups: E f(k1^2 X1 + k2^2 X2), by quadrature in X1 for each X2."""
    one, two = event.groups
    inner = (math.expm1(epsilon) + rate) / rate
    tilt = math.log(inner)

    def delta(mu: float) -> float:
        if tilt >= 0:
            return gaussian.delta_of_gaussian(tilt, math.sqrt(mu))
        return -math.expm1(tilt) + math.exp(tilt) * gaussian.delta_of_gaussian(-tilt, math.sqrt(mu))

    def given(y: float) -> float:
        return _beta_mean(one.width or 0, one.rank or 0, lambda x: delta(one.kappa**2 * x + two.kappa**2 * y))

    mean = given(1.0) if two.width is None else _beta_mean(two.width, two.rank or 0, given)
    return rate * mean


@pytest.mark.parametrize("rate", [None, 0.05])
def test_separate_clips_curve_lies_above_the_exact_pair(rate: float | None) -> None:
    layer, head = acct.ProjectionGroup("a", 300, 8, 2.0), acct.ProjectionGroup("b", None, None, 0.3)
    other = acct.ProjectionGroup("c", 64, 4, 1.0)
    for groups, thresholds in (((layer, head), (0.01, 0.3, 1.0)), ((layer, other), (0.3,))):
        event = acct.NoisyProjectionEvent(groups, rate, "separate")
        for epsilon in thresholds:
            exact = _exact_separate(event, epsilon, rate or 1.0)
            ours = float(profile.remove_curve(event, np.array([epsilon]), 1.0)[0])
            assert exact * (1 - 1e-6) <= ours <= 1.6 * exact
            assert not 0.5 * ours >= exact  # twin: half the curve would be caught


def test_separate_clips_have_a_profile_below_the_moments() -> None:
    groups = (acct.ProjectionGroup("a", 768, 8, 2.0), acct.ProjectionGroup("b", None, None, 0.2))
    event = acct.NoisyProjectionEvent(groups, 0.01, "separate").times(300)
    best = acct.epsilon_of(event, 1e-5)
    assert best.accountant == "projection profile, composed PLD"
    assert best.epsilon < 0.9 * acct.epsilon_of(event, 1e-5, accountant="rdp").epsilon
    head = acct.epsilon_of(acct.PoissonGaussianEvent(5.0, 0.01).times(300), 1e-5).epsilon
    assert best.epsilon > head * (1 - 1e-6)
