"""What a plan would cost an account, without recording anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fedlora.accounting import Event, compose, epsilon_of, within_budget
from fedlora.accounting.reports import EpsilonReport
from fedlora.errors import LedgerError, UnsupportedEventError
from fedlora.ledger.projection import first_period, multiset_of, period_of
from fedlora.ledger.reports import ADVERSARY, UNIT_NOTES, is_sampled, sampling_of
from fedlora.ledger.state import LedgerState
from fedlora.ledger.types import Account, Budget

SEARCH_LIMIT: Final = 10_000_000


@dataclass(frozen=True)
class Projection:
    """Spend before and after a plan, in the budget's window; `most_steps` is how many of its steps still fit.

    `accountant`, `adversary`, `sampling_assumption` and `conditions` say, with the budget, what `projected` means.
    """

    spent: float
    projected: float
    budget: Budget
    fits: bool
    most_steps: int
    accountant: str
    adversary: str
    sampling_assumption: str
    conditions: tuple[str, ...]


def project(
    state: LedgerState, account: Account, event: Event, steps: int, terms: Budget | None, now: int
) -> Projection | None:
    """Return the projection, or None if the account is new and no terms are given.

    Raises:
        LedgerError: if steps < 1.
        UnsupportedEventError: if the event cannot pay for a release.
    """
    if isinstance(steps, bool) or not steps >= 1:
        raise LedgerError(f"planned steps: got {steps!r}; allowed: a whole number >= 1; give the run's steps")
    if event.chargeable is not True:
        raise UnsupportedEventError(
            f"event {event.kind}: a conditional analysis cannot pay for a release; add noise"
        )
    number = state.account_ids.get(account)
    known = None if number is None else state.accounts[number].terms
    budget = known if known is not None else terms
    if budget is None:
        return None
    spend = {} if number is None else state.accounts[number].spend
    window = first_period(budget.window, period_of(now))
    base = [(state.event(event_id), count) for event_id, count in multiset_of(spend, window)]

    def report(pairs: list[tuple[Event, int]]) -> EpsilonReport:
        return epsilon_of(
            compose(pairs), budget.delta, adjacency=budget.adjacency, accountant=budget.accountant
        )

    def fits(extra: int) -> bool:
        if budget.accountant != "best":
            return bool(report([*base, (event, extra)]).epsilon <= budget.epsilon)
        pairs = [*base, (event, extra)]
        return bool(within_budget(compose(pairs), budget.epsilon, budget.delta, adjacency=budget.adjacency))

    most = _most_steps(fits)
    after = report([*base, (event, steps)])
    sampled = any(is_sampled(one) for one, _ in [*base, (event, steps)])
    return Projection(
        report(base).epsilon if base else 0.0,
        after.epsilon,
        budget,
        steps <= most or fits(steps),
        most,
        after.accountant,
        ADVERSARY[budget.unit],
        sampling_of(budget.unit, sampled),
        (UNIT_NOTES[budget.unit], *after.conditions),
    )


def _most_steps(fits: Callable[[int], bool]) -> int:
    """Return the largest number of steps that fits (up to twice `SEARCH_LIMIT`), by doubling and halving."""
    low, high = 0, 1
    while high <= SEARCH_LIMIT and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
