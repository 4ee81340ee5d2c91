"""Small files that are replaced whole, at once or durably, and the lock of a folder in use."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, Self

from fedlora.errors import DataError, FileAccessError, FolderInUseError

_LOG = logging.getLogger(__name__)
_LOCK_NAME: Final = "in-use.lock"
_UNSUPPORTED: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def replace_text(path: Path, text: str) -> None:
    """Write UTF-8 text under a name of its own, then move it into place: readers see the old file or the new one.

    A link stays a link; what is no plain file (a pipe, a device) is written as it is.
    """
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():
        place.write_text(text, encoding="utf-8")
        return
    part = place.with_name(f".{place.name}.{secrets.token_hex(4)}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, place)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def write_durably(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves the old one or the new one, never a part; its folder is made.

    Raises:
        OSError: if it cannot be written; nothing is left of it then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def ends_in_a_cut_line(handle: int) -> bool:
    """Return whether a readable file's last line has no end: a kill or a power failure cut it."""
    size = os.fstat(handle).st_size
    return size > 0 and os.pread(handle, 1, size - 1) != b"\n"


def object_of(text: str | bytes, place: str) -> Mapping[str, Any]:
    """Return a JSON object; numbers that JSON does not know and nesting without end are damage too.

    Args:
        text: UTF-8.
        place: names it in errors.

    Raises:
        DataError: if it is anything else.
    """
    try:
        found = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # bytes that are no UTF-8 are a ValueError
        raise DataError(f"{place}: not JSON; the file is damaged") from error
    if not isinstance(found, Mapping):
        raise DataError(f"{place}: a JSON object is needed; the file is damaged")
    return found


def read_object(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in a file, {} where there is no such file.

    Raises:
        DataError: if the file is damaged.
    """
    return object_of(path.read_bytes(), str(path)) if path.is_file() else {}


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def sync_folder(folder: Path) -> None:
    """Make names of new files in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class FolderLock:
    """One process's exclusive use of a folder, from its making to `close` or to the process's death, however it dies.

    The kernel holds the lock (flock on `in-use.lock`, which stays in the folder). Programs that this process starts
    do not get it, and a forked child gives its copy up at once, so that workers that outlive a killed process do
    not keep the folder. Where a file system knows no locks, a warning says so and nothing is locked.

    Attributes:
        path: the lock's file.
    """

    def __init__(self, folder: Path, what: str) -> None:
        """Take the lock, or fail at once.

        Args:
            folder: an existing folder.
            what: what it is called in messages, e.g. "run folder".

        Raises:
            FolderInUseError: if another process (or another caller in this one) has it.
            FileAccessError: if the lock's file cannot be made.
        """
        self.path = folder / _LOCK_NAME
        try:
            self._handle: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise FileAccessError(
                f"{what} {folder}: cannot be locked ({error.strerror}); make it writable"
            ) from error
        try:
            self._take(self._handle, folder, what)
        except BaseException:
            self.close()
            raise
        _HELD.add(self)

    @staticmethod
    def _take(handle: int, folder: Path, what: str) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                _LOG.warning("%s %s: this file system knows no locks; start nothing else on it", what, folder)
                return
            if not isinstance(error, BlockingIOError):
                raise FileAccessError(f"{what} {folder}: cannot be locked ({error.strerror})") from error
            owner = os.pread(handle, 200, 0).decode("utf-8", "replace").strip()
            raise FolderInUseError(
                f"{what} {folder}: in use by {owner or 'another process'}; allowed: one process at a time; wait for "
                "its end, or stop it"
            ) from None
        with contextlib.suppress(OSError):  # only a help for whoever is refused
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def close(self) -> None:
        """Give the folder up; safe to call twice."""
        handle, self._handle = self._handle, None
        _HELD.discard(self)
        if handle is not None:
            os.close(handle)

    def __enter__(self) -> Self:
        """Return the lock."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the folder up."""
        self.close()


_HELD: Final[weakref.WeakSet[FolderLock]] = weakref.WeakSet()


def _forget_in_child() -> None:
    for lock in list(_HELD):
        lock.close()


os.register_at_fork(after_in_child=_forget_in_child)
