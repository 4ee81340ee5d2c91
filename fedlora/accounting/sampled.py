"""Where the privacy loss of a Poisson-sampled Gaussian passes a threshold, for whole vectors of thresholds.

Conventions of dp_accounting 0.6: sensitivity 1, the loss falls with the output x. REMOVE compares (1-q) N(0) + q N(-1)
with N(0), ADD compares N(0) with (1-q) N(0) + q N(1), REPLACE compares (1-q) N(0) + q N(-1) with (1-q) N(0) + q N(1).
"""

from __future__ import annotations

import math

import numpy as np

from fedlora.accounting.hypergeometric import FloatArray


def unsampled(threshold: FloatArray, rate: float) -> FloatArray:
    """Return log((e^t - (1 - q)) / q), the loss without sampling that gives t with it; -infinity below log(1 - q)."""
    if rate == 1.0:
        return threshold
    with np.errstate(divide="ignore", invalid="ignore"):
        near = np.log(np.maximum(np.expm1(np.minimum(threshold, 1.0)) + rate, 0.0))
        far = threshold + np.log1p((rate - 1.0) * np.exp(-np.maximum(threshold, 1.0)))
    return np.asarray(np.where(threshold > 1.0, far, near) - math.log(rate))


def cutoff(threshold: FloatArray, sigma: float, rate: float, kind: str) -> FloatArray:
    """Return the largest x at which the loss is at least the threshold, infinite where it always or never is.

    Args:
      threshold: any real numbers.
      sigma: noise standard deviation over sensitivity.
      rate: q in (0, 1].
      kind: REMOVE, ADD or REPLACE.
    """
    if kind == "REMOVE":
        return np.asarray(-0.5 - sigma**2 * unsampled(threshold, rate))
    if kind == "ADD":
        return np.asarray(0.5 + sigma**2 * unsampled(-threshold, rate))
    half = 0.5 * np.abs(threshold)
    if rate == 1.0:
        return np.asarray(-0.5 * sigma**2 * threshold)
    # with y = e^(x / sigma^2 + t / 2): 1 / y - y = 2 sinh(t / 2) e^(1 / (2 sigma^2)) (1 - q) / q
    with np.errstate(divide="ignore"):
        log_side = np.log(-np.expm1(-2.0 * half)) + half - math.log(2.0)
    log_side = log_side + 0.5 / sigma**2 + math.log1p(-rate) - math.log(rate)
    root = np.logaddexp(0.5 * np.logaddexp(0.0, 2.0 * log_side), log_side)
    return np.asarray(sigma**2 * (-np.sign(threshold) * root - 0.5 * threshold))


__all__ = ["cutoff", "unsampled"]
