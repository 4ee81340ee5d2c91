"""Upper bounds on log 1F1(a; b; z), the log-moment of a Beta variable, in the log domain.

E exp(z X) = 1F1(a; b; z) for X ~ Beta(a, b - a). The Kummer series has positive terms only, so that a partial sum plus
a geometric bound on the rest is an upper bound; quadrature around the mode can fall below the value. For very large z:
1F1(a; b; z) = e^z E exp(-z Y), Y ~ Beta(b - a, a), and (1 - y)^(a-1) <= 1 for a >= 1 gives
1F1(a; b; z) <= e^z z^-(b-a) Gamma(b) / Gamma(a).
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

FloatArray = npt.NDArray[np.float64]
_SERIES_LIMIT = 2.0e6
_MARGIN = 1.0e-9


@functools.lru_cache(maxsize=16)
def _coefficients(a: float, b: float, size: int) -> FloatArray:
    """Log of (a)_n / ((b)_n n!) for n = 0..size-1; rising factorials by exact ratios near 0."""
    n = np.arange(size, dtype=np.float64)
    values = (gammaln(a + n) - gammaln(a)) - (gammaln(b + n) - gammaln(b)) - gammaln(n + 1.0)
    head = min(size - 1, 4096)
    steps = np.log((a + n[:head]) / ((b + n[:head]) * (n[:head] + 1.0)))
    values[1 : head + 1] = np.cumsum(steps)
    values[0] = 0.0
    values.setflags(write=False)
    return np.asarray(values)


def _window(a: float, b: float, z: float) -> tuple[int, int]:
    """First and last index of the terms around the mode of t_n, n >= 1; the mode solves (a+n) z = (b+n)(n+1)."""
    last = int(z + 14.0 * math.sqrt(z + 1.0)) + 80
    linear = z - b - 1.0
    mode = max(1.0, 0.5 * (linear + math.sqrt(max(0.0, linear * linear + 4.0 * (a * z - b)))))
    curvature = 1.0 / (mode + 1.0) + 1.0 / (b + mode) - 1.0 / (a + mode)
    if not curvature > 0.0:
        return 1, last
    reach = 11.0 * math.sqrt(1.0 / curvature) + 80.0
    return max(1, int(mode - reach)), min(last, int(mode + reach) + 1)


def _series(a: float, b: float, z: float) -> float:
    """Sum the terms of a window; from `head` on they rise to the mode and fall after it, which bounds what is left out.

    The ratio of neighbouring terms falls with n as soon as n^2 + 2 a n >= b (1 - a) - a: at once for a >= 1, from
    sqrt(b) on for rank 1, whose first terms are summed one by one.
    """
    first, last = _window(a, b, z)
    head = 0 if a >= 1.0 else int(math.sqrt(b)) + 2
    first = 1 if first <= head else first
    size = 1 << max(10, (last + 1).bit_length())
    table = _coefficients(a, b, size)
    log_z = math.log(z)
    while True:
        logs = table[first : last + 1] + np.arange(first, last + 1) * log_z
        peak = float(np.max(logs))
        body = float(np.sum(np.exp(logs - peak)))
        ratio = (a + last) * z / ((b + last) * (last + 1.0))
        above = math.exp(float(logs[-1]) - peak) * ratio / (1.0 - ratio) if ratio < 1.0 else math.inf
        below = (first - 1) * math.exp(float(logs[0]) - peak)
        if first > 1 and head > 0:
            start = table[1 : head + 1] + np.arange(1, head + 1) * log_z
            body += float(np.sum(np.exp(np.minimum(start - peak, 700.0))))
            below = below if float(start[-1]) <= float(logs[0]) else math.inf
        if above + below <= 1e-11 * body or (first == 1 and last > z):
            break
        first, last = 1, int(z + 14.0 * math.sqrt(z + 1.0)) + 80
        table = _coefficients(a, b, 1 << max(10, (last + 1).bit_length()))
    total = peak + math.log(body + above + below)
    return total if total > 40.0 else math.log1p(math.exp(total))


def log_kummer(a: float, b: float, z: float) -> float:
    """Return an upper bound on log 1F1(a; b; z), tight to 1e-9 relative while z <= 2e6.

    Args:
      a: > 0, half the rank.
      b: >= a, half the width.
      z: >= 0.

    Returns:
      A value in [log 1F1, z]; z itself when b == a.
    """
    if z == 0.0:
        return 0.0
    if b <= a or not math.isfinite(z):
        return z
    if z <= _SERIES_LIMIT:
        return min(_series(a, b, z) * (1.0 + _MARGIN), z)
    return min(z, _large(a, b, z))


def _large(a: float, b: float, z: float) -> float:
    if a < 1.0:
        return _half_rank(b, z)
    value = z + float(gammaln(b)) - float(gammaln(a)) - (b - a) * math.log(z)
    return value + _MARGIN * z


def _half_rank(b: float, z: float) -> float:
    """Rank 1: a + 1 in place of a, since 1F1 grows with a."""
    if b <= 1.5:
        return z
    return z + float(gammaln(b)) - float(gammaln(1.5)) - (b - 1.5) * math.log(z) + _MARGIN * z


def log_kummer_many(a: float, b: float, z: FloatArray) -> FloatArray:
    """Return `log_kummer` for each entry of z."""
    return np.array([log_kummer(a, b, float(value)) for value in z], dtype=np.float64)
