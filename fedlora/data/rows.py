"""Records as a lazy sequence of dictionaries that knows where each one came from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, overload

import numpy as np
import numpy.typing as npt

from fedlora.errors import DataError, FedLoraError

Row = dict[str, Any]
Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Origin:
    """Where a record lies: a file (or source name) and its row, counted from 1."""

    source: str
    row: int

    def __str__(self) -> str:
        """Return `FILE, row N`, as error messages show it."""
        return f"{self.source}, row {self.row}"


class RowStore(Protocol):
    """Random access to the records of one source; SENSITIVE.

    A store may also have `read_many(indices)`, an iterator over many records that opens its file or asks its database
    once, and `column(name)`, one column of all records.
    """

    columns: tuple[str, ...]

    def __len__(self) -> int:
        """Return the number of records."""

    def read(self, index: int) -> Row:
        """Return one record as a new dictionary."""

    def origin(self, index: int) -> Origin:
        """Return where one record came from."""


class Rows(Sequence[Row]):
    """SENSITIVE. A view of a store: chosen records, with the task's roles added to each.

    A role is a name that tasks read (`text`, `label`, `prompt`, ...); `roles` maps it to the
    column that holds it. Reading a record checks that its strings are valid Unicode.
    """

    def __init__(
        self, store: RowStore, roles: Mapping[str, str] | None = None, index: Index | None = None
    ) -> None:
        """Make a view of `store`; `index` chooses records (all by default).

        Raises:
            DataError: if a role names a column that the source does not have.
        """
        self._store = store
        self._roles = dict(roles or {})
        self._index = np.arange(len(store), dtype=np.int64) if index is None else index
        for role, column in self._roles.items():
            if store.columns and column not in store.columns:
                have = ", ".join(store.columns)
                raise DataError(f"data.columns: {role} is mapped to {column!r}; the columns are {have}")

    def __len__(self) -> int:
        """Return the number of records in this view."""
        return len(self._index)

    @overload
    def __getitem__(self, item: int) -> Row: ...

    @overload
    def __getitem__(self, item: slice) -> Rows: ...

    def __getitem__(self, item: int | slice) -> Row | Rows:
        """Return one record, or a view for a slice."""
        if isinstance(item, slice):
            return self.subset(np.arange(len(self), dtype=np.int64)[item])
        place = int(self._index[item])
        return self._checked(place, self._guarded(place, lambda: self._store.read(place)))

    def read_many(self, chosen: npt.ArrayLike) -> Iterator[Row]:
        """Read chosen records in the order given, in one pass: a file is opened once, not once a record.

        Raises:
            DataError: as for one record, when the pass comes to it.
        """
        places: list[int] = self._index[np.asarray(chosen, dtype=np.int64)].tolist()
        rows = read_rows(self._store, places)
        for place in places:
            yield self._checked(place, self._guarded(place, lambda: next(rows)))
        next(rows, None)  # what a store checks at the end of a pass

    def _checked(self, place: int, row: Row) -> Row:
        """Return a record with its roles; one whose texts are no Unicode is refused."""
        for role, column in self._roles.items():
            if column not in row:
                raise DataError(f"{self._store.origin(place)}: column {column!r} (for {role}) is missing")
        # Roles are looked up before any is written, so that two columns can change places.
        row = row | {role: row[column] for role, column in self._roles.items()}
        if not is_text_valid(row):
            raise DataError(
                f"{self._store.origin(place)}: a text has an unpaired surrogate (half an emoji, say); "
                "content withheld; repair or remove the record"
            )
        return row

    def _guarded(self, place: int, read: Callable[[], Row]) -> Row:
        try:
            return read()
        except (FedLoraError, MemoryError):
            raise
        except Exception as fault:
            # Whatever a store's own library says may quote the record.
            raise DataError(
                f"{self._store.origin(place)}: the record cannot be read ({type(fault).__name__}); content withheld"
            ) from None

    def __iter__(self) -> Iterator[Row]:
        """Read the records one after the other, in one pass."""
        return self.read_many(np.arange(len(self), dtype=np.int64))

    def origin(self, item: int) -> Origin:
        """Return file and row of one record."""
        return self._store.origin(int(self._index[item]))

    @property
    def columns(self) -> tuple[str, ...]:
        """Names that a record has: the source's columns and the mapped roles."""
        return tuple(dict.fromkeys([*self._store.columns, *self._roles]))

    def subset(self, chosen: npt.ArrayLike) -> Rows:
        """Return a view of the chosen records, by position in this view.

        Raises:
            DataError: if a position is beyond the records: whoever chose it saw another source.
        """
        places = np.asarray(chosen, dtype=np.int64)
        if places.size > 0 and (int(places.max()) >= len(self) or int(places.min()) < 0):
            raise DataError(
                f"data.source: it has {len(self)} records here, fewer than where they were shared out; the source "
                "changed, or is another one on this machine"
            )
        return Rows(self._store, self._roles, self._index[places])

    def column(self, name: str) -> list[Any]:
        """Return one column or role of all records.

        Raises:
            DataError: naming the first record that lacks it.
        """
        source = self._roles.get(name, name)
        fast: Callable[[str], Sequence[Any]] | None = getattr(self._store, "column", None)
        if fast is not None and source in self._store.columns:
            values = fast(source)
            return [values[int(place)] for place in self._index]
        found = []
        for place, row in enumerate(self):
            if name not in row:
                raise DataError(f"{self.origin(place)}: column {name!r} is missing")
            found.append(row[name])
        return found


def read_rows(store: RowStore, indices: Sequence[int]) -> Iterator[Row]:
    """Read many records of a store, in one pass where it can."""
    many: Callable[[Sequence[int]], Iterator[Row]] | None = getattr(store, "read_many", None)
    return iter(many(indices)) if many is not None else map(store.read, indices)


class ListStore:
    """Records held in memory, from one named source (or with a source each)."""

    def __init__(self, rows: Sequence[Row], source: str | Sequence[Origin]) -> None:
        """Keep the records; `source` is a name, or one Origin per record."""
        self._rows = rows
        self._source = source
        self.columns = tuple(dict.fromkeys(name for row in rows for name in row))

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._rows)

    def read(self, index: int) -> Row:
        """Return a copy of one record."""
        return dict(self._rows[index])

    def origin(self, index: int) -> Origin:
        """Return the record's source."""
        if isinstance(self._source, str):
            return Origin(self._source, index + 1)
        return self._source[index]


class ConcatStore:
    """Several stores one after the other; used for several files."""

    def __init__(self, stores: Sequence[RowStore]) -> None:
        """Join the stores in the order given."""
        self._stores = tuple(stores)
        self._ends = np.cumsum([len(store) for store in stores], dtype=np.int64)
        self.columns = tuple(dict.fromkeys(name for store in stores for name in store.columns))

    def __len__(self) -> int:
        """Return the number of records in all stores."""
        return int(self._ends[-1]) if len(self._ends) > 0 else 0

    def _locate(self, index: int) -> tuple[RowStore, int]:
        which = int(np.searchsorted(self._ends, index, side="right"))
        start = int(self._ends[which - 1]) if which > 0 else 0
        return self._stores[which], index - start

    def read(self, index: int) -> Row:
        """Return one record of the store that holds it."""
        store, place = self._locate(index)
        return store.read(place)

    def read_many(self, indices: Sequence[int]) -> Iterator[Row]:
        """Read many records; neighbours from one store in one pass over it."""
        located = (self._locate(index) for index in indices)
        for _, run in groupby(located, key=lambda one: id(one[0])):
            found = list(run)
            yield from read_rows(found[0][0], [place for _, place in found])

    def origin(self, index: int) -> Origin:
        """Return file and row in the store that holds it."""
        store, place = self._locate(index)
        return store.origin(place)


class ColumnStore:
    """Records held as equally long columns (Arrow tables, data sets of the hub): read lazily."""

    def __init__(self, table: Any, columns: Sequence[str], length: int, source: str) -> None:
        """Wrap `table`, which gives one record as a dictionary by `table[i]`."""
        self._table = table
        self._length = length
        self._source = source
        self.columns = tuple(columns)

    def __len__(self) -> int:
        """Return the number of records."""
        return self._length

    def read(self, index: int) -> Row:
        """Return one record."""
        return dict(self._table[index])

    def column(self, name: str) -> Sequence[Any]:
        """Return one column without reading the others."""
        own: Callable[[str], Sequence[Any]] | None = getattr(self._table, "column", None)
        return list(self._table[name]) if own is None else own(name)

    def origin(self, index: int) -> Origin:
        """Return the source's name and the row."""
        return Origin(self._source, index + 1)


def refuse_twins(names: Sequence[Any], where: object) -> None:
    """Refuse columns that have one name: nobody could say which of them is read.

    Raises:
        DataError: naming the columns.
    """
    twins = sorted({str(name) for name in names if list(names).count(name) > 1})
    if twins:
        raise DataError(f"{where}: the header names {', '.join(map(repr, twins))} more than once")


def is_text_valid(value: Any) -> bool:
    """Say whether every string in a record can be written as UTF-8."""
    if isinstance(value, str):
        if value.isascii():
            return True
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return False
        return True
    if isinstance(value, Mapping):
        return _are_texts_valid(value) and _are_texts_valid(value.values())
    if isinstance(value, (list, tuple)):
        return _are_texts_valid(value)
    return True


def _are_texts_valid(values: Iterable[Any]) -> bool:
    """Say the same of every one of some values; numbers and plain ASCII, nearly all of them, cost no call."""
    for value in values:
        kind = type(value)
        if (kind is str and value.isascii()) or kind is int or kind is float:
            continue
        if not is_text_valid(value):
            return False
    return True
