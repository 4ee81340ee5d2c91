"""The client's secret: 32 random bytes in a file that only its owner can read (SENSITIVE)."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from fedlora.errors import LedgerError

SECRET_BYTES = 32


def load_or_create_secret(path: str | os.PathLike[str]) -> bytes:
    """Return the secret in `path`; create it (mode 0600, synced to disk) if the file does not exist.

    Args:
        path: key file. Keep it away from the ledger's folder and its backups.

    Returns: 32 bytes, SENSITIVE.

    Raises:
        LedgerError: if the file is readable by others, has another length or cannot be made.
    """
    file = Path(path)
    try:
        return load_secret(file)
    except FileNotFoundError:
        pass
    temporary = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(secrets.token_bytes(SECRET_BYTES))
            stream.flush()
            os.fsync(stream.fileno())
        os.link(temporary, file)  # atomic, and fails if another process was faster
    except FileExistsError:
        pass
    except OSError as error:
        raise LedgerError(
            f"ledger secret {file}: cannot be created ({error.strerror}); choose another path"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return load_secret(file)


def load_secret(path: str | os.PathLike[str]) -> bytes:
    """Return the secret in `path`.

    Raises:
        FileNotFoundError: if there is no such file.
        LedgerError: if it is readable by others or has another length.
    """
    file = Path(path)
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        value = file.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise LedgerError(
            f"ledger secret {file}: cannot be read ({error.strerror}); check its owner"
        ) from error
    if mode & 0o077:
        raise LedgerError(f"ledger secret {file}: got mode {mode:04o}; required: 0600; run chmod 600")
    if len(value) != SECRET_BYTES:
        raise LedgerError(
            f"ledger secret {file}: got {len(value)} bytes; required: {SECRET_BYTES}; put the right key file back"
        )
    return value
