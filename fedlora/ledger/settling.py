"""Settling reservations: commit what ran, abandon, release; faults charge more, never less."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import sqlalchemy as sa

from fedlora.accounting import Event, NonPrivateEvent
from fedlora.errors import LedgerError
from fedlora.ledger import chain
from fedlora.ledger.chain import canonical_json
from fedlora.ledger.draft import Draft
from fedlora.ledger.schema import entries
from fedlora.ledger.state import LedgerState
from fedlora.ledger.types import CommitRequest, Pending, Reservation

_SETTLED: Final = (chain.COMMIT, chain.ABANDON, chain.RELEASE)

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


def not_open(reservations: Sequence[Reservation], state: LedgerState) -> str:
    """Return what is wrong with the first reservation that is settled, released or unknown; empty if all are open."""
    for item in reservations:
        if item.seq not in state.pending:
            return (
                f"round {item.server_round} of run {item.run_id!r} (entry {item.seq}): got a reservation that is not "
                "open; required: an open one before data is touched; reserve the round first"
            )
    return ""


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
        self._charge_excess(request, extra, where)
        what = (
            f"got {taken} steps of {pending.steps} reserved"
            if same
            else "got another event than was reserved"
        )
        return (
            f"{where}: {what}; the reservation stays spent and the excess is charged; do not send the reply"
        )

    def _charge_excess(self, request: CommitRequest, extra: int, where: str) -> None:
        reservation, event = request.reservation, request.event
        if not isinstance(event, Event) or event.chargeable is not True:
            event = NonPrivateEvent()
        text = f"{where}: {extra} steps ran beyond what was reserved; they are charged on top"
        self._draft.add(
            chain.EXCESS,
            self._draft.state.account_ids[reservation.account],
            run_id=reservation.run_id,
            server_round=reservation.server_round,
            event_id=self._draft.event(event),
            steps=extra,
            charge=extra,
            ref=reservation.seq,
            detail=canonical_json({"conditions": [text]}),
        )

    def _closed(self, request: CommitRequest, where: str) -> str | None:
        """Accept the exact repetition of a commit (its first answer may have been lost); refuse the rest.

        A report of more than the closed reservation paid for is charged all the same: it says that noise was drawn.
        """
        seq = request.reservation.seq
        if any(e.ref == seq and e.kind != chain.EXCESS for e in self._draft.entries):
            return f"{where}: committed twice in one call; commit each reservation once"
        row = self._row(entries.c.ref == seq, entries.c.kind.in_(_SETTLED))
        held = self._row(entries.c.seq == seq, entries.c.kind == chain.RESERVE)
        if row is None or held is None or not self._is_held(request.reservation, held):
            return f"{where}: got a reservation that this ledger does not hold; allowed: open reservations"
        text = self._draft.state.event_texts.get(int(row.event_id), "")
        event = self._event_text(request.event) if isinstance(request.event, Event) else None
        wanted = (chain.COMMIT, request.steps_taken, request.reply_digest, event)
        if (row.kind, int(row.steps), row.digest, text) == wanted:
            return None
        refusal = f"{where}: already {chain.KIND_NAMES[row.kind]}; allowed: one commit per reservation"
        extra = self._unpaid(request, int(held.steps) + int(row.charge), text)
        if extra < 1:
            return refusal
        self._charge_excess(request, extra, where)
        return f"{refusal}; {extra} more steps are charged; do not send the reply"

    def _row(self, *conditions: Any) -> Any:
        columns = ("kind", "account_id", "run_id", "server_round", "steps", "charge", "digest", "event_id")
        return self._connection.execute(
            sa.select(*(entries.c[name] for name in columns)).where(*conditions)
        ).first()

    def _is_held(self, reservation: Reservation, held: Any) -> bool:
        account_id = self._draft.state.account_ids.get(reservation.account)
        found = (held.account_id, held.run_id, held.server_round)
        return bool(found == (account_id, reservation.run_id, reservation.server_round))

    def _unpaid(self, request: CommitRequest, paid: int, event_text: str) -> int:
        """Return how many of the reported steps no entry has charged yet, of the event that is reported."""
        taken = request.steps_taken
        if not isinstance(taken, int) or isinstance(taken, bool) or not isinstance(request.event, Event):
            return 0
        text = self._event_text(request.event)
        extras = self._connection.execute(
            sa.select(entries.c.steps, entries.c.event_id)
            .where(entries.c.ref == request.reservation.seq)
            .where(entries.c.kind == chain.EXCESS)
        ).all()
        texts = self._draft.state.event_texts
        charged = sum(int(row.steps) for row in extras if texts.get(int(row.event_id)) == text)
        return taken - charged - (paid if text == event_text else 0)

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
