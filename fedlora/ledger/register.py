"""The register beside a key: which ledgers were begun with it, so that none is begun anew unsaid.

A ledger that is deleted together with its anchor leaves nothing that tells of it, but its key is usually kept
elsewhere. `<key>.ledgers` holds one authenticated line per ledger; a key that has begun a ledger does not begin
another one, and does not open one that it has not begun, unless the owner accepts it with a reason. Who deletes
ledger, anchor and register (or uses a new key) starts from zero all the same: only others can tell then (the
server's mirror, an earlier report).
"""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Final

from fedlora.errors import LedgerError, LedgerIntegrityError
from fedlora.files import sync_folder
from fedlora.ledger import chain

_LOG = logging.getLogger(__name__)
_MAGIC: Final = "fedlora-ledger-1"
NOT_ALLOWED: Final = (errno.EACCES, errno.EPERM, errno.EROFS)
"""What a key's read-only folder answers: then nothing can be kept beside the key."""


def register_of(key_file: str | os.PathLike[str]) -> Path:
    """Return the register of a key file."""
    return Path(f"{os.fspath(key_file)}.ledgers")


def anchor_beside(register: Path) -> Path:
    """Return the anchor of a ledger behind a URL, which has no folder of its own: `<key>.anchor`."""
    return register.with_suffix(".anchor")


class Register:
    """Identities of the ledgers of one key (PUBLIC); lines are only ever added."""

    def __init__(self, path: Path, secret: bytes) -> None:
        """Name the file; nothing is read or written yet."""
        self.path = path
        self._mac = chain.make_mac(chain.derive_key(secret, "register"))

    def _line(self, ledger_id: str) -> str:
        body = f"{_MAGIC} {ledger_id}"
        return f"{body} {self._mac(body.encode()).hex()}"

    def _text(self) -> str:
        try:
            return self.path.read_bytes().decode("ascii", "replace")
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise LedgerError(f"ledger register {self.path}: cannot be read ({error.strerror})") from error

    def known(self) -> tuple[str, ...]:
        """Return the identities of all ledgers of this key; a torn or foreign line does not count.

        Raises:
            LedgerError: if the file is there and cannot be read.
        """
        parts = [line.split(" ") for line in self._text().splitlines()]
        return tuple(one[1] for one in parts if len(one) == 3 and " ".join(one) == self._line(one[1]))

    def names_others(self, ledger_id: str) -> bool:
        """Return whether the key has begun ledgers, and not this one."""
        known = self.known()
        return bool(known) and ledger_id not in known

    def begun(self) -> bool:
        """Return whether anything was ever written, readable or not."""
        return self._text().strip() != ""

    def add(self, ledger_id: str) -> None:
        """Note a ledger durably, once. Where the key's folder is read-only nothing can be noted, and the log says so.

        Raises:
            LedgerError: if it cannot be written for another reason.
        """
        if ledger_id in self.known():
            return
        text = self._text()
        line = ("" if text == "" or text.endswith("\n") else "\n") + self._line(ledger_id) + "\n"
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                os.write(descriptor, line.encode())
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            sync_folder(self.path.parent)
        except OSError as error:
            if error.errno not in NOT_ALLOWED:
                raise LedgerError(
                    f"ledger register {self.path}: cannot be written ({error.strerror}); make room for it"
                ) from error
            _LOG.warning(
                "ledger register %s: cannot be written (%s); a ledger that is deleted with its anchor and begun anew "
                "would not be noticed; keep the key in a folder that can be written",
                self.path,
                error.strerror,
            )


def begun_before(location: str, register: Register) -> LedgerIntegrityError:
    """Return the error for a ledger that is missing or empty although its key has begun one."""
    return LedgerIntegrityError(
        f"ledger {location}: is missing or empty, but its key has begun a ledger before ({register.path}), and "
        "starting anew would forget what was spent; put it back ('fedlora budget restore'), or, if it is lost for "
        "good, let the owner accept that with 'fedlora budget accept' and a reason"
    )
