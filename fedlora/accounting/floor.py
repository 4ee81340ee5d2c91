"""Cheap lower bounds on the epsilon of composed (sampled) Gaussians, to skip distributions that cannot win.

Every test statistic gives one: epsilon >= log((P(S) - delta) / Q(S)). Two statistics are used: the sum of the noised
sums (best for large noise) and the number of steps above one half (best for small noise). They decide only what is not
computed; no reported figure depends on them.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import betainc, gammaln, log_ndtr, logsumexp, ndtr

from fedlora.accounting import gaussian, pld
from fedlora.accounting.hypergeometric import FloatArray
from fedlora.accounting.reports import Adjacency


def epsilon_floor(parts: pld.Parts, delta: float, adjacency: Adjacency) -> float:
    """Return a lower bound on the epsilon of Gaussian events; 0 where nothing is known.

    Args:
      parts: Gaussian events with counts (projections count as the Gaussian that they post-process).
      delta: in (0, 1).
      adjacency: neighbouring relation.
    """
    split = pld.gaussian_parts(parts)
    if split is None:
        return 0.0
    gain = 2.0 if adjacency is Adjacency.REPLACE_ONE else 1.0
    best = gaussian.epsilon_of_gaussian(delta, gain * math.sqrt(split[0])) if split[0] > 0.0 else 0.0
    for sigma, rate, count in split[1]:
        best = max(
            best, _sum(sigma, rate, count, delta, adjacency), _count(sigma, rate, count, delta, adjacency)
        )
    return best


def _read(log_p: FloatArray, log_q: FloatArray, delta: float) -> float:
    """The largest log((P - delta) / Q) over a family of tests."""
    p = np.exp(np.minimum(log_p, 0.0)) - delta
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.where(p > 0.0, np.log(np.maximum(p, 1e-300)) - log_q, -np.inf)
    values = values[np.isfinite(values)]
    return max(0.0, float(np.max(values))) if values.size else 0.0


def _sum(sigma: float, rate: float, count: int, delta: float, adjacency: Adjacency) -> float:
    """Test sum > s: a binomial mixture of Gaussians of variance count sigma^2."""
    spread = math.sqrt(count * rate * (1.0 - rate))
    low = max(0.0, math.floor(count * rate - 12.0 * spread - 1.0))
    high = min(float(count), math.ceil(count * rate + 12.0 * spread + 40.0))
    k = np.unique(np.round(np.linspace(low, high, min(401, int(high - low) + 1))))
    exact = k.size == int(high - low) + 1
    weights = gammaln(count + 1.0) - gammaln(k + 1.0) - gammaln(count - k + 1.0)
    weights = weights + k * math.log(rate) + (count - k) * math.log1p(-rate)
    if not exact:
        weights = weights - logsumexp(weights)
    deviation = sigma * math.sqrt(count)
    centre, width = count * rate, math.hypot(deviation, spread)
    s = centre + width * np.linspace(-2.0, 9.0, 120)
    log_p = logsumexp(weights[:, None] + log_ndtr((k[:, None] - s) / deviation), axis=0)
    if adjacency is Adjacency.REPLACE_ONE:
        log_q = logsumexp(weights[:, None] + log_ndtr((-k[:, None] - s) / deviation), axis=0)
    else:
        log_q = log_ndtr(-s / deviation)
    return _read(np.asarray(log_p), np.asarray(log_q), delta)


def _count(sigma: float, rate: float, count: int, delta: float, adjacency: Adjacency) -> float:
    """Test at least k steps above 1/2: binomial tails, the one in the denominator by Chernoff's bound."""
    quiet, loud = float(ndtr(-0.5 / sigma)), float(ndtr(0.5 / sigma))
    p = (1.0 - rate) * quiet + rate * loud
    q = quiet
    if adjacency is Adjacency.REPLACE_ONE:
        q = (1.0 - rate) * quiet + rate * float(ndtr(-1.5 / sigma))
    spread = math.sqrt(count * p * (1.0 - p))
    points = np.round(count * p + np.linspace(-7.0, 9.0, 60) * (spread + 0.5))
    k = np.unique(np.clip(points, 1.0, float(count)))
    log_p = np.log(np.maximum(betainc(k, count - k + 1.0, p), 1e-300))
    share = np.clip(k / count, 1e-300, 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        rest = np.where(share < 1.0, (1.0 - share) * (np.log1p(-share) - math.log1p(-q)), 0.0)
        chernoff = -count * (share * (np.log(share) - math.log(max(q, 1e-300))) + rest)
    return _read(log_p, np.where(share > q, chernoff, 0.0), delta)


__all__ = ["epsilon_floor"]
