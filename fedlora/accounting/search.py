"""Searches for the last value at which a bound meets a target, with few evaluations of the costly bound.

Every search returns a value at which the target was seen to be met; guides only say where to look.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


class Unreachable(Exception):
    """The target is not met at the largest value allowed."""


_TURNS = 7
_ROUGH_TURNS = 30
_GRID_NOISE = 0.005
"""A discretised bound moves by steps of this size; a private value that near to the target is as good as it gets."""


@dataclass(frozen=True)
class Bracket:
    """Values on both sides of the root with their epsilons; `high` is the private side."""

    low: float
    low_value: float
    high: float
    value: float


def smallest(
    full: Callable[[float], float],
    rough: Callable[[float], float],
    guides: tuple[Callable[[float], float], ...],
    target: float,
    width: float,
    limits: tuple[float, float],
) -> float:
    """Return (nearly) the smallest x at which `full`, which falls with x, was seen to meet the target.

    Cheap guides (the Renyi bound, a lower bound, coarse grids) say where to look; the root is checked in full.

    Raises:
      Unreachable: if the target is not met at the upper limit.
    """
    for guide in guides:
        try:
            start = _narrow(guide, target, _bracket(guide, target, limits), 20.0 * width).high
        except Unreachable:
            continue
        near = _by_secants(rough, guide, target, start, width, limits, _ROUGH_TURNS)
        found = _by_secants(full, rough, target, near or start, width, limits)
        if found is not None:
            return found
    near = _narrow(rough, target, _bracket(rough, target, limits), 20.0 * width).high
    found = _by_secants(full, rough, target, near, width, limits)
    if found is not None:
        return found
    bracket = _narrow(full, target, _bracket(full, target, limits, near), 20.0 * width)
    return _narrow(full, target, _private_start(full, target, bracket, width, limits), width).high


def _by_secants(
    full: Callable[[float], float],
    guide: Callable[[float], float],
    target: float,
    start: float,
    width: float,
    limits: tuple[float, float],
    turns: int = _TURNS,
) -> float | None:
    """Secants of the full bound in log-log, the first one with the guide's slope; None if they do not settle.

    Where the bound is 0 or infinite (delta pays for everything, or nothing is covered) no line can be drawn: the known
    bracket is halved instead, or its missing end is looked for.
    """
    x, points = start, dict[float, float]()
    low = 0.0  # the largest value seen beyond the target
    good: tuple[float, float] | None = None  # the smallest one that met it, with its epsilon
    for turn in range(turns):
        value = full(x)
        drawn = 0.0 < value < math.inf
        if drawn:
            points[math.log(x)] = math.log(value / target)
        slope = _slope(points, guide, x) if drawn else None
        root = x * math.exp(_bounded(-math.log(value / target) / slope)) if slope is not None else None
        if value <= target:
            good = (x, value) if good is None or x < good[0] else good
            nearest = low if root is None else max(root, low)
            if x <= nearest * (1.0 + width) or x <= limits[0]:
                return x
        else:
            low = max(low, x)
        x = min(max(_next(root, low, good, width, turn), limits[0]), limits[1])
    if good is None:
        return None
    return good[0] if good[1] >= (1.0 - _GRID_NOISE) * target or good[0] <= low * (1.0 + width) else None


def _bounded(step: float) -> float:
    return max(-3.0, min(3.0, step))


def _next(root: float | None, low: float, good: tuple[float, float] | None, width: float, turn: int) -> float:
    """The point beyond the estimated root inside the bracket; without an estimate its middle or a step outwards."""
    inside = root is not None and root >= low and (good is None or root * (1.0 + 0.3 * width) < good[0])
    if root is not None and inside:
        return max(root, low) * (1.0 + 0.3 * width)
    if good is None:
        return 2.0 * low
    return math.sqrt(low * good[0]) if low > 0.0 else good[0] / (1.0 + min(1.0, 2.0 * width * 4.0**turn))


def _slope(points: dict[float, float], guide: Callable[[float], float], x: float) -> float | None:
    """Return d log epsilon / d log x (negative) from the two points nearest to the root, or from the guide."""
    near = sorted(points.items(), key=lambda point: abs(point[1]))[:2]
    if len(near) == 2 and near[0][0] != near[1][0]:
        slope = (near[0][1] - near[1][1]) / (near[0][0] - near[1][0])
    else:
        here, there = guide(x), guide(x * 1.02)
        if not 0.0 < there < here < math.inf:
            return None
        slope = math.log(there / here) / math.log(1.02)
    return slope if slope < -1e-3 else None


def _bracket(
    function: Callable[[float], float], target: float, limits: tuple[float, float], start: float = 1.0
) -> Bracket:
    """Bracket the root by growing factors, from a point inside the limits."""
    low = high = start
    low_value = value = function(start)
    factor = 2.0 if start == 1.0 else 1.02
    while not value <= target:
        if high >= limits[1]:
            raise Unreachable
        low, low_value = high, value
        high, factor = min(high * factor, limits[1]), min(factor * factor, 4.0)
        value = function(high)
    while low_value <= target and low > limits[0]:
        high, value = low, low_value
        low, factor = max(low / factor, limits[0]), min(factor * factor, 4.0)
        low_value = function(low)
    return Bracket(low, low_value, high, value)


def _private_start(
    full: Callable[[float], float],
    target: float,
    cheap: Bracket,
    width: float,
    limits: tuple[float, float],
) -> Bracket:
    """Bracket the root of the full bound, starting from the cheap bound's private end."""
    high, value = cheap.high, full(cheap.high)
    while not value <= target:  # another tool than the cheap one was asked for
        if high >= limits[1]:
            raise Unreachable
        high = min(high * 1.5, limits[1])
        value = full(high)
    slope = 1.0
    if cheap.low < cheap.high and cheap.value < cheap.low_value < math.inf and cheap.value > 0.0:
        slope = math.log(cheap.low_value / cheap.value) / math.log(cheap.high / cheap.low)
    step = 5.0 * width
    while True:
        share = min(1.0, value / target) if value > 0.0 else 0.5
        low = max(high * 0.2, high * share ** (1.0 / min(max(slope, 0.5), 4.0))) / (1.0 + step)
        low = max(low, limits[0])
        low_value = full(low)
        if low_value > target or low <= limits[0]:
            return Bracket(low, low_value, high, value)
        high, value, step = low, low_value, 4.0 * step


def _narrow(full: Callable[[float], float], target: float, bracket: Bracket, width: float) -> Bracket:
    """Narrow a bracket to a relative width by safeguarded secant steps in log-log."""
    for turn in range(80):
        if bracket.high / bracket.low <= 1.0 + width or not bracket.low_value > target:
            break
        middle = _between(bracket, target, turn, width)
        got = full(middle)
        if got <= target:
            bracket = Bracket(bracket.low, bracket.low_value, middle, got)
        else:
            bracket = Bracket(middle, got, bracket.high, bracket.value)
    return bracket


def _between(x: Bracket, target: float, turn: int, width: float) -> float:
    a, b = math.log(x.low), math.log(x.high)
    if not 0.0 < x.value < x.low_value < math.inf or turn % 4 == 3:
        return math.exp(0.5 * (a + b))
    share = (math.log(x.low_value) - math.log(target)) / (math.log(x.low_value) - math.log(x.value))
    root = a + share * (b - a)
    # first just to the private side of the estimate, then just to the other one: two hits close the bracket
    point = root - 0.4 * width if b - root <= 0.6 * width else root + 0.4 * width
    return math.exp(min(b - 0.02 * (b - a), max(a + 0.02 * (b - a), point)))


def largest_count(
    full: Callable[[float], float], guide: Callable[[float], float], target: float, limit: int
) -> int:
    """Return the largest count found at which the full bound was seen to meet the target, 0 if none.

    Args:
      full: the bound that counts; grows with the count.
      guide: a cheap bound, to start from.
      target: >= 0.
      limit: largest count of interest.
    """
    good, bad = 0, limit + 1
    count = max(1, _by_doubling(lambda n: guide(n) <= target, bad))
    points: dict[float, float] = {}
    for turn in range(1, 200):
        value = full(count)
        good, bad = (max(good, count), bad) if value <= target else (good, min(bad, count))
        if bad - good <= 1 or (turn >= _TURNS and bad - good <= _GRID_NOISE * good):
            break
        if 0.0 < value < math.inf and target > 0.0:
            points[math.log(count)] = math.log(value / target)
        middle = (good + bad) // 2 if bad <= limit else 2 * max(good, 1)
        guess = middle if turn % 4 == 0 else _guess_count(points, guide, middle)
        count = min(max(guess, good + 1), bad - 1)
    return good


def _guess_count(points: dict[float, float], guide: Callable[[float], float], middle: int) -> int:
    """Where a line in log-log through the two points nearest to the root meets it; by the guide's slope at first."""
    near = sorted(points.items(), key=lambda point: abs(point[1]))[:2]
    if not near:
        return middle
    (at, gap), *other = near
    count = math.exp(at)
    if other:
        slope = (gap - other[0][1]) / (at - other[0][0])
    else:
        here, there = guide(round(count)), guide(round(1.1 * count) + 1)
        rising = 0.0 < here < there < math.inf
        slope = math.log(there / here) / math.log((round(1.1 * count) + 1) / round(count)) if rising else 0.0
    return int(count * math.exp(max(-5.0, min(5.0, -gap / slope)))) if slope > 1e-3 else middle


def _by_doubling(fits: Callable[[int], bool], end: int) -> int:
    """The largest count below `end` that fits, 0 if none, by doubling and bisection (fitting taken as monotone)."""
    good, bad = 0, 1
    while bad < end and fits(bad):
        good, bad = bad, 2 * bad
    bad = min(bad, end)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


__all__ = ["Unreachable", "largest_count", "smallest"]
