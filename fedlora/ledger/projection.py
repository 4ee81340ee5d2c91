"""Projected epsilon of a multiset of events, remembered per multiset (never per account).

What is remembered is the value of a pure function of (events, delta, adjacency, accountant) in
this process; nothing of it is stored, so nothing stored can lower a reported epsilon.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from fedlora.accounting import EpsilonReport, Event, compose, epsilon_of, within_budget
from fedlora.ledger.types import WINDOWS, Budget

Multiset = tuple[tuple[int, int], ...]
"""Sorted (event id, steps > 0) pairs."""
FORESEEN: Final = 16
"""How many different questions of the next round are worked out ahead at most."""


def period_of(milliseconds: int) -> int:
    """Return year * 12 + month - 1 in UTC of milliseconds since the epoch.

    Example:
        >>> period_of(0) == 1970 * 12
        True
    """
    days = milliseconds // 86_400_000
    # Civil-from-days (proleptic Gregorian calendar), exact for all dates.
    shifted = days + 719_468
    era = shifted // 146_097
    day_of_era = shifted - era * 146_097
    year_of_era = (day_of_era - day_of_era // 1460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    month_index = (5 * day_of_year + 2) // 153
    month = month_index + 3 if month_index < 10 else month_index - 9
    year = year_of_era + era * 400 + (1 if month <= 2 else 0)
    return year * 12 + month - 1


def first_period(window: str, now: int) -> int | None:
    """Return the first period that counts in a window that contains period `now`; None for lifetime."""
    months = {"lifetime": None, "calendar-year": 12, "calendar-quarter": 3, "calendar-month": 1}
    length = months[window if window in WINDOWS else "lifetime"]
    return None if length is None else now - now % length


def multiset_of(spend: Mapping[tuple[int, int], int], first: int | None) -> Multiset:
    """Return charged steps per event from period `first` on."""
    if len(spend) == 1:
        ((event, period), steps) = next(iter(spend.items()))
        return ((event, steps),) if steps > 0 and (first is None or period >= first) else ()
    totals: dict[int, int] = {}
    for (event, period), steps in spend.items():
        if steps > 0 and (first is None or period >= first):
            totals[event] = totals.get(event, 0) + steps
    return tuple(sorted(totals.items()))


def add_steps(base: Multiset, event: int, steps: int) -> Multiset:
    """Return the multiset with `steps` more of one event."""
    if not base:
        return ((event, steps),)
    if len(base) == 1 and base[0][0] == event:
        return ((event, base[0][1] + steps),)
    totals = dict(base)
    totals[event] = totals.get(event, 0) + steps
    return tuple(sorted(totals.items()))


class Projector:
    """Answers "does it fit" and "how much is it" for multisets of one ledger's events."""

    def __init__(self, event_of: Callable[[int], Event]) -> None:
        """Take the function from event number to event."""
        self._event_of = event_of
        self._events: dict[int, Event] = {}
        self._fits: dict[tuple[Multiset, float, float, str, str], bool] = {}
        self._brackets: dict[tuple[int, float, float, str, str], tuple[int, int]] = {}
        self._epsilons: dict[tuple[Multiset, float, str, str], EpsilonReport] = {}
        self._expected: dict[tuple[Multiset, Budget], None] = {}

    def event(self, number: int) -> Event:
        """Return an event by its number."""
        found = self._events.get(number)
        if found is None:
            found = self._events[number] = self._event_of(number)
        return found

    def _compose(self, multiset: Multiset) -> Event:
        return compose([(self.event(number), steps) for number, steps in multiset])

    def epsilon(self, multiset: Multiset, delta: float, adjacency: str, accountant: str) -> EpsilonReport:
        """Return the epsilon of a non-empty multiset."""
        key = (multiset, delta, adjacency, accountant)
        found = self._epsilons.get(key)
        if found is None:
            found = epsilon_of(self._compose(multiset), delta, adjacency=adjacency, accountant=accountant)
            self._epsilons[key] = found
        return found

    def expect(self, multiset: Multiset, budget: Budget) -> None:
        """Note what the next round will ask for; only the newest `FORESEEN` are kept."""
        self._expected.pop((multiset, budget), None)
        self._expected[(multiset, budget)] = None
        if len(self._expected) > FORESEEN:
            del self._expected[next(iter(self._expected))]

    def foresee(self) -> None:
        """Answer now what the next round will ask for (a pure function of events and terms; nothing is charged)."""
        expected, self._expected = self._expected, {}
        for multiset, budget in expected:
            self.fits(multiset, budget)
            self.epsilon(multiset, budget.delta, budget.adjacency, budget.accountant)

    def fits(self, multiset: Multiset, budget: Budget) -> bool:
        """Return whether epsilon(multiset) <= budget.epsilon; False for anything not a number."""
        if not multiset:
            return True
        terms = (budget.epsilon, budget.delta, budget.adjacency, budget.accountant)
        if len(multiset) == 1:
            return self._fits_single(multiset[0][0], multiset[0][1], budget, terms)
        key = (multiset, *terms)
        found = self._fits.get(key)
        if found is None:
            found = self._fits[key] = self._decide(multiset, budget)
        return found

    def _fits_single(
        self, event: int, steps: int, budget: Budget, terms: tuple[float, float, str, str]
    ) -> bool:
        # Epsilon grows with steps, so known answers decide all smaller and larger numbers of steps.
        key = (event, *terms)
        most, least = self._brackets.get(key, (0, 1 << 62))
        if steps <= most:
            return True
        if steps >= least:
            return False
        found = self._decide(((event, steps),), budget)
        most, least = (steps, least) if found else (most, steps)
        if found and 2 * steps < least:  # look ahead, so that the rounds to come are answered already
            most, least = (
                (2 * steps, least) if self._decide(((event, 2 * steps),), budget) else (most, 2 * steps)
            )
        self._brackets[key] = (most, least)
        return found

    def _decide(self, multiset: Multiset, budget: Budget) -> bool:
        if budget.accountant == "best":
            event = self._compose(multiset)
            return bool(within_budget(event, budget.epsilon, budget.delta, adjacency=budget.adjacency))
        report = self.epsilon(multiset, budget.delta, budget.adjacency, budget.accountant)
        return bool(report.epsilon <= budget.epsilon)

    def most_steps(self, base: Multiset, event: int, wanted: int, budget: Budget) -> int:
        """Return the largest n <= wanted such that `base` and n steps of `event` fit (0 if none)."""
        low, high = 0, wanted
        while low < high:
            middle = (low + high + 1) // 2
            if self.fits(add_steps(base, event, middle), budget):
                low = middle
            else:
                high = middle - 1
        return low
