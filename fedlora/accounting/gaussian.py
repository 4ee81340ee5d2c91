"""The Gaussian mechanism in closed form.

Exact privacy profile: Balle and Wang, "Improving the Gaussian Mechanism for Differential Privacy: Analytical
Calibration and Optimal Denoising", ICML 2018, Theorem 8.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.special import erfcx, log_ndtr

from fedlora.accounting import _checks
from fedlora.accounting.hypergeometric import FloatArray

_NEAR = 0.1
_FAR = 30.0
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
_ROUNDING = 1.0e-12
"""Bound on the relative rounding error of delta; it is put on the private side."""


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
    s = epsilon / mu - mu / 2.0
    if mu < _NEAR or s > 0.0:
        return _log_delta_scaled(s, mu)
    first, second = float(log_ndtr(-s)), epsilon + float(log_ndtr(-s - mu))
    return first + math.log1p(-math.exp(second - first))


def _log_delta_scaled(s: float, mu: float) -> float:
    """Log delta without the cancellation of the profile's two terms; s = epsilon / mu - mu / 2.

    With Mills's ratio R(t) = Phi(-t) / phi(t) the terms are phi(s) R(s) and phi(s) R(s + mu), because
    epsilon - (s + mu)^2 / 2 = -s^2 / 2; and R(s) - R(s + mu) is the integral of -R'(t) = 1 - t R(t) > 0.
    """
    if not s < 1.0e150:
        return -math.inf
    if s > 1.0e4:
        difference = mu / s / (s + mu)  # above it by 3 / s^2, relative
    elif mu < _NEAR:
        t = s + 0.5 * mu * (1.0 + _NODES)
        difference = 0.5 * mu * float(_WEIGHTS @ (_far_slope(t) if s > _FAR else 1.0 - t * _mills(t)))
    else:
        difference = _mills(s) - _mills(s + mu)
    return math.log(difference) - 0.5 * s * s - 0.5 * math.log(2.0 * math.pi)


def _mills(t: Any) -> Any:
    """R(t) = Phi(-t) / phi(t), of a number or an array."""
    return math.sqrt(math.pi / 2.0) * erfcx(t / math.sqrt(2.0))


def _far_slope(t: FloatArray) -> FloatArray:
    """1 - t R(t) by its asymptotic series 1/t^2 - 3/t^4 + 15/t^6 - ..., for t >= 30."""
    total, term = np.zeros_like(t), np.ones_like(t)
    for k in range(9):
        term = -(2.0 * k + 1.0) / t**2 * term
        total = total - term
    return total


def delta_of_gaussian(epsilon: float, mu: float) -> float:
    """Return the exact delta of a Gaussian mechanism with `mu` = sensitivity / noise standard deviation, rounded up."""
    return min(1.0, math.exp(log_delta(epsilon, mu) + _ROUNDING))


def epsilon_of_gaussian(delta: float, mu: float) -> float:
    """Return the exact epsilon of a Gaussian mechanism, rounded up.

    Args:
      delta: in (0, 1).
      mu: sensitivity / noise standard deviation, >= 0, may be infinity.

    Returns:
      The smallest epsilon >= 0 with delta(epsilon) <= delta, from above within 1e-12 relative.
    """
    target = math.log(_checks.delta(delta)) - _ROUNDING
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
