"""The last reply of each account and run, so that a repeated request gets the same bytes (PUBLIC)."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

from fedlora.errors import LedgerError, LedgerIntegrityError
from fedlora.files import sync_folder
from fedlora.ledger.types import Account, Reservation


class ReplyStore:
    """A folder with one file per account and run; written atomically, checked by digest when read."""

    def __init__(self, folder: Path) -> None:
        """Name the folder; it is made on first use."""
        self._folder = folder

    def _file(self, account: Account, run_id: str) -> Path:
        text = f"{account.client}\x1f{account.dataset}\x1f{run_id}"
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.reply"

    def store(self, reservation: Reservation, reply: bytes) -> str:
        """Keep a reply (replacing the one of an earlier round) and return its sha256.

        Raises:
            LedgerError: if it cannot be written.
        """
        digest = hashlib.sha256(reply).hexdigest()
        file = self._file(reservation.account, reservation.run_id)
        temporary = file.with_suffix(f".{secrets.token_hex(4)}.part")
        header = f"{reservation.server_round} {digest}\n".encode()
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(header)
                stream.write(reply)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(file)
            sync_folder(self._folder)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise LedgerError(
                f"ledger reply {file.name}: cannot be kept ({error.strerror}); the round stays spent; do not send it"
            ) from error
        return digest

    def load(self, account: Account, run_id: str, server_round: int, digest: str) -> bytes | None:
        """Return the kept reply of a round, or None if another round's (or none) is kept.

        Raises:
            LedgerIntegrityError: if the kept bytes do not have the committed digest.
        """
        try:
            header, _, reply = self._file(account, run_id).read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LedgerError(f"ledger reply: cannot be read ({error.strerror}); refuse the round") from error
        if header.split(b" ")[0] != str(server_round).encode():
            return None
        if hashlib.sha256(reply).hexdigest() != digest:
            raise LedgerIntegrityError(
                f"ledger reply of round {server_round}: the kept bytes differ from the committed digest; "
                "refuse the round (fresh noise would be a second release)"
            )
        return reply
