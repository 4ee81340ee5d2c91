"""Settling reservations: commit what ran, abandon, release; faults charge more, never less."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from fedlora.accounting import Event, NonPrivateEvent
from fedlora.errors import LedgerError
from fedlora.ledger import chain
from fedlora.ledger.chain import canonical_json
from fedlora.ledger.journal import Draft
from fedlora.ledger.schema import entries
from fedlora.ledger.types import CommitRequest, Pending, Reservation

CommitItem = CommitRequest | tuple[Reservation, int, Event, str]


def as_commit_request(item: CommitItem) -> CommitRequest:
    """Return a commit request from itself or a plain tuple.

    Raises:
        LedgerError: if it is neither.
    """
    request = item if isinstance(item, CommitRequest) else CommitRequest(*item)
    if not isinstance(request.reservation, Reservation):
        raise LedgerError(
            "commit: got no Reservation; allowed: what reserve returned; refused rounds have none"
        )
    return request


class Settler:
    """Closes reservations inside one write transaction; returns the faults it found, as messages."""

    def __init__(self, draft: Draft) -> None:
        """Take the transaction's draft."""
        self._draft = draft
        self._connection = draft.connection
        self._texts: dict[int, str] = {}

    def commit(self, requests: Sequence[CommitRequest]) -> list[str]:
        """Commit each request; the faulty ones stay spent, with any excess charged on top."""
        faults = []
        for request in requests:
            fault = self._commit(request)
            if fault is not None:
                faults.append(fault)
        return faults

    def _event_text(self, event: Event) -> str:
        found = self._texts.get(id(event))
        if found is None:
            found = self._texts[id(event)] = event.key()
        return found

    def _commit(self, request: CommitRequest) -> str | None:
        reservation, taken = request.reservation, request.steps_taken
        where = f"round {reservation.server_round} of run {reservation.run_id!r} (entry {reservation.seq})"
        pending = self._pending(reservation)
        if pending is None:
            return self._closed(request, where)
        same = isinstance(request.event, Event) and (
            self._event_text(request.event) == self._draft.state.event_texts[pending.event_id]
        )
        counted = isinstance(taken, int) and not isinstance(taken, bool) and taken >= 1
        if same and counted and taken <= pending.steps:
            self._settle(chain.COMMIT, pending, taken, taken - pending.steps, request.reply_digest)
            return None
        return self._excess(request, pending, same, counted, where)

    def _pending(self, reservation: Reservation) -> Pending | None:
        pending = self._draft.state.pending.get(reservation.seq)
        if pending is None:
            return None
        account_id = self._draft.state.account_ids.get(reservation.account)
        found = (pending.account_id, pending.run_id, pending.server_round)
        wanted = (account_id, reservation.run_id, reservation.server_round)
        return pending if found == wanted else None

    def _settle(self, kind: str, pending: Pending, steps: int, charge: int, digest: str = "") -> None:
        self._draft.add(
            kind,
            pending.account_id,
            run_id=pending.run_id,
            server_round=pending.server_round,
            event_id=pending.event_id,
            steps=steps,
            charge=charge,
            ref=pending.seq,
            period=pending.period,
            digest=digest,
        )

    def _excess(self, request: CommitRequest, pending: Pending, same: bool, counted: bool, where: str) -> str:
        """Keep the reservation spent and charge what ran beyond it."""
        taken = request.steps_taken
        self._settle(chain.ABANDON, pending, 0, 0)
        if same and not counted:
            return f"{where}: got {taken!r} steps; allowed: 1 to {pending.steps}; the reservation stays spent"
        extra = taken - pending.steps if same else (taken if counted else pending.steps)
        event = request.event
        if not isinstance(event, Event) or event.chargeable is not True:
            event = NonPrivateEvent()
        text = f"{where}: {extra} steps ran beyond what was reserved; they are charged on top"
        self._draft.add(
            chain.EXCESS,
            pending.account_id,
            run_id=pending.run_id,
            server_round=pending.server_round,
            event_id=self._draft.event(event),
            steps=extra,
            charge=extra,
            detail=canonical_json({"conditions": [text]}),
        )
        what = (
            f"got {taken} steps of {pending.steps} reserved"
            if same
            else "got another event than was reserved"
        )
        return (
            f"{where}: {what}; the reservation stays spent and the excess is charged; do not send the reply"
        )

    def _closed(self, request: CommitRequest, where: str) -> str | None:
        """Accept the exact repetition of a commit (its first answer may have been lost); refuse the rest."""
        row = self._connection.execute(
            sa.select(entries.c.kind, entries.c.steps, entries.c.digest, entries.c.event_id)
            .where(entries.c.ref == request.reservation.seq)
            .where(entries.c.ref > 0)
        ).first()
        if row is None and any(e.ref == request.reservation.seq for e in self._draft.entries):
            return f"{where}: committed twice in one call; commit each reservation once"
        if row is None:
            return f"{where}: got a reservation that this ledger does not hold; allowed: open reservations"
        text = self._draft.state.event_texts.get(int(row.event_id), "")
        wanted = (chain.COMMIT, request.steps_taken, request.reply_digest, self._event_text(request.event))
        if (row.kind, int(row.steps), row.digest, text) == wanted:
            return None
        return f"{where}: already {chain.KIND_NAMES[row.kind]}; allowed: one commit per reservation"

    def abandon(self, seqs: Sequence[int]) -> list[str]:
        """Close reservations; they stay charged."""
        return self._close(seqs, chain.ABANDON)

    def release(self, seqs: Sequence[int]) -> list[str]:
        """Take reservations back (the ledger has checked that their data was never touched)."""
        return self._close(seqs, chain.RELEASE)

    def _close(self, seqs: Sequence[int], kind: str) -> list[str]:
        faults = []
        for seq in seqs:
            pending: Any = self._draft.state.pending.get(seq)
            if pending is None:
                faults.append(
                    f"entry {seq}: is not an open reservation; allowed: open ones; leave it as it is"
                )
                continue
            self._settle(kind, pending, 0, -pending.steps if kind == chain.RELEASE else 0)
        return faults
