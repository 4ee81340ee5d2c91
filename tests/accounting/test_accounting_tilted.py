"""Composition by a tilted FFT: above the exact figure at any delta and count, where a plain FFT falls below it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import fedlora.accounting as acct
from fedlora.accounting import gaussian, pld, projection_profile, sampled, tilted, variation

ADD, REPLACE = acct.Adjacency.ADD_OR_REMOVE, acct.Adjacency.REPLACE_ONE


def _step(mu: float, steps: int, epsilon: float) -> tuple[tilted.Law, float]:
    """One of many full-batch steps that together are exactly one Gaussian."""
    sigma = math.sqrt(steps) / mu
    interval = pld.choose_interval(pld.loss_range(sigma, 1.0, ADD), epsilon, steps)
    return pld.step(sigma, 1.0, interval, ADD, True)[0], interval


@pytest.mark.parametrize("steps", [1, 100, 10_000, 1_000_000])
@pytest.mark.parametrize("mu", [0.3, 5.0, 30.0])
@pytest.mark.parametrize("delta", [1e-5, 1e-10, 1e-12])
def test_many_steps_at_a_small_delta_are_not_below_the_exact_profile(
    steps: int, mu: float, delta: float
) -> None:
    exact = gaussian.epsilon_of_gaussian(delta, mu)
    law, interval = _step(mu, steps, exact)
    ours = tilted.epsilon([(law, steps)], interval, delta)
    assert exact * (1 - 1e-12) <= ours <= exact * (1 + 5e-4)
    assert delta * (1 - 1e-9) <= tilted.delta([(law, steps)], interval, exact) <= delta * 1.05
    lower = tilted.epsilon([(law, steps)], interval, delta, sign=-1.0)
    assert ours * (1 - 1e-5) <= lower <= ours


def test_a_plain_fft_falls_below_the_exact_profile() -> None:
    """The twin: the same masses composed without the tilt are caught by the comparison above."""
    from dp_accounting.pld import pld_pmf

    exact = gaussian.epsilon_of_gaussian(1e-12, 5.0)
    law = pld.step(math.sqrt(10**6) / 5.0, 1.0, 5e-4, ADD, True)[0]
    masses = {law.first + i: float(mass) for i, mass in enumerate(law.masses) if mass > 0.0}
    plain = pld_pmf.create_pmf(masses, 5e-4, law.infinite, True).to_dense_pmf().self_compose(10**6)
    assert not plain.get_epsilon_for_delta(1e-12) >= exact * (1 - 1e-3)
    assert tilted.epsilon([(law, 10**6)], 5e-4, 1e-12) >= exact


@pytest.mark.parametrize("delta", [1e-4, 1e-8])
def test_heavy_tails_do_not_fold_back_into_the_window(delta: float) -> None:
    """A rare large loss in each of many steps: against a plain FFT on a window that holds everything."""
    event = acct.NoisyProjectionEvent.single(4096, 16, 0.05, 1e-4)
    found = projection_profile.distribution(event, 4e-3, ADD)
    assert found is not None
    law, steps, size = found[0], 10**5, 2**18
    entries = np.zeros(size)
    np.add.at(entries, (law.first + np.arange(law.masses.size)) % size, law.masses)
    composed = np.fft.ifft(np.fft.fft(entries) ** steps).real
    losses = np.where(np.arange(size) < size // 2, np.arange(size), np.arange(size) - size) * 4e-3
    ours = tilted.epsilon([(law, steps)], 4e-3, delta)
    ahead = losses > ours
    truth = float(composed[ahead] @ -np.expm1(ours - losses[ahead]))
    assert truth == pytest.approx(delta, rel=1e-3, abs=3e-11)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(0.01, 1.0), min_size=2, max_size=6),
    st.lists(st.integers(-6, 9), min_size=6, max_size=6, unique=True),
    st.integers(1, 9),
    st.integers(1, 9),
    st.floats(-9.0, -0.3),
)
def test_small_laws_match_their_composition_by_direct_sums(
    weights: list[float], places: list[int], first_count: int, second_count: int, log_delta: float
) -> None:
    law = _small_law(weights, places)
    other = _small_law(weights[::-1], places)
    total = np.ones(1)
    for one, count in ((law, first_count), (other, second_count)):
        for _ in range(count):
            total = np.convolve(total, one.masses)
    start = law.first * first_count + other.first * second_count
    losses = (start + np.arange(total.size)) * 0.1
    delta = 10.0**log_delta
    ours = tilted.epsilon([(law, first_count), (other, second_count)], 0.1, delta)

    def exact(epsilon: float) -> float:
        return float(np.sum(total * np.maximum(0.0, -np.expm1(np.minimum(epsilon - losses, 0.0)))))

    assert exact(ours) <= delta * (1 + 1e-9) + 1e-13
    if ours > 0.0:
        assert exact(ours * (1 - 1e-5) - 1e-7) >= delta * (1 - 1e-6)


def _small_law(weights: list[float], places: list[int]) -> tilted.Law:
    index = sorted(places[: len(weights)])
    masses = np.zeros(index[-1] - index[0] + 1)
    masses[np.array(index) - index[0]] = np.array(weights) / sum(weights)
    return tilted.Law(masses, index[0], 0.0)


@pytest.mark.parametrize(
    ("tilt", "interval", "size"), [(0.3, 1e-4, 5000), (40.0, 1e-3, 1000), (1e-4, 0.5, 130)]
)
def test_sums_over_blocks_equal_sums_over_entries(tilt: float, interval: float, size: int) -> None:
    """The divergence is read from block sums; at any epsilon, on the grid or off it, they are the plain sum."""
    rng = np.random.default_rng(size)
    entries = rng.exponential(size=size) ** 3
    losses = (np.arange(size) - size // 3) * interval
    window = tilted._Window(losses, entries, tilt, 0.0, 0.0, 0.0, 0.0, interval, 0.0)
    for epsilon in (
        losses[0] - 0.3 * interval,
        losses[7],
        losses[127],
        losses[size // 2] + 0.4 * interval,
        losses[-2],
    ):
        ahead = losses[losses > epsilon] - epsilon
        weights = entries[losses > epsilon] * np.exp(-tilt * losses[losses > epsilon])
        value, slope = window.delta(float(epsilon))
        assert value == pytest.approx(float(weights @ -np.expm1(-ahead)), rel=1e-12)
        assert slope == pytest.approx(float(weights @ np.exp(-ahead)), rel=1e-12)


@pytest.mark.parametrize("kind", ["REMOVE", "ADD", "REPLACE"])
@pytest.mark.parametrize(("sigma", "rate"), [(0.3, 1e-5), (1.0, 0.01), (4.0, 0.6), (0.7, 1.0), (90.0, 1e-3)])
def test_vectors_of_cut_offs_give_dp_accountings_own_curve(kind: str, sigma: float, rate: float) -> None:
    from dp_accounting.pld import privacy_loss_mechanism as mechanism

    terms = {"sampling_prob": rate, "adjacency_type": mechanism.AdjacencyType[kind]}
    theirs = mechanism.GaussianPrivacyLoss(sigma, 1.0, **terms)
    ours = pld._loss_class()(sigma, 1.0, **terms)
    epsilon = np.concatenate([np.arange(-200, 200) * 1e-4 / sigma, np.linspace(-20.0, 40.0, 121)])
    x = sampled.cutoff(epsilon, sigma, rate, kind)
    expected, got = theirs.get_delta_for_epsilon(epsilon), ours.get_delta_for_epsilon(epsilon)
    upper = theirs.mu_upper_cdf(x)
    allowed = 1e-300 + upper * (4e-14 + 4e-15 * (np.abs(epsilon) - np.log(np.maximum(upper, 1e-300))))
    assert np.all(np.abs(got - expected) <= allowed)
    if rate < 1.0 and kind == "REPLACE":  # the twin: a cut-off elsewhere gives another, smaller curve
        wrong = theirs.mu_upper_cdf(x + 0.1 * sigma) - np.exp(
            epsilon + theirs.mu_lower_log_cdf(x + 0.1 * sigma)
        )
        assert not np.all(np.abs(wrong - expected) <= allowed)


@pytest.mark.parametrize(("rate", "sigma", "steps"), [(0.3, 0.5, 7), (0.02, 0.2, 60), (1.0, 3.0, 5)])
def test_total_variation_of_a_composition_covers_the_exact_one(rate: float, sigma: float, steps: int) -> None:
    """1 - prod (1 - TV) against the composed law at epsilon 0; for few large shifts it is nearly met."""
    event = acct.PoissonGaussianEvent(sigma, rate)
    total = variation.total_variation(((event, steps),), ADD)
    laws = pld.step(sigma, rate, 1e-3, ADD, False)
    lower = max(tilted.delta([(law, steps)], 1e-3, 0.0) for law in laws)
    assert lower * (1 - 1e-6) <= total <= 1 - (1 - rate) ** steps + 1e-12
    if sigma == 0.2:
        assert not lower <= 0.9 * total


def test_a_heavy_mass_at_the_lowest_loss_is_not_folded_to_the_top() -> None:
    """Thinned masses put the window's end above the lowest losses, whose mass came back as 64: delta 84 % too large."""
    for law in pld.step(0.2, 0.02, 1e-3, ADD, True):
        composed = np.convolve(law.masses, law.masses)
        losses = (2 * law.first + np.arange(composed.size)) * 1e-3

        def exact(at: float, m: np.ndarray = composed, x: np.ndarray = losses) -> float:
            return float(m @ np.maximum(0.0, -np.expm1(np.minimum(at - x, 0.0))))

        for epsilon in (0.0, 0.01, 1.0):
            delta = exact(epsilon)
            ours = tilted.delta([(law, 2)], 1e-3, epsilon)
            assert delta * (1 - 1e-9) <= ours <= delta * (1 + 1e-6) + 1e-12
            if delta > 1e-9:
                back = exact(tilted.epsilon([(law, 2)], 1e-3, delta))
                assert delta * (1 - 1e-5) <= back <= delta * (1 + 1e-9)


def test_infinite_mass_and_unreachable_deltas_fail_closed() -> None:
    law = tilted.Law(np.array([1.0 - 1e-6]), 0, 1e-6)
    assert tilted.epsilon([(law, 1)], 0.1, 1e-7) == math.inf
    assert tilted.epsilon([(law, 11)], 0.1, 1e-5) == math.inf
    assert tilted.delta([(law, 10)], 0.1, 5.0) >= 9.9e-6


@pytest.mark.parametrize("adjacency", [ADD, REPLACE])
@pytest.mark.parametrize(
    ("event", "steps"),
    [
        (acct.PoissonGaussianEvent(0.8, 1e-4), 1),
        (acct.NoisyProjectionEvent.single(64, 8, 0.5, 0.01), 3),
        (acct.NoisyProjectionEvent.single(64, 8, 20.0), 1),
    ],
)
def test_total_variation_is_above_the_profile_at_zero_and_near_it(
    event: acct.Event, steps: int, adjacency: acct.Adjacency
) -> None:
    total = variation.total_variation(((event, steps),), adjacency)
    assert acct.epsilon_of(event.times(steps), total, adjacency=adjacency).epsilon == 0.0
    if isinstance(event, acct.NoisyProjectionEvent):
        gain = 4.0 if adjacency is REPLACE else 1.0
        x = stats.beta(4.0, 28.0).ppf((np.arange(4000) + 0.5) / 4000)
        kappa = event.groups[0].kappa
        exact = float(np.mean(2 * stats.norm.cdf(kappa * np.sqrt(gain * x) / 2) - 1)) * (
            event.sample_rate or 1.0
        )
        assert exact * steps <= total <= exact * steps * 1.05
        assert not exact * steps <= 0.9 * total
    else:
        assert acct.epsilon_of(event.times(steps), 0.9 * total, adjacency=adjacency).epsilon > 0.0
