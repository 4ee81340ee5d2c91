"""Solve for noise, steps or sampling rate, always on the private side and re-checked at the root.

Every search keeps one end at which the target was verified by evaluation and returns that end, so that an inexact or
non-monotone bound can cost accuracy but never privacy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fedlora.accounting import _checks, accountant, floor
from fedlora.accounting.events import Event
from fedlora.accounting.reports import Adjacency, compose
from fedlora.accounting.search import Unreachable, largest_count, smallest
from fedlora.errors import AccountingError

_COARSE = 10.0
_LARGEST_NOISE = 1.0e9
_SMALLEST_NOISE = 1.0e-6
_LARGEST_INVERSE_RATE = 1.0e12
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

    full = _Full(make_event, probability, relation, accountant_name)

    guides = _guides(make_event, probability, relation) if _has_curve(make_event) else ()
    try:
        return smallest(full, full.rough, guides, target, width, (_SMALLEST_NOISE, _LARGEST_NOISE))
    except Unreachable:
        raise AccountingError(
            f"calibration: no noise multiplier up to {_LARGEST_NOISE:g} reaches the target; "
            "allow a larger epsilon or delta, or fewer steps"
        ) from None


@dataclass(frozen=True)
class _Full:
    """The bound that counts, as a function of one parameter; `rough` is its cheap form on a coarse grid."""

    make_event: Callable[[float], Event]
    delta: float
    adjacency: Adjacency
    name: str

    def __call__(self, x: float, coarse: float = 1.0) -> float:
        report = accountant.epsilon_of(
            self.make_event(x), self.delta, adjacency=self.adjacency, accountant=self.name, coarse=coarse
        )
        return report.epsilon

    def rough(self, x: float) -> float:
        return self(x, _COARSE) if self.name in ("best", "moment", "pld") else self(x)


def _guides(
    make_event: Callable[[float], Event], delta: float, adjacency: Adjacency
) -> tuple[Callable[[float], float], ...]:
    """Cheap bounds that move with the answer: the Renyi bound, and the lower bound of a test."""

    def renyi(x: float) -> float:
        return accountant.rdp_epsilon(accountant.parts_of(make_event(x)), delta, adjacency)

    def test(x: float) -> float:
        return floor.epsilon_floor(accountant.parts_of(make_event(x)), delta, adjacency)

    return renyi, test


def _has_curve(make_event: Callable[[float], Event]) -> bool:
    return all(event.chargeable for event, _ in accountant.parts_of(make_event(1.0)))


def max_steps_within(
    event: Event,
    target_epsilon: float,
    delta: float,
    *,
    spent: Event | None = None,
    adjacency: Adjacency | str = Adjacency.ADD_OR_REMOVE,
    accountant_name: str = "best",
    at_most: int = _MOST_STEPS,
) -> int:
    """Return how often an event may run so that everything together stays within the target.

    Args:
      event: one step (or one round).
      target_epsilon: the budget, >= 0.
      delta: in (0, 1).
      spent: what was already charged to the same data.
      adjacency: neighbouring relation.
      accountant_name: as in `epsilon_of`.
      at_most: largest count of interest.

    Returns:
      A count, possibly 0, at which the budget was verified.
    """
    before = [] if spent is None else [(spent, 1)]
    target = _checks.real("target_epsilon", target_epsilon, at_least=0.0)
    probability, relation = _checks.delta(delta), Adjacency.parse(adjacency)
    limit = _checks.integer("at_most", at_most, at_most=_MOST_STEPS)
    accountant.require_chargeable(accountant.parts_of([*before, (event, 1)]))

    def make(count: float) -> Event:
        return compose([*before, (event, int(count))])

    full = _Full(make, probability, relation, accountant_name)
    return largest_count(full, _guides(make, probability, relation)[0], target, limit)


def max_sample_rate(
    make_event: Callable[[float], Event],
    target_epsilon: float,
    delta: float,
    *,
    adjacency: Adjacency | str = Adjacency.ADD_OR_REMOVE,
    accountant_name: str = "best",
    tolerance: float = 1.0e-4,
) -> float:
    """Return (nearly) the largest sampling rate whose event meets the target; 0 if none does.

    Args:
      make_event: builds the whole run's event for a rate in (0, 1].
      target_epsilon: > 0.
      delta: in (0, 1).
      adjacency: neighbouring relation.
      accountant_name: as in `epsilon_of`.
      tolerance: relative width of the last bracket.
    """
    target = _checks.real("target_epsilon", target_epsilon, above=0.0)
    probability, relation = _checks.delta(delta), Adjacency.parse(adjacency)
    width = _checks.real("tolerance", tolerance, above=0.0, below=1.0)
    accountant.require_chargeable(accountant.parts_of(make_event(1.0)))

    def make(inverse: float) -> Event:
        return make_event(1.0 / inverse)

    full = _Full(make, probability, relation, accountant_name)
    if full(1.0) <= target:
        return 1.0
    try:
        guides = _guides(make, probability, relation)
        found = smallest(full, full.rough, guides, target, width, (1.0, _LARGEST_INVERSE_RATE))
    except Unreachable:
        return 0.0
    return 1.0 / found if full(found) <= target else 0.0


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
