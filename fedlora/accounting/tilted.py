"""Composition of discrete privacy loss distributions by one tilted FFT, with its rounding bounded.

A plain FFT computes every mass of a composition with the same absolute error, about 1e-16 times the number of steps: at
delta 1e-12 and 1e6 steps that error is larger than delta and epsilon comes out too small. Here each step's masses are
first multiplied by exp(lambda l - K(lambda)), K its cumulant function, so that the composed law is centred where
delta is decided (the saddle point; exponential tilting as in Keich, "sFFT: a faster accurate computation of the
p-value of the entropy score", 2005). After the inverse factor the error is relative to delta. What is left of it, the
mass above the window (Chernoff's bound) and what the window folds back (which only adds) are on the private side.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import fft

from fedlora.accounting.hypergeometric import FloatArray

_UNIT = 2.0**-53
_THIN = 4096
_LARGEST_WINDOW = 1_500_000
_TOP_SHARE, _TOP_SHARE_LOWER = 1.0e-9, 1.0e-4
"""Shares of delta that may lie above the window: added to an upper bound, left out of a lower one."""
_RETRIES = 12
_WEAKER = (1.0, 0.85, 0.7, 0.5)
_FOLDED = 1.0e-13
_BLOCK = 128
_CURVE = 4.0e-14
"""Error of a step's divergence curve, relative to the tail's probability (more where losses are large). Masses are its
second differences; summation by parts bounds the moment's error by that times (1 + tilt) (1 + moment) per step."""


@dataclass(frozen=True)
class Law:
    """Masses of one step's privacy loss on a grid.

    Attributes:
      masses: (size,), >= 0; entry i is the mass at loss (first + i) times the interval.
      first: index of the first entry.
      infinite: mass at infinity.
    """

    masses: FloatArray
    first: int
    infinite: float


@dataclass(frozen=True)
class _Part:
    """One law on its grid of losses, with log masses and count."""

    losses: FloatArray
    logs: FloatArray
    count: int

    def cumulant(self, tilt: float) -> tuple[float, float, float]:
        """Return K, K' and K'' of one step."""
        exponent = self.logs + tilt * self.losses
        peak = float(np.max(exponent))
        weights = np.exp(exponent - peak)
        total = float(np.sum(weights))
        mean = float(weights @ self.losses) / total
        return peak + math.log(total), mean, float(weights @ (self.losses - mean) ** 2) / total


def _parts(laws: Sequence[tuple[Law, int]], interval: float) -> list[_Part]:
    result = []
    for law, count in laws:
        keep = np.flatnonzero(law.masses > 0.0)
        losses = (law.first + keep.astype(np.float64)) * interval
        result.append(_Part(losses, np.log(law.masses[keep]), count))
    return result


def _thinned(part: _Part) -> _Part:
    """Few points with the same mass, for searches that need no accuracy."""
    if part.losses.size <= 2 * _THIN:
        return part
    edges = np.linspace(0, part.losses.size, _THIN + 1).astype(np.int64)[:-1]
    mass = np.add.reduceat(np.exp(part.logs), edges)
    safe = np.maximum(mass, 1e-300)
    return _Part(np.add.reduceat(np.exp(part.logs) * part.losses, edges) / safe, np.log(safe), part.count)


def _total(parts: Sequence[_Part], tilt: float) -> tuple[float, float]:
    """K and K' of the composition."""
    found = [(part.cumulant(tilt), part.count) for part in parts]
    return sum(c * k[0] for k, c in found), sum(c * k[1] for k, c in found)


def _largest_below(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Geometric bisection for the last point of [low, high] at which a falling condition holds."""
    if holds(high):
        return high
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
        if high <= low * 1.001:
            break
    return low


def _tilt(parts: Sequence[_Part], log_mass: float, interval: float, *, excess: bool = False) -> float:
    """The tilt at which Chernoff's bound on the upper tail is about exp(log_mass).

    With `excess` it is the bound on the divergence E (1 - e^(epsilon - L))_+, which is smaller by the largest value of
    e^(-tilt x) (1 - e^-x), tilt^tilt / (1 + tilt)^(1 + tilt): where most of the mass lies at the largest loss,
    the two tilts differ.
    """

    def before(tilt: float) -> bool:
        total, mean = _total(parts, tilt)
        gain = tilt * math.log(tilt) - (1.0 + tilt) * math.log1p(tilt) if excess else 0.0
        return tilt * mean - total - gain < -log_mass

    return _largest_below(before, 1e-9, 1.0 / interval)


def _tilt_at(parts: Sequence[_Part], loss: float, interval: float) -> float:
    """The tilt that centres the composition at a loss."""
    return _largest_below(lambda tilt: _total(parts, tilt)[1] < loss, 1e-9, 1.0 / interval)


@dataclass(frozen=True)
class _Window:
    """The composed law between two losses: masses are scale exp(-tilt (l - centre)) entries, noise is per entry."""

    losses: FloatArray
    entries: FloatArray
    tilt: float
    centre: float
    log_scale: float
    noise: float
    relative: float
    interval: float
    above: float

    @functools.cached_property
    def _blocks(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Sums over blocks, (size / _BLOCK,) each: v e^(-tilt x), v e^(-tilt x) (1 - e^-x) and v e^(-(tilt + 1) x).

        x is the distance from the block's first loss. Every term is positive, so that nothing cancels.
        """
        ahead = np.arange(_BLOCK) * self.interval
        padded = np.zeros(-(-self.entries.size // _BLOCK) * _BLOCK)
        padded[: self.entries.size] = self.entries
        rows = padded.reshape(-1, _BLOCK)
        decay = np.exp(-self.tilt * ahead)
        return rows @ decay, rows @ (decay * -np.expm1(-ahead)), rows @ (decay * np.exp(-ahead))

    def _sums(self, epsilon: float) -> tuple[float, float, int]:
        """Sums over losses y beyond epsilon: of v e^(-tilt y) (1 - e^-y), of v e^(-(tilt + 1) y), and their number."""
        start = int(np.searchsorted(self.losses, epsilon, side="right"))
        block = -(-start // _BLOCK)
        ahead = self.losses[start : block * _BLOCK] - epsilon
        with np.errstate(under="ignore"):
            weights = self.entries[start : block * _BLOCK] * np.exp(-self.tilt * ahead)
            value, tilted = float(weights @ -np.expm1(-ahead)), float(weights @ np.exp(-ahead))
            ahead = self.losses[block * _BLOCK :: _BLOCK] - epsilon
            plain, inner, both = (sums[block:] for sums in self._blocks)
            decay, own = np.exp(-self.tilt * ahead), np.exp(-ahead)
            value += float(decay @ (plain * -np.expm1(-ahead) + inner * own))
            tilted += float(decay @ (both * own))
        return value, tilted, self.entries.size - start

    def delta(self, epsilon: float, sign: float = 1.0) -> tuple[float, float]:
        """Return the divergence at epsilon with its error on the private side (sign 1), and its slope in e^epsilon.

        The second figure is the sum of masses times exp(epsilon - loss) over losses beyond epsilon.
        """
        sums, tilted, size = self._sums(epsilon)
        scale = math.exp(min(700.0, self.log_scale - self.tilt * (epsilon - self.centre)))
        spread = min(float(size), 1.0 + 1.0 / -math.expm1(-min(50.0, self.tilt * self.interval)))
        error = scale * self.noise * spread + self.above
        if sign < 0.0:  # what the window folds back only adds: a lower bound goes without it
            error += scale * 2.0 * _FOLDED
        return scale * sums * (1.0 + sign * self.relative) + sign * error, scale * tilted


def _window(laws: Sequence[tuple[Law, int]], interval: float, tilt: float, top_mass: float) -> _Window:
    """Compose around the tilt; the mass above the window is at most `top_mass`."""
    parts = _parts(laws, interval)
    thin = [_thinned(part) for part in parts]
    steep = _tilt(thin, math.log(top_mass), interval)
    high = (_total(parts, steep)[0] - math.log(top_mass)) / steep
    high = max(high, _end(parts, thin, tilt, 1.0))
    low = min(_end(parts, thin, tilt, -1.0), high - interval)
    first = math.floor(low / interval)
    size = fft.next_fast_len(max(16, math.ceil(high / interval) - first + 2), True)
    if size > _LARGEST_WINDOW:
        raise MemoryError
    entries, log_scale, noise, relative = _transform(parts, laws, interval, tilt, first, size)
    losses = (first + np.arange(size, dtype=np.float64)) * interval
    centre = losses[int(np.argmax(entries))]
    return _Window(
        losses,
        entries,
        tilt,
        float(centre),
        log_scale - tilt * float(centre),
        noise,
        relative,
        interval,
        top_mass,
    )


def _fitting(laws: Sequence[tuple[Law, int]], interval: float, tilt: float, top_mass: float) -> _Window:
    """A window that fits: rare large losses make the tilted law wide, and a weaker tilt only costs rounding."""
    for factor in _WEAKER:
        with contextlib.suppress(MemoryError):
            return _window(laws, interval, factor * tilt, top_mass)
    raise MemoryError


def _end(parts: Sequence[_Part], thin: Sequence[_Part], tilt: float, side: float) -> float:
    """A loss beyond which, on one side, the tilted composition has a mass of at most `_FOLDED` (Chernoff).

    The thinned parts say where Chernoff's bound is good, the whole ones give it: thinning moves the outermost masses.
    """
    near = _total(thin, tilt)[0]

    def before(step: float) -> bool:
        total, mean = _total(thin, tilt + side * step)
        return near - total + side * step * mean < -math.log(_FOLDED)

    step = _largest_below(before, 1e-9, 1e9)
    return side * (_total(parts, tilt + side * step)[0] - _total(parts, tilt)[0] - math.log(_FOLDED)) / step


def _transform(
    parts: Sequence[_Part],
    laws: Sequence[tuple[Law, int]],
    interval: float,
    tilt: float,
    first: int,
    size: int,
) -> tuple[FloatArray, float, float, float]:
    """Tilted masses from index `first` on, log of their scale, error per entry and relative error."""
    log_total, offset, log_scale, relative = np.zeros(size // 2 + 1, dtype=np.complex128), 0, 0.0, 0.0
    slopes = []
    for part, (law, count) in zip(parts, laws, strict=True):
        cumulant, mean, _ = part.cumulant(tilt)
        weights = np.exp(part.logs + tilt * part.losses - cumulant)
        shift = round(mean / interval)
        index = law.first + np.flatnonzero(law.masses > 0.0) - shift
        spectrum = fft.rfft(np.bincount(index % size, weights, size))
        with np.errstate(divide="ignore"):
            logs = np.log(spectrum)
        log_total += count * logs
        slopes.append((count, logs.real))
        offset += count * shift
        log_scale += count * cumulant
        own = 8.0 + tilt * float(weights @ np.abs(part.losses)) + abs(cumulant)
        curve = _CURVE + 8.0 * _UNIT * float(np.max(np.abs(part.losses)))
        relative += count * (4.0 * _UNIT * own + 2.0 * curve * (1.0 + tilt) * (1.0 + math.exp(-cumulant)))
    with np.errstate(under="ignore", invalid="ignore"):
        product = np.where(np.isneginf(log_total.real), 0.0, np.exp(log_total))
        sizes = [count * np.exp(np.minimum(log_total.real - logs, 0.0)) for count, logs in slopes]
        wobble = float(np.mean(np.nan_to_num(sum(sizes) + np.abs(product))))
    values = np.roll(fft.irfft(product, size), (offset - first) % size)
    noise = _UNIT * (8.0 * math.log2(size) + 16.0) * 2.0 * wobble
    return np.maximum(values, 0.0), log_scale, noise, relative


def _infinite(laws: Sequence[tuple[Law, int]]) -> float:
    if any(law.infinite >= 1.0 for law, _ in laws):
        return 1.0
    return -math.expm1(sum(count * math.log1p(-law.infinite) for law, count in laws))


def epsilon(laws: Sequence[tuple[Law, int]], interval: float, delta: float, *, sign: float = 1.0) -> float:
    """Return an upper bound (sign 1) or a lower one (sign -1) on epsilon of composed laws at delta.

    Args:
      laws: discretised laws, pessimistic for sign 1, with counts >= 1.
      interval: their common grid.
      delta: in (0, 1).
      sign: side of the numerical error.

    Returns:
      epsilon >= 0, infinity where delta is not reached.

    Raises:
      MemoryError: if the window does not fit; ArithmeticError where double precision ends.
    """
    budget = delta - _infinite(laws)
    if not budget > 0.0:
        return math.inf if sign > 0.0 else 0.0
    thin = [_thinned(part) for part in _parts(laws, interval)]
    tilt = _tilt(thin, math.log(budget), interval, excess=True)
    top_mass = budget * (_TOP_SHARE if sign > 0.0 else _TOP_SHARE_LOWER)
    for _ in range(_RETRIES):
        window = _fitting(laws, interval, tilt, top_mass)
        if sign < 0.0 or window.losses[0] <= 0.0 or window.delta(float(window.losses[0]), sign)[0] > budget:
            break
        # The largest losses alone are more than the budget: the answer lies below the window.
        tilt = window.tilt / 4.0
    return _root(window, interval, budget, sign)


def _root(window: _Window, interval: float, budget: float, sign: float) -> float:
    """Where the window's divergence passes the budget, 0 or more."""
    low, high = -1, window.losses.size - 1  # divergence beyond the budget at low, within it at high
    point = int(np.argmax(window.entries))
    for turn in range(200):
        if high - low <= 1:
            break
        if turn % 4 == 3 or not low < point < high:
            point = (low + high) // 2
        value = window.delta(float(window.losses[point]), sign)[0]
        low, high = (point, high) if value > budget else (low, point)
        # the logarithm of the divergence falls at about the tilt's rate near the answer
        move = math.log(value / budget) / (window.tilt * interval) if value > 0.0 else -1.0
        point += math.ceil(move) if move > 0.0 else min(-1, math.floor(max(move, -1e9)))
    if low < 0:
        return max(0.0, float(window.losses[0])) if sign > 0.0 else 0.0
    start = float(window.losses[low])
    value, slope = window.delta(start, sign)
    inside = math.log1p(min(1.0, (value - budget) / slope)) if slope > 0.0 else interval
    return max(0.0, start + min(interval, inside))


def delta(laws: Sequence[tuple[Law, int]], interval: float, epsilon_at: float) -> float:
    """Return an upper bound on delta of composed laws at epsilon; arguments as in `epsilon`."""
    infinite = _infinite(laws)
    thin = [_thinned(part) for part in _parts(laws, interval)]
    tilt = _tilt_at(thin, epsilon_at, interval)
    log_tail = min(-1e-9, _total(thin, tilt)[0] - tilt * epsilon_at)
    window = _window(laws, interval, tilt, math.exp(max(log_tail, -690.0)) * _TOP_SHARE)
    return min(1.0, infinite + window.delta(epsilon_at)[0])


__all__ = ["Law", "delta", "epsilon"]
