"""Renyi curves of every event, as log-moments, and their conversion to (epsilon, delta).

The moment of order a is G(a) = (a - 1) D_a; it adds up under adaptive composition, is convex in a and vanishes at
a = 1. Where a formula holds at integer orders only, G is interpolated linearly between integers (an upper bound by
convexity; interpolating D_a itself would not be one).
"""

from __future__ import annotations

import functools
import math

import numpy as np
from scipy.special import gammaln, gammasgn, log_ndtr

from fedlora.accounting import hypergeometric as hyper
from fedlora.accounting.conditional import PaveEvent, SketchEvent
from fedlora.accounting.events import (
    Event,
    GaussianEvent,
    NoisyProjectionEvent,
    NonPrivateEvent,
    PoissonGaussianEvent,
    ProjectionGroup,
)
from fedlora.accounting.hypergeometric import FloatArray
from fedlora.accounting.reports import Adjacency
from fedlora.errors import UnsupportedEventError

_WORK = 1.0e7
_MAX_INTEGER_ORDER = 20_000


def _default_orders() -> FloatArray:
    fine = 1.0 + np.concatenate(
        [[0.002, 0.005, 0.01, 0.02, 0.05], np.arange(0.1, 4.0, 0.1), np.arange(4.0, 12.0, 0.25)]
    )
    whole = np.arange(13.0, 129.0)
    wide = np.unique(np.round(np.geomspace(130.0, _MAX_INTEGER_ORDER, 120)))
    return np.unique(np.concatenate([fine, whole, wide, [3e4, 1e5, 3e5, 1e6]]))


ORDERS: FloatArray = _default_orders()
ORDERS.setflags(write=False)


def _gain(adjacency: Adjacency) -> float:
    """Squared sensitivity in units of the squared clipping norm."""
    return 4.0 if adjacency is Adjacency.REPLACE_ONE else 1.0


def gaussian_moment(orders: FloatArray, mu_squared: float) -> FloatArray:
    """Return G of the Gaussian mechanism: a (a - 1) mu^2 / 2, mu = sensitivity / noise standard deviation."""
    return orders * (orders - 1.0) * (mu_squared / 2.0)


def poisson_moment(order: int, rate: float, log_factors: FloatArray) -> float:
    """Return G at one integer order of a Poisson-sampled mechanism.

    log sum_k C(a, k) (1 - q)^(a-k) q^k F_k, computed as log1p(sum_k w_k (F_k - 1)) so that small values keep their
    digits. Source: Mironov, Talwar and Zhang, "Renyi Differential Privacy of the Sampled Gaussian Mechanism",
    arXiv:1908.10530v1, Section 3.3.

    Args:
      order: a >= 2.
      rate: q in (0, 1].
      log_factors: (>= a + 1,), log F_k for k = 0, 1, ...; F_0 = F_1 = 1.
    """
    return float(poisson_moments(np.array([float(order)]), rate, log_factors)[0])


def poisson_moments(orders: FloatArray, rate: float, log_factors: FloatArray) -> FloatArray:
    """Return `poisson_moment` at several integer orders.

    Args:
      orders: integers >= 2.
      rate: q in (0, 1].
      log_factors: (>= largest order + 1,), as in `poisson_moment`.
    """
    whole = orders.astype(np.int64)
    if rate == 1.0:
        return np.asarray(log_factors[whole])
    last = int(whole.max())
    k = np.arange(last + 1, dtype=np.float64)
    factorial, factors = _log_factorials(last + 1), log_factors[: last + 1]
    with np.errstate(divide="ignore"):
        excess = np.where(factors > 30.0, factors, np.log(np.expm1(np.minimum(factors, 30.0))))
    tilted = excess + k * (math.log(rate) - math.log1p(-rate)) - factorial[: last + 1]
    totals = np.empty(whole.size)
    for index, a in enumerate(whole.tolist()):
        terms = tilted[2 : a + 1] - factorial[a - 2 :: -1]
        peak = float(terms.max())
        total = peak + math.log(float(np.exp(terms - peak).sum())) if peak > -math.inf else -math.inf
        total += float(factorial[a]) + a * math.log1p(-rate)
        totals[index] = total if total > 40.0 else math.log1p(math.exp(total))
    return totals * (1.0 + 1.0e-12 * (1.0 + orders**0.5))


@functools.lru_cache(maxsize=4)
def _log_factorials(size: int) -> FloatArray:
    """Log n! for n = 0..size-1 (at least the table for all orders in use)."""
    return np.asarray(gammaln(np.arange(max(size, _MAX_INTEGER_ORDER + 3), dtype=np.float64) + 1.0))


def _interpolate(orders: FloatArray, whole: FloatArray, moments: FloatArray) -> FloatArray:
    """Interpolate G linearly between integer orders (G(1) = 0); beyond the last one it is infinite."""
    xs, ys = np.concatenate([[1.0], whole]), np.concatenate([[0.0], moments])
    return np.asarray(np.interp(orders, xs, ys, right=math.inf))


def _whole_orders(limit: int) -> FloatArray:
    whole = ORDERS[(np.round(ORDERS) == ORDERS) & (ORDERS >= 2.0) & (limit >= ORDERS)]
    return np.unique(np.concatenate([np.arange(2.0, min(limit, 128) + 1.0), whole]))


def _next_whole(orders: FloatArray) -> int:
    """The smallest integer order of the grid that is not below any of the orders."""
    top = math.ceil(float(np.max(orders)))
    return max(2, top if top <= 128 else int(ORDERS[min(len(ORDERS) - 1, int(np.searchsorted(ORDERS, top)))]))


def _group_factors(group: ProjectionGroup, gain: float, last: int) -> FloatArray:
    """Log F_k, k = 0..last, of one group."""
    k = np.arange(last + 1, dtype=np.float64)
    z = k * (k - 1.0) / 2.0 * (group.kappa**2 * gain)
    if group.width is None or group.rank is None or group.rank == group.width:
        return z
    return hyper.log_kummer_many(group.rank / 2.0, group.width / 2.0, z)


def _last_order(event: NoisyProjectionEvent, gain: float) -> int:
    """The largest integer order whose series stay within a second of work."""
    projected = [g.kappa**2 * gain for g in event.groups if g.width is not None and g.rank != g.width]
    if not projected:
        return _MAX_INTEGER_ORDER
    scale = max(projected) * len(projected)
    # the last series has K^2 scale / 2 terms in its table; windows of its root are summed for every k
    table = math.sqrt(2.0 * 2.0e6 / scale)
    windows = (_WORK / (30.0 * math.sqrt(scale) * len(projected))) ** 0.5
    return int(max(8.0, min(table, windows, _WORK / (1000.0 * len(projected)), 2048.0)))


def _factors(event: NoisyProjectionEvent, gain: float, last: int) -> FloatArray:
    parts = [_group_factors(group, gain, last) for group in _distinct(event)]
    if event.clip == "shared":
        return np.asarray(np.max(np.stack(parts), axis=0))
    return np.asarray(np.sum(np.stack(parts), axis=0))


def _distinct(event: NoisyProjectionEvent) -> tuple[ProjectionGroup, ...]:
    """Under one clip equal groups give equal factors, so that each kind is needed once."""
    if event.clip != "shared":
        return event.groups
    kinds = {(group.width, group.rank, group.kappa): group for group in event.groups}
    return tuple(kinds.values())


def projection_moment(event: NoisyProjectionEvent, orders: FloatArray, adjacency: Adjacency) -> FloatArray:
    """Return an upper bound on G of the noisy projection at every order (see docs/accounting.md, Theorem A).

    Full batch: the maximum (one clip) or sum (separate clips) over groups of log 1F1(r/2; d/2; kappa^2 a(a-1)/2), any
    order. Poisson: integer orders, the factors inside the binomial sum, linear interpolation of G in between.
    """
    gain = _gain(adjacency)
    rate = 1.0 if event.sample_rate is None else event.sample_rate
    if rate == 1.0:
        return _full_moment(event, orders, gain)
    last = min(_last_order(event, gain), _next_whole(orders))
    whole = _whole_orders(last)
    factors = _factors(event, gain, last)
    moments = poisson_moments(whole, rate, factors)
    return _interpolate(orders, whole, moments)


def _full_moment(event: NoisyProjectionEvent, orders: FloatArray, gain: float) -> FloatArray:
    parts = []
    for group in _distinct(event):
        z = orders * (orders - 1.0) / 2.0 * (group.kappa**2 * gain)
        if group.width is None or group.rank is None:
            parts.append(z)
        else:
            parts.append(_kummer_budgeted(group.rank / 2.0, group.width / 2.0, z))
    stacked = np.stack(parts)
    return np.asarray(np.max(stacked, axis=0) if event.clip == "shared" else np.sum(stacked, axis=0))


def _kummer_budgeted(a: float, b: float, z: FloatArray) -> FloatArray:
    """Log 1F1 while the series stay affordable, the (valid, looser) e^z beyond."""
    affordable = np.cumsum(z + 300.0) <= _WORK
    return np.array(
        [
            hyper.log_kummer(a, b, float(v)) if ok or v > 2.0e6 else float(v)
            for v, ok in zip(z, affordable, strict=True)
        ]
    )


def gaussian_at(order: int, sigma: float, rate: float, adjacency: Adjacency) -> float:
    """Return G of a (sampled) Gaussian at one integer order."""
    k = np.arange(order + 1, dtype=np.float64)
    return poisson_moment(order, rate, k * (k - 1.0) / 2.0 * (_gain(adjacency) / sigma**2))


def sampled_gaussian_moment(
    event: PoissonGaussianEvent, orders: FloatArray, adjacency: Adjacency
) -> FloatArray:
    """Return an upper bound on G of the Poisson-sampled Gaussian (exact at integers for add-or-remove)."""
    gain = _gain(adjacency) / event.noise_multiplier**2
    if event.sample_rate == 1.0:
        return gaussian_moment(orders, gain)
    last = min(_MAX_INTEGER_ORDER, _next_whole(orders) + 2)
    k = np.arange(last + 1, dtype=np.float64)
    factors = k * (k - 1.0) / 2.0 * gain
    whole = _whole_orders(last)
    moments = poisson_moments(whole, event.sample_rate, factors)
    values = _interpolate(orders, whole, moments)
    sigma = 1.0 / math.sqrt(gain)
    for index in np.flatnonzero((orders != np.round(orders)) & (orders < 33.0)):
        below = math.floor(orders[index])
        exact = _fractional_moment(float(orders[index]), event.sample_rate, sigma)
        # G is convex: the extension of the next two integers' chord is a floor, and the chord itself a ceiling
        floor = moments[below - 1] - (below + 1 - orders[index]) * (moments[below] - moments[below - 1])
        if max(0.0, floor) <= exact <= values[index]:
            values[index] = exact
    return values


def _fractional_moment(order: float, rate: float, sigma: float) -> float:
    """Return G of the sampled Gaussian at a fractional order, infinity where the series does not settle.

    Mironov, Talwar and Zhang, arXiv:1908.10530v1, Section 3.3: two binomial series with Gaussian tails.
    """
    i = np.arange(0.0, 2000.0)
    j = order - i
    z0 = sigma * sigma * math.log(1.0 / rate - 1.0) + 0.5 if rate < 1.0 else -math.inf
    sign, log_binomial = gammasgn(j + 1.0), gammaln(order + 1.0) - gammaln(i + 1.0) - gammaln(j + 1.0)
    log_q, log_p = math.log(rate), math.log1p(-rate)
    first = (
        log_binomial + i * log_q + j * log_p + i * (i - 1.0) / (2.0 * sigma**2) + log_ndtr((z0 - i) / sigma)
    )
    second = (
        log_binomial + j * log_q + i * log_p + j * (j - 1.0) / (2.0 * sigma**2) + log_ndtr((j - z0) / sigma)
    )
    peak = float(max(np.max(first), np.max(second)))
    sizes = np.exp(first - peak) + np.exp(second - peak)
    # beyond the order the terms alternate and shrink, so that the last one bounds the rest; the other part is rounding
    parts = gammaln(order + 1.0) + gammaln(i + 1.0) + np.abs(gammaln(j + 1.0))
    slack = float(sizes[-1]) + 2.0**-51 * float(sizes @ (8.0 + parts))
    total = float(np.sum(sign * sizes))
    return math.inf if not total > 0.0 else peak + math.log(total + slack)


def replaced_moment(moments: FloatArray, rate: float | None, adjacency: Adjacency) -> FloatArray:
    """Turn the add-or-remove curve at twice the sensitivity into a proved replace-one curve of a sampled event.

    Let (A, B) be the sampled pair at twice the sensitivity and (P, Q) the replace-one pair. Advanced joint convexity
    (Balle, Barthe and Gaboardi, arXiv:1807.01647v2, Theorem 2) gives H_g(P||Q), H_g(Q||P) <= H_g(A||B) for every
    g >= 1. In E_Q (P/Q)^a - 1 = a (a - 1) int_1^inf [g^(a-2) H_g(P||Q) + g^(-a-1) H_g(Q||P)] dg the first term is then
    at most M - 1 and the second at most E_A (B/A)^a ... - 1 <= M - 1, with M = E_B (A/B)^a. Hence
    G_replace <= log(2 M - 1). The same holds conditionally on published projections, and in expectation over them.

    Args:
      moments: log M on the orders.
      rate: sampling rate; None or 1 needs no change (the pair at twice the sensitivity is the exact one).
      adjacency: neighbouring relation.
    """
    if adjacency is not Adjacency.REPLACE_ONE or rate is None or rate == 1.0:
        return moments
    small = np.minimum(moments, 30.0)
    return np.where(moments > 30.0, moments + math.log(2.0), np.log1p(2.0 * np.expm1(small)))


def sketch_moment(event: SketchEvent, orders: FloatArray) -> FloatArray:
    """Return G of the secret sketch, infinite from Gamma on.

    r L tau / 2 [a log(1 - 1/Gamma) - log(1 - a / Gamma)], 1 < a < Gamma: "LoRA Provides Differential Privacy by Design
    via Random Sketching", Lemma 7.1, Eq. 12, and Lemma 7.2, Eq. 15.
    """
    t = 1.0 / event.gamma
    inside = orders < event.gamma
    safe = np.where(inside, orders, 1.0)
    first, second = safe * math.log1p(-t), np.log1p(-safe * t)
    value = first - second + _rounding(first, second, safe * t)
    return np.where(inside, 0.5 * event.rank * event.layers * event.tau * value, math.inf)


def _rounding(first: FloatArray, second: FloatArray, x: FloatArray) -> FloatArray:
    """Bound on the rounding error of first - second with second = log(1 - x), x < 1."""
    return 2.0**-50 * (np.abs(first) + np.abs(second) + np.abs(x) / (1.0 - x))


def pave_moment(event: PaveEvent, orders: FloatArray) -> FloatArray:
    """Return G of a compact PAVE specification at all orders (see docs/accounting.md, Theorem C).

    sum over layers of r k max over l in {1 - gamma, 1 + gamma} of [(1 - a) ln l - ln(a + (1 - a) l)] / 2, infinite
    from 1 + 1/gamma on. Order 2 is Theorem 3.5, Eq. 24 of "PAVE Specifications of Learnwares Yield Intrinsic
    Privacy-Preserving Capabilities"; layers add by Lemma 7.12.
    """
    total = np.zeros_like(orders)
    for layer in event.layers:
        best = np.zeros_like(orders)
        for step in (-layer.gamma, layer.gamma):
            inner = (1.0 - orders) * step  # a + (1 - a) l = 1 + (1 - a) (l - 1)
            inside = inner > -1.0
            first, second = (1.0 - orders) * math.log1p(step), np.log1p(np.where(inside, inner, 0.0))
            value = first - second + _rounding(first, second, -np.where(inside, inner, 0.0))
            best = np.maximum(best, np.where(inside, value, math.inf))
        total = total + 0.5 * layer.rank * layer.dimension * best
    return total


@functools.lru_cache(maxsize=4096)
def _cached(key: str, event: Event, adjacency: Adjacency) -> FloatArray:
    del key
    values = moment(event, ORDERS, adjacency)
    values.setflags(write=False)
    return values


def curve(event: Event, adjacency: Adjacency) -> FloatArray:
    """Return G of a basic event on ORDERS, cached by the event's key."""
    return _cached(event.key(), event, adjacency)


def moment(event: Event, orders: FloatArray, adjacency: Adjacency) -> FloatArray:
    """Return an upper bound on G = (a - 1) D_a of a basic event at the given orders.

    Raises:
      UnsupportedEventError: if the event has no Renyi curve.
    """
    if isinstance(event, NonPrivateEvent):
        return np.full_like(orders, math.inf)
    if isinstance(event, (GaussianEvent, PoissonGaussianEvent)):
        if event.noise_multiplier == 0.0 or math.isinf(1.0 / event.noise_multiplier**2):
            return np.full_like(orders, math.inf)
        if isinstance(event, PoissonGaussianEvent):
            return replaced_moment(
                sampled_gaussian_moment(event, orders, adjacency), event.sample_rate, adjacency
            )
        return gaussian_moment(orders, _gain(adjacency) / event.noise_multiplier**2)
    if isinstance(event, NoisyProjectionEvent):
        return replaced_moment(projection_moment(event, orders, adjacency), event.sample_rate, adjacency)
    if isinstance(event, SketchEvent):
        return sketch_moment(event, orders)
    if isinstance(event, PaveEvent):
        return pave_moment(event, orders)
    raise UnsupportedEventError(f"event {event.kind!r}: has no Renyi curve; analyse it with its own function")


def epsilon_from_moments(orders: FloatArray, moments: FloatArray, delta: float) -> tuple[float, float]:
    """Convert G to epsilon at delta, minimised over the orders.

    eps = D_a + log(1 - 1/a) - (log delta + log a) / (a - 1): Canonne, Kamath and Steinke, "The Discrete Gaussian for
    Differential Privacy", arXiv:2004.00010, Proposition 12.

    Returns:
      epsilon >= 0 (infinity if no order helps) and its order.
    """
    with np.errstate(invalid="ignore"):
        values = (moments - math.log(delta) - np.log(orders)) / (orders - 1.0) + np.log1p(-1.0 / orders)
    return _smallest(orders, values)


def epsilon_from_moments_mironov(
    orders: FloatArray, moments: FloatArray, delta: float
) -> tuple[float, float]:
    """Convert G to epsilon by D_a + log(1/delta) / (a - 1) (Mironov, "Renyi Differential Privacy", Proposition 3)."""
    return _smallest(orders, (moments - math.log(delta)) / (orders - 1.0))


def _smallest(orders: FloatArray, values: FloatArray) -> tuple[float, float]:
    safe = np.where(np.isnan(values), math.inf, values)
    index = int(np.argmin(safe))
    return max(0.0, float(safe[index])), float(orders[index])


def log_delta_from_moments(orders: FloatArray, moments: FloatArray, epsilon: float) -> float:
    """Return log delta at epsilon, the same conversion solved for delta."""
    values = moments - (orders - 1.0) * (epsilon - np.log1p(-1.0 / orders)) - np.log(orders)
    safe = np.where(np.isnan(values), math.inf, values)
    return min(0.0, float(np.min(safe)))
