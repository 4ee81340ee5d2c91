"""Noisy projection: oracles, sandwich, groups, the published bound."""

from __future__ import annotations

import json
import math
from pathlib import Path

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

import fedlora.accounting as acct
from fedlora.accounting import gaussian, rdp, theorem5
from fedlora.accounting.hypergeometric import log_kummer

ADD = acct.Adjacency.ADD_OR_REMOVE


def _moment(event: acct.Event, order: float, adjacency: acct.Adjacency = ADD) -> float:
    return float(rdp.moment(event, np.array([order]), adjacency)[0])


@settings(max_examples=60, deadline=None)
@given(st.integers(16, 100_000), st.floats(0, 1), st.floats(-6, 4))
def test_kummer_bound_against_high_precision(width: int, share: float, log_z: float) -> None:
    rank = max(1, int(width**share))
    z = 10.0**log_z
    with mpmath.workdps(30):
        exact = float(mpmath.log(mpmath.hyp1f1(mpmath.mpf(rank) / 2, mpmath.mpf(width) / 2, mpmath.mpf(z))))
    got = log_kummer(rank / 2.0, width / 2.0, z)
    assert exact <= got <= exact * (1 + 3e-9)


@pytest.mark.parametrize(
    ("a", "b", "z"), [(9.5, 10, 800), (0.5, 384, 700), (4, 384, 3e6), (0.5, 8, 5e6), (16, 1024, 1e5)]
)
def test_kummer_bound_in_hard_places(a: float, b: float, z: float) -> None:
    got = log_kummer(a, b, z)
    with mpmath.workdps(40):
        exact = mpmath.log(mpmath.hyp1f1(a, b, z)) if z <= 1e5 else None
    if exact is None:  # large z: e^z z^(a-b) Gamma(b)/Gamma(a) (1 + (b-a)(1-a)/z + ...)
        lead = z + math.lgamma(b) - math.lgamma(a) + (a - b) * math.log(z)
        exact = lead + math.log1p(
            (b - a) * (1 - a) / z + (b - a) * (b - a + 1) * (1 - a) * (2 - a) / (2 * z * z)
        )
        assert float(exact) * (1 - 1e-9) <= got <= min(z, float(exact) + 40.0)
    else:
        assert float(exact) <= got <= float(exact) * (1 + 3e-9)


def test_references_are_met_and_never_undercut(shared_dir: Path) -> None:
    data = json.loads((shared_dir / "reference" / "projection_accounting.json").read_text())
    for kind in ("m2_full", "m2_poisson"):
        for row in data[kind]:
            event = acct.NoisyProjectionEvent.single(row["d"], row["r"], row["sigma"], row.get("q"))
            got = _moment(event, float(row["alpha"])) / (row["alpha"] - 1)
            assert row["rdp"] <= got <= row["rdp"] * (1 + 1e-6)
    for row in data["m2_eps"]:
        event = acct.NoisyProjectionEvent.single(row["d"], row["r"], row["sigma"], row["q"]).times(
            row["steps"]
        )
        got = acct.epsilon_of(event, row["delta"], accountant="moment").epsilon
        assert got <= row["eps_integer_orders_2_32"] * (1 + 1e-6)
        assert got >= row["eps_integer_orders_2_32"] * 0.98


def _exact_rank_one_delta(width: int, rank: int, sigma: float, epsilon: float) -> float:
    law = stats.beta(rank / 2, (width - rank) / 2)
    points = [law.ppf(p) for p in (1e-6, 0.5, 1 - 1e-6, 1 - 1e-12)]
    return float(
        integrate.quad(
            lambda x: law.pdf(x) * gaussian.delta_of_gaussian(epsilon, math.sqrt(x) / sigma),
            0,
            1,
            points=points,
            limit=400,
        )[0]
    )


def test_one_shot_sandwich_exact_ours_paper_gaussian() -> None:
    """Exact rank-one figure <= moment bound <= Theorem 5 and <= the Gaussian without projection."""
    rng = np.random.default_rng(5)
    for _ in range(15):
        width = int(10 ** rng.uniform(1.6, 3.5))
        rank = int(rng.integers(2, max(3, width // 8)))
        sigma, delta = float(10 ** rng.uniform(-0.7, 0.5)), float(10 ** rng.uniform(-8, -3))
        event = acct.NoisyProjectionEvent.single(width, rank, sigma, out_width=1)
        ours = acct.epsilon_of(event, delta, accountant="moment").epsilon
        assert _exact_rank_one_delta(width, rank, sigma, ours) <= delta * (1 + 1e-6)
        assert ours <= acct.epsilon_of(acct.GaussianEvent(sigma), delta).epsilon * (1 + 1e-9)
        published = theorem5.one_shot(event, delta)
        sharper = theorem5.one_shot(event, delta, exact_profile=True)
        assert sharper <= published * (1 + 1e-9)
        assert _exact_rank_one_delta(width, rank, sigma, sharper) <= delta * (1 + 1e-6)
        if published > 0.05:
            assert ours <= published * 1.2


def test_figures_of_the_bound_stay() -> None:
    one = acct.NoisyProjectionEvent.single(2000, 16, 0.5, out_width=10)
    assert acct.epsilon_of(one, 1e-5, accountant="moment").epsilon == pytest.approx(0.865, abs=2e-3)
    assert theorem5.one_shot(one, 1e-5) == pytest.approx(1.588, abs=2e-3)
    many = acct.NoisyProjectionEvent.single(768, 8, 0.2, 0.01, out_width=768)
    assert theorem5.composed(many, 1000, 1e-5, accountant="rdp") == pytest.approx(6.43, abs=0.01)
    assert acct.epsilon_of(many.times(1000), 1e-5, accountant="moment").epsilon == pytest.approx(
        1.856, abs=1e-3
    )


def _simulated_moment(
    seed: int, repeats: int, width: int, rank: int, z: float, weights: list[float]
) -> tuple[float, float]:
    """Mean and standard error of exp(z * sum_j w_j |P u_j|^2) over real projections."""
    rng = np.random.default_rng(seed)
    values = np.empty(repeats)
    basis = np.linalg.qr(rng.normal(size=(width, len(weights))))[0]
    for index in range(repeats):
        frame = np.linalg.qr(rng.normal(size=(width, rank)))[0]
        values[index] = math.exp(z * float(np.sum(weights * np.sum((frame.T @ basis) ** 2, axis=0))))
    return float(np.mean(values)), float(np.std(values) / math.sqrt(repeats))


def test_simulated_moments_equal_the_bound_for_rank_one_and_stay_below_for_more() -> None:
    mean, error = _simulated_moment(1, 4000, 24, 4, 3.0, [1.0])
    bound = math.exp(log_kummer(2.0, 12.0, 3.0))
    assert abs(mean - bound) <= 4 * error
    spread, spread_error = _simulated_moment(2, 2000, 24, 4, 3.0, [0.4, 0.3, 0.2])
    assert spread - 4 * spread_error <= bound


def test_power_twin_a_bound_five_percent_too_small_is_caught() -> None:
    mean, error = _simulated_moment(1, 4000, 24, 4, 3.0, [1.0])
    assert mean - 4 * error > 0.95 * math.exp(log_kummer(2.0, 12.0, 3.0))
    assert mean + 4 * error < 1.05 * math.exp(log_kummer(2.0, 12.0, 3.0))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(16, 3000), st.floats(0.1, 0.9), st.floats(0.2, 20.0), st.floats(1e-4, 0.5), st.integers(2, 8)
)
def test_more_rank_more_rate_less_noise_cost_more(
    width: int, share: float, sigma: float, rate: float, order: int
) -> None:
    rank = max(1, int(width**share) - 1)
    base = _moment(acct.NoisyProjectionEvent.single(width, rank, sigma, rate), order)
    slack = 1 + 1e-8
    assert base <= _moment(acct.NoisyProjectionEvent.single(width, rank + 1, sigma, rate), order) * slack
    assert base <= _moment(acct.NoisyProjectionEvent.single(width, rank, sigma * 0.9, rate), order) * slack
    assert (
        base
        <= _moment(acct.NoisyProjectionEvent.single(width, rank, sigma, min(1.0, rate * 1.5)), order) * slack
    )
    assert base <= _moment(acct.NoisyProjectionEvent.single(width + 1, rank, sigma, rate), order) * 1e9
    assert base <= _moment(acct.PoissonGaussianEvent(sigma, rate), order) * slack
    assert (
        base
        <= _moment(
            acct.NoisyProjectionEvent.single(width, rank, sigma, rate), order, acct.Adjacency.REPLACE_ONE
        )
        * slack
    )


def test_interpolation_is_above_the_moment_between_integers() -> None:
    """The full-batch formula holds at every order; its interpolation between integers must not fall below it."""
    event = acct.NoisyProjectionEvent.single(256, 8, 0.7)
    for low in (1, 2, 5, 9):
        ends = [0.0 if a == 1 else _moment(event, float(a)) for a in (low, low + 1)]
        for share in (0.2, 0.5, 0.8):
            chord = (1 - share) * ends[0] + share * ends[1]
            assert chord >= _moment(event, low + share)


def test_full_rank_is_the_plain_gaussian() -> None:
    wide = acct.NoisyProjectionEvent.single(64, 64, 1.3, 0.05).times(50)
    plain = acct.PoissonGaussianEvent(1.3, 0.05).times(50)
    assert acct.epsilon_of(wide, 1e-5).epsilon == pytest.approx(
        acct.epsilon_of(plain, 1e-5).epsilon, rel=1e-9
    )


def test_an_unprojected_group_under_the_same_clip_takes_the_advantage() -> None:
    layer = acct.ProjectionGroup("layer", 768, 8, 2.0)
    head = acct.ProjectionGroup("head", None, None, 2.0)
    shared = acct.NoisyProjectionEvent((layer, head), 0.01)
    alone = acct.NoisyProjectionEvent((layer,), 0.01)
    assert _moment(alone, 8.0) == pytest.approx(1.2e-4, rel=0.2)
    assert _moment(shared, 8.0) == pytest.approx(75.2, rel=1e-2)
    own = acct.NoisyProjectionEvent((layer, acct.ProjectionGroup("head", None, None, 0.2)), 0.01, "separate")
    assert _moment(alone, 8.0) < _moment(own, 8.0) < 1e-3
    report = acct.epsilon_of(shared.times(100), 1e-5)
    plain = acct.epsilon_of(acct.PoissonGaussianEvent(0.5, 0.01).times(100), 1e-5)
    assert report.epsilon == pytest.approx(plain.epsilon, rel=1e-9)


def test_separate_clips_multiply_inside_one_sampling_coin() -> None:
    """Adding the groups' sampled moments would be wrong (too small); the product sits inside the binomial sum."""
    groups = tuple(acct.ProjectionGroup(f"g{i}", None, None, 0.5) for i in range(4))
    joint = acct.NoisyProjectionEvent(groups, 0.01, "separate")
    assert _moment(joint, 6.0) == pytest.approx(_moment(acct.PoissonGaussianEvent(1.0, 0.01), 6.0), rel=1e-9)
    summed = 4 * _moment(acct.PoissonGaussianEvent(2.0, 0.01), 6.0)
    assert summed < _moment(joint, 6.0)


def test_layers_of_different_width_take_the_worst() -> None:
    a, b = acct.ProjectionGroup("a", 768, 8, 3.0), acct.ProjectionGroup("b", 96, 8, 3.0)
    both = acct.NoisyProjectionEvent((a, b), 0.02)
    assert _moment(both, 5.0) == pytest.approx(_moment(acct.NoisyProjectionEvent((b,), 0.02), 5.0), rel=1e-12)
    weighted = acct.NoisyProjectionEvent((acct.ProjectionGroup("w", 768, 8, 1.0 / (0.5 * 0.4)),), 0.02)
    assert _moment(weighted, 5.0) == pytest.approx(
        _moment(acct.NoisyProjectionEvent.single(768, 8, 0.2, 0.02), 5.0)
    )


def test_mixed_histories_compose() -> None:
    parts = [
        (acct.NoisyProjectionEvent.single(768, 8, 0.3, 0.01), 500),
        (acct.PoissonGaussianEvent(2.0, 0.01), 500),
    ]
    both = acct.epsilon_of(parts, 1e-5).epsilon
    each = [acct.epsilon_of([part], 1e-5).epsilon for part in parts]
    assert max(each) < both < 2 * sum(each)
    assert both <= acct.epsilon_of(parts, 1e-5, accountant="moment").epsilon


@pytest.mark.parametrize("sigma", [0.01, 0.3, 10.0, 100.0])
@pytest.mark.parametrize(("width", "rank"), [(16, 1), (16, 16), (100_000, 1), (100_000, 50_000)])
def test_stable_over_the_whole_range(width: int, rank: int, sigma: float) -> None:
    for rate in (None, 0.01):
        event = acct.NoisyProjectionEvent.single(width, rank, sigma, rate)
        few, many = (
            acct.epsilon_of(event, 1e-5, accountant="rdp"),
            acct.epsilon_of(event.times(10**6), 1e-5, accountant="rdp"),
        )
        assert 0.0 <= few.epsilon <= many.epsilon < math.inf
