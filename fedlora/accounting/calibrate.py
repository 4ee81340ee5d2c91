"""Solve for noise, steps or sampling rate, always on the private side and re-checked at the root.

Every search keeps one end at which the target was verified by evaluation and returns that end, so that an inexact or
non-monotone bound can cost accuracy but never privacy.
"""

from __future__ import annotations

import math
from collections.abc import Callable

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

    def cheap(sigma: float) -> bool:
        parts = accountant.parts_of(make_event(sigma))
        return accountant.rdp_epsilon(parts, probability, relation) <= target

    def full(sigma: float) -> float:
        event = make_event(sigma)
        return accountant.epsilon_of(
            event, probability, adjacency=relation, accountant=accountant_name
        ).epsilon

    high = _private_end(
        cheap
        if accountant_name in ("best", "rdp") and _has_curve(make_event)
        else (lambda sigma: full(sigma) <= target),
        width,
    )
    value = full(high)
    while not value <= target:  # another tool than the cheap one was asked for
        high *= 1.5
        if high > _LARGEST_NOISE:
            raise AccountingError(_unreachable(target, probability))
        value = full(high)
    return _narrow(full, target, high, value, width)


def _has_curve(make_event: Callable[[float], Event]) -> bool:
    return all(event.chargeable for event, _ in accountant.parts_of(make_event(1.0)))


def _unreachable(target: float, delta: float) -> str:
    return (
        f"calibration: no noise multiplier up to {_LARGEST_NOISE:g} gives epsilon <= {target:g} at delta {delta:g}; "
        "allow a larger epsilon or delta, or fewer steps"
    )


def _private_end(private: Callable[[float], bool], width: float) -> float:
    """The private end of a bracket by a cheap test, from 1 by factors of 2, then bisection to 30 * width."""
    high = 1.0
    while not private(high):
        high *= 2.0
        if high > _LARGEST_NOISE:
            raise AccountingError(
                f"calibration: no noise multiplier up to {_LARGEST_NOISE:g} reaches the target; "
                "allow a larger epsilon or delta, or fewer steps"
            )
    low = high / 2.0
    while low > _SMALLEST_NOISE and private(low):
        high, low = low, low / 2.0
    while high / low > 1.0 + 30.0 * width:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if private(middle) else (middle, high)
    return high


def _narrow(full: Callable[[float], float], target: float, high: float, value: float, width: float) -> float:
    """Narrow from the verified private end `high` down to the root by safeguarded secant steps in log-log."""
    low, low_value, step = high, value, 0.02
    while low_value <= target:
        high, value = low, low_value
        low, step = low / (1.0 + step), min(1.0, 3.0 * step)
        if low < _SMALLEST_NOISE:
            return high
        low_value = full(low)
    for turn in range(60):
        if high / low <= 1.0 + width:
            break
        middle = _between(low, low_value, high, value, target, turn)
        got = full(middle)
        if got <= target:
            high, value = middle, got
        else:
            low, low_value = middle, got
    return high


def _between(low: float, low_value: float, high: float, value: float, target: float, turn: int) -> float:
    a, b = math.log(low), math.log(high)
    usable = 0.0 < value < low_value < math.inf and turn % 3 != 2
    if not usable:
        return math.exp(0.5 * (a + b))
    share = (math.log(low_value) - math.log(target)) / (math.log(low_value) - math.log(value))
    # aim a little to the private side so that both ends move
    share = min(0.98, max(0.02, share + 0.01))
    return math.exp(a + share * (b - a))


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


def solve_parameter(private: Callable[[float], bool], safe: float, unsafe: float, tolerance: float = 1.0e-6) -> float:
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
        raise AccountingError(f"calibration: the target is not met even at {safe:g}; allow a larger epsilon or delta")
    good, bad = safe, unsafe
    for _ in range(200):
        if abs(good - bad) <= tolerance * abs(good):
            break
        middle = math.sqrt(good * bad) if min(good, bad) > 0.0 else 0.5 * (good + bad)
        if middle in (good, bad):
            break
        good, bad = (middle, bad) if private(middle) else (good, middle)
    return good
