"""Randomly drawn references, computed here by independent means: mpmath quadrature and a plain Fourier composition."""

from __future__ import annotations

import math
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
from scipy import optimize
from scipy.special import ndtr

import fedlora.accounting as acct
from fedlora.accounting import measured, rdp, theorem5

ADD, REPLACE = acct.Adjacency.ADD_OR_REMOVE, acct.Adjacency.REPLACE_ONE
DRAWS = 12


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def _beta_moment(width: int, rank: int, z: float) -> mpmath.mpf:
    """E exp(z X), X ~ Beta(r/2, (d-r)/2), by 20-digit quadrature between points around the integrand's mode."""
    a, b = mpmath.mpf(rank) / 2, mpmath.mpf(width - rank) / 2

    def density(x: mpmath.mpf) -> mpmath.mpf:
        return mpmath.exp(z * x + (a - 1) * mpmath.log(x) + (b - 1) * mpmath.log(1 - x)) / mpmath.beta(a, b)

    best = _mode(float(a), float(b), z)
    spread = 1.0 / math.sqrt(abs((a - 1) / best**2 + (b - 1) / (1 - best) ** 2) + 1e-9)
    points = sorted(
        {min(max(best + k * spread, 0.0), 1.0) for k in (-30, -12, -6, -3, -1, 0, 1, 3, 6, 12, 30)}
        | {0.0, 1.0}
    )
    return mpmath.quad(density, points, maxdegree=7)


def _mode(a: float, b: float, z: float) -> float:
    grid = np.concatenate([np.geomspace(1e-9, 0.5, 4000), 1 - np.geomspace(1e-9, 0.5, 4000)])
    values = z * grid + (a - 1) * np.log(grid) + (b - 1) * np.log1p(-grid)
    return float(min(max(grid[int(np.argmax(values))], 1e-6), 1 - 1e-6))


@pytest.mark.parametrize("index", range(DRAWS))
def test_projection_moments_against_quadrature(index: int) -> None:
    """Within 1e-6 and never below, full batch and Poisson; a 5 % smaller value would be caught."""
    rng = _rng(100 + index)
    width = round(10 ** rng.uniform(1.3, 3.7))
    rank = int(rng.integers(2, max(3, width // 3)))
    sigma, order = 10 ** rng.uniform(-0.5, 0.7), int(rng.integers(2, 13))
    rate = None if index % 3 == 0 else float(10 ** rng.uniform(-3, -0.5))
    with mpmath.workdps(20):
        if rate is None:
            exact = mpmath.log(_beta_moment(width, rank, order * (order - 1) / 2 / sigma**2))
        else:
            q = mpmath.mpf(rate)
            total = mpmath.mpf(0)
            for k in range(order + 1):
                factor = _beta_moment(width, rank, k * (k - 1) / 2 / sigma**2) if k > 1 else mpmath.mpf(1)
                total += mpmath.binomial(order, k) * (1 - q) ** (order - k) * q**k * factor
            exact = mpmath.log(total)
    event = acct.NoisyProjectionEvent.single(width, rank, sigma, rate)
    ours = float(rdp.moment(event, np.array([float(order)]), ADD)[0])
    assert float(exact) * (1 - 1e-13) <= ours <= float(exact) * (1 + 1e-6)
    assert not float(exact) <= 0.95 * ours


@pytest.mark.parametrize("index", range(DRAWS))
def test_pave_and_sketch_against_high_precision(index: int) -> None:
    rng = _rng(200 + index)
    rank, size = int(rng.integers(1, 33)), int(rng.integers(1, 65))
    gamma, ratio = 10 ** rng.uniform(-3, -0.3), 10 ** rng.uniform(0.5, 3)
    delta = float(10 ** rng.uniform(-8, -3))

    def smallest(divergence: Callable[[mpmath.mpf], mpmath.mpf], top: float) -> float:
        """The Renyi conversion, minimised over orders: a coarse scan in log(a - 1), then a bounded search."""

        def value(x: float) -> float:
            a = 1 + mpmath.exp(x)
            return float(
                divergence(a) + mpmath.log(1 - 1 / a) - (mpmath.log(delta) + mpmath.log(a)) / (a - 1)
            )

        grid = np.linspace(math.log(top - 1) - 12, math.log(top - 1) - 1e-6, 200)
        best = int(np.argmin([value(x) for x in grid]))
        around = (grid[max(0, best - 1)], grid[min(grid.size - 1, best + 1)])
        return max(0.0, float(optimize.minimize_scalar(value, bounds=around, options={"xatol": 1e-9}).fun))

    def pave(a: mpmath.mpf) -> mpmath.mpf:
        sides = []
        for ratio_ in (1 - mpmath.mpf(gamma), 1 + mpmath.mpf(gamma)):
            inside = a + (1 - a) * ratio_
            sides.append(
                mpmath.inf
                if inside <= 0
                else ((1 - a) * mpmath.log(ratio_) - mpmath.log(inside)) / (2 * (a - 1))
            )
        return rank * size * max(sides)

    def sketch(a: mpmath.mpf) -> mpmath.mpf:
        t = 1 / mpmath.mpf(ratio)
        return rank * size / (2 * (a - 1)) * (a * mpmath.log(1 - t) - mpmath.log(1 - a * t))

    with mpmath.workdps(30):
        expected = smallest(pave, 1 + 1 / gamma), smallest(sketch, ratio)
    got = (
        acct.epsilon_of(acct.PaveEvent((acct.PaveLayer(rank, size, gamma),)), delta).epsilon,
        acct.epsilon_of(acct.SketchEvent(rank, size, ratio), delta).epsilon,
    )
    for ours, exact in zip(got, expected, strict=True):
        assert ours == pytest.approx(exact, rel=1e-6, abs=1e-9)
        if exact > 1e-6:
            assert 0.95 * ours != pytest.approx(exact, rel=1e-6)
    for order in (1.5, 2.0):
        with mpmath.workdps(30):
            exact = (
                float((order - 1) * pave(mpmath.mpf(order))),
                float((order - 1) * sketch(mpmath.mpf(order))),
            )
        events = acct.PaveEvent((acct.PaveLayer(rank, size, gamma),)), acct.SketchEvent(rank, size, ratio)
        for event, value in zip(events, exact, strict=True):
            assert float(rdp.moment(event, np.array([order]), REPLACE)[0]) == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize(
    ("event", "delta"),
    [
        (acct.PaveEvent((acct.PaveLayer(5, 5, 1.09e-6),)), 1.2e-93),
        (acct.PaveEvent((acct.PaveLayer(1, 7, 1.17e-6), acct.PaveLayer(30, 9000, 1e-6))), 1.9e-220),
        (acct.PaveEvent((acct.PaveLayer(64, 700, 0.999),)), 0.6),
        (acct.SketchEvent(3, 4, 3e5), 3.5e-238),
        (acct.SketchEvent(723, 140, 1.000125, 7), 0.33),
    ],
)
def test_extreme_ranges_of_orders_are_searched_to_their_ends(event: acct.Event, delta: float) -> None:
    """Orders beyond 2e6 were not tried (up to 40 % too large); near their end rounding put figures 1e-10 too low."""

    def logistic(x: mpmath.mpf) -> mpmath.mpf:
        return 1 / (1 + mpmath.exp(-x))

    with mpmath.workdps(40):
        if isinstance(event, acct.SketchEvent):
            t, size, top = 1 / mpmath.mpf(event.gamma), event.rank * event.tau * event.layers, event.gamma - 1
            layers = [(size, (t,))]
        else:
            assert isinstance(event, acct.PaveEvent)
            layers = [
                (x.rank * x.dimension, (mpmath.mpf(x.gamma), -mpmath.mpf(x.gamma))) for x in event.layers
            ]
            top = min(1 / x.gamma for x in event.layers)

        def epsilon(x: mpmath.mpf) -> mpmath.mpf:
            a, total = 1 + top * logistic(x), mpmath.mpf(0)
            for size, sides in layers:
                if isinstance(event, acct.SketchEvent):
                    total += size * (a * mpmath.log(1 - sides[0]) - mpmath.log(1 - a * sides[0])) / 2
                else:
                    found = [
                        ((1 - a) * mpmath.log(1 + g) - mpmath.log(1 + (1 - a) * g)) / 2
                        for g in sides
                        if 1 + (1 - a) * g > 0
                    ]
                    total += size * max(found)
            return (total - mpmath.log(delta) - mpmath.log(a)) / (a - 1) + mpmath.log(1 - 1 / a)

        at = min((mpmath.mpf(k) / 2 for k in range(-80, 60)), key=epsilon)
        low, high, share = at - 1, at + 1, (mpmath.sqrt(5) - 1) / 2
        for _ in range(80):
            first, second = high - share * (high - low), low + share * (high - low)
            low, high = (low, second) if epsilon(first) < epsilon(second) else (first, high)
        exact = epsilon((low + high) / 2)
        ours = mpmath.mpf(acct.epsilon_of(event, delta).epsilon)
        assert exact * (1 - mpmath.mpf(10) ** -13) <= ours <= exact * (1 + mpmath.mpf(10) ** -7)


def _fourier_epsilon(sigma: float, rate: float, steps: int, delta: float, replaced: bool) -> float:
    """Compose losses of the worst pair on a fine grid, masses split linearly between neighbours; no bound, a value."""
    y = np.linspace(-14 * sigma - 1, 1 + 14 * sigma, 1_200_001)

    def log_density(centre: float) -> np.ndarray:
        return np.logaddexp(
            math.log1p(-rate) - y**2 / (2 * sigma**2), math.log(rate) - (y - centre) ** 2 / (2 * sigma**2)
        )

    edges = np.concatenate([[y[0] - (y[1] - y[0]) / 2], (y[1:] + y[:-1]) / 2, [y[-1] + (y[1] - y[0]) / 2]])

    def mass(centre: float | None) -> np.ndarray:
        quiet = np.diff(ndtr(edges / sigma))
        return (
            quiet if centre is None else (1 - rate) * quiet + rate * np.diff(ndtr((edges - centre) / sigma))
        )

    first = log_density(1.0)
    second = log_density(-1.0) if replaced else -(y**2) / (2 * sigma**2)
    answers = []
    pairs = [(first - second, mass(1.0))]
    if not replaced:
        pairs.append((second - first, mass(None)))
    for loss, weight in pairs:
        step = max(2e-5, float(np.ptp(loss)) / 150_000)
        low = math.floor(float(loss.min()) / step)
        place = loss / step - low
        left = np.floor(place).astype(int)
        grid = np.bincount(left, weight * (1 - (place - left)), left.max() + 2)
        grid += np.bincount(left + 1, weight * (place - left), left.max() + 2)
        mean = float(np.sum(grid * np.arange(grid.size)))
        spread = math.sqrt(steps * float(np.sum(grid * (np.arange(grid.size) - mean) ** 2)))
        size = 1 << max(grid.size, int(40 * spread) + 1).bit_length()
        total = np.real(np.fft.ifft(np.fft.fft(grid, size) ** steps))
        start = round(steps * mean - size / 2)
        index = start + np.arange(size)
        losses, masses = (index + steps * low) * step, np.maximum(total[index % size], 0.0)

        def excess(epsilon: float, x: np.ndarray = losses, m: np.ndarray = masses) -> float:
            over = x > epsilon
            return float(np.sum(m[over] * -np.expm1(epsilon - x[over])))

        a, b = 0.0, float(losses[-1])
        for _ in range(60):
            middle = (a + b) / 2
            a, b = (middle, b) if excess(middle) > delta else (a, middle)
        answers.append(b)
    return max(answers)


@pytest.mark.parametrize("index", range(8))
def test_sampled_gaussian_against_a_plain_fourier_composition(index: int) -> None:
    """Within 1e-3, both relations; the discretised bound is not below the value; a 5 % smaller one would be caught."""
    rng = _rng(300 + index)
    sigma, rate = float(rng.uniform(0.7, 3.0)), float(10 ** rng.uniform(-2.5, -0.7))
    steps, delta = int(10 ** rng.uniform(0.5, 2.7)), float(10 ** rng.uniform(-6, -4))
    relation = REPLACE if index % 2 else ADD
    exact = _fourier_epsilon(sigma, rate, steps, delta, relation is REPLACE)
    ours = acct.epsilon_of(
        acct.PoissonGaussianEvent(sigma, rate).times(steps), delta, adjacency=relation
    ).epsilon
    assert exact * (1 - 2e-5) <= ours <= exact * (1 + 1e-3)
    assert not exact * (1 - 2e-5) <= 0.95 * ours


@pytest.mark.parametrize("index", range(4))
def test_composed_projection_lies_between_its_lower_bound_and_the_published_one(index: int) -> None:
    """Lower bound <= smallest <= moments, smallest <= published; a 15 % smaller figure would be caught."""
    rng = _rng(400 + index)
    width = round(10 ** rng.uniform(2, 3.3))
    rank = int(rng.integers(4, max(5, width // 20)))
    noise, rate, steps = (
        float(rng.uniform(0.3, 1.0)),
        float(rng.uniform(0.01, 0.05)),
        int(rng.integers(50, 600)),
    )
    event = acct.NoisyProjectionEvent.single(width, rank, noise, rate, width)
    low = measured.epsilon_lower(event, steps, 1e-5)
    ours = acct.epsilon_of(event.times(steps), 1e-5).epsilon
    assert low <= ours <= theorem5.composed(event, steps, 1e-5) * (1 + 1e-8)
    assert ours <= acct.epsilon_of(event.times(steps), 1e-5, accountant="rdp").epsilon
    assert not low <= 0.85 * ours


@pytest.mark.parametrize(("sigma", "rate", "steps"), [(0.5, 1.0, 1), (1.5, 0.02, 100)])
def test_the_lower_bound_without_projection_is_the_gaussians(sigma: float, rate: float, steps: int) -> None:
    """Rank close to the width: the lower bound must approach, and not pass, the Gaussian's own figure."""
    event = acct.NoisyProjectionEvent.single(4000, 3999, sigma, None if rate == 1.0 else rate)
    plain = acct.GaussianEvent(sigma) if rate == 1.0 else acct.PoissonGaussianEvent(sigma, rate)
    truth = acct.epsilon_of(plain.times(steps), 1e-5).epsilon
    low = measured.epsilon_lower(event, steps, 1e-5)
    assert 0.95 * truth <= low <= truth * (1 + 1e-6)


@pytest.mark.parametrize("delta", [1e-8, 1e-12])
def test_the_lower_bound_holds_at_small_deltas(delta: float) -> None:
    """A plain FFT's rounding is larger than such a delta: added up over steps it could lift a lower bound."""
    event = acct.NoisyProjectionEvent.single(64, 4, 0.5, 0.02)
    low = measured.epsilon_lower(event, 200, delta, interval=2e-4)
    ours = acct.epsilon_of(event.times(200), delta).epsilon
    assert 0.8 * ours <= low <= ours
    plain = acct.PoissonGaussianEvent(1.5, 0.02)
    near = acct.NoisyProjectionEvent.single(4000, 3999, 1.5, 0.02)
    low, truth = measured.epsilon_lower(near, 100, delta), acct.epsilon_of(plain.times(100), delta).epsilon
    assert 0.95 * truth <= low <= truth
