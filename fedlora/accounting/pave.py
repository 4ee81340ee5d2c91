"""PAVE specifications: intrinsic and certified privacy, corrected, and risk bounds.

"PAVE Specifications of Learnwares Yield Intrinsic Privacy-Preserving Capabilities". Theorem 3.5's regime is
conditional; Theorem 3.9's mechanism (noise in the low-rank space) is a real guarantee, but its Eq. 28, a sum over
layers of
*subsampled* terms, is false for sampling rates below 1: the layers share one batch. Clipping each of L layers to C with
noise sigma C is one subsampled Gaussian whose noise multiplier is sigma / sqrt(L).
"""

from __future__ import annotations

import math

from fedlora.accounting import _checks, rdp
from fedlora.accounting.conditional import PaveEvent
from fedlora.accounting.events import Event, PoissonGaussianEvent
from fedlora.accounting.reports import Adjacency


def gamma_from_bounds(smallest: float, largest: float, sensitivity: float) -> float:
    """Return Lemma 7.8's gamma = 2 L Delta / mu^2 for mu^2 I <= H H^T <= L^2 I and ||H - H'|| <= Delta (Eq. 26)."""
    mu = _checks.real("smallest", smallest, above=0.0)
    top = _checks.real("largest", largest, at_least=mu)
    return 2.0 * top * _checks.real("sensitivity", sensitivity, above=0.0) / (mu * mu)


def sensitivity_of_mean(bound: float, records: int) -> float:
    """Return Lemma 7.9's Delta = 2 G / n of an average of n matrices of norm at most G."""
    return 2.0 * _checks.real("bound", bound, above=0.0) / _checks.integer("records", records)


def order_two(event: PaveEvent, delta: float) -> float:
    """Return Theorem 3.5's epsilon, Eq. 25: sum of r k / 2 log(1 / (1 - gamma^2)) + log(1 / delta).

    Layers add by Lemma 7.12.
    """
    rho = sum(-0.5 * x.rank * x.dimension * math.log1p(-x.gamma * x.gamma) for x in event.layers)
    return rho - math.log(_checks.delta(delta))


def certified_event(noise_multiplier: float, layers: int, sample_rate: float, steps: int) -> Event:
    """Return what DP-S-PAVE (Algorithm 1) really is: one subsampled Gaussian for all layers together.

    Args:
      noise_multiplier: sigma, noise standard deviation / per-layer clipping norm, > 0.
      layers: L, each clipped to the same norm.
      sample_rate: Poisson rate.
      steps: T.
    """
    sigma = _checks.real("noise_multiplier", noise_multiplier, above=0.0)
    return PoissonGaussianEvent(sigma / math.sqrt(_checks.integer("layers", layers)), sample_rate).times(
        steps
    )


def claimed_epsilon(
    noise_multiplier: float, layers: int, sample_rate: float, steps: int, delta: float
) -> float:
    """Return Theorem 3.9's printed epsilon (Eqs. 28, 29): NOT a bound for sample_rate < 1; for comparison only."""
    event = PoissonGaussianEvent(noise_multiplier, sample_rate)
    moments = layers * steps * rdp.curve(event, Adjacency.REPLACE_ONE)
    return rdp.epsilon_from_moments_mironov(rdp.ORDERS, moments, _checks.delta(delta))[0]


def risk_bound(epsilon: float, delta: float) -> float:
    """Return Theorems 4.2 and 4.3's bound on disclosure or amplification advantage: min(1, e^eps - 1 + delta)."""
    value = _checks.real("epsilon", epsilon, at_least=0.0)
    return min(1.0, (math.expm1(value) if value < 1.0 else math.inf) + _checks.delta(delta))


def risk_bound_tight(epsilon: float, delta: float) -> float:
    """Return the total-variation bound (e^eps - 1 + 2 delta) / (e^eps + 1), never above `risk_bound`.

    Lemma 4.1's step g_D(u) <= e^eps g_D'(u) + delta, used in both directions, bounds the distance of the two
    conditional laws by this value for every u.
    """
    value = _checks.real("epsilon", epsilon, at_least=0.0)
    half = math.tanh(value / 2.0)
    return min(1.0, half + 2.0 * _checks.delta(delta) / (math.exp(min(value, 700.0)) + 1.0))


def gain_increase(risk: float) -> float:
    """Return Corollary 7.23's bound on the growth of the optimal guess: half the risk."""
    return 0.5 * _checks.real("risk", risk, at_least=0.0)
