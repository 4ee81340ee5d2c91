"""A file that is read by index must stay as it was when it was indexed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from fedlora.errors import DataError


class WatchedFile:
    """Opens one file again and again, and refuses once its size or its time of change is another.

    Positions, persons and partitions were read off the file as it was; records of another file must not be drawn
    in their place.
    """

    def __init__(self, path: Path) -> None:
        """Remember the file as it is now."""
        self.path = path
        with path.open("rb") as handle:
            self._seen = _state(handle)

    def open(self) -> BinaryIO:
        """Open the file for reading.

        Raises:
            DataError: if it changed, or can no longer be read.
        """
        try:
            handle = self.path.open("rb")
        except OSError as fault:
            raise DataError(
                f"{self.path}: can no longer be read ({type(fault).__name__}); it changed while it was in use"
            ) from None
        if _state(handle) != self._seen:
            handle.close()
            raise self._changed()
        return handle

    def _changed(self) -> DataError:
        return DataError(f"{self.path}: the file changed while it was in use; start again, or use a copy")

    def still(self, handle: BinaryIO) -> None:
        """Refuse to go on with an opened file that was changed meanwhile (one system call).

        Raises:
            DataError: if it changed.
        """
        if _state(handle) != self._seen:
            raise self._changed()

    def each(self, indices: Iterable[int]) -> Iterator[tuple[BinaryIO, int]]:
        """Yield the opened file with each of some indices; it is opened once and looked at before each and at the end.

        Raises:
            DataError: as `open`, when the pass comes to it.
        """
        with self.open() as handle:
            for index in indices:
                self.still(handle)
                yield handle, index
        self.check()

    def check(self) -> None:
        """Refuse a file that changed.

        Raises:
            DataError: as `open`.
        """
        self.open().close()


def _state(handle: BinaryIO) -> tuple[int, int]:
    found = os.fstat(handle.fileno())
    return found.st_size, found.st_mtime_ns
