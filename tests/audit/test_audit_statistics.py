"""Lower bounds on epsilon: they hold for mechanisms of known privacy, and they find violations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fedlora.audit.statistics import (
    best_one_run_bound,
    clopper_pearson,
    epsilon_from_counts,
    epsilon_one_run,
    one_run_p_value,
    roc_figures,
)
from fedlora.errors import PrivacyParameterError


def test_auc_counts_pairs():
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 8, 60).astype(float)
    truth = rng.random(60) < 0.5
    members, others = scores[truth], scores[~truth]
    pairs = [(m > o) + 0.5 * (m == o) for m in members for o in others]
    assert roc_figures(scores, truth).auc == pytest.approx(np.mean(pairs), abs=1e-12)


def test_tpr_never_exceeds_its_false_positive_rate_for_useless_scores():
    figures = roc_figures(np.zeros(200), np.arange(200) % 2 == 0)
    assert (figures.auc, figures.tpr_at_1, figures.tpr_at_10) == (0.5, 0.0, 0.0)
    perfect = roc_figures(np.arange(200.0), np.arange(200) >= 100)
    assert (perfect.auc, perfect.tpr_at_1) == (1.0, 1.0)


@pytest.mark.parametrize("scores", [[1.0, math.nan], [1.0, math.inf]])
def test_scores_must_be_finite(scores):
    with pytest.raises(PrivacyParameterError):
        roc_figures(scores, [True, False])


def test_one_class_alone_is_refused():
    with pytest.raises(PrivacyParameterError):
        roc_figures([1.0, 2.0], [True, True])


@pytest.mark.parametrize(("rate", "trials"), [(0.01, 200), (0.5, 40), (0.97, 300)])
def test_clopper_pearson_covers(rate, trials):
    rng = np.random.default_rng(1)
    draws = rng.binomial(trials, rate, 4000)
    bounds = {k: clopper_pearson(int(k), trials, 0.95) for k in set(draws)}
    assert np.mean([bounds[k][0] <= rate for k in draws]) >= 0.945
    assert np.mean([bounds[k][1] >= rate for k in draws]) >= 0.945


def randomized_response(rng: np.random.Generator, epsilon: float, trials: int) -> tuple[int, int]:
    rate = math.exp(epsilon) / (1 + math.exp(epsilon))
    return int(rng.binomial(trials, rate)), int(rng.binomial(trials, 1 - rate))


def test_bound_from_counts_holds_and_is_tight():
    rng = np.random.default_rng(2)
    bounds = []
    for _ in range(400):
        tp, fp = randomized_response(rng, 1.0, 2000)
        bounds.append(epsilon_from_counts(tp, 2000, fp, 2000, delta=0.0, confidence=0.95))
    assert np.mean(np.array(bounds) <= 1.0) >= 0.94
    assert np.median(bounds) > 0.8


def test_bound_from_counts_finds_a_violation():
    rng = np.random.default_rng(3)
    tp, fp = randomized_response(rng, 2.0, 5000)
    assert epsilon_from_counts(tp, 5000, fp, 5000, delta=1e-5) > 1.5


def test_bound_is_zero_when_nothing_is_shown():
    assert epsilon_from_counts(50, 100, 50, 100, delta=1e-5) == 0.0
    assert epsilon_one_run(1000, 0, 0, delta=0.0) == 0.0
    assert epsilon_one_run(1000, 500, 250, delta=0.0) == 0.0


def test_one_run_bound_holds_for_randomized_response():
    rng = np.random.default_rng(4)
    epsilon = 1.5
    rate = math.exp(epsilon) / (1 + math.exp(epsilon))
    bounds = [
        epsilon_one_run(1000, 1000, int(rng.binomial(1000, rate)), delta=0.0, confidence=0.95)
        for _ in range(200)
    ]
    assert np.mean(np.array(bounds) <= epsilon) >= 0.93
    assert np.median(bounds) > 1.3


def test_one_run_delta_costs_something():
    assert epsilon_one_run(1000, 100, 99, delta=1e-5) < epsilon_one_run(1000, 100, 99, delta=0.0)
    assert epsilon_one_run(1000, 100, 99, delta=1e-2) == 0.0


def test_one_run_p_value_equals_the_tail_without_delta():
    assert one_run_p_value(50, 20, 15, 0.7, 0.0) == pytest.approx(
        stats.binom.sf(14, 20, 1 / (1 + math.exp(-0.7))), rel=1e-12
    )


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
def test_one_run_bound_stays_below_a_gaussian_mechanism(sigma):
    """Sum of orthogonal canaries with noise: every score is N(member, sigma^2)."""
    from scipy.optimize import brentq

    delta = 1e-5

    def excess(eps):
        upper = stats.norm.sf(eps * sigma - 0.5 / sigma)
        return upper - math.exp(eps) * stats.norm.sf(eps * sigma + 0.5 / sigma) - delta

    exact = brentq(excess, 0, 80)
    rng = np.random.default_rng(5)
    bounds = []
    for _ in range(25):
        truth = rng.random(2000) < 0.5
        bounds.append(best_one_run_bound(truth + sigma * rng.standard_normal(2000), truth, delta=delta)[0])
    assert max(bounds) <= exact
    assert np.median(bounds) > 0.2 * exact


def test_counts_that_contradict_are_refused():
    with pytest.raises(PrivacyParameterError):
        epsilon_one_run(10, 5, 6, delta=0.0)
    with pytest.raises(PrivacyParameterError):
        clopper_pearson(5, 4, 0.95)
    with pytest.raises(PrivacyParameterError):
        epsilon_from_counts(1, 2, 1, 2, delta=1.0)
