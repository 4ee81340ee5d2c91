"""Put a copy of a lost ledger back: what the copy lacks is counted, accepted by its owner and said in every report."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from fedlora.errors import LedgerError, LedgerIntegrityError
from fedlora.ledger import chain
from fedlora.ledger.anchor import Anchor
from fedlora.ledger.chain import canonical_json
from fedlora.ledger.journal import Journal
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
    copy: Path, ledger: Path, *, secret: bytes, reason: str = "", anchor: Path | None = None
) -> Restored:
    """Put a copy in the place of a ledger that is gone, after checking every link of its chain.

    Where the anchor shows that nothing was charged since the copy was made, that is all. Otherwise what was
    charged since is not in the ledger any more, and no figure of it can be right without it: the owner has to
    accept that with a reason, and every later report repeats it.

    Args:
        copy: what `backup` wrote.
        ledger: where it goes; nothing may be there.
        secret: the ledger's key, SENSITIVE.
        reason: why entries that may be missing are accepted.
        anchor: the ledger's anchor, `<ledger>.anchor` by default.

    Raises:
        LedgerError: if something is at the ledger's place, or it cannot be written.
        LedgerIntegrityError: if the copy is damaged or of another ledger, or may lack entries and no reason is given.
    """
    for place in (ledger, Path(f"{ledger}-wal")):
        if place.exists():
            raise LedgerError(
                f"ledger {place}: is there already; move it away and keep it, it may hold newer entries"
            )
    if reason:
        check_name("reason", reason)
    anchor_path = Path(f"{ledger}.anchor") if anchor is None else anchor
    if not ledger.parent.is_dir():
        raise LedgerError(f"ledger {ledger}: its folder does not exist; make it first")
    with tempfile.TemporaryDirectory(dir=ledger.parent, prefix=".restore-") as folder:
        staged = Path(folder) / "ledger.db"
        seq, mac, ledger_id = _checked(copy, staged, secret)
        missing = _missing(anchor_path, secret, seq, mac, ledger_id)
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
        head = chain.encode_head(seq, mac)
        if missing != 0:
            text = f"restored from a copy that ends at entry {seq}, {_words(missing)}: {reason}"
            seq, mac = _accepted(staged, secret, text)
            head = chain.encode_head(seq, mac)
        _place(staged, ledger)
    if missing != 0:
        if anchor_path.exists():
            anchor_path.rename(anchor_path.with_name(f"{anchor_path.name}.before-{time.time_ns()}"))
        Anchor(anchor_path, secret).write(seq, mac, ledger_id)
    return Restored(head, missing)


def _checked(copy: Path, staged: Path, secret: bytes) -> tuple[int, bytes, str]:
    """Copy the file and replay it in full; return its newest entry's number and link, and the ledger's id."""
    try:
        shutil.copyfile(copy, staged)
        os.chmod(staged, 0o600)
    except OSError as error:
        raise LedgerError(f"copy {copy}: cannot be read ({error.strerror}); check the path") from None
    store = Store(str(staged), create=False)
    try:
        state = Journal(store, secret, anchor=None).verify()
        return state.seq, state.mac, state.ledger_id
    finally:
        store.close()


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


def _accepted(staged: Path, secret: bytes, text: str) -> tuple[int, bytes]:
    """Write the note into the staged ledger; return its newest entry's number and link."""
    store = Store(str(staged), create=False)
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
        folder = os.open(ledger.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise LedgerError(f"ledger {ledger}: cannot be written ({error.strerror})") from None
