"""Privacy loss distributions of the noisy projection, tighter than its moments (docs/accounting.md, Theorem D).

Given the projections the mechanism is a (sampled) Gaussian with squared distance mu = sum w kappa^2 X. At a threshold
e^eps its hockey-stick divergence is f(mu), convex up to mu_0 = 2 sqrt(1 + eps^2) - 2 and concave beyond, so that
max(f, tangent at m), m >= mu_0, is a convex, non-decreasing majorant of f. By convexity the worst difference puts all
its weight on one direction of one group (of every group, if each has its own clip: then mu is a sum), and the Beta
variable may be replaced by a discrete one above it in convex order (chords over bins). The resulting curve bounds the
divergence of both neighbours at every threshold; its convex hull on a grid is the curve of a discrete distribution,
which composes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import betainc, betaincinv, log_ndtr

from fedlora.accounting import pld, tilted
from fedlora.accounting.events import NoisyProjectionEvent, ProjectionGroup
from fedlora.accounting.hypergeometric import FloatArray
from fedlora.accounting.reports import Adjacency
from fedlora.accounting.tilted import Law

_NODES = 48
_LARGEST_GRID = 40_000
_STEPS = 1500.0


def _nodes(group: ProjectionGroup, gain: float) -> tuple[FloatArray, FloatArray]:
    """Points and weights of a discrete law above mu = kappa^2 X in convex order."""
    scale = group.kappa**2 * gain
    if group.width is None or group.rank is None or group.rank == group.width:
        return np.array([scale]), np.array([1.0])
    a, b = group.rank / 2.0, (group.width - group.rank) / 2.0
    tail = np.geomspace(1e-22, 0.02, _NODES // 2)
    quantiles = np.concatenate([[1e-8, 1e-4], np.linspace(0.02, 0.98, _NODES)])
    upper = 1.0 - betaincinv(b, a, tail)
    x = np.unique(np.concatenate([[0.0], betaincinv(a, b, quantiles), upper, [1.0]]))
    below, mean_below = betainc(a, b, x), a / (a + b) * betainc(a + 1.0, b, x)
    above, mean_above = betainc(b, a, 1.0 - x), a / (a + b) * betainc(b, a + 1.0, 1.0 - x)
    low = below[1:] < 0.5
    mass = np.where(low, np.diff(below), -np.diff(above))
    mean = np.where(low, np.diff(mean_below), -np.diff(mean_above))
    step = np.diff(x)
    right = np.clip((mean - x[:-1] * mass) / step, 0.0, mass)
    weights = np.zeros_like(x)
    weights[1:] += right
    weights[:-1] += mass - right
    return scale * x, weights * (1.0 + 1e-12)


def _sum(
    first: tuple[FloatArray, FloatArray], second: tuple[FloatArray, FloatArray]
) -> tuple[FloatArray, FloatArray]:
    """The sum of two independent discrete laws, moved to fewer points upwards in convex order (chords)."""
    points = np.add.outer(first[0], second[0]).ravel()
    weights = np.multiply.outer(first[1], second[1]).ravel()
    sort = np.argsort(points)
    points, weights = points[sort], weights[sort]
    if points.size <= 2 * _NODES:
        return points, weights
    below, above = np.cumsum(weights), np.cumsum(weights[::-1])[::-1]
    low = np.searchsorted(below, np.concatenate([[1e-8, 1e-4], np.linspace(0.02, 0.98, _NODES)]))
    high = points.size - np.searchsorted(above[::-1], np.geomspace(1e-22, 0.02, _NODES // 2))
    chosen = np.clip(np.concatenate([[0, points.size - 1], low, high]), 0, points.size - 1)
    grid = np.unique(points[chosen])
    left = np.clip(np.searchsorted(grid, points, side="right") - 1, 0, grid.size - 2)
    share = np.clip((points - grid[left]) / (grid[left + 1] - grid[left]), 0.0, 1.0)
    moved = np.bincount(left, weights * (1.0 - share), grid.size)
    moved += np.bincount(left + 1, weights * share, grid.size)
    return grid, np.asarray(moved * (1.0 + 1e-12), dtype=np.float64)


def _laws(event: NoisyProjectionEvent, gain: float) -> list[tuple[FloatArray, FloatArray]]:
    """One law for each group under one clip; the law of their sum under separate clips."""
    laws = [_nodes(group, gain) for group in event.groups]
    return [functools.reduce(_sum, laws)] if event.clip == "separate" else laws


def _gaussian_curve(epsilon: FloatArray, mu: FloatArray) -> FloatArray:
    """Delta of the Gaussian mechanism, (epsilons, squared distances), any sign of epsilon."""
    root = np.sqrt(np.maximum(mu, 1e-300))
    first = log_ndtr(root / 2.0 - epsilon[:, None] / root)
    second = epsilon[:, None] + log_ndtr(-root / 2.0 - epsilon[:, None] / root)
    values = np.exp(first) * -np.expm1(np.minimum(second - first, 0.0))
    none = np.maximum(0.0, -np.expm1(np.minimum(epsilon, 0.0)))[:, None]
    return np.asarray(np.where(mu > 0.0, np.maximum(values, none), none))


def _majorant(epsilon: FloatArray, laws: list[tuple[FloatArray, FloatArray]]) -> FloatArray:
    """Max over groups of E max(f, tangent at m), the smallest over a few m."""
    turn = 2.0 * np.sqrt(1.0 + epsilon**2) - 2.0
    centre = max(float(np.sum(w * mu)) for mu, w in laws)
    curves = [_gaussian_curve(epsilon, mu) for mu, _ in laws]
    best = np.full(epsilon.shape, math.inf)
    for factor in (0.0, 0.5, 1.0, 2.0):
        m = np.maximum(np.maximum(turn, factor * centre), 1e-14)
        root = np.sqrt(m)
        value = _pairwise(epsilon, m)
        slope = np.exp(-0.5 * (root / 2.0 - epsilon / root) ** 2) / (2.0 * root * math.sqrt(2.0 * math.pi))
        worst = np.zeros(epsilon.shape)
        for (mu, weights), curve in zip(laws, curves, strict=True):
            line = value[:, None] + slope[:, None] * (mu - m[:, None])
            worst = np.maximum(worst, np.maximum(curve, line) @ weights)
        best = np.minimum(best, worst)
    return np.asarray(np.minimum(best, 1.0))


def _pairwise(epsilon: FloatArray, mu: FloatArray) -> FloatArray:
    root = np.sqrt(mu)
    first = log_ndtr(root / 2.0 - epsilon / root)
    second = epsilon + log_ndtr(-root / 2.0 - epsilon / root)
    return np.asarray(np.exp(first) * -np.expm1(np.minimum(second - first, 0.0)))


def remove_curve(event: NoisyProjectionEvent, epsilon: FloatArray, gain: float) -> FloatArray:
    """Return an upper bound on the hockey-stick divergence with the record against without it, at each epsilon.

    Args:
      event: one step.
      epsilon: thresholds, any sign.
      gain: squared sensitivity in units of the squared clip (1 for add-or-remove).
    """
    laws = _laws(event, gain)
    rate = 1.0 if event.sample_rate is None else event.sample_rate
    if rate == 1.0:
        return np.maximum(_majorant(epsilon, laws), -np.expm1(np.minimum(epsilon, 0.0)))
    inner = (np.expm1(np.minimum(epsilon, 30.0)) + rate) / rate  # (e^eps - (1 - q)) / q
    safe = inner > 0.0
    far = epsilon - math.log(rate) + np.log1p((rate - 1.0) * np.exp(-np.maximum(epsilon, 30.0)))
    tilted = np.where(epsilon > 30.0, far, np.log(np.where(safe, inner, 1.0)))
    trivial = -np.expm1(np.minimum(epsilon, 0.0))
    value = np.where(safe, rate * _majorant(tilted, laws), trivial)
    return np.asarray(np.maximum(value, trivial))


def add_curve(event: NoisyProjectionEvent, epsilon: FloatArray, gain: float) -> FloatArray:
    """Return the bound for the other direction.

    (1 - e^eps (1-q)) f at the threshold e^eps q / (1 - e^eps (1-q)), and 0 from eps = -log(1-q) on.
    """
    rate = 1.0 if event.sample_rate is None else event.sample_rate
    if rate == 1.0:
        return remove_curve(event, epsilon, gain)
    laws = _laws(event, gain)
    left = rate - (1.0 - rate) * np.expm1(np.minimum(epsilon, 700.0))  # 1 - e^eps (1 - q)
    safe = left > 0.0
    threshold = epsilon + math.log(rate) - np.log(np.where(safe, left, 1.0))
    trivial = -np.expm1(np.minimum(epsilon, 0.0))
    value = np.where(safe, left * _majorant(np.where(safe, threshold, 0.0), laws), 0.0)
    return np.asarray(np.maximum(value, trivial))


def replace_curve(event: NoisyProjectionEvent, epsilon: FloatArray, gain: float) -> FloatArray:
    """Return the bound for replacing a record: `remove_curve` at eps >= 0, reflected below.

    By advanced joint convexity, for eps >= 0, the pair diverges by q times at most the larger of the divergences at the
    distances of one record and of the difference of two; the relation is symmetric, which gives eps < 0.
    """
    positive = remove_curve(event, np.abs(epsilon), gain)
    below = -np.expm1(np.minimum(epsilon, 0.0)) + np.exp(np.minimum(epsilon, 0.0)) * positive
    return np.where(epsilon >= 0.0, positive, below)


def _hull(t: FloatArray, h: FloatArray) -> list[int]:
    """Indices of the lower convex hull of points with increasing t."""
    keep: list[int] = []
    for i in range(len(t)):
        while len(keep) > 1:
            a, b = keep[-2], keep[-1]
            if (h[b] - h[a]) * (t[i] - t[b]) >= (h[i] - h[b]) * (t[b] - t[a]):
                keep.pop()
            else:
                break
        keep.append(i)
    return keep


def _law(grid: FloatArray, first: int, h: FloatArray) -> Law:
    """The distribution whose curve is the hull of (grid, h), with its first index on the grid."""
    t = np.concatenate([[0.0], np.exp(grid)])
    values = np.concatenate([[1.0], h])
    keep = _hull(t, values)
    slopes = np.diff(values[keep]) / np.diff(t[keep])
    slopes = np.append(np.minimum(slopes, 0.0), 0.0)
    masses = np.zeros(grid.size)
    masses[np.array(keep[1:]) - 1] = np.maximum(np.diff(slopes) * t[keep[1:]], 0.0)
    return Law(masses, first, min(1.0, float(values[-1])))


@functools.lru_cache(maxsize=64)
def distribution(
    event: NoisyProjectionEvent, interval: float, adjacency: Adjacency
) -> tuple[Law, ...] | None:
    """Return the laws of one step, one for each direction that differs, pessimistic; None if their grid is too large.

    Args:
      event: one step.
      interval: discretisation.
      adjacency: neighbouring relation.
    """
    replaced = adjacency is Adjacency.REPLACE_ONE
    gain = 4.0 if replaced else 1.0
    laws = []
    both = (remove_curve, add_curve) if event.sample_rate not in (None, 1.0) else (remove_curve,)
    for curve in (replace_curve,) if replaced else both:
        span = _span(event, interval, gain, curve)
        if span is None:
            return None
        first, last = span
        grid: FloatArray = np.arange(first, last + 1, dtype=np.float64) * np.float64(interval)
        values = curve(event, grid, gain)
        if last * interval > 600.0 or not bool(np.all(np.isfinite(values))):
            return None
        laws.append(_law(grid, first, values))
    return tuple(laws)


def _span(event: NoisyProjectionEvent, interval: float, gain: float, curve: Any) -> tuple[int, int] | None:
    """Grid indices between which the curve is not trivial: above 1e-20 at the top, off 1 - e^eps at the bottom."""
    kappa = math.sqrt(gain) / (pld.envelope(event) or (1.0, 1.0))[0]
    limit = kappa * kappa / 2.0 + 11.0 * kappa
    ladder = np.unique(np.concatenate([np.geomspace(interval, max(limit, 2 * interval), 200), [limit]]))
    top = ladder[curve(event, ladder, gain) > 1e-20]
    low = ladder[curve(event, -ladder, gain) > -np.expm1(-ladder) * (1.0 + 1e-14) + 1e-17]
    last = math.ceil((float(top[-1]) if top.size else interval) * 1.1 / interval) + 1
    first = -math.ceil((float(low[-1]) if low.size else interval) * 1.1 / interval) - 1
    return None if last - first > _LARGEST_GRID else (first, last)


@dataclass(frozen=True)
class _Composed:
    """Laws with counts for each direction, on a grid."""

    laws: pld.Compositions
    interval: float


def applies(parts: pld.Parts) -> bool:
    """Whether every event is Gaussian or a noisy projection, and one projection is worth it."""
    worth = False
    for event, _ in parts:
        if isinstance(event, NoisyProjectionEvent):
            worth = worth or not pld.is_exact(((event, 1),))
        elif pld.envelope(event) is None or pld.envelope(event) == (0.0, 1.0):
            return False
    return worth


def epsilon(
    parts: pld.Parts, delta: float, adjacency: Adjacency, rough: float, *, coarse: float = 1.0
) -> float | None:
    """Return an upper bound on epsilon from composed distributions.

    Args:
      parts: basic events with counts.
      delta: in (0, 1).
      adjacency: neighbouring relation.
      rough: an upper bound on the answer, to choose the discretisation.
      coarse: factor >= 1 on the discretisation; the bound stays valid.

    Returns:
      The bound, rounding included, or None where this tool does not apply.
    """
    if delta < pld.SMALLEST_DELTA or not applies(parts):
        return None
    best = math.inf
    for scout in (4.0, 1.0, 1.0):  # a coarse pass first, since the rough bound can be far above
        guess = min(rough, best)
        value = _read(parts, adjacency, guess, coarse * scout, delta)
        best = best if value is None else min(best, value)
        if scout == 1.0 and not _interval(best, coarse) < 0.9 * _interval(guess, coarse):
            break
    return None if math.isinf(best) else best


def _read(parts: pld.Parts, adjacency: Adjacency, guess: float, coarse: float, delta: float) -> float | None:
    """The bound on the first grid whose composed window fits."""

    def read(factor: float) -> float:
        found = _settled(parts, adjacency, guess, coarse * factor)
        if found is None:
            return math.nan
        return max(tilted.epsilon(laws, found.interval, delta) for laws in found.laws)

    value, _ = pld.on_a_grid_that_fits(read)
    return None if math.isnan(value) else max(0.0, value)


def delta(parts: pld.Parts, epsilon_at: float, adjacency: Adjacency, rough: float) -> float | None:
    """Return an upper bound on delta at epsilon from composed distributions, or None where they do not apply."""
    if not applies(parts):
        return None
    found = _settled(parts, adjacency, max(rough, epsilon_at), 1.0)
    if found is None:
        return None
    try:
        value = max(tilted.delta(laws, found.interval, epsilon_at) for laws in found.laws)
    except pld.FAILURES:
        return None
    return None if math.isnan(value) else min(1.0, max(0.0, value) + pld.SMALLEST_DELTA)


def _interval(guess: float, coarse: float) -> float:
    """Discretisation for an answer of about `guess`."""
    wanted = min(2.0e-3, max(1.0e-5, min(guess, 1.0e4) / _STEPS)) * coarse
    unit = 10.0 ** (math.floor(math.log10(wanted)) - 1)  # two digits, so that the answer hardly jumps
    return math.ceil(wanted / unit * (1.0 - 1e-9)) * unit


def _settled(parts: pld.Parts, adjacency: Adjacency, rough: float, coarse: float) -> _Composed | None:
    """The composition on the first grid that fits."""
    interval = _interval(rough, coarse)
    for _ in range(8):
        try:
            composed = _compose(parts, interval, adjacency)
        except pld.FAILURES:
            return None
        if composed is not None:
            return composed
        interval *= 2.0
    return None


def _compose(parts: pld.Parts, interval: float, adjacency: Adjacency) -> _Composed | None:
    """The steps' laws, or None if a grid is too large."""
    steps = []
    for event, count in parts:
        if isinstance(event, NoisyProjectionEvent):
            laws = distribution(event, interval, adjacency)
            if laws is None:
                return None
        else:
            sigma, rate = pld.envelope(event) or (0.0, 1.0)
            if not sigma > 0.0 or pld.loss_range(sigma, rate, adjacency) / interval > 10.0 * _LARGEST_GRID:
                return None
            laws = pld.step(sigma, rate, interval, adjacency, True)
        steps.append((laws, count))
    return _Composed(pld.directions(steps), interval)
