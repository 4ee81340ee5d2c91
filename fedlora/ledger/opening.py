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
            better a path outside the ledger's backups).
        replies: folder for the last replies (default for a SQLite file: `<file>.replies`).
        clock: seconds since the epoch; entries never go back in time whatever it says.
        accept_lost_anchor: go on although the anchor is gone; recorded in the ledger and all reports.

    Raises:
        LedgerError: if it cannot be opened.
        LedgerIntegrityError: if it is damaged, edited, rolled back, or from a newer library.
    """
    text = os.fspath(location)
    chain.derive_key(secret, "check")
    path = None if is_url(text) and not text.startswith("sqlite") else Store._path_of(text)
    anchor_path = Path(anchor) if anchor is not None else (None if path is None else Path(f"{path}.anchor"))
    if path is not None and not path.exists() and anchor_path is not None and anchor_path.exists():
        raise LedgerIntegrityError(
            f"ledger {path}: the file is missing but its anchor {anchor_path} is here; put the ledger back "
            "(starting anew would forget what was spent)"
        )
    store = Store(text, create=create, read_only=read_only)
    try:
        journal = Journal(
            store,
            secret,
            anchor=None if anchor_path is None else Anchor(anchor_path, secret),
            clock=clock,
            accept_lost_anchor=accept_lost_anchor,
        )
    except BaseException:
        store.close()
        raise
    folder = Path(replies) if replies is not None else (None if path is None else Path(f"{path}.replies"))
    return Ledger(journal, None if folder is None else ReplyStore(folder))
