"""The server's mirror: receipts kept, recomputed and compared; a client's higher figure stands (PUBLIC).

The mirror never lowers anything: per account it reports the largest of what the client claims
and what follows from the receipts and from the rounds that were asked for and never answered.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, Final

from fedlora.accounting import Event, compose, epsilon_of
from fedlora.errors import AuthenticationError, FedLoraError, LedgerError
from fedlora.ledger.chain import canonical_json, decode_head
from fedlora.ledger.mirror_types import Charges, History, MirrorFlag, MirrorReport
from fedlora.ledger.receipts import Receipt, SignedReceipt, verify_receipt
from fedlora.ledger.types import Account

TOLERANCE: Final = 1e-6

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS keys (client TEXT PRIMARY KEY, public_key TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS receipts (
  id INTEGER PRIMARY KEY, client TEXT NOT NULL, dataset TEXT NOT NULL, run_id TEXT NOT NULL,
  server_round INTEGER NOT NULL, entry INTEGER NOT NULL, body TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS asked (
  client TEXT NOT NULL, dataset TEXT NOT NULL, run_id TEXT NOT NULL, server_round INTEGER NOT NULL,
  event TEXT NOT NULL, steps INTEGER NOT NULL,
  PRIMARY KEY (client, dataset, run_id, server_round));
CREATE INDEX IF NOT EXISTS receipts_round ON receipts (client, run_id, server_round);
CREATE INDEX IF NOT EXISTS receipts_account ON receipts (client, dataset, id);
CREATE TABLE IF NOT EXISTS heads (client TEXT PRIMARY KEY, head TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS flags (
  id INTEGER PRIMARY KEY, client TEXT NOT NULL, dataset TEXT NOT NULL, code TEXT NOT NULL, text TEXT NOT NULL,
  UNIQUE (client, dataset, code, text));
"""
_KEEP_FLAG: Final = "INSERT OR IGNORE INTO flags (client, dataset, code, text) VALUES (?, ?, ?, ?)"


class Mirror:
    """Durable store of receipts (SQLite file); survives restarts of the server."""

    def __init__(self, path: str | os.PathLike[str], *, keys: Mapping[str, str] | None = None) -> None:
        """Open or create the mirror.

        Args:
            path: SQLite file.
            keys: public key (64 hex digits) by client; a client that is not in it is pinned to the
                key of its first receipt.

        Raises:
            LedgerError: if the file cannot be used.
        """
        self._path = Path(path)
        self._lock = threading.RLock()
        self._pinned = dict(keys or {})
        self._known: dict[tuple[Any, ...], float] = {}
        self._histories: dict[Account, History] = {}
        self._version = 0
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self._path, check_same_thread=False, timeout=30.0)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
            rows = self._db.execute("SELECT client, public_key FROM keys").fetchall()
        except (sqlite3.Error, OSError) as error:
            raise LedgerError(
                f"ledger mirror {self._path}: cannot be used ({error}); check the path"
            ) from error
        for client, key in rows:
            self._pinned.setdefault(client, key)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def asked(self, account: Account, run_id: str, server_round: int, event: Event, steps: int) -> None:
        """Remember, before a request is sent, what the client was asked to spend.

        Raises:
            LedgerError: if it cannot be written.
        """
        self.asked_all([account], run_id, server_round, event, steps)

    def asked_all(
        self, accounts: Iterable[Account], run_id: str, server_round: int, event: Event, steps: int
    ) -> None:
        """Remember a whole round's requests in one durable transaction, before any is sent.

        Raises:
            LedgerError: if it cannot be written.
        """
        text = event.key()
        rows = [(one.client, one.dataset, run_id, server_round, text, steps) for one in accounts]
        self._write_all("INSERT OR IGNORE INTO asked VALUES (?, ?, ?, ?, ?, ?)", rows)

    def declined(self, client: str, run_id: str, server_round: int) -> None:
        """Forget a request that the client refused by name: it spent nothing (by its own word).

        Raises:
            LedgerError: if it cannot be written.
        """
        self._write(
            "DELETE FROM asked WHERE client=? AND run_id=? AND server_round=?", (client, run_id, server_round)
        )

    def record(self, data: Mapping[str, Any] | SignedReceipt) -> list[MirrorFlag]:
        """Take one signed receipt; see `record_all`."""
        return self.record_all([data])

    def record_all(self, items: Iterable[Mapping[str, Any] | SignedReceipt]) -> list[MirrorFlag]:
        """Take signed receipts in one durable transaction; return the differences they show (also kept).

        Raises:
            LedgerError: if the mirror cannot be written; then none is taken. A bad receipt is flagged, never raised.
        """
        flags: list[MirrorFlag] = []
        with self._lock:
            try:
                with self._db:
                    for data in items:
                        flags += self._record(data)
            except BaseException as error:
                self._histories.clear()  # read again: what was not committed is forgotten
                if isinstance(error, sqlite3.Error):
                    raise self._unwritable(error) from error
                raise
        return flags

    def _record(self, data: Mapping[str, Any] | SignedReceipt) -> list[MirrorFlag]:
        try:
            signed = data if isinstance(data, SignedReceipt) else SignedReceipt.from_json(data)
            receipt = verify_receipt(signed, self._pinned.get(signed.receipt.client))
        except AuthenticationError as error:
            code = "key-changed" if "another key" in str(error) else "bad-signature"
            return self._flag([MirrorFlag(signed.receipt.client, signed.receipt.dataset, code, str(error))])
        except FedLoraError as error:
            return self._flag([MirrorFlag("?", "?", "unreadable", str(error))])
        flags = self._compare(receipt)
        self._pinned.setdefault(receipt.client, signed.public_key)
        self._db.execute("INSERT OR IGNORE INTO keys VALUES (?, ?)", (receipt.client, signed.public_key))
        taken = self._db.execute(
            "INSERT OR IGNORE INTO receipts (client, dataset, run_id, server_round, entry, body) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (
                receipt.client,
                receipt.dataset,
                receipt.run_id,
                receipt.server_round,
                receipt.entry,
                canonical_json(signed.to_json()),
            ),
        )
        if taken.rowcount == 1:
            self._history(Account(receipt.client, receipt.dataset)).add(receipt)
        self._note_head(receipt)
        return self._flag(flags + self._compare_figure(receipt))

    def _note_head(self, receipt: Receipt) -> None:
        """Remember the newest head of a client; an older one never takes its place."""
        known = self.known_head(receipt.client)
        if not known or decode_head(receipt.head)[0] > decode_head(known)[0]:
            self._db.execute("INSERT OR REPLACE INTO heads VALUES (?, ?)", (receipt.client, receipt.head))

    def flag(self, client: str, dataset: str, code: str, text: str) -> None:
        """Keep a difference that was found elsewhere.

        Raises:
            LedgerError: if it cannot be written.
        """
        self._write(_KEEP_FLAG, (client, dataset, code, text))

    def _unwritable(self, error: sqlite3.Error) -> LedgerError:
        return LedgerError(f"ledger mirror {self._path}: cannot be written ({error}); stop the run")

    def _write(self, statement: str, values: tuple[Any, ...]) -> None:
        self._write_all(statement, [values])

    def _write_all(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        try:
            with self._lock, self._db:
                self._db.executemany(statement, rows)
        except sqlite3.Error as error:
            raise self._unwritable(error) from error

    def _flag(self, flags: list[MirrorFlag]) -> list[MirrorFlag]:
        """Keep differences, inside the caller's transaction."""
        self._db.executemany(_KEEP_FLAG, [astuple(flag) for flag in flags])
        return flags

    def _history(self, account: Account) -> History:
        """Return what is known of an account; read from the file once, and again after another server wrote to it."""
        version = int(self._db.execute("PRAGMA data_version").fetchone()[0])
        if version != self._version:
            self._histories.clear()
            self._version = version
        found = self._histories.get(account)
        if found is None:
            rows = self._db.execute(
                "SELECT body FROM receipts WHERE client=? AND dataset=? ORDER BY id",
                (account.client, account.dataset),
            )
            found = History()
            for (body,) in rows:
                found.add(SignedReceipt.from_json(json.loads(body)).receipt)
            self._histories[account] = found
        return found

    def receipts(self, account: Account) -> list[Receipt]:
        """Return the receipts of one account, in the order they came."""
        with self._lock:
            return list(self._history(account).receipts)

    def accounts(self) -> list[Account]:
        """Return every account with a receipt or an unanswered round, sorted."""
        rows = self._db.execute(
            "SELECT client, dataset FROM receipts UNION SELECT client, dataset FROM asked"
        )
        return sorted(Account(client, dataset) for client, dataset in rows)

    def _compare(self, receipt: Receipt) -> list[MirrorFlag]:
        account = Account(receipt.client, receipt.dataset)
        flags: list[MirrorFlag] = []

        def flag(code: str, text: str) -> None:
            flags.append(MirrorFlag(receipt.client, receipt.dataset, code, text))

        where = f"round {receipt.server_round} of run {receipt.run_id!r}"
        history = self._history(account)
        newest = history.newest
        if newest is not None:
            self._compare_chain(receipt, newest, flag)
            terms = (receipt.delta, receipt.adjacency, receipt.unit)
            if terms != (newest.delta, newest.adjacency, newest.unit):
                flag("terms-changed", f"{where}: delta, adjacency or unit differ from the receipts before it")
        sent = history.replies(receipt.run_id, receipt.server_round)
        if receipt.reply_digest and sent - {receipt.reply_digest}:
            flag("second-release", f"{where}: two different replies were sent; both are charged")
        asked = self._db.execute(
            "SELECT event, steps FROM asked WHERE client=? AND run_id=? AND server_round=?",
            (receipt.client, receipt.run_id, receipt.server_round),
        ).fetchone()
        if asked is not None and asked[0] != receipt.event:
            flag("event-differs", f"{where}: the client's event differs from the one it was asked for")
        if asked is not None and receipt.steps > int(asked[1]):
            flag("steps-differ", f"{where}: the client charged {receipt.steps} steps, asked were {asked[1]}")
        return flags

    @staticmethod
    def _compare_chain(receipt: Receipt, newest: Receipt, flag: Any) -> None:
        if receipt.ledger_id != newest.ledger_id:
            flag(
                "another-ledger",
                "the client answers from another ledger than before; its old spend is kept here",
            )
            return
        (seq, link), (known, known_link) = decode_head(receipt.head), decode_head(newest.head)
        if seq < known or (seq == known and link != known_link):
            flag(
                "rollback",
                f"the client's ledger ends at entry {seq}; entry {known} is known: an older copy is in use",
            )

    def _compare_figure(self, receipt: Receipt) -> list[MirrorFlag]:
        account = Account(receipt.client, receipt.dataset)
        charges = self._charges(account, with_unanswered=False)
        flags = []
        steps = sum(count for _, count in charges.values())
        if receipt.num_events < steps:
            text = (
                f"the client's ledger counts {receipt.num_events} steps; its own receipts add up to {steps}"
            )
            flags.append(MirrorFlag(receipt.client, receipt.dataset, "missing-events", text))
        known = self._figure(charges, receipt.delta, receipt.adjacency, receipt.accountant)
        if not receipt.epsilon >= known * (1.0 - TOLERANCE) - TOLERANCE:
            text = f"claimed epsilon {receipt.epsilon:.6g} is below {known:.6g}, which follows from its own receipts"
            flags.append(MirrorFlag(receipt.client, receipt.dataset, "lower-epsilon", text))
        return flags

    def _charges(self, account: Account, *, with_unanswered: bool) -> Charges:
        """Return what an account's receipts (and the rounds that it never answered) charge."""
        charges = dict(self._history(account).charges)
        if with_unanswered:
            for (run_id, server_round), (event, steps) in self._unanswered(account).items():
                charges[(run_id, server_round, "asked", "")] = (event, steps)
        return charges

    def _unanswered(self, account: Account) -> dict[tuple[str, int], tuple[str, int]]:
        rows = self._db.execute(
            "SELECT a.run_id, a.server_round, a.event, a.steps FROM asked a WHERE a.client=? AND a.dataset=? "
            "AND NOT EXISTS (SELECT 1 FROM receipts r WHERE r.client=a.client "
            "AND r.run_id=a.run_id AND r.server_round=a.server_round) ORDER BY a.run_id, a.server_round",
            (account.client, account.dataset),
        )
        return {(run_id, server_round): (event, steps) for run_id, server_round, event, steps in rows}

    def _figure(
        self,
        charges: Charges,
        delta: float,
        adjacency: str,
        accountant: str,
    ) -> float:
        """Compose charges anew; remembered by multiset of events, which is a pure function."""
        totals: dict[str, int] = {}
        for event, steps in charges.values():
            totals[event] = totals.get(event, 0) + steps
        multiset = tuple(sorted((event, steps) for event, steps in totals.items() if steps > 0))
        if not multiset:
            return 0.0
        key = (multiset, delta, adjacency, accountant)
        if key not in self._known:
            self._known[key] = _composed(multiset, delta, adjacency, accountant)
        return self._known[key]

    def report(
        self, account: Account, *, delta: float | None = None, adjacency: str = "add_or_remove"
    ) -> MirrorReport:
        """Return the figure that stands for one account, with every difference seen so far.

        Args:
            account: whose.
            delta: needed only for an account without receipts.
            adjacency: likewise.

        Raises:
            LedgerError: if there is no receipt and no delta.
        """
        receipts = self.receipts(account)
        if not receipts and delta is None:
            raise LedgerError(
                f"mirror of {account.client}/{account.dataset}: no receipts; give the run's delta"
            )
        newest = receipts[-1] if receipts else None
        at = newest.delta if newest is not None else float(delta or 0.0)
        relation = newest.adjacency if newest is not None else adjacency
        accountant = newest.accountant if newest is not None else "best"
        recomputed = self._figure(self._charges(account, with_unanswered=True), at, relation, accountant)
        claimed = max((receipt.epsilon for receipt in receipts), default=0.0)
        flags = self._db.execute(
            "SELECT client, dataset, code, text FROM flags WHERE client=? AND dataset=? ORDER BY id",
            (account.client, account.dataset),
        )
        return MirrorReport(
            account=account,
            epsilon=max(claimed, recomputed),
            claimed=claimed,
            recomputed=recomputed,
            delta=at,
            adjacency=relation,
            unit=newest.unit if newest is not None else "record",
            unanswered=tuple(self._unanswered(account)),
            head=self.known_head(account.client),
            flags=tuple(MirrorFlag(*row) for row in flags),
        )

    def known_head(self, client: str) -> str:
        """Return the newest chain head that the client's receipts named, or "" (one chain covers all its data sets)."""
        row = self._db.execute("SELECT head FROM heads WHERE client=?", (client,)).fetchone()
        return "" if row is None else str(row[0])

    def data_set(self, client: str) -> str | None:
        """Return the data-set name of the client's newest receipt, or None."""
        query = "SELECT dataset FROM receipts WHERE client=? ORDER BY id DESC LIMIT 1"
        row = self._db.execute(query, (client,)).fetchone()
        return None if row is None else str(row[0])

    def asked_in(self, run_id: str) -> frozenset[str]:
        """Return the clients that were asked in a run, or whose receipts name it."""
        query = "SELECT client FROM asked WHERE run_id=? UNION SELECT client FROM receipts WHERE run_id=?"
        return frozenset(str(client) for (client,) in self._db.execute(query, (run_id, run_id)))

    def missing(self, client: str, run_id: str) -> tuple[int, ...]:
        """Return the rounds of a run that a client was asked for and for which it gave no receipt."""
        rows = self._db.execute(
            "SELECT DISTINCT a.server_round FROM asked a WHERE a.client=? AND a.run_id=? AND NOT EXISTS (SELECT 1 FROM "
            "receipts r WHERE r.client=a.client AND r.run_id=a.run_id AND r.server_round=a.server_round) ORDER BY 1",
            (client, run_id),
        )
        return tuple(int(number) for (number,) in rows)


def _composed(multiset: Iterable[tuple[str, int]], delta: float, adjacency: str, accountant: str) -> float:
    """Return the epsilon of signed events; infinite where no accountant gives a bound for what a site signed."""
    try:
        pairs = [(Event.from_json(json.loads(event)), steps) for event, steps in multiset]
        value = epsilon_of(compose(pairs), delta, adjacency=adjacency, accountant=accountant).epsilon
    except (FedLoraError, ArithmeticError):
        return math.inf
    return math.inf if math.isnan(value) else value
