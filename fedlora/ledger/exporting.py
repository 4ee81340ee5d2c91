"""Copies for auditors (CSV, JSON) and consistent backups."""

from __future__ import annotations

import csv
import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from fedlora.errors import LedgerError
from fedlora.ledger import chain
from fedlora.ledger.ledger import Ledger

EXPORT_COLUMNS: Final = (
    "seq",
    "state",
    "client",
    "dataset",
    "run_id",
    "server_round",
    "event",
    "steps",
    "charged_steps",
    "settles",
    "at",
    "reply_digest",
    "detail",
    "link",
)


def export_rows(ledger: Ledger) -> Iterator[dict[str, Any]]:
    """Yield every entry as plain values; the sum of `charged_steps` per client, data set and event is the spend."""
    for entry, account, event in ledger.entries():
        yield {
            "seq": entry.seq,
            "state": chain.KIND_NAMES[entry.kind],
            "client": "" if account is None else account.client,
            "dataset": "" if account is None else account.dataset,
            "run_id": entry.run_id,
            "server_round": entry.server_round,
            "event": event,
            "steps": entry.steps,
            "charged_steps": entry.charge,
            "settles": entry.ref,
            "at": datetime.fromtimestamp(entry.at / 1000, UTC).isoformat(timespec="milliseconds"),
            "reply_digest": entry.digest,
            "detail": entry.detail,
            "link": bytes(entry.mac).hex(),
        }


def write_export(ledger: Ledger, path: Path, *, kind: str) -> int:
    """Write all entries to a new file and return their number.

    Args:
        ledger: source.
        path: file that must not exist yet.
        kind: "csv" or "json".

    Raises:
        LedgerError: if the kind is unknown or the file exists or cannot be written.
    """
    if kind not in ("csv", "json"):
        raise LedgerError(f"export format: got {kind!r}; allowed: csv, json; choose one")
    try:
        with path.open("x", encoding="utf-8", newline="") as stream:
            if kind == "json":
                rows = list(export_rows(ledger))
                json.dump(
                    {"ledger_id": ledger.ledger_id, "head": ledger.head(), "entries": rows}, stream, indent=1
                )
                return len(rows)
            writer = csv.DictWriter(stream, EXPORT_COLUMNS)
            writer.writeheader()
            count = 0
            for row in export_rows(ledger):
                writer.writerow({name: _plain_cell(value) for name, value in row.items()})
                count += 1
            return count
    except OSError as error:
        raise LedgerError(
            f"export {path}: cannot be written ({error.strerror}); choose a new file name"
        ) from error


def _plain_cell(value: Any) -> Any:
    """Keep spreadsheets from reading a name as a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t") else value


def backup(ledger: Ledger, path: Path) -> str:
    """Copy a SQLite ledger consistently to a new file and return the head it ends at.

    Putting a backup back is a rollback: what the ledger charged since then is missing, and the
    anchor (or the server's mirror) makes the ledger refuse to go on until the owner accepts it.

    Raises:
        LedgerError: if the ledger is behind a URL, the file exists or cannot be written.
    """
    source = ledger.path
    if source is None:
        raise LedgerError(
            "backup: got a ledger behind a URL; allowed: SQLite files; use the server's own backup"
        )
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        raise LedgerError(
            f"backup {path}: cannot be created ({error.strerror}); choose a new file name"
        ) from error
    try:
        with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(path)) as new:
            old.backup(new)
            row = new.execute("SELECT seq, mac FROM entries ORDER BY seq DESC LIMIT 1").fetchone()
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
    except (sqlite3.Error, OSError) as error:
        path.unlink(missing_ok=True)
        raise LedgerError(f"backup {path}: cannot be written ({error}); nothing was kept") from error
    return chain.encode_head(int(row[0]), bytes(row[1]))
