"""Losses: put a copy back or go on with what is there; the owner accepts what is missing, every report says it."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from fedlora.errors import LedgerError, LedgerIntegrityError
from fedlora.files import sync_folder
from fedlora.ledger import chain
from fedlora.ledger.anchor import Anchor
from fedlora.ledger.chain import canonical_json
from fedlora.ledger.journal import Journal
from fedlora.ledger.opening import anchor_of, file_of
from fedlora.ledger.register import Register
from fedlora.ledger.schema import entries
from fedlora.ledger.state import LedgerState
from fedlora.ledger.store import Store
from fedlora.ledger.types import check_name


@dataclass(frozen=True)
class Restored:
    """PUBLIC. What a restore did.

    Attributes:
        head: newest head of the ledger now.
        missing: entries that the anchor knows of and the copy lacks; None if no anchor could tell.
    """

    head: str
    missing: int | None


def restore(
    copy: Path,
    ledger: Path,
    *,
    secret: bytes,
    reason: str = "",
    anchor: Path | None = None,
    register: Path | None = None,
) -> Restored:
    """Put a copy in the place of a ledger that is gone, after checking every link of its chain.

    Where the anchor shows that nothing was charged since the copy was made, that is all. Otherwise what was
    charged since is not in the ledger any more, and no figure of it can be right without it: the owner has to
    accept that with a reason, and every later report repeats it.

    Args:
        copy: what `backup` wrote, or a ledger's file that was moved away (with its write-ahead log, if it has one).
        ledger: where it goes; nothing may be there.
        secret: the ledger's key, SENSITIVE.
        reason: why entries that may be missing are accepted.
        anchor: the ledger's anchor, `<ledger>.anchor` by default.
        register: names the ledgers of the key (see `register_of`); None for none.

    Raises:
        LedgerError: if something is at the ledger's place, or it cannot be written.
        LedgerIntegrityError: if the copy is damaged or of another ledger, or may lack entries and no reason is given.
    """
    _check_free(ledger)
    if reason:
        check_name("reason", reason)
    anchor_path = Path(f"{ledger}.anchor") if anchor is None else anchor
    with tempfile.TemporaryDirectory(dir=ledger.parent, prefix=".restore-") as folder:
        staged = Path(folder) / "ledger.db"
        seq, mac, ledger_id = _checked(copy, staged, secret)
        missing = _missing(anchor_path, secret, seq, mac, ledger_id)
        known = None if register is None else Register(register, secret)
        if known is not None and known.names_others(ledger_id):
            missing = None  # the key has begun another ledger: what that one charged is not in this copy
        if missing != 0 and not reason:
            what = (
                "no anchor tells whether entries are missing"
                if missing is None
                else f"{missing} entries are missing"
            )
            raise LedgerIntegrityError(
                f"copy {copy}: {what}, and what they charged would not be in any figure; put a newer copy back, or "
                "accept it with a reason, which every later report repeats"
            )
        if missing != 0:
            text = f"restored from a copy that ends at entry {seq}, {_words(missing)}: {reason}"
            seq, mac = _accepted(Store(str(staged), create=False), secret, text)
        _place(staged, ledger)
    if known is not None:
        known.add(ledger_id)
    if missing != 0:
        _anchor_anew(Anchor(anchor_path, secret), seq, mac, ledger_id)
    return Restored(chain.encode_head(seq, mac), missing)


def _check_free(ledger: Path) -> None:
    """Refuse a place where something is, or whose folder is not there."""
    for place in (ledger, Path(f"{ledger}-wal")):
        if place.exists():
            raise LedgerError(
                f"ledger {place}: is there already; move it away and keep it, it may hold newer entries"
            )
    if not ledger.parent.is_dir():
        raise LedgerError(f"ledger {ledger}: its folder does not exist; make it first")


def accept(
    location: str, *, secret: bytes, reason: str, register: Path, anchor: Path | None = None
) -> Restored:
    """Go on with what is there: no ledger at all (a new one is begun), an older one, one without its anchor.

    Every link of what is there is checked first. What is missing cannot be in any figure; the reason is an entry of
    the chain and every later report repeats it. Old anchors are kept under another name.

    Args:
        location: path of a SQLite file, or a SQLAlchemy URL.
        secret: the ledger's key, SENSITIVE.
        reason: why what may be missing is accepted.
        register: names the ledgers of the key (see `register_of`).
        anchor: the ledger's anchor; the default is that of `open_ledger`.

    Raises:
        LedgerError: if nothing is missing, or it cannot be written.
        LedgerIntegrityError: if what is there is damaged.
    """
    check_name("reason", reason)
    known = Register(register, secret)
    path = file_of(location)
    guard = anchor_of(path, anchor, known, secret)
    if path is not None and not path.exists() and _lost(None, guard, known, secret)[0] == 0:
        raise LedgerError(f"ledger {path}: is not there, and nothing tells of an earlier one; check the path")
    store = Store(location, create=True)
    try:
        state = _unbegun(store, secret)
        missing, ledger_id = _lost(state, guard, known, secret)
        if missing == 0:
            raise LedgerError(f"ledger {store.location}: nothing is missing, so there is nothing to accept")
        if state is None:
            return Restored(_begun_anew(store, secret, guard, known, reason), missing)
        text = f"accepted as it ends at entry {state.seq}, {_words(missing)}: {reason}"
        seq, mac = _accepted(store, secret, text)
        known.add(ledger_id)
        if guard is not None:
            _anchor_anew(guard, seq, mac, ledger_id)
        return Restored(chain.encode_head(seq, mac), missing)
    finally:
        store.close()


def _unbegun(store: Store, secret: bytes) -> LedgerState | None:
    """Return the fully checked state of a ledger, None if it has no entry."""
    with store.read() as connection:
        empty = connection.execute(sa.select(entries.c.seq).limit(1)).first() is None
    return None if empty else Journal(store, secret, anchor=None).verify()


def _lost(
    state: LedgerState | None, guard: Anchor | None, known: Register, secret: bytes
) -> tuple[int | None, str]:
    """Return how many entries are known to be missing (None: unknown) and the ledger's identity."""
    if state is None:
        return (None if known.begun() or (guard is not None and guard.path.exists()) else 0), ""
    if known.names_others(state.ledger_id):
        return None, state.ledger_id
    if guard is None or (guard.optional and not guard.path.exists()):
        return 0, state.ledger_id
    try:
        return _missing(guard.path, secret, state.seq, state.mac, state.ledger_id), state.ledger_id
    except LedgerIntegrityError:
        return None, state.ledger_id


def _begun_anew(store: Store, secret: bytes, guard: Anchor | None, known: Register, reason: str) -> str:
    if guard is not None:
        _set_aside(guard.path)
    journal = Journal(store, secret, anchor=guard, register=known, begin_anew=reason)
    return journal.state.head


def _set_aside(anchor: Path) -> None:
    if anchor.exists():
        anchor.rename(anchor.with_name(f"{anchor.name}.before-{time.time_ns()}"))


def _anchor_anew(anchor: Anchor, seq: int, mac: bytes, ledger_id: str) -> None:
    _set_aside(anchor.path)
    anchor.write(seq, mac, ledger_id)


def _checked(copy: Path, staged: Path, secret: bytes) -> tuple[int, bytes, str]:
    """Copy the file and replay it in full; return its newest entry's number and link, and the ledger's id."""
    try:
        for suffix in ("", "-wal"):
            if suffix == "" or Path(f"{copy}{suffix}").exists():
                shutil.copyfile(f"{copy}{suffix}", f"{staged}{suffix}")
                os.chmod(f"{staged}{suffix}", 0o600)
    except OSError as error:
        raise LedgerError(f"copy {copy}: cannot be read ({error.strerror}); check the path") from None
    store = Store(str(staged), create=False)
    try:
        state = Journal(store, secret, anchor=None).verify()
        return state.seq, state.mac, state.ledger_id
    finally:
        store.close()
        if Path(f"{staged}-wal").exists():
            raise LedgerError(
                f"copy {copy}: its write-ahead log cannot be joined to it; check the free space"
            )


def _missing(anchor: Path, secret: bytes, seq: int, mac: bytes, ledger_id: str) -> int | None:
    try:
        known = Anchor(anchor, secret).read()
    except LedgerIntegrityError:
        return None
    if known is None:
        return None
    if known[2] != ledger_id or (known[0] == seq and known[1] != mac):
        raise LedgerIntegrityError(
            f"anchor {anchor}: belongs to another ledger than the copy; check both paths"
        )
    return max(0, known[0] - seq)


def _words(missing: int | None) -> str:
    return (
        "an unknown number of later ones is missing"
        if missing is None
        else f"{missing} later ones are missing"
    )


def _accepted(store: Store, secret: bytes, text: str) -> tuple[int, bytes]:
    """Write the note into a ledger and close it; return its newest entry's number and link."""
    try:
        journal = Journal(store, secret, anchor=None)
        with journal.transaction() as draft:
            draft.add(chain.NOTE, detail=canonical_json({"conditions": [text]}))
        return journal.state.seq, journal.state.mac
    finally:
        store.close()


def _place(staged: Path, ledger: Path) -> None:
    """Move the file to its place durably; a crash before the anchor follows leaves a ledger that is refused."""
    try:
        with staged.open("rb") as stream:
            os.fsync(stream.fileno())
        os.link(staged, ledger)  # never over a file that has appeared meanwhile
        sync_folder(ledger.parent)
    except OSError as error:
        raise LedgerError(f"ledger {ledger}: cannot be written ({error.strerror})") from None
