"""A node's records: which logical clients live here, and their records, encoded when first drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fedlora.data import Encoded, EncodedRows, Rows, Task
from fedlora.errors import DataError


class Records(Protocol):
    """SENSITIVE. One client's records."""

    def __len__(self) -> int:
        """Return the number of records."""

    def batch(self, indices: npt.NDArray[np.int64]) -> list[Encoded]:
        """Return these records, encoded."""


class Shelf(Protocol):
    """Everything private at a node; nothing is read before `open`."""

    def clients(self) -> Sequence[str]:
        """Return the logical client ids that live here."""

    def open(self, client: str, task: Task) -> Records:
        """Open one client's records; called only after a durable reservation."""


class LazyRecords:
    """SENSITIVE. Records that are encoded when they are first drawn and then kept.

    Args:
        rows: all rows of the node's source.
        indices: positions of this client's rows.
        task: turns rows into model inputs.
    """

    def __init__(self, rows: Rows, indices: npt.NDArray[np.int64], task: Task) -> None:
        """Keep references only; nothing is read yet."""
        self._encoded = EncodedRows(task, rows.subset(indices))

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._encoded)

    def batch(self, indices: npt.NDArray[np.int64]) -> list[Encoded]:
        """Return these records, encoded (and remember them)."""
        return self._encoded.take(indices.tolist())


class RowShelf:
    """Rows of one source, split over logical clients.

    Args:
        load: reads the rows; called at most once, at the first `open`.
        parts: client id to the positions of its rows.
    """

    def __init__(
        self, load: Callable[[], Rows], parts: Mapping[str, Sequence[int] | npt.NDArray[Any]]
    ) -> None:
        """Keep the loader; nothing is read yet."""
        self._load, self._parts = load, parts
        self._rows: Rows | None = None
        self._open: dict[str, LazyRecords] = {}
        self._task: Task | None = None

    def clients(self) -> Sequence[str]:
        """Return the logical client ids that live here."""
        return tuple(self._parts)

    def open(self, client: str, task: Task) -> Records:
        """Open one client's records.

        Raises:
            DataError: if the client does not live here.
        """
        if client not in self._parts:
            raise DataError(f"client {client}: does not live at this node; it has {len(self._parts)} clients")
        if task is not self._task:
            self._open, self._task = {}, task
        records = self._open.get(client)
        if records is None:
            if self._rows is None:
                self._rows = self._load()
            records = self._open[client] = LazyRecords(
                self._rows, np.asarray(self._parts[client], dtype=np.int64), task
            )
        return records
