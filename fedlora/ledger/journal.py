"""Append-only journal: the store, the chain and the working state moved forward together.

Every transaction first checks that the database's last entry is the one the working state ends
at (catching up, link by link, with what other processes appended), so nothing is decided on a
stale or exchanged ledger.
"""

from __future__ import annotations

import hashlib
import secrets
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import sqlalchemy as sa

from fedlora.errors import LedgerError, LedgerIntegrityError
from fedlora.ledger import chain
from fedlora.ledger.anchor import Anchor
from fedlora.ledger.chain import Entry, canonical_json
from fedlora.ledger.draft import Draft
from fedlora.ledger.register import Register, begun_before
from fedlora.ledger.schema import accounts, entries, events, snapshots
from fedlora.ledger.state import LedgerState, integrity_error, readable_rows
from fedlora.ledger.store import Store
from fedlora.ledger.types import Account, Clock

SNAPSHOT_EVERY: Final = 16_384
"""Entries between two snapshots of the working state; small ledgers have none and are checked whole."""

CLOCK_TOLERANCE_SECONDS: Final = 3600.0


class Journal:
    """One ledger's entries: durable, chained, replayed. Use from one process; threads are serialised."""

    def __init__(
        self,
        store: Store,
        secret: bytes,
        *,
        anchor: Anchor | None,
        register: Register | None = None,
        clock: Clock = time.time,
        accept_lost_anchor: bool = False,
        begin_anew: str = "",
    ) -> None:
        """Open the journal and check it against its chain, its anchor and its key's register.

        Raises:
            LedgerIntegrityError: if the chain does not hold, the ledger is older than its anchor, or the key has begun
                another one.
            LedgerError: if the database cannot be used.
        """
        self.store = store
        self._key = chain.derive_key(secret, "chain")
        self._anchor = anchor
        self._register = register
        self._clock = clock
        self._state: LedgerState | None = None
        self._floor: tuple[int, bytes] = (0, chain.ZERO_MAC)
        self._clock_noted = False
        self._open(accept_lost_anchor, begin_anew)

    def _open(self, accept_lost_anchor: bool, begin_anew: str) -> None:
        lost = ""
        known = None
        if self._anchor is not None:
            try:
                known = self._anchor.read()
            except LedgerIntegrityError:
                if not accept_lost_anchor:
                    raise
                lost = "unreadable"
        if known is not None:
            self._floor = known[:2]
        with self.store.read() as connection:
            state = self.sync(connection)
        if known is None and lost == "" and self._anchor is not None and state.seq > 1:
            known = self._anchor.read()  # another process may just have begun this ledger
            if known is not None:
                self._floor, self._state = known[:2], None
                state = self.refresh()
        if state.seq > 0 and not (self.store.read_only and state.seq >= SNAPSHOT_EVERY):
            self.store.integrity_check()  # a damaged index would hide a round that was spent
        if known is not None and known[2] != state.ledger_id:
            raise integrity_error(1, "belongs to another ledger than the anchor beside it")
        if begin_anew and state.seq > 0:
            raise LedgerError(f"ledger {self.store.location}: has entries already; nothing was begun anew")
        if state.seq == 0:
            self._begin(begin_anew)
        elif self._anchor is not None and known is None:
            self._adopt(state, lost or "missing", accept_lost_anchor)
        self._enrol(self.state)

    def _begin(self, anew: str) -> None:
        register, ledger_id = self._register, secrets.token_hex(16)
        if register is not None and anew:
            register.add(ledger_id)
        elif register is not None and register.begun() and self.refresh().seq == 0:
            raise begun_before(self.store.location, register)
        with self.transaction() as draft:
            if draft.state.seq == 0:
                draft.add(chain.GENESIS, detail=canonical_json({"ledger_id": ledger_id, "format": 1}))
                if anew:
                    text = f"begun anew; what an earlier ledger of this key charged is in no figure: {anew}"
                    draft.add(chain.NOTE, detail=canonical_json({"conditions": [text]}))

    def _enrol(self, state: LedgerState) -> None:
        register = self._register
        known = () if register is None else register.known()
        if register is None or state.ledger_id in known:
            return
        if self.store.read_only and known:
            state.conditions["its key has begun another ledger too: the figures of both add up"] = None
        elif known:
            raise LedgerIntegrityError(
                f"ledger {self.store.location}: is not a ledger that its key has begun ({register.path} names others); "
                "put the right one back, or let the owner accept it with 'fedlora budget accept' and a reason"
            )
        elif not self.store.read_only:
            register.add(state.ledger_id)

    def _adopt(self, state: LedgerState, what: str, accepted: bool) -> None:
        anchor = self._anchor
        if anchor is None or (self.store.read_only and (state.seq == 1 or anchor.optional)):
            return
        if self.store.read_only:
            state.conditions["the anchor is missing: a rollback to an older copy cannot be excluded"] = None
        elif state.seq == 1 or (anchor.optional and what == "missing"):
            anchor.write(state.seq, state.mac, state.ledger_id)
        elif not accepted:
            raise LedgerIntegrityError(
                f"ledger anchor {anchor.path}: missing beside a used ledger, so an older copy may have been put back; "
                "put the anchor back, or compare the head with the last report or the server's mirror and let the "
                "owner accept it with 'fedlora budget accept' and a reason (or accept_lost_anchor in Python)"
            )
        else:
            text = f"the anchor was {what} and was accepted anew; a rollback before that cannot be excluded"
            with self.transaction() as draft:
                draft.add(chain.NOTE, detail=canonical_json({"conditions": [text]}))

    @property
    def state(self) -> LedgerState:
        """The working state at the last transaction (caught up by `refresh`)."""
        if self._state is None:
            return self.refresh()
        return self._state

    def refresh(self) -> LedgerState:
        """Catch up with the database and return the working state."""
        with self.store.read() as connection:
            return self.sync(connection)

    @contextmanager
    def transaction(self) -> Iterator[Draft]:
        """Open the one write transaction; entries of the draft are durable on leaving.

        Raises:
            LedgerError: if it cannot be written; nothing of the draft counts then.
            LedgerIntegrityError: if the ledger is damaged or not the one that was opened.
        """
        try:
            with self.store.write() as connection:
                state = self.sync(connection)
                draft = Draft(state, self.now(state), connection)
                self._note_clock(draft)
                body = self._snapshot(draft)
                yield draft
                self._insert(connection, draft, body)
        except BaseException:
            self._state = None  # rebuilt from the database: what was not committed is forgotten
            raise
        if draft.entries:
            self._floor = (state.seq, state.mac)
            if self._anchor is not None:
                self._anchor.write(state.seq, state.mac, state.ledger_id)

    def now(self, state: LedgerState) -> int:
        """Return milliseconds since the epoch, never before the last entry."""
        return max(int(self._clock() * 1000), state.last_at)

    def _note_clock(self, draft: Draft) -> None:
        behind = draft.state.last_at / 1000 - self._clock()
        if behind > CLOCK_TOLERANCE_SECONDS and not self._clock_noted:
            self._clock_noted = True
            text = f"the clock was {int(behind)} s behind the ledger after entry {draft.state.seq}; that time counts"
            draft.add(chain.NOTE, detail=canonical_json({"conditions": [text]}))

    @staticmethod
    def _snapshot(draft: Draft) -> tuple[int, bytes] | None:
        state = draft.state
        if state.seq - state.snapshot_seq < SNAPSHOT_EVERY:
            return None
        body = state.dump()
        seq = draft.add(chain.SNAPSHOT, digest=hashlib.sha256(body).hexdigest())
        return seq, zlib.compress(body, 6)

    @staticmethod
    def _insert(connection: sa.Connection, draft: Draft, body: tuple[int, bytes] | None) -> None:
        if draft.accounts:
            connection.execute(sa.insert(accounts), draft.accounts)
        if draft.events:
            connection.execute(sa.insert(events), draft.events)
        if draft.entries:
            mark = "?" if connection.dialect.paramstyle == "qmark" else "%s"
            text = f"INSERT INTO entries ({', '.join(chain.COLUMNS)}) VALUES ({', '.join([mark] * len(chain.COLUMNS))})"  # noqa: S608
            parameters: list[tuple[Any, ...]] = list(draft.entries)
            connection.exec_driver_sql(text, parameters)
        if body is not None:
            connection.execute(sa.insert(snapshots), {"seq": body[0], "body": body[1]})

    def sync(self, connection: sa.Connection) -> LedgerState:
        """Bring the working state to the database's last entry, checking every link on the way.

        Raises:
            LedgerIntegrityError: if the database is older than what this process or the anchor
                knows, or a link does not hold.
        """
        last = connection.execute(
            sa.select(entries.c.seq, entries.c.mac).order_by(entries.c.seq.desc()).limit(1)
        ).first()
        with readable_rows():
            seq, mac = (0, chain.ZERO_MAC) if last is None else (int(last[0]), chain.as_link(last[1]))
        state = self._state
        if state is not None and state.seq == seq:
            if state.mac != mac:
                raise integrity_error(seq, "was exchanged")
            self._define(connection, state)  # a refused request leaves its event's row without an entry
            return state
        if seq < self._floor[0]:
            self._state = None
            raise LedgerIntegrityError(
                f"ledger {self.store.location}: ends at entry {seq}, but entry {self._floor[0]} is known to exist; "
                "an older copy was put back or entries were removed; restore the newest ledger "
                "(the difference counts as spent)"
            )
        self._state = None
        if state is None:
            state = LedgerState(self._key)
        with readable_rows():
            self._catch_up(connection, state)
            self._check_floor(connection)
        self._state = state
        return state

    def _catch_up(self, connection: sa.Connection, state: LedgerState, *, whole: bool = False) -> None:
        self._define(connection, state)
        if state.seq == 0 and not whole:
            self._load_snapshot(connection, state)
        state.replay(self.stream(connection, after=state.seq))

    @staticmethod
    def stream(connection: sa.Connection, after: int = 0) -> Iterator[Entry]:
        """Return the stored entries after a sequence number, in order, unchecked."""
        rows = connection.exec_driver_sql(
            f"SELECT {', '.join(chain.COLUMNS)} FROM entries WHERE seq > {int(after)} ORDER BY seq",  # noqa: S608
            execution_options={"yield_per": 10_000},
        )
        return map(Entry._make, rows)

    @staticmethod
    def _define(connection: sa.Connection, state: LedgerState) -> None:
        rows = connection.execute(
            sa.select(accounts).where(accounts.c.id > len(state.accounts)).order_by(accounts.c.id)
        )
        for number, client, dataset in rows:
            state.define_account(number, Account(client, dataset))
        for row in connection.execute(
            sa.select(events).where(events.c.id > len(state.event_ids)).order_by(events.c.id)
        ):
            state.define_event(*row)

    @staticmethod
    def _load_snapshot(connection: sa.Connection, state: LedgerState) -> None:
        found = connection.execute(
            sa.select(snapshots.c.seq, snapshots.c.body, entries.c.digest)
            .join(entries, entries.c.seq == snapshots.c.seq)
            .order_by(snapshots.c.seq.desc())
            .limit(1)
        ).first()
        if found is None:
            return
        try:
            body = zlib.decompress(found[1])
        except zlib.error as error:
            raise integrity_error(found[0], "has a damaged snapshot") from error
        if hashlib.sha256(body).hexdigest() != found[2]:
            raise integrity_error(found[0], "has an edited snapshot")
        state.load(body)
        if state.seq != found[0] - 1:
            raise integrity_error(found[0], "has another entry's snapshot")

    def _check_floor(self, connection: sa.Connection) -> None:
        seq, mac = self._floor
        if seq == 0:
            return
        found = self.link_at(connection, seq)
        if found != mac:
            raise integrity_error(
                seq, "differs from the one that is known; this is another branch or an edited copy"
            )

    @staticmethod
    def link_at(connection: sa.Connection, seq: int) -> bytes | None:
        """Return the stored link of one entry, or None."""
        value = connection.execute(sa.select(entries.c.mac).where(entries.c.seq == seq)).scalar()
        return None if value is None else chain.as_link(value)

    def verify(self, progress: Callable[[int], None] | None = None) -> LedgerState:
        """Check pages, every link and every snapshot from the first entry on; return the replayed state.

        Raises:
            LedgerIntegrityError: at the first fault.
        """
        self.store.integrity_check()
        state = LedgerState(self._key)
        with self.store.read() as connection, readable_rows():
            self._define(connection, state)
            marks = list(
                connection.execute(sa.select(snapshots.c.seq, snapshots.c.body).order_by(snapshots.c.seq))
            )
            stream = self.stream(connection)
            for mark, body in marks:
                state.replay(_until(stream, mark - 1, state.seq))
                if progress is not None:
                    progress(state.seq)
                if state.dump() != zlib.decompress(body):
                    raise integrity_error(
                        mark, "has a snapshot that does not follow from the entries before it"
                    )
            state.replay(stream)
            self._check_floor(connection)
        if state.seq < self._floor[0]:
            raise integrity_error(state.seq + 1, "is missing though it is known to exist")
        return state


def _until(stream: Iterator[Entry], last: int, done: int) -> Iterator[Entry]:
    for _ in range(last - done):
        entry = next(stream, None)
        if entry is None:
            return
        yield entry
