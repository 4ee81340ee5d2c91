"""Vector projection, M1, sketch and PAVE: simulation, oracles, sandwiches, corrected statements."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import fedlora.accounting as acct
from fedlora.accounting import m1, pave, rdp, sketch, vector

REPLACE = acct.Adjacency.REPLACE_ONE


def _simulated_profile(
    width: int, rank: int, rho: float, epsilon: float, repeats: int
) -> tuple[float, float]:
    """E[(1 - exp(eps - L))_+] with L from the density of Lemma 9 at simulated outputs of real projections."""
    rng = np.random.default_rng(11)
    z = rng.normal(size=(repeats, width, rank)) / math.sqrt(rank)
    v = np.zeros(width)
    v[0] = 1.0
    w = np.zeros(width)
    w[:2] = rho, math.sqrt(1 - rho * rho)
    y = np.einsum("nij,nj->ni", z, z[:, 0, :])
    vy, wy = y @ v, y @ w
    norm = np.sum(y * y, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        loss = (width - rank + 1) / 2 * np.log(wy / vy) - rank * norm / 2 * (1 / vy - 1 / wy)
        values = np.where(wy > 0, np.maximum(0.0, 1 - np.exp(epsilon - loss)), 1.0)
    return float(np.mean(values)), float(np.std(values) / math.sqrt(repeats))


@pytest.mark.parametrize(
    ("width", "rank", "rho", "epsilon"), [(10, 4, 0.9, 0.2), (12, 3, 0.95, 1.0), (9, 9, 0.8, 0.5)]
)
def test_exact_vector_profile_equals_simulation(width: int, rank: int, rho: float, epsilon: float) -> None:
    mean, error = _simulated_profile(width, rank, rho, epsilon, 100_000)
    exact = vector.profile(width, rank, rho, epsilon)
    assert abs(mean - exact) <= 4 * error
    # power twin: five percent off in either direction is rejected
    assert mean - 4 * error > 0.95 * exact
    assert mean + 4 * error < 1.05 * exact


@pytest.mark.parametrize(
    ("width", "rank", "rho"), [(20, 4, 0.9), (400, 32, 0.999), (30, 30, 0.95), (15, 1, 0.9999)]
)
def test_vector_quadrature_against_a_double_integral(width: int, rank: int, rho: float) -> None:
    """An independent route: integrate over A and B without the closed form."""
    epsilon, c, nu = 0.3, (width - rank + 1) / 2, width + rank - 1
    b, wb = np.polynomial.legendre.leggauss(400)
    edges = stats.chi2.ppf([1e-13, 1 - 1e-13], nu)
    b = edges[0] + (b + 1) / 2 * (edges[1] - edges[0])
    wb = wb * (edges[1] - edges[0]) / 2 * stats.chi2.pdf(b, nu)

    phi = math.acos(rho)
    x, wx = np.polynomial.legendre.leggauss(1500)
    theta = phi - math.pi / 2 + (x + 1) / 2 * (math.pi - phi)
    a = rho + math.sqrt(1 - rho * rho) * np.tan(theta)
    density = stats.t.pdf(math.sqrt(rank) * np.tan(theta), rank) * math.sqrt(rank) / np.cos(theta) ** 2
    loss = c * np.log(a)[:, None] + b / 2 * (1 / a - 1)[:, None]
    inner = np.maximum(0.0, 1 - np.exp(np.minimum(epsilon - loss, 0.0))) @ wb
    total = float(np.sum(wx * (math.pi - phi) / 2 * density * inner)) + vector.support_mass(rank, rho)
    assert vector.profile(width, rank, rho, epsilon) == pytest.approx(total, rel=2e-3, abs=1e-7)


@settings(max_examples=25, deadline=None)
@given(st.integers(4, 800), st.floats(0, 1), st.floats(-5, -1), st.floats(-6, -1))
def test_theorem_1_lies_above_the_exact_profile(
    width: int, share: float, log_angle: float, log_delta: float
) -> None:
    rank, rho, delta = max(1, int(width**share)), 1.0 - 10.0**log_angle, 10.0**log_delta
    published = vector.theorem1(width, rank, rho, delta)
    if not math.isfinite(published):
        return
    assert vector.profile(width, rank, rho, max(0.0, published)) <= delta * (1 + 1e-6)
    report = acct.epsilon_of(acct.VectorProjectionEvent(width, rank, rho), delta)
    assert report.epsilon <= published * (1 + 1e-9)


def test_theorem_1_grows_as_alignment_falls() -> None:
    values = [vector.theorem1(200, 32, rho, 0.01) for rho in np.linspace(0.8, 0.9999, 40)]
    assert all(a >= b for a, b in itertools.pairwise(values))
    exact = [vector.profile(200, 32, float(rho), 0.5) for rho in np.linspace(0.8, 0.9999, 40)]
    assert all(a >= b * (1 - 1e-9) for a, b in itertools.pairwise(exact))


@pytest.mark.parametrize("rank", [1, 2, 199, 200, 10**5, 10**8, 10**9, 10**12])
def test_vector_quadrature_misses_no_mass_at_any_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From rank 1e8 on the peak fell between the nodes: epsilon 9e-13 at rank 1e9 and alignment 1/2, truth infinity."""
    for width in (max(2, rank), 3 * rank + 1):
        for rho in (-0.5, 0.5, 0.99, 1.0 - 1e-9):
            _, mass = vector._integral(width, rank, rho, 1.0, 120)
            assert mass == pytest.approx(1.0 - vector.support_mass(rank, rho), abs=1e-12)
    if rank >= 10**8:
        assert vector.profile(rank, rank, 0.5, 1.0) > 1.0 - 1e-9
        assert vector.profile(rank, rank, 0.99, 100.0) > 1.0 - 1e-9
        assert acct.epsilon_of(acct.VectorProjectionEvent(rank, rank, 0.5), 0.01).epsilon > 1e6
    # the twin: a quadrature that sees a part of the mass only charges the rest in full
    points, weights = vector._nodes(120)
    monkeypatch.setattr(vector, "_nodes", lambda _: (points, 0.9 * weights))
    assert vector.profile(max(2, rank), rank, 1.0 - 1e-6, 0.1) >= 0.1 * (1.0 - 1e-6)


def test_vector_limits() -> None:
    assert acct.epsilon_of(acct.VectorProjectionEvent(50, 5, 1.0), 1e-5).epsilon == 0.0
    assert math.isinf(acct.epsilon_of(acct.VectorProjectionEvent(50, 5, 0.0), 1e-5).epsilon)
    with mpmath.workdps(20):
        exact = mpmath.quad(
            lambda x: (
                mpmath.ncdf(-0.9 * mpmath.sqrt(x) / mpmath.sqrt(1 - 0.81))
                * x**1.5
                * mpmath.exp(-x / 2)
                / (2**2.5 * mpmath.gamma(2.5))
            ),
            [0, 1, 5, 20, 100],
        )
    assert vector.support_mass(5, 0.9) == pytest.approx(float(exact), rel=1e-9)


def test_noise_before_the_projection_aligns() -> None:
    """Lemma 10 by simulation; our cosine is at least the printed rho + s."""
    rng = np.random.default_rng(3)
    width, rho, radius, delta = 400, 0.3, 5.0, 1e-3
    promised = vector.aligned_by_noise(width, rho, radius, delta)
    assert promised >= rho + vector.alignment_gain(width, rho, radius, delta) - 1e-12
    v, w = np.zeros(width), np.zeros(width)
    v[0], w[:2] = 1.0, (rho, math.sqrt(1 - rho * rho))
    below = 0
    for _ in range(2000):
        z = rng.normal(size=width)
        z *= radius / np.linalg.norm(z)
        a, b = v + z, w + z
        below += float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) < promised
    assert below <= 2000 * delta + 8
    assert vector.aligned_by_noise(width, rho, 1e-3, delta) < rho  # too little noise promises nothing


@settings(max_examples=3, deadline=None)
@given(st.integers(30, 300), st.floats(0.2, 0.9), st.integers(1, 20), st.floats(1.0, 50.0), st.floats(-4, -2))
def test_m1_sharper_parts_stay_below_the_printed_ones(
    width: int, share: float, span: int, noise: float, log_angle: float
) -> None:
    rank = max(2, int(width * share))
    event = acct.M1Event(width, rank, min(span, width - 1), 1 - 10.0**log_angle, 0.5, 0.1, noise)
    printed = m1.one_column(event, 1e-4, paper=True)
    ours = m1.one_column(event, 1e-4)
    assert ours <= printed * 1.01 + 1e-3 or not printed < 1.0
    report = acct.epsilon_of(event, 1e-4)
    assert report.alternatives["theorems_3_and_4_as_printed"] == printed


def test_m1_special_cases() -> None:
    base = {"width": 60, "rank": 20, "alignment": 0.999, "column_distance": 0.1}
    silent = acct.M1Event(**base, span=10, residual=0.5, noise_std=0.0)
    assert math.isinf(acct.epsilon_of(silent, 1e-4).epsilon)
    inside = acct.M1Event(**base, span=10, residual=0.0, noise_std=5.0)
    both = acct.M1Event(**base, span=10, residual=0.5, noise_std=5.0)
    assert acct.epsilon_of(inside, 1e-4).epsilon < acct.epsilon_of(both, 1e-4).epsilon
    filled = acct.M1Event(
        **base, span=30, residual=0.5, noise_std=5.0
    )  # rank used up by the span: no residual block
    assert math.isfinite(acct.epsilon_of(filled, 1e-4).epsilon)
    quiet = {**base, "span": 10, "residual": 0.0, "noise_std": 50.0}
    several = m1.several_columns(acct.M1Event(**quiet, changed_columns=2), 1e-4)
    assert several > 2 * m1.several_columns(acct.M1Event(**quiet), 1e-4)


def test_sketch_references(shared_dir: Path) -> None:
    data = json.loads((shared_dir / "reference" / "projection_accounting.json").read_text())
    for row in data["sketch"]:
        event = acct.SketchEvent(row["r"], row["tau"], float(row["Gamma"]))
        got = rdp.moment(event, np.array([float(row["alpha"])]), REPLACE)[0] / (row["alpha"] - 1)
        assert got == pytest.approx(row["rdp"], rel=1e-9)


def test_sketch_bound_is_met_by_two_gaussians() -> None:
    """The divergence of N(0, 1) from N(0, 1 - t)... the extreme eigenvalue of Lemma 7.1 attains the bound."""
    t, order = 1.0 / 8.0, 3.0
    bound = rdp.moment(acct.SketchEvent(1, 1, 8.0), np.array([order]), REPLACE)[0]
    s1, s2 = (
        1.0,
        1.0 - t,
    )  # Sigma_1 and Sigma_2 = Sigma_1 - t: alpha Sigma_2 + (1 - alpha) Sigma_1 = 1 - alpha t
    exact = -0.5 * math.log((order * s2 + (1 - order) * s1) / (s1 ** (1 - order) * s2**order))
    assert bound == pytest.approx(exact, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.floats(2.51, 500.0), st.integers(1, 64), st.integers(1, 64))
def test_corollary_7_3_holds_on_its_range(gamma: float, rank: int, tau: int) -> None:
    event = acct.SketchEvent(rank, tau, gamma)
    pair = sketch.truncated_cdp(event)
    assert pair is not None
    orders = 1.0 + np.linspace(1e-3, 1.0, 50)[:-1] * (max(pair[1], 1.001) - 1.0)
    divergence = rdp.moment(event, orders, REPLACE) / (orders - 1.0)
    assert np.all(divergence <= pair[0] * orders * (1 + 1e-9))


def test_tcdp_conversion_keeps_its_second_case() -> None:
    event = acct.SketchEvent(1, 1, 5.0)
    rho, omega = sketch.truncated_cdp(event) or (math.nan, math.nan)
    shortened = rho + 2 * math.sqrt(rho * math.log(1e5))
    full = sketch.epsilon_of_truncated_cdp(rho, omega, 1e-5)
    assert full > shortened  # the shortened form would claim too little here
    assert acct.epsilon_of(event, 1e-5).epsilon <= full
    assert sketch.truncated_cdp(acct.SketchEvent(1, 1, 2.5)) is None


def test_sketch_gammas() -> None:
    assert sketch.gamma_of_sketch(4.0, 1.0, 2.0, 0.5) == 2.5
    eta, beta, b, lam, r, c, steps = 0.1, 2.0, 32, 50.0, 8, 0.3, 5
    direct = eta * beta / 4 * b * (lam + r * 0.5**2) / (c * c * steps * ((1 + eta * beta) ** steps - 1))
    assert sketch.gamma_of_lora(lam, 0.5, r, eta, beta, b, c, steps) == pytest.approx(direct)
    lemma = sketch.gamma_of_sketch(
        lam, r * 0.5**2, steps * c, 2 * c / b * ((1 + eta * beta) ** steps - 1) / (eta * beta)
    )
    assert lemma == pytest.approx(direct)


def test_pave_references(shared_dir: Path) -> None:
    data = json.loads((shared_dir / "reference" / "projection_accounting.json").read_text())
    for row in data["pave"]:
        event = acct.PaveEvent((acct.PaveLayer(row["r"], row["k"], row["gamma"]),))
        assert pave.order_two(event, row["delta"]) == pytest.approx(row["eps_theorem_order2"], rel=1e-9)
        got = acct.epsilon_of(event, row["delta"]).epsilon
        assert row["eps_all_orders"] * (1 - 1e-3) <= got <= row["eps_all_orders"] * (1 + 1e-6)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.001, 0.9), st.floats(0.01, 0.99), st.data())
def test_pave_bound_covers_every_covariance_ratio(gamma: float, share: float, data: st.DataObject) -> None:
    """Exact Gaussian divergence at any eigenvalue of the covariance ratio in [1 - gamma, 1 + gamma] <= the bound."""
    order = 1.0 + share / gamma
    bound = float(rdp.moment(acct.PaveEvent((acct.PaveLayer(1, 1, gamma),)), np.array([order]), REPLACE)[0])
    ratio = data.draw(st.floats(1 - gamma, 1 + gamma))
    exact = ((1 - order) * math.log(ratio) - math.log(order + (1 - order) * ratio)) / 2
    assert exact <= bound * (1 + 1e-9) + 1e-12


def test_pave_divergence_formula_by_quadrature() -> None:
    ratio, order = 1.2, 2.5
    x = np.linspace(-60, 60, 400_001)
    p, q = stats.norm.logpdf(x, 0, math.sqrt(ratio)), stats.norm.logpdf(x)
    exact = math.log(float(np.trapezoid(np.exp(order * p + (1 - order) * q), x)))
    assert ((1 - order) * math.log(ratio) - math.log(order + (1 - order) * ratio)) / 2 == pytest.approx(
        exact, rel=1e-9
    )


def test_pave_layers_add_and_stacks_count_all_rows() -> None:
    one = acct.PaveLayer(8, 8, 0.01)
    orders = np.array([2.0, 7.5, 30.0])
    single = rdp.moment(acct.PaveEvent((one,)), orders, REPLACE)
    assert np.allclose(rdp.moment(acct.PaveEvent((one,) * 3), orders, REPLACE), 3 * single)
    stacked = acct.PaveEvent((acct.PaveLayer(8, 24, 0.01),))
    assert np.allclose(rdp.moment(stacked, orders, REPLACE), 3 * single)
    assert math.isinf(rdp.moment(acct.PaveEvent((one,)), np.array([101.0]), REPLACE)[0])
    assert acct.epsilon_of(acct.PaveEvent((acct.PaveLayer(8, 8, 0.0),)), 1e-5).epsilon < 0.01


@pytest.mark.parametrize(
    ("sigma", "layers"),
    [(4.0, 48), pytest.param(2.0, 24, marks=pytest.mark.long), pytest.param(1.5, 12, marks=pytest.mark.long)],
)
def test_theorem_3_9_sum_over_layers_is_false_under_sampling(sigma: float, layers: int) -> None:
    """The printed figure lies below a *lower* bound of the mechanism: layers share one batch."""
    from fedlora.accounting import accountant, pld

    rate, steps, delta = 0.01, 1000, 1e-5
    claimed = pave.claimed_epsilon(sigma, layers, rate, steps, delta)
    event = pave.certified_event(sigma, layers, rate, steps)
    ours = acct.epsilon_of(event, delta, adjacency=REPLACE).epsilon
    lower = pld.epsilon_lower(accountant.parts_of(event), delta, REPLACE, ours)
    assert lower is not None
    assert claimed < lower <= ours
    # without sampling the sum is right: layers compose like steps
    full = pave.certified_event(sigma, layers, 1.0, 10)
    assert acct.epsilon_of(full, delta, adjacency=REPLACE).epsilon <= pave.claimed_epsilon(
        sigma, layers, 1.0, 10, delta
    )


def test_pave_parameters_and_risks() -> None:
    assert pave.gamma_from_bounds(1.0, 2.0, pave.sensitivity_of_mean(1.0, 100)) == pytest.approx(0.08)
    for epsilon in (0.0, 0.1, 1.0, 3.0):
        tight, loose = pave.risk_bound_tight(epsilon, 1e-5), pave.risk_bound(epsilon, 1e-5)
        assert tight <= loose <= 1.0
        assert tight >= math.tanh(epsilon / 2)
        assert pave.gain_increase(tight) == tight / 2
    # randomised response attains the total-variation bound
    assert pave.risk_bound_tight(1.0, 1e-12) == pytest.approx((math.e - 1) / (math.e + 1), rel=1e-6)


@pytest.mark.parametrize(
    "conditional",
    [
        acct.PaveEvent((acct.PaveLayer(8, 8, 0.01),)),
        acct.SketchEvent(16, 64, 1000.0),
        acct.PaveEvent((acct.PaveLayer(2, 2, 0.001),)),
    ],
)
def test_a_mixture_with_a_conditional_event_is_charged_as_replace_one_throughout(conditional):
    """The Gaussian beside a conditional analysis must not keep the sensitivity of add-or-remove."""
    mixed = acct.compose([(conditional, 1), (acct.GaussianEvent(1.0), 1)])
    asked, forced = acct.epsilon_of(mixed, 1e-5), acct.epsilon_of(mixed, 1e-5, adjacency=REPLACE)
    assert asked.adjacency is REPLACE
    assert asked.epsilon == forced.epsilon
    assert asked.epsilon >= acct.epsilon_of(acct.GaussianEvent(1.0), 1e-5, adjacency=REPLACE).epsilon - 1e-9
    assert acct.delta_of(mixed, 5.0) == acct.delta_of(mixed, 5.0, adjacency=REPLACE)
