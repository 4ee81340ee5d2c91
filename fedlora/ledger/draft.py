"""Entries of one write transaction in progress, with the accounts and events that they need."""

from __future__ import annotations

import hashlib
from typing import Any

import sqlalchemy as sa

from fedlora.accounting import Event
from fedlora.ledger.chain import Entry
from fedlora.ledger.projection import period_of
from fedlora.ledger.state import LedgerState
from fedlora.ledger.types import Account


class Draft:
    """Entries of the transaction in progress; they already count in the working state."""

    def __init__(self, state: LedgerState, now: int, connection: sa.Connection) -> None:
        """Start with nothing, at `now` milliseconds since the epoch, in an open transaction."""
        self.state = state
        self.connection = connection
        self.now = now
        self.period = period_of(now)
        self.entries: list[Entry] = []
        self.accounts: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self._event_numbers: dict[Event, int] = {}

    def account(self, account: Account) -> int:
        """Return the account's number, defining it if it is new."""
        number = self.state.account_ids.get(account)
        if number is None:
            number = len(self.state.accounts) + 1
            self.state.define_account(number, account)
            self.accounts.append({"id": number, "client": account.client, "dataset": account.dataset})
        return number

    def event(self, event: Event) -> int:
        """Return the event's number, defining it if it is new."""
        number = self._event_numbers.get(event)
        if number is None:
            text = event.key()
            digest = hashlib.sha256(text.encode()).hexdigest()
            number = self.state.event_ids.get(digest, 0)
            if number == 0:
                number = len(self.state.event_ids) + 1
                self.state.define_event(number, digest, text)
                self.events.append({"id": number, "hash": digest, "json": text})
            self._event_numbers[event] = number
        return number

    def add(
        self,
        kind: str,
        account_id: int = 0,
        *,
        run_id: str = "",
        server_round: int = 0,
        attempt: int = 0,
        event_id: int = 0,
        steps: int = 0,
        charge: int = 0,
        ref: int = 0,
        period: int | None = None,
        digest: str = "",
        detail: str = "",
    ) -> int:
        """Append one entry and return its sequence number."""
        state = self.state
        bare = Entry(
            state.seq + 1,
            kind,
            account_id,
            run_id,
            server_round,
            attempt,
            event_id,
            steps,
            charge,
            ref,
            self.period if period is None else period,
            self.now,
            digest,
            detail,
            b"",
        )
        entry = state.link(bare)
        state.apply(entry)
        self.entries.append(entry)
        return entry.seq
