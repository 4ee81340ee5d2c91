"""Gaussian family: references, exact profile, adjacency, composition over rounds, faults of other tools."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedlora.accounting as acct
from fedlora.accounting import accountant, gaussian, pld, rdp
from fedlora.errors import AccountingError, PrivacyParameterError, UnsupportedEventError


def _exact_delta(epsilon: float, mu: float) -> mpmath.mpf:
    with mpmath.workdps(40):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
        return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)


@settings(max_examples=60, deadline=None)
@given(st.floats(-2, 2), st.floats(1, 13))
def test_exact_profile_against_high_precision(log_mu: float, digits: float) -> None:
    mu, delta = 10.0**log_mu, 10.0**-digits
    epsilon = gaussian.epsilon_of_gaussian(delta, mu)
    assert _exact_delta(epsilon, mu) <= delta * (1 + 1e-9)
    if epsilon > 1e-9:
        assert _exact_delta(epsilon * (1 - 1e-6), mu) > delta


@settings(max_examples=40, deadline=None)
@given(st.floats(-14, 3), st.floats(0.1, 300), st.booleans())
def test_exact_profile_of_large_noise_does_not_fall_below_by_cancellation(
    log_mu: float, digits: float, near_one: bool
) -> None:
    """The two terms of the profile agree to mu: their difference was too small by 3e-8 at mu 1e-7, by all at 1e-13."""
    mu = 10.0**log_mu
    delta = 1.0 - 10.0 ** -min(digits, 15.0) if near_one else 10.0**-digits
    epsilon = gaussian.epsilon_of_gaussian(delta, mu)
    with mpmath.workdps(340):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)

        def above(x: mpmath.mpf) -> mpmath.mpf:
            return mpmath.erfc((x / m - m / 2) / mpmath.sqrt(2)) / 2 - mpmath.exp(x) * (
                mpmath.erfc((x / m + m / 2) / mpmath.sqrt(2)) / 2
            )

        assert above(e) <= mpmath.mpf(delta)
        if epsilon > 0.0:
            assert above(e * (1 - mpmath.mpf(10) ** -9)) >= mpmath.mpf(delta) * (1 - mpmath.mpf(10) ** -11)
        at = gaussian.delta_of_gaussian(epsilon, mu)
        assert above(e) <= at <= above(e) * (1 + mpmath.mpf(10) ** -11)


def test_profile_far_out_is_zero_not_an_error() -> None:
    for mu in (1e-300, 1e-9, 0.05, 1.0, 1e6):
        for epsilon in (1e9, 1e20, 1e300):
            assert gaussian.delta_of_gaussian(epsilon, mu) == pytest.approx(
                1.0 if mu == 1e6 and epsilon == 1e9 else 0.0
            )
    assert gaussian.log_delta(1e5, 1.0) == pytest.approx(-5e9, rel=1e-4)


@settings(max_examples=6, deadline=None)
@given(st.floats(-0.5, 1.5), st.floats(2, 12))
def test_pld_is_above_the_exact_profile_and_near(log_sigma: float, digits: float) -> None:
    parts = accountant.parts_of(acct.GaussianEvent(10.0**log_sigma))
    delta = 10.0**-digits
    exact = gaussian.epsilon_of_gaussian(delta, 10.0**-log_sigma)
    value = pld.epsilon(parts, delta, acct.Adjacency.ADD_OR_REMOVE, 10.0 * exact + 1.0)
    lower = pld.epsilon_lower(parts, delta, acct.Adjacency.ADD_OR_REMOVE, 10.0 * exact + 1.0)
    assert value is not None
    assert exact * (1 - 1e-9) <= value <= exact * 1.001 + 2e-4
    assert lower is None or lower <= exact * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.4, 5.0), st.floats(1e-4, 0.5), st.integers(2, 12))
def test_integer_moments_equal_quadrature(sigma: float, rate: float, order: int) -> None:
    event = acct.PoissonGaussianEvent(sigma, rate)
    got = float(rdp.moment(event, np.array([float(order)]), acct.Adjacency.ADD_OR_REMOVE)[0])
    with mpmath.workdps(30):
        s, q = mpmath.mpf(sigma), mpmath.mpf(rate)
        exact = mpmath.log(
            mpmath.fsum(
                mpmath.binomial(order, k)
                * (1 - q) ** (order - k)
                * q**k
                * mpmath.exp(k * (k - 1) / (2 * s * s))
                for k in range(order + 1)
            )
        )
    assert float(exact) * (1 - 1e-12) <= got <= float(exact) * (1 + 1e-9)


@pytest.mark.parametrize("order", [1.1, 1.5, 2.5, 3.7, 7.25])
@pytest.mark.parametrize(("sigma", "rate"), [(0.5, 0.01), (1.0, 0.1), (2.0, 0.04), (0.3, 0.02)])
def test_fractional_moments_are_upper_bounds(order: float, sigma: float, rate: float) -> None:
    x = np.linspace(-40 * sigma, 40 * sigma + order, 2_000_001)
    log_base = -x * x / (2 * sigma**2)
    log_ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * sigma**2))
    values = np.exp(log_base + order * log_ratio - math.log(sigma * math.sqrt(2 * math.pi)))
    exact = math.log(float(np.trapezoid(values, x)))
    event = acct.PoissonGaussianEvent(sigma, rate)
    got = float(rdp.moment(event, np.array([order]), acct.Adjacency.ADD_OR_REMOVE)[0])
    assert exact * (1 - 1e-6) <= got <= exact * 1.001 + 1e-9


def test_replace_one_renyi_rule_covers_the_worst_pair() -> None:
    """Half the noise multiplier bounds the moments of (1-q) N(0) + q N(1) against (1-q) N(0) + q N(-1)."""
    for sigma in (0.5, 0.8, 1.5, 4.0):
        x = np.linspace(-40 * sigma - 15, 40 * sigma + 15, 40_001)
        for rate in (1e-3, 0.01, 0.1, 0.4, 0.9):
            base = -x * x / (2 * sigma**2) - math.log(sigma * math.sqrt(2 * math.pi))
            p = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * sigma**2))
            q = np.logaddexp(math.log1p(-rate), math.log(rate) + (-2 * x - 1) / (2 * sigma**2))
            event = acct.PoissonGaussianEvent(sigma, rate)
            for order in (2.0, 3.0, 5.0, 9.0):
                exact = math.log(float(np.trapezoid(np.exp(base + order * p + (1 - order) * q), x)))
                bound = float(rdp.moment(event, np.array([order]), acct.Adjacency.REPLACE_ONE)[0])
                assert exact <= bound * (1 + 1e-9) + 1e-12


def _rows(shared_dir: Path) -> list[dict[str, str]]:
    with (shared_dir / "reference" / "gaussian_accountants.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["epsilon"]]


def _meet(rows: list[dict[str, str]]) -> int:
    seen = 0
    for row in rows:
        event = acct.PoissonGaussianEvent(float(row["noise_multiplier"]), float(row["sample_rate"]))
        adjacency = "replace_one" if row["adjacency"] == "replace_one" else "add_or_remove"
        name = "rdp" if row["accountant"] == "opacus_rdp" else "best"
        run = event.times(int(row["steps"]))
        got = acct.epsilon_of(run, float(row["delta"]), adjacency=adjacency, accountant=name).epsilon
        assert got == pytest.approx(float(row["epsilon"]), rel=1e-3)
        seen += 1
    return seen


def _known(shared_dir: Path) -> list[dict[str, str]]:
    return [row for row in _rows(shared_dir) if row["accountant"].startswith(("dpa_pld", "opacus_rdp"))]


def test_some_reference_accountants_are_met(shared_dir: Path) -> None:
    assert (
        _meet(
            [
                row
                for row in _known(shared_dir)
                if int(row["steps"]) <= 500 or row["accountant"] == "opacus_rdp"
            ][:14]
        )
        >= 8
    )


@pytest.mark.long
def test_all_reference_accountants_are_met(shared_dir: Path) -> None:
    assert _meet(_known(shared_dir)) >= 20


@pytest.mark.parametrize(("sigma", "steps"), [(10.0, 100), (5.0, 30), (20.0, 1000)])
def test_fault_of_dp_accounting_replace_one_renyi_is_caught(
    sigma: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dp_accounting 0.6.0 forgets that replacing moves the sum by twice the clip; its figure must never be reported."""
    import dp_accounting
    from dp_accounting.rdp import rdp_privacy_accountant

    tool = rdp_privacy_accountant.RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
    )
    tool.compose(dp_accounting.GaussianDpEvent(sigma), steps)
    wrong = tool.get_epsilon(1e-5)
    event = acct.GaussianEvent(sigma).times(steps)
    exact = gaussian.epsilon_of_gaussian(1e-5, 2.0 * math.sqrt(steps) / sigma)
    for name in ("best", "rdp", "pld"):
        right = acct.epsilon_of(event, 1e-5, adjacency="replace-one", accountant=name).epsilon
        assert right >= exact * (1 - 1e-9)
        assert wrong < 0.7 * right
    acct.clear_caches()
    monkeypatch.setattr(accountant, "rdp_epsilon", lambda *_: wrong)
    with pytest.raises(AccountingError, match="contradict"):
        acct.epsilon_of(event, 1e-5, adjacency="replace-one")
    with pytest.raises(AccountingError, match="contradict"):
        acct.epsilon_of(acct.PoissonGaussianEvent(sigma, 0.99).times(steps), 1e-5, adjacency="replace-one")
    acct.clear_caches()


def test_fault_of_the_stated_case() -> None:
    report = acct.epsilon_of(acct.GaussianEvent(10.0).times(100), 1e-5, adjacency="replace_one")
    assert report.epsilon == pytest.approx(9.997256, rel=1e-6)


@pytest.mark.parametrize(
    ("rounds", "sigma", "rate", "steps", "all_rounds", "one_round"),
    [(20, 1.0, 0.25, 4, 16.289, 4.9), (5, 2.0, 0.04, 100, 1.9753, 1.2), (10, 10.0, 1.0, 10, 4.37718, 2.0)],
)
def test_h12_epsilon_accumulates_over_rounds(
    rounds: int, sigma: float, rate: float, steps: int, all_rounds: float, one_round: float
) -> None:
    one = acct.PoissonGaussianEvent(sigma, rate).times(steps)
    total = acct.epsilon_of([one] * rounds, 1e-5)
    assert total.num_events == rounds * steps
    assert total.epsilon == pytest.approx(all_rounds, rel=2e-3)
    assert total.epsilon == acct.epsilon_of([(one, rounds)], 1e-5).epsilon
    assert acct.epsilon_of(one, 1e-5).epsilon < one_round


def test_heterogeneous_rounds_compose_tightly() -> None:
    parts = [
        (acct.PoissonGaussianEvent(1.0, 0.02), 50),
        (acct.PoissonGaussianEvent(1.5, 0.05), 50),
        (acct.GaussianEvent(8.0), 3),
    ]
    report = acct.epsilon_of(parts, 1e-5)
    assert report.accountant.startswith("dp_accounting PLD")
    assert report.epsilon < acct.epsilon_of(parts, 1e-5, accountant="rdp").epsilon
    assert report.epsilon > max(acct.epsilon_of([part], 1e-5).epsilon for part in parts)
    assert acct.delta_of(parts, report.epsilon) <= 1e-5 * 1.01


def test_many_clients_with_the_same_events_cost_one_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = accountant._evaluate
    monkeypatch.setattr(accountant, "_evaluate", lambda *a: calls.append(1) or original(*a))
    acct.clear_caches()
    event = acct.PoissonGaussianEvent(1.0, 0.125)
    reports = [acct.epsilon_of([(event, 3), (event, 4)], 1e-5, unit="record") for _ in range(500)]
    assert len(calls) == 1
    assert acct.parallel(reports).epsilon == reports[0].epsilon


def test_budget_checks_avoid_distributions_where_moments_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    event = acct.PoissonGaussianEvent(1.1, 0.05)
    monkeypatch.setattr(pld, "epsilon", lambda *_: pytest.fail("a distribution was composed"))
    for count in range(1, 100):
        assert acct.within_budget([(event, count)], 8.0, 1e-5)


@pytest.mark.parametrize("name", ["pld", "rdp", "best"])
def test_within_budget_agrees_with_epsilon(name: str) -> None:
    event = acct.PoissonGaussianEvent(0.9, 0.1).times(20)
    epsilon = acct.epsilon_of(event, 1e-5, accountant=name).epsilon
    assert acct.within_budget(event, epsilon * 1.0001, 1e-5)
    best = acct.epsilon_of(event, 1e-5).epsilon
    assert not acct.within_budget(event, best * 0.999, 1e-5)


@pytest.mark.long
def test_opacus_prv_agrees_within_its_stated_error() -> None:
    event = acct.PoissonGaussianEvent(1.0, 0.01).times(1000)
    got = acct.epsilon_of(event, 1e-5, accountant="prv").epsilon
    assert acct.epsilon_of(event, 1e-5).epsilon <= got <= 1.83824 + 0.02
    with pytest.raises(UnsupportedEventError):
        acct.epsilon_of(event, 1e-5, accountant="prv", adjacency="replace-one")
    with pytest.raises(UnsupportedEventError):
        acct.epsilon_of(acct.NoisyProjectionEvent.single(64, 4, 1.0), 1e-5, accountant="prv")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(PrivacyParameterError):
        acct.epsilon_of(acct.GaussianEvent(1.0), 1e-5, accountant="moments")
    with pytest.raises(PrivacyParameterError):
        acct.epsilon_of(acct.GaussianEvent(1.0), 1e-5, adjacency="hamming")
    with pytest.raises(UnsupportedEventError):
        acct.epsilon_of(acct.NoisyProjectionEvent.single(64, 4, 1.0), 1e-5, accountant="pld")


@pytest.mark.long
@pytest.mark.parametrize(
    ("sigma", "rate"), [(0.05, 0.01), (0.05, 1e-6), (0.05, 0.5), (1.0, 1e-3), (100.0, 0.01)]
)
@pytest.mark.parametrize("adjacency", list(acct.Adjacency))
def test_extreme_settings_end_within_a_minute(sigma: float, rate: float, adjacency: acct.Adjacency) -> None:
    import time

    start = time.process_time()
    report = acct.epsilon_of(acct.PoissonGaussianEvent(sigma, rate).times(10**6), 1e-12, adjacency=adjacency)
    assert 0.0 < report.epsilon < math.inf
    assert time.process_time() - start < 60.0


@pytest.mark.parametrize(("sigma", "rate"), [(0.7, 0.01), (2.0, 0.2), (5.0, 0.9)])
def test_sampled_replace_one_uses_the_proved_form(sigma: float, rate: float) -> None:
    """log(2 M - 1) with M the moment at twice the sensitivity; no change without sampling."""
    orders = np.array([2.0, 5.0, 16.0])
    half = rdp.moment(acct.PoissonGaussianEvent(sigma / 2.0, rate), orders, acct.Adjacency.ADD_OR_REMOVE)
    ours = rdp.moment(acct.PoissonGaussianEvent(sigma, rate), orders, acct.Adjacency.REPLACE_ONE)
    assert ours == pytest.approx(
        [float(mpmath.log(2 * mpmath.exp(mpmath.mpf(float(g))) - 1)) for g in half], rel=1e-9
    )
    full = rdp.moment(acct.PoissonGaussianEvent(sigma, 1.0), orders, acct.Adjacency.REPLACE_ONE)
    assert full == pytest.approx(orders * (orders - 1.0) * 2.0 / sigma**2, rel=1e-12)
