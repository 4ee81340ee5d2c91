"""Write small files durably and with the right permissions."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from fedlora.errors import DeploymentError

PRIVATE = 0o600
PUBLIC = 0o644


def write_file(path: Path, content: bytes, *, mode: int = PRIVATE, replace: bool = False) -> Path:
    """Write a file in one step (temporary name, fsync, rename); refuse to overwrite unless asked to.

    Args:
        path: where to write; its folder is made.
        content: bytes, possibly SENSITIVE (then `mode` is PRIVATE).
        mode: permissions, set before the content is written.
        replace: overwrite an existing file.

    Raises:
        DeploymentError: if the file exists already or cannot be written.
    """
    if path.exists() and not replace:
        raise DeploymentError(f"{path}: exists already; choose another folder or ask for a rotation")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as stream:
            os.fchmod(stream.fileno(), mode)
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise DeploymentError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        temporary.unlink(missing_ok=True)
    return path


def read_file(path: Path, what: str, remedy: str) -> bytes:
    """Read a file.

    Raises:
        DeploymentError: naming what the file is for and what to do.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise DeploymentError(f"{what} {path}: cannot be read ({error.strerror}); {remedy}") from None


def require_private(path: Path, what: str, *, group: bool = False) -> None:
    """Refuse a secret file that others can read.

    Args:
        path: the file.
        what: for the message.
        group: its group may (volumes of Kubernetes are made so for the pod's own group).

    Raises:
        DeploymentError: with the mode found and the command that repairs it.
    """
    mode = path.stat().st_mode & 0o777
    if mode & (0o007 if group else 0o077):
        raise DeploymentError(f"{what} {path}: mode is {mode:04o}, others may read it; run chmod 600 {path}")
