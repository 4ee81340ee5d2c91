"""Solve for noise, steps or sampling rate, always on the private side and re-checked at the root.

Every search keeps one end at which the target was verified by evaluation and returns that end, so that an inexact or
non-monotone bound can cost accuracy but never privacy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fedlora.accounting import _checks, accountant
from fedlora.accounting.events import Event
from fedlora.accounting.reports import Adjacency
from fedlora.errors import AccountingError

_LARGEST_NOISE = 1.0e9
_SMALLEST_NOISE = 1.0e-6
_MOST_STEPS = 10**12


def calibrate_noise_multiplier(
    make_event: Callable[[float], Event],
    target_epsilon: float,
    delta: float,
    *,
    adjacency: Adjacency | str = Adjacency.ADD_OR_REMOVE,
    accountant_name: str = "best",
    tolerance: float = 1.0e-4,
) -> float:
    """Return (nearly) the smallest noise multiplier whose event meets the target.

    Args:
      make_event: builds the whole run's event for a noise multiplier; epsilon must fall as noise grows.
      target_epsilon: > 0.
      delta: in (0, 1).
      adjacency: neighbouring relation.
      accountant_name: as in `epsilon_of`.
      tolerance: relative width of the last bracket.

    Returns:
      A noise multiplier at which epsilon <= target_epsilon was computed.

    Raises:
      AccountingError: if no noise up to 1e9 reaches the target.
    """
    target = _checks.real("target_epsilon", target_epsilon, above=0.0)
    probability = _checks.delta(delta)
    relation = Adjacency.parse(adjacency)
    width = _checks.real("tolerance", tolerance, above=0.0, below=1.0)

    def full(sigma: float) -> float:
        event = make_event(sigma)
        return accountant.epsilon_of(
            event, probability, adjacency=relation, accountant=accountant_name
        ).epsilon

    def cheap(sigma: float) -> float:
        return accountant.rdp_epsilon(accountant.parts_of(make_event(sigma)), probability, relation)

    bracket = _bracket(cheap if _has_curve(make_event) else full, target)
    bracket = _narrow(cheap if _has_curve(make_event) else full, target, bracket, 20.0 * width)
    bracket = _private_start(full, target, bracket, width)
    return _narrow(full, target, bracket, width).high


@dataclass(frozen=True)
class _Bracket:
    """Noise multipliers on both sides of the root with their epsilons; `high` is the private side."""

    low: float
    low_value: float
    high: float
    value: float


def _has_curve(make_event: Callable[[float], Event]) -> bool:
    return all(event.chargeable for event, _ in accountant.parts_of(make_event(1.0)))


def _unreachable() -> AccountingError:
    return AccountingError(
        f"calibration: no noise multiplier up to {_LARGEST_NOISE:g} reaches the target; "
        "allow a larger epsilon or delta, or fewer steps"
    )


def _bracket(function: Callable[[float], float], target: float) -> _Bracket:
    """Bracket the root from 1 by factors of 2."""
    high = 1.0
    value = function(high)
    low, low_value = high, value
    while not value <= target:
        low, low_value = high, value
        high *= 2.0
        if high > _LARGEST_NOISE:
            raise _unreachable()
        value = function(high)
    while low_value <= target and low > _SMALLEST_NOISE:
        high, value = low, low_value
        low /= 2.0
        low_value = function(low)
    return _Bracket(low, low_value, high, value)


def _private_start(full: Callable[[float], float], target: float, cheap: _Bracket, width: float) -> _Bracket:
    """Bracket the root of the full bound, starting from the cheap bound's private end."""
    high, value = cheap.high, full(cheap.high)
    while not value <= target:  # another tool than the cheap one was asked for
        high *= 1.5
        if high > _LARGEST_NOISE:
            raise _unreachable()
        value = full(high)
    slope = 1.0
    if cheap.low < cheap.high and cheap.value < cheap.low_value < math.inf and cheap.value > 0.0:
        slope = math.log(cheap.low_value / cheap.value) / math.log(cheap.high / cheap.low)
    step = 5.0 * width
    while True:
        share = min(1.0, value / target) if value > 0.0 else 0.5
        low = max(high * 0.2, high * share ** (1.0 / min(max(slope, 0.5), 4.0))) / (1.0 + step)
        low_value = full(low)
        if low_value > target or low < _SMALLEST_NOISE:
            return _Bracket(low, low_value, high, value)
        high, value, step = low, low_value, 4.0 * step


def _narrow(full: Callable[[float], float], target: float, bracket: _Bracket, width: float) -> _Bracket:
    """Narrow a bracket to a relative width by safeguarded secant steps in log-log."""
    for turn in range(80):
        if bracket.high / bracket.low <= 1.0 + width or not bracket.low_value > target:
            break
        middle = _between(bracket, target, turn, width)
        got = full(middle)
        if got <= target:
            bracket = _Bracket(bracket.low, bracket.low_value, middle, got)
        else:
            bracket = _Bracket(middle, got, bracket.high, bracket.value)
    return bracket


def _between(x: _Bracket, target: float, turn: int, width: float) -> float:
    a, b = math.log(x.low), math.log(x.high)
    if not 0.0 < x.value < x.low_value < math.inf or turn % 4 == 3:
        return math.exp(0.5 * (a + b))
    share = (math.log(x.low_value) - math.log(target)) / (math.log(x.low_value) - math.log(x.value))
    root = a + share * (b - a)
    # first just to the private side of the estimate, then just to the other one: two hits close the bracket
    point = root - 0.4 * width if b - root <= 0.6 * width else root + 0.4 * width
    return math.exp(min(b - 0.02 * (b - a), max(a + 0.02 * (b - a), point)))


def max_steps_within(
    event: Event,
    target_epsilon: float,
    delta: float,
    *,
    spent: Event | None = None,
    adjacency: Adjacency | str = Adjacency.ADD_OR_REMOVE,
    at_most: int = _MOST_STEPS,
) -> int:
    """Return how often an event may run so that everything together stays within the target.

    Args:
      event: one step (or one round).
      target_epsilon: the budget, >= 0.
      delta: in (0, 1).
      spent: what was already charged to the same data.
      adjacency: neighbouring relation.
      at_most: largest count of interest.

    Returns:
      A count, possibly 0, at which the budget was verified.
    """
    before = [] if spent is None else [(spent, 1)]

    def fits(count: int) -> bool:
        return accountant.within_budget([*before, (event, count)], target_epsilon, delta, adjacency=adjacency)

    limit = _checks.integer("at_most", at_most, at_most=_MOST_STEPS)
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= limit and fits(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def max_sample_rate(
    make_event: Callable[[float], Event],
    target_epsilon: float,
    delta: float,
    *,
    adjacency: Adjacency | str = Adjacency.ADD_OR_REMOVE,
    tolerance: float = 1.0e-4,
) -> float:
    """Return (nearly) the largest sampling rate whose event meets the target; 0 if none does.

    Args:
      make_event: builds the whole run's event for a rate in (0, 1].
      target_epsilon: >= 0.
      delta: in (0, 1).
      adjacency: neighbouring relation.
      tolerance: relative width of the last bracket.
    """

    def fits(rate: float) -> bool:
        return accountant.within_budget(make_event(rate), target_epsilon, delta, adjacency=adjacency)

    width = _checks.real("tolerance", tolerance, above=0.0, below=1.0)
    if fits(1.0):
        return 1.0
    high, low = 1.0, 0.1
    while not fits(low):
        high, low = low, low / 10.0
        if low < 1.0e-12:
            return 0.0
    while high / low > 1.0 + width:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def solve_parameter(
    private: Callable[[float], bool], safe: float, unsafe: float, tolerance: float = 1.0e-6
) -> float:
    """Return the value nearest to `unsafe` at which `private` was seen to hold, by bisection.

    Args:
      private: whether the target is met at a value.
      safe: a value at which it is met.
      unsafe: a value beyond.
      tolerance: relative width of the last bracket.

    Raises:
      AccountingError: if the target is not met at `safe`.
    """
    if private(unsafe):
        return unsafe
    if not private(safe):
        raise AccountingError(
            f"calibration: the target is not met even at {safe:g}; allow a larger epsilon or delta"
        )
    good, bad = safe, unsafe
    for _ in range(200):
        if abs(good - bad) <= tolerance * abs(good):
            break
        middle = math.sqrt(good * bad) if min(good, bad) > 0.0 else 0.5 * (good + bad)
        if middle in (good, bad):
            break
        good, bad = (middle, bad) if private(middle) else (good, middle)
    return good
