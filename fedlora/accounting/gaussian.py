"""The Gaussian mechanism in closed form.

Exact privacy profile: Balle and Wang, "Improving the Gaussian Mechanism for Differential Privacy: Analytical
Calibration and Optimal Denoising", ICML 2018, Theorem 8.
"""

from __future__ import annotations

import math

from scipy.special import log_ndtr

from fedlora.accounting import _checks


def log_delta(epsilon: float, mu: float) -> float:
    """Return the logarithm of the Gaussian mechanism's exact delta.

    Args:
      epsilon: >= 0.
      mu: sensitivity over noise standard deviation, >= 0.

    Returns:
      log delta(epsilon), -inf at mu = 0.
    """
    if mu == 0.0:
        return -math.inf
    first = float(log_ndtr(mu / 2.0 - epsilon / mu))
    second = epsilon + float(log_ndtr(-mu / 2.0 - epsilon / mu))
    if not second < first:
        return -math.inf
    return first + math.log1p(-math.exp(second - first))


def delta_of_gaussian(epsilon: float, mu: float) -> float:
    """Return the exact delta of a Gaussian mechanism with `mu` = sensitivity / noise standard deviation."""
    return math.exp(log_delta(epsilon, mu))


def epsilon_of_gaussian(delta: float, mu: float) -> float:
    """Return the exact epsilon of a Gaussian mechanism, rounded up.

    Args:
      delta: in (0, 1).
      mu: sensitivity / noise standard deviation, >= 0, may be infinity.

    Returns:
      The smallest epsilon >= 0 with delta(epsilon) <= delta, from above within 1e-12 relative.
    """
    target = math.log(_checks.delta(delta))
    if math.isinf(mu) or math.isnan(mu):
        return math.inf
    if mu == 0.0 or log_delta(0.0, mu) <= target:
        return 0.0
    low, high = 0.0, 1.0
    while log_delta(high, mu) > target:
        low, high = high, 2.0 * high
        if math.isinf(high):
            return math.inf
    while high - low > 1e-12 * high:
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        if log_delta(middle, mu) > target:
            low = middle
        else:
            high = middle
    return high * (1.0 + 1e-12)
