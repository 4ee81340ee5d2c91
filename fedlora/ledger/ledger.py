"""The ledger: reserve before data is touched, commit what ran, report what was spent.

Order of things (each arrow is durable before the next starts):

```
projected epsilon -> refuse | reserve -> read data, train -> commit -> send
```

Formal guarantee: at every moment, including after a crash at any point, each account's reported
epsilon is an upper bound for the composition of all events whose noise was ever drawn under a
reservation, because a reservation counts in full from the moment it is durable, and noise is
drawn only after that. Only `commit` of fewer steps than reserved and `release_unused` lower a
charge, and both say that nothing was noised for the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from fedlora.accounting import Event
from fedlora.errors import LedgerError
from fedlora.ledger.chain import Entry
from fedlora.ledger.heads import check_known_head
from fedlora.ledger.journal import Journal
from fedlora.ledger.planning import Projection, project
from fedlora.ledger.projection import Projector
from fedlora.ledger.replies import ReplyStore
from fedlora.ledger.reports import (
    VerifyReport,
    accounts_of_runs,
    make_report,
    round_rows,
    verify_report,
    worst_accounts,
)
from fedlora.ledger.reserving import Reserver, amend, known_fingerprint, note_fingerprint
from fedlora.ledger.settling import CommitItem, Settler, as_commit_request, not_open
from fedlora.ledger.state import LedgerState
from fedlora.ledger.types import (
    Account,
    Budget,
    LedgerReport,
    Pending,
    Refusal,
    Reservation,
    ReserveRequest,
    RoundRow,
)


class Ledger:
    """Durable budgets of any number of accounts, runs and data sets. Made by `open_ledger`."""

    def __init__(self, journal: Journal, replies: ReplyStore | None) -> None:
        """Wrap an open journal; `replies` keeps the last reply's bytes."""
        self._journal = journal
        self._replies = replies
        self._releasable: set[int] = set()
        self._remembered: tuple[LedgerState, Projector] | None = None

    def __enter__(self) -> Self:
        """Return the ledger."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the ledger."""
        self.close()

    def close(self) -> None:
        """Close the database; open reservations stay spent."""
        self._journal.store.close()

    def reserve(self, requests: Iterable[ReserveRequest]) -> list[Reservation | Refusal]:
        """Reserve for a cohort, one request per account and round, in one durable transaction; refusals are single.

        Returns: one outcome per request, in order.

        Raises:
            LedgerError: if nothing could be written; then nothing may be released for any of them.
            LedgerIntegrityError: if the ledger is damaged or rolled back.
        """
        items = list(requests)
        with self._journal.transaction() as draft:
            outcomes = Reserver(draft, self._projector(draft.state)).run(items)
        self._releasable.update(item.seq for item in outcomes if isinstance(item, Reservation))
        return outcomes

    def reserve_one(self, request: ReserveRequest) -> Reservation:
        """Reserve for one account, or raise the refusal's error.

        Raises:
            BudgetExceededError: if the projected epsilon is above the budget.
            DuplicateRoundError: if the round was reserved before; `reply_digest` tells what was sent.
            LedgerError: if the terms differ from the ledger's, or nothing could be written.
            UnsupportedEventError: if the event cannot pay for a release.
        """
        outcome = self.reserve([request])[0]
        if isinstance(outcome, Refusal):
            raise outcome.error
        return outcome

    def foresee(self) -> None:
        """Work out what the next round like the last one will ask for, while nobody waits; charges nothing."""
        if self._remembered is not None:
            self._remembered[1].foresee()

    def mark_started(self, reservations: Iterable[Reservation]) -> None:
        """Declare that data is about to be touched: from here on nothing can be released unused.

        Raises:
            LedgerError: if one of them is not open (it was settled or released): no data may be touched for it.
        """
        items = list(reservations)
        if not_open(items, self._journal.state):
            closed = not_open(items, self._journal.refresh())
            if closed:
                raise LedgerError(closed)
        self._releasable.difference_update(item.seq for item in items)

    def commit(self, items: Iterable[CommitItem]) -> None:
        """Record what ran: (reservation, steps taken, event that ran, reply digest) each.

        Steps come from the optimiser's own counter and the event from the object that ran. Fewer
        steps than reserved (but at least 1) may be committed if nothing was noised for the rest.

        Raises:
            LedgerError: if more steps ran than were reserved, another event ran, or a reservation
                is not open. The reservation stays spent, the excess is charged on top, and the
                other items are committed; nothing of the faulty ones may be sent.
        """
        requests = [as_commit_request(item) for item in items]
        self._releasable.difference_update(request.reservation.seq for request in requests)
        with self._journal.transaction() as draft:
            faults = Settler(draft).commit(requests)
        if faults:
            raise LedgerError("; ".join(faults))

    def abandon(self, reservations: Iterable[Reservation | Pending]) -> None:
        """Close reservations whose round failed: they stay charged in full.

        Raises:
            LedgerError: if one of them is not open (the others are abandoned).
        """
        chosen = list(reservations)
        self._releasable.difference_update(item.seq for item in chosen)
        with self._journal.transaction() as draft:
            faults = Settler(draft).abandon([item.seq for item in chosen])
        if faults:
            raise LedgerError("; ".join(faults))

    def release_unused(self, reservations: Iterable[Reservation]) -> None:
        """Take reservations back whose data was never touched.

        Only the very object that reserved may do so, and only before `mark_started`: after a
        crash nobody can, so a crash always counts as spent.

        Raises:
            LedgerError: if one of them was started, settled or reserved elsewhere (none is released).
        """
        seqs = [item.seq for item in reservations]
        if not self._releasable.issuperset(seqs):
            raise LedgerError(
                "release of a reservation: got one that was started, settled or made by another process; "
                "allowed: reservations of this object before mark_started; abandon it instead (it stays spent)"
            )
        with self._journal.transaction() as draft:
            faults = Settler(draft).release(seqs)
        self._releasable.difference_update(seqs)
        if faults:
            raise LedgerError("; ".join(faults))

    def amend_budget(self, account: Account, budget: Budget, *, reason: str) -> None:
        """Change an account's terms for the future, by its owner; all events are kept and recomputed.

        Raises:
            LedgerError: if the unit of a used account would change, or `reason` is empty.
        """
        with self._journal.transaction() as draft:
            amend(draft, account, budget, reason)

    def note_fingerprint(self, account: Account, fingerprint: str) -> None:
        """Record the fingerprint of an account's records (evidence only; what was spent stays spent).

        Raises:
            LedgerError: if it is not what `fingerprint_records` returns, or nothing could be written.
        """
        if known_fingerprint(self._journal.refresh(), account) != fingerprint:
            with self._journal.transaction() as draft:
                note_fingerprint(draft, account, fingerprint)

    def report(
        self, account: Account, delta: float | None = None, *, with_rounds: bool = True
    ) -> LedgerReport:
        """Return what an account spent, recomputed from its events.

        Args:
            account: whose.
            delta: report at this delta instead of the budget's (all events are recomputed).
            with_rounds: also list one row per reservation.

        Raises:
            LedgerError: if the account is unknown.
        """
        with self._journal.store.read() as connection:
            state = self._journal.sync(connection)
            rows = round_rows(connection, state, account) if with_rounds else ()
            return make_report(state, self._projector(state), account, delta, rows, self._journal.now(state))

    def reports(self, accounts: Iterable[Account], delta: float | None = None) -> list[LedgerReport]:
        """Return the reports of many accounts at one moment, without rows.

        Raises:
            LedgerError: if an account is unknown.
        """
        state = self._journal.refresh()
        now = self._journal.now(state)
        return [make_report(state, self._projector(state), account, delta, (), now) for account in accounts]

    def project(
        self, account: Account, event: Event, steps: int, terms: Budget | None = None
    ) -> Projection | None:
        """Return what `steps` more of an event would cost, without recording anything.

        Args:
            account: whose.
            event: event of one step.
            steps: >= 1.
            terms: budget to assume for an account that the ledger does not know.

        Returns: None if the account is new and no terms are given.

        Raises:
            UnsupportedEventError: if the event cannot pay for a release.
        """
        state = self._journal.refresh()
        return project(state, account, event, steps, terms, self._journal.now(state))

    def fingerprints(self) -> dict[Account, str]:
        """Return the last fingerprint of each account's records, where there is one."""
        found = self._journal.refresh().accounts.values()
        return {entry.account: entry.fingerprint for entry in found if entry.fingerprint is not None}

    def worst_accounts(self) -> list[Account]:
        """Return accounts of which one has the largest lifetime epsilon (if all have the same delta and relation).

        An account is left out if another one was charged at least as often for every event.
        """
        state = self._journal.refresh()
        budgeted = [entry for entry in state.accounts.values() if entry.terms is not None]
        return worst_accounts({entry.account: entry.spend for entry in budgeted})

    def rounds(self, account: Account) -> tuple[RoundRow, ...]:
        """Return one row per reservation of an account, in order."""
        with self._journal.store.read() as connection:
            return round_rows(connection, self._journal.sync(connection), account)

    def accounts_of_runs(self, prefix: str) -> tuple[Account, ...]:
        """Return the accounts that paid for runs whose id starts with `prefix`, sorted."""
        with self._journal.store.read() as connection:
            return accounts_of_runs(connection, self._journal.sync(connection), prefix)

    def accounts(self) -> tuple[Account, ...]:
        """Return all accounts that have a budget, sorted (records alone may have been opened for others)."""
        known = self._journal.refresh().accounts.values()
        return tuple(sorted(entry.account for entry in known if entry.terms is not None))

    def pending(self, run_id: str | None = None) -> tuple[Pending, ...]:
        """Return open reservations (after a crash: what was spent without a commit)."""
        found = self._journal.refresh().pending.values()
        return tuple(item for item in found if run_id is None or item.run_id == run_id)

    @property
    def ledger_id(self) -> str:
        """Random identity of this ledger, 32 hex digits (PUBLIC)."""
        return self._journal.state.ledger_id

    def head(self) -> str:
        """Return the chain head, 80 hex digits; keep it elsewhere to detect an old copy."""
        return self._journal.refresh().head

    def known_head_check(self, head: str) -> None:
        """Check that a head known elsewhere lies on this ledger's chain.

        Raises:
            LedgerIntegrityError: if this ledger is older than the head or another branch.
        """
        check_known_head(self._journal, head)

    def entries(self) -> Iterator[tuple[Entry, Account | None, str]]:
        """Yield every entry with its account and its event's JSON, in order, for exports."""
        with self._journal.store.read() as connection:
            state = self._journal.sync(connection)
            for entry in self._journal.stream(connection):
                known = state.accounts.get(entry.account_id)
                yield (
                    entry,
                    None if known is None else known.account,
                    state.event_texts.get(entry.event_id, ""),
                )

    @property
    def path(self) -> Path | None:
        """The SQLite file, or None behind a URL."""
        return self._journal.store.path

    def verify(self) -> VerifyReport:
        """Check pages, every link, every snapshot and every entry's meaning from the first entry on.

        Raises:
            LedgerIntegrityError: at the first fault.
        """
        return verify_report(self._journal.verify())

    def store_reply(self, reservation: Reservation, reply: bytes) -> str:
        """Keep the reply of one round durably (one per account and run) and return its sha256.

        Raises:
            LedgerError: if there is no place for replies or it cannot be written.
        """
        return self._reply_store().store(reservation, reply)

    def load_reply(self, account: Account, run_id: str, server_round: int) -> bytes | None:
        """Return the committed reply of one round, or None if it is not kept (then the round is refused).

        Raises:
            LedgerIntegrityError: if the kept bytes differ from the committed digest.
        """
        digest = next(
            (
                row.reply_digest
                for row in reversed(self.rounds(account))
                if (row.run_id, row.server_round, row.state) == (run_id, server_round, "committed")
            ),
            "",
        )
        return self._reply_store().load(account, run_id, server_round, digest) if digest else None

    def _reply_store(self) -> ReplyStore:
        if self._replies is None:
            raise LedgerError(
                "ledger replies: no folder for a ledger behind a URL; pass replies= to open_ledger"
            )
        return self._replies

    def _projector(self, state: LedgerState) -> Projector:
        # Event numbers mean something only within one working state, so a rebuilt state starts anew.
        if self._remembered is None or self._remembered[0] is not state:
            self._remembered = (state, Projector(state.event))
        return self._remembered[1]
