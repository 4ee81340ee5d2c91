"""Reports: epsilon recomputed from events, with everything the figure depends on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import sqlalchemy as sa

from fedlora.accounting import Event
from fedlora.errors import LedgerError, PrivacyParameterError
from fedlora.ledger import chain
from fedlora.ledger.projection import Multiset, Projector, first_period, multiset_of, period_of
from fedlora.ledger.schema import entries
from fedlora.ledger.state import LedgerState, readable_rows
from fedlora.ledger.types import Account, Budget, LedgerReport, RoundRow

ADVERSARY: Final = {
    "record": "anyone who sees every message and model of all runs, the server included",
    "person": "anyone who sees every message and model of all runs, the server included",
    "client": "anyone who sees every released model; whoever adds the noise is trusted",
}
POISSON: Final = "Poisson: each record joins each step independently with the public sample rate"
NO_SAMPLING: Final = "none: every record may take part in every step"
POISSON_CLIENTS: Final = "Poisson: each client joins each round independently with the public rate"
NO_CLIENT_SAMPLING: Final = "none: every client may take part in every round"
UNIT_NOTES: Final = {
    "record": "the guarantee is per record, not per person",
    "person": "contributions are bounded per person before sampling",
    "client": "the guarantee is per client with all its records",
}


@dataclass(frozen=True)
class VerifyReport:
    """What a full check saw: it raises if anything is wrong."""

    entries: int
    accounts: int
    open_reservations: int
    head: str
    ledger_id: str


def verify_report(state: LedgerState) -> VerifyReport:
    """Return the summary of a fully replayed state."""
    return VerifyReport(state.seq, len(state.accounts), len(state.pending), state.head, state.ledger_id)


def is_sampled(event: Event) -> bool:
    """Return whether an event claims amplification by sampling."""
    return any(
        getattr(leaf, "sample_rate", None) is not None and not getattr(leaf, "sample_rate", 1.0) >= 1.0
        for leaf, _ in event.leaves()
    )


def _found(state: LedgerState, account: Account) -> tuple[int, Budget]:
    """Return an account's number and terms.

    Raises:
        LedgerError: if the ledger has no such account.
    """
    number = state.account_ids.get(account)
    terms = None if number is None else state.accounts[number].terms
    if number is None or terms is None:
        raise LedgerError(f"account {account.client}/{account.dataset}: not in this ledger; check both names")
    return number, terms


def make_report(
    state: LedgerState,
    projector: Projector,
    account: Account,
    delta: float | None,
    rows: tuple[RoundRow, ...],
    now: int,
) -> LedgerReport:
    """Return the report of one account at `now` milliseconds since the epoch.

    Raises:
        LedgerError: if the account is unknown.
        PrivacyParameterError: if delta is not in (0, 1).
    """
    number, terms = _found(state, account)
    at = terms.delta if delta is None else delta
    if not (0 < at < 1):
        raise PrivacyParameterError(
            f"delta: got {at!r}; allowed: 0 < delta < 1; use the budget's {terms.delta:g}"
        )
    spend = state.accounts[number].spend
    whole = multiset_of(spend, None)
    window = multiset_of(spend, first_period(terms.window, period_of(now)))
    epsilon, accountant, conditions = _evaluate(projector, window, at, terms)
    lifetime = epsilon if window == whole else _evaluate(projector, whole, at, terms)[0]
    sampled = any(is_sampled(projector.event(event)) for event, _ in whole)
    notes = [UNIT_NOTES[terms.unit], *conditions, *state.accounts[number].conditions, *state.conditions]
    if at != terms.delta:
        notes.append(f"recomputed at delta {at:g}; the budget is at delta {terms.delta:g}")
    return LedgerReport(
        account=account,
        epsilon=epsilon,
        delta=at,
        budget=terms,
        left=max(0.0, terms.epsilon - epsilon) if at == terms.delta else None,
        epsilon_lifetime=lifetime,
        accountant=accountant,
        adjacency=terms.adjacency,
        unit=terms.unit,
        adversary=ADVERSARY[terms.unit],
        sampling_assumption=sampling_of(terms.unit, sampled),
        num_events=sum(steps for _, steps in whole),
        conditions=tuple(dict.fromkeys(notes)),
        integrity="full" if state.loaded_from == 0 else f"since entry {state.loaded_from}",
        head=state.head,
        rounds=rows,
    )


def sampling_of(unit: str, sampled: bool) -> str:
    """Return how records (or clients) must have been drawn for an epsilon to hold."""
    if unit == "client":
        return POISSON_CLIENTS if sampled else NO_CLIENT_SAMPLING
    return POISSON if sampled else NO_SAMPLING


def _evaluate(
    projector: Projector, multiset: Multiset, delta: float, terms: Budget
) -> tuple[float, str, tuple[str, ...]]:
    if not multiset:
        return 0.0, terms.accountant, ()
    report = projector.epsilon(multiset, delta, terms.adjacency, terms.accountant)
    value = report.epsilon
    return (math.inf if math.isnan(value) else value), report.accountant, tuple(report.conditions)


def round_rows(connection: sa.Connection, state: LedgerState, account: Account) -> tuple[RoundRow, ...]:
    """Return one row per reservation of an account, with what became of it, in order."""
    number = state.account_ids.get(account)
    if number is None:
        return ()
    query = (
        sa.select(entries)
        .where(entries.c.account_id == number)
        .where(entries.c.kind.in_((chain.RESERVE, chain.COMMIT, chain.ABANDON, chain.RELEASE, chain.EXCESS)))
        .order_by(entries.c.seq)
    )
    with readable_rows():
        return _rows_of(connection.execute(query), state)


def _rows_of(found: Iterable[Any], state: LedgerState) -> tuple[RoundRow, ...]:
    rows: dict[int, RoundRow] = {}
    for entry in found:
        if entry.kind in (chain.RESERVE, chain.EXCESS):
            rows[entry.seq] = RoundRow(
                entry.seq,
                entry.run_id,
                entry.server_round,
                state.event_hashes[entry.event_id],
                state.event_texts[entry.event_id],
                entry.steps,
                entry.steps,
                chain.KIND_NAMES[entry.kind],
                "",
                datetime.fromtimestamp(entry.at / 1000, UTC).isoformat(timespec="seconds"),
            )
        else:
            earlier = rows[entry.ref]
            rows[entry.ref] = dataclasses.replace(
                earlier,
                state=chain.KIND_NAMES[entry.kind],
                steps_charged=earlier.steps_charged + entry.charge,
                reply_digest=entry.digest,
            )
    return tuple(rows.values())


def accounts_of_runs(connection: sa.Connection, state: LedgerState, prefix: str) -> tuple[Account, ...]:
    """Return the accounts with a reservation of a run whose id starts with `prefix`, sorted."""
    query = (
        sa.select(entries.c.account_id)
        .where(entries.c.kind == chain.RESERVE)
        .where(entries.c.run_id.startswith(prefix, autoescape=True))
        .distinct()
    )
    names = {number: account for account, number in state.account_ids.items()}
    return tuple(sorted(names[row.account_id] for row in connection.execute(query)))


def worst_accounts(spends: Mapping[Account, Mapping[tuple[int, int], int]]) -> list[Account]:
    """Return one account per multiset of events that no other multiset contains."""
    owners: dict[Multiset, Account] = {}
    for account, spend in spends.items():
        owners.setdefault(multiset_of(spend, None), account)
    largest: dict[tuple[int, ...], list[Multiset]] = {}
    for multiset in sorted(owners, key=lambda item: sum(steps for _, steps in item), reverse=True):
        group = largest.setdefault(tuple(event for event, _ in multiset), [])
        if not any(all(a[1] <= b[1] for a, b in zip(multiset, other, strict=True)) for other in group):
            group.append(multiset)
    return [owners[multiset] for group in largest.values() for multiset in group]
