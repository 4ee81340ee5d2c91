"""Open a ledger: its database, its anchor and the folder of its last replies."""

from __future__ import annotations

import os
import time
from pathlib import Path

from fedlora.errors import LedgerIntegrityError
from fedlora.ledger import chain
from fedlora.ledger.anchor import Anchor
from fedlora.ledger.journal import Journal
from fedlora.ledger.ledger import Ledger
from fedlora.ledger.register import Register, anchor_beside, begun_before
from fedlora.ledger.replies import ReplyStore
from fedlora.ledger.store import Store, is_url
from fedlora.ledger.types import Clock


def open_ledger(
    location: str | os.PathLike[str],
    *,
    secret: bytes,
    create: bool = True,
    read_only: bool = False,
    anchor: str | os.PathLike[str] | None = None,
    replies: str | os.PathLike[str] | None = None,
    register: str | os.PathLike[str] | None = None,
    clock: Clock = time.time,
    accept_lost_anchor: bool = False,
) -> Ledger:
    """Open (or create) a ledger and check it.

    Args:
        location: path of a SQLite file, or a SQLAlchemy URL such as postgresql+psycopg://...
        secret: the client's key (see `load_or_create_secret`), SENSITIVE.
        create: make a new ledger if there is none.
        read_only: report only.
        anchor: file that remembers the newest head (default for a SQLite file: `<file>.anchor`;
            better a path outside the ledger's backups; default behind a URL: beside the register, if there is one).
        replies: folder for the last replies (default for a SQLite file: `<file>.replies`).
        register: file beside the key that names the ledgers begun with it (see `register_of`); None for none.
        clock: seconds since the epoch; entries never go back in time whatever it says.
        accept_lost_anchor: go on although the anchor is gone; recorded in the ledger and all reports.

    Raises:
        LedgerError: if it cannot be opened.
        LedgerIntegrityError: if it is damaged, edited, rolled back, from a newer library, or missing though its key
            has begun one.
    """
    text = os.fspath(location)
    chain.derive_key(secret, "check")
    path = file_of(text)
    known = None if register is None else Register(Path(register), secret)
    guard = anchor_of(path, anchor, known, secret)
    _check_missing(path, guard, known)
    store = Store(text, create=create, read_only=read_only)
    try:
        journal = Journal(
            store,
            secret,
            anchor=guard,
            register=known,
            clock=clock,
            accept_lost_anchor=accept_lost_anchor,
        )
    except BaseException:
        store.close()
        raise
    folder = Path(replies) if replies is not None else (None if path is None else Path(f"{path}.replies"))
    return Ledger(journal, None if folder is None else ReplyStore(folder))


def file_of(location: str) -> Path | None:
    """Return a SQLite ledger's file, None behind another URL."""
    return None if is_url(location) and not location.startswith("sqlite") else Store._path_of(location)


def anchor_of(
    path: Path | None, named: str | os.PathLike[str] | None, register: Register | None, secret: bytes
) -> Anchor | None:
    """Return the anchor of a ledger: the one that is named, or the default of a file or a URL."""
    if named is not None:
        return Anchor(Path(named), secret)
    if path is not None:
        return Anchor(Path(f"{path}.anchor"), secret)
    return None if register is None else Anchor(anchor_beside(register.path), secret, optional=True)


def _check_missing(path: Path | None, anchor: Anchor | None, register: Register | None) -> None:
    """Refuse a file that is gone, before an empty one is made in its place."""
    if path is None or path.exists():
        return
    if anchor is not None and anchor.path.exists():
        raise LedgerIntegrityError(
            f"ledger {path}: the file is missing but its anchor {anchor.path} is here; put the ledger back "
            "(starting anew would forget what was spent), or let the owner accept the loss with "
            "'fedlora budget accept' and a reason"
        )
    if register is None or not register.begun():
        return
    if not path.exists():  # asked again: another process may have made it just now
        raise begun_before(str(path), register)
