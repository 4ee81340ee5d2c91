"""The anchor: a small file beside (better: away from) the ledger that remembers its newest chain head.

An old copy of the ledger put back is a valid, shorter chain; the anchor shows the gap. Two
slots are written in turn, in place and synced, so that a torn write leaves the other one
and a full disk cannot stop it. It is written after each commit: a crash in between leaves an
older head, which still lies on the chain.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from fedlora.errors import LedgerError, LedgerIntegrityError
from fedlora.files import sync_folder
from fedlora.ledger import chain
from fedlora.ledger.register import NOT_ALLOWED

_SLOT: Final = 256
_MAGIC: Final = "fedlora-anchor-1"


class Anchor:
    """One anchor file, authenticated with the ledger's key.

    Attributes:
        path: the file.
        optional: it may be missing (beside a key that is used on another machine for the first time) and may
            stand in a folder that cannot be written; what it knows binds all the same.
    """

    def __init__(self, path: Path, secret: bytes, *, optional: bool = False) -> None:
        """Name the file; nothing is read or written yet."""
        self.path = path
        self.optional = optional
        self._mac = chain.make_mac(chain.derive_key(secret, "anchor"))

    def _parse(self, slot: bytes) -> tuple[int, bytes, str] | None:
        parts = slot.rstrip(b"\0\n ").decode("ascii", "replace").split(" ")
        if len(parts) != 4 or parts[0] != _MAGIC:
            return None
        body = " ".join(parts[:3])
        if self._mac(body.encode()).hex() != parts[3]:
            return None
        seq, mac = chain.decode_head(parts[1])
        return seq, mac, parts[2]

    def read(self) -> tuple[int, bytes, str] | None:
        """Return (sequence number, link, ledger id) of the newest intact slot; None if there is no file.

        Raises:
            LedgerIntegrityError: if the file exists and no slot is intact.
            LedgerError: if it cannot be read.
        """
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LedgerError(f"ledger anchor {self.path}: cannot be read ({error.strerror})") from error
        found = [
            slot
            for slot in (self._parse(raw[:_SLOT]), self._parse(raw[_SLOT : 2 * _SLOT]))
            if slot is not None
        ]
        if not found:
            raise LedgerIntegrityError(
                f"ledger anchor {self.path}: no intact head, or another ledger's key; a rollback cannot be excluded; "
                "compare the head with the last report or the server's mirror, then accept it with accept_lost_anchor"
            )
        return max(found)

    def write(self, seq: int, mac: bytes, ledger_id: str) -> None:
        """Remember a head durably (in the slot that holds the older one).

        Raises:
            LedgerError: if the file cannot be written.
        """
        body = f"{_MAGIC} {chain.encode_head(seq, mac)} {ledger_id}"
        slot = f"{body} {self._mac(body.encode()).hex()}".encode().ljust(_SLOT - 1) + b"\n"
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                raw = os.pread(descriptor, 2 * _SLOT, 0)
                fresh = len(raw) < 2 * _SLOT
                if fresh:
                    os.pwrite(descriptor, slot + slot, 0)
                    os.fsync(descriptor)
                    sync_folder(self.path.parent)
                    return
                first, second = self._parse(raw[:_SLOT]), self._parse(raw[_SLOT:])
                use_second = first is not None and (second is None or second[0] < first[0])
                os.pwrite(descriptor, slot, _SLOT if use_second else 0)
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            if self.optional and error.errno in NOT_ALLOWED:
                return
            raise LedgerError(
                f"ledger anchor {self.path}: cannot be written ({error.strerror}); what was reserved stays spent"
            ) from error
