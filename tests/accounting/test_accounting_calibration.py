"""Calibration: on the private side, re-checked, extreme targets, steps and rates."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedlora.accounting as acct
from fedlora.errors import AccountingError, PrivacyParameterError


@pytest.mark.parametrize(
    ("target", "records", "batch", "rounds", "epochs", "delta", "tool"),
    [
        (3.0, 101, 10, 7, 3, 1e-5, "best"),
        (8.0, 57, 8, 5, 2, 1e-4, "rdp"),
        (1.0, 999, 33, 4, 1, 1e-6, "rdp"),
    ],
)
def test_h17_noise_search_never_overshoots_the_target(
    target: float, records: int, batch: int, rounds: int, epochs: int, delta: float, tool: str
) -> None:
    per_round = epochs * math.ceil(records / batch)
    rate = batch / records

    def run(sigma: float) -> acct.Event:
        return acct.PoissonGaussianEvent(sigma, rate).times(rounds * per_round)

    sigma = acct.calibrate_noise_multiplier(run, target, delta, tolerance=2e-3, accountant_name=tool)
    assert acct.epsilon_of(run(sigma), delta, accountant=tool).epsilon <= target
    assert acct.epsilon_of(run(sigma * 0.98), delta, accountant=tool).epsilon > target
    step = acct.PoissonGaussianEvent(sigma, rate)
    for took_part in (1, rounds // 2, rounds):  # clients that took part in different numbers of rounds
        assert acct.within_budget(step.times(took_part * per_round), target, delta)
    if rounds == 7:
        allowed = acct.max_steps_within(step, target, delta)
        assert allowed >= rounds * per_round
        assert not acct.within_budget(step.times(allowed + 1), target, delta)
        spent = step.times(allowed - 1)
        assert (
            acct.max_steps_within(step, target, delta, spent=spent) == 1
        )  # the step that would pass is not taken


@pytest.mark.parametrize(("target", "delta"), [(0.01, 1e-12), (1000.0, 1e-12), (0.01, 1e-3), (1000.0, 1e-5)])
def test_extreme_targets_are_met_by_full_batches(target: float, delta: float) -> None:
    sigma = acct.calibrate_noise_multiplier(lambda s: acct.GaussianEvent(s).times(100), target, delta)
    assert acct.epsilon_of(acct.GaussianEvent(sigma).times(100), delta).epsilon <= target
    assert acct.epsilon_of(acct.GaussianEvent(sigma * 0.999).times(100), delta).epsilon > target


@pytest.mark.long
@pytest.mark.parametrize(("target", "delta"), [(0.01, 1e-12), (1000.0, 1e-12)])
@pytest.mark.parametrize("adjacency", ["add_or_remove", "replace_one"])
def test_extreme_targets_are_met_under_sampling(target: float, delta: float, adjacency: str) -> None:
    for make in (
        lambda s: acct.PoissonGaussianEvent(s, 0.01).times(1000),
        lambda s: acct.NoisyProjectionEvent.single(768, 8, s, 0.01).times(1000),
    ):
        sigma = acct.calibrate_noise_multiplier(make, target, delta, adjacency=adjacency)
        assert acct.epsilon_of(make(sigma), delta, adjacency=adjacency).epsilon <= target


@settings(max_examples=12, deadline=None)
@given(st.floats(-2, 3), st.floats(1, 12), st.sampled_from(["add_or_remove", "replace_one"]))
def test_any_target_is_met_and_nearly_used(log_target: float, digits: float, adjacency: str) -> None:
    target, delta = 10.0**log_target, 10.0**-digits
    sigma = acct.calibrate_noise_multiplier(acct.GaussianEvent, target, delta, adjacency=adjacency)
    assert (
        target * 0.99
        <= acct.epsilon_of(acct.GaussianEvent(sigma), delta, adjacency=adjacency).epsilon
        <= target
    )


def test_projection_is_calibrated_below_the_gaussian() -> None:
    def run(sigma: float) -> acct.Event:
        return acct.NoisyProjectionEvent.single(768, 8, sigma, 0.02).times(200)

    sigma = acct.calibrate_noise_multiplier(run, 1.0, 1e-5, tolerance=2e-2, accountant_name="moment")
    assert acct.epsilon_of(run(sigma), 1e-5, accountant="moment").epsilon <= 1.0
    plain = acct.calibrate_noise_multiplier(
        lambda s: acct.PoissonGaussianEvent(s, 0.02).times(200),
        1.0,
        1e-5,
        accountant_name="rdp",
        tolerance=1e-3,
    )
    assert sigma < 0.6 * plain


def test_rates_and_impossible_targets() -> None:
    rate = acct.max_sample_rate(
        lambda q: acct.PoissonGaussianEvent(1.0, q).times(10), 2.0, 1e-5, tolerance=0.3
    )
    assert acct.within_budget(acct.PoissonGaussianEvent(1.0, rate).times(10), 2.0, 1e-5)
    assert not acct.within_budget(acct.PoissonGaussianEvent(1.0, rate * 1.4).times(10), 2.0, 1e-5)
    assert acct.max_sample_rate(lambda q: acct.PoissonGaussianEvent(50.0, q), 8.0, 1e-5) == 1.0
    assert acct.max_sample_rate(lambda q: acct.NonPrivateEvent(), 8.0, 1e-5) == 0.0
    assert acct.max_steps_within(acct.GaussianEvent(0.1), 1.0, 1e-5) == 0
    assert acct.max_steps_within(acct.GaussianEvent(100.0), 1.0, 1e-5, at_most=5) == 5
    with pytest.raises(AccountingError):
        acct.calibrate_noise_multiplier(lambda _: acct.NonPrivateEvent(), 1.0, 1e-5)
    with pytest.raises(AccountingError):
        acct.solve_parameter(lambda _: False, 1.0, 2.0)
    with pytest.raises(PrivacyParameterError):
        acct.calibrate_noise_multiplier(acct.GaussianEvent, 0.0, 1e-5)


def test_solving_returns_the_safe_side() -> None:
    assert acct.solve_parameter(lambda x: x <= 0.3, 1e-6, 1.0) <= 0.3
    assert acct.solve_parameter(lambda x: x >= 2.0, 100.0, 0.1) >= 2.0
    assert acct.solve_parameter(lambda _: True, 1.0, 2.0) == 2.0


@pytest.mark.parametrize(
    ("target", "delta", "rate", "steps"),
    [(0.01, 0.1, 0.5, 100), (1000.0, 0.1, 0.01, 10), (0.01, 1e-5, 1e-6, 1), (1000.0, 0.1, 0.0105, 10)],
)
def test_a_delta_near_the_total_variation_needs_few_evaluations(
    monkeypatch: pytest.MonkeyPatch, target: float, delta: float, rate: float, steps: int
) -> None:
    """There epsilon jumps to 0 and has no slope; the search must neither crawl nor give up accuracy."""
    from fedlora.accounting import accountant

    def make(sigma: float) -> acct.Event:
        return acct.PoissonGaussianEvent(sigma, rate).times(steps)

    calls = {"full": 0, "coarse": 0}
    real = accountant.epsilon_of

    def counted(*args: object, **terms: float) -> acct.EpsilonReport:
        calls["full" if terms.get("coarse", 1.0) == 1.0 else "coarse"] += 1
        return real(*args, **terms)  # type: ignore[arg-type]

    monkeypatch.setattr(accountant, "epsilon_of", counted)
    sigma = acct.calibrate_noise_multiplier(make, target, delta)
    assert calls["full"] <= 4
    assert calls["coarse"] <= 40
    assert acct.epsilon_of(make(sigma), delta).epsilon <= target
    if sigma > 1e-6:
        assert acct.epsilon_of(make(sigma * 0.999), delta).epsilon > target


@pytest.mark.parametrize("adjacency", ["add_or_remove", "replace_one"])
def test_a_guarantee_that_sampling_alone_meets_carries_a_warning(adjacency: str) -> None:
    """Delta at or above the chance of being used at all: correct with any noise, and worth nothing to who is used."""
    run = acct.PoissonGaussianEvent(1e-6, 0.01).times(10)
    chance = 1 - 0.99**10
    for delta, warned in (
        (0.1, True),
        (chance * (1 + 1e-9), True),
        (chance * (1 - 1e-9), False),
        (1e-5, False),
    ):
        report = acct.epsilon_of(run, delta, adjacency=adjacency, accountant="moment")
        assert any(text.startswith("warning:") for text in report.conditions) is warned
        assert (report.epsilon == 0.0) is warned
    both = [(acct.PoissonGaussianEvent(1.0, 0.01), 1), (acct.GaussianEvent(1e3), 1)]
    assert not any("warning" in text for text in acct.epsilon_of(both, 0.1, adjacency=adjacency).conditions)
