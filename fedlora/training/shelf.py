"""A node's records: which logical clients live here, and their records, encoded when first drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fedlora.errors import DataError

Row = Mapping[str, Any]
Encoded = Any


class Encoder(Protocol):
    """The part of a task that turns a row into model inputs."""

    def encode(self, row: Row) -> Encoded:
        """Encode one row."""


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

    def open(self, client: str, encoder: Encoder) -> Records:
        """Open one client's records; called only after a durable reservation."""


class LazyRecords:
    """SENSITIVE. Records that are encoded when they are first drawn and then kept.

    Args:
        rows: all rows of the node's source.
        indices: which of them are this client's.
        encoder: turns a row into model inputs.
    """

    def __init__(
        self, rows: Sequence[Row], indices: Sequence[int] | npt.NDArray[Any], encoder: Encoder
    ) -> None:
        """Keep references only; nothing is read yet."""
        self._rows, self._indices, self._encoder = rows, indices, encoder
        self._kept: dict[int, Encoded] = {}

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._indices)

    def batch(self, indices: npt.NDArray[np.int64]) -> list[Encoded]:
        """Return these records, encoded (and remember them)."""
        found = []
        for position in indices.tolist():
            encoded = self._kept.get(position)
            if encoded is None:
                encoded = self._kept[position] = self._encoder.encode(
                    self._rows[int(self._indices[position])]
                )
            found.append(encoded)
        return found


class RowShelf:
    """Rows of one source, split over logical clients.

    Args:
        load: reads the rows; called at most once, at the first `open`.
        parts: client id to the positions of its rows.
    """

    def __init__(
        self, load: Callable[[], Sequence[Row]], parts: Mapping[str, Sequence[int] | npt.NDArray[Any]]
    ) -> None:
        """Keep the loader; nothing is read yet."""
        self._load, self._parts = load, parts
        self._rows: Sequence[Row] | None = None
        self._open: dict[str, LazyRecords] = {}
        self._encoder: Encoder | None = None

    def clients(self) -> Sequence[str]:
        """Return the logical client ids that live here."""
        return tuple(self._parts)

    def open(self, client: str, encoder: Encoder) -> Records:
        """Open one client's records.

        Raises:
            DataError: if the client does not live here.
        """
        if client not in self._parts:
            raise DataError(f"client {client}: does not live at this node; it has {len(self._parts)} clients")
        if encoder is not self._encoder:
            self._open, self._encoder = {}, encoder
        records = self._open.get(client)
        if records is None:
            if self._rows is None:
                self._rows = self._load()
            records = self._open[client] = LazyRecords(self._rows, self._parts[client], encoder)
        return records
