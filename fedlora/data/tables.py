"""Delimited files by byte offset and Parquet files by row group, both larger than memory."""

from __future__ import annotations

import csv
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import numpy as np

from fedlora.data.rows import Index, Origin, Row, refuse_twins
from fedlora.data.utf8 import BOM, check_start, decode
from fedlora.data.watch import WatchedFile
from fedlora.errors import DataError

PARQUET_BYTES: Final = 256 * 2**20
"""Decoded row groups of one Parquet file kept in memory, in bytes; at least one group is kept."""

_CSV_FIELD_LIMIT: Final = 2**31 - 1


class DelimitedStore:
    """Records of a CSV or TSV file by byte offset; 16 bytes a record stay in memory.

    Quoted fields of a CSV file may contain line ends; a TSV file has no quotes.
    """

    def __init__(self, path: Path, delimiter: str, header: Sequence[str] | None) -> None:
        """Index and check every record once, holding one at a time.

        Args:
            path: the file, UTF-8.
            delimiter: "," or a tab.
            header: column names of a file without a header line.

        Raises:
            DataError: naming file and row of the first bad record.
        """
        csv.field_size_limit(_CSV_FIELD_LIMIT)
        self._path, self._file, self._delimiter = path, WatchedFile(path), delimiter
        self._names = tuple(header) if header is not None else ()
        self._refuse_twins()
        self._offsets, self._numbers = self._index(header is None)
        self._file.check()
        self.columns = self._names

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._offsets)

    def read(self, index: int) -> Row:
        """Read and parse one record.

        Raises:
            DataError: if the file changed since it was indexed.
        """
        return next(self.read_many([index]))

    def read_many(self, indices: Sequence[int]) -> Iterator[Row]:
        """Read and parse many records, opening the file once.

        Raises:
            DataError: if the file changed since it was indexed, or while it is read.
        """
        for handle, index in self._file.each(indices):
            yield self._parsed(handle, index)

    def _parsed(self, handle: BinaryIO, index: int) -> Row:
        try:
            fields: list[str] = next(self._reader(_Lines(handle, int(self._offsets[index]))), [])
        except (csv.Error, ValueError):
            fields = []
        if len(fields) != len(self._names):
            raise DataError(f"{self.origin(index)}: the file changed while it was in use")
        return dict(zip(self._names, fields, strict=True))

    def column(self, name: str) -> list[str]:
        """Return one column of all records in one pass over the file.

        Raises:
            DataError: if the file changed since it was indexed.
        """
        if name not in self._names:
            raise DataError(f"{self._path}: column {name!r} is missing")
        if len(self) == 0:
            return []
        place = self._names.index(name)
        try:
            with self._file.open() as handle:
                lines = _Lines(handle, int(self._offsets[0]))
                found = [fields[place] for fields in self._reader(lines) if fields]
        except (csv.Error, ValueError, IndexError):
            found = []
        if len(found) != len(self):
            raise DataError(f"{self._path}: the file changed while it was in use")
        return found

    def origin(self, index: int) -> Origin:
        """Return the file and the line that the record ends on."""
        return Origin(str(self._path), int(self._numbers[index]))

    def _reader(self, lines: _Lines) -> Any:
        quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if self._delimiter == "," else csv.QUOTE_NONE
        return csv.reader(lines, delimiter=self._delimiter, quoting=quoting, strict=True)

    def _index(self, with_header: bool) -> tuple[Index, Index]:
        offsets, numbers = array("q"), array("q")
        with self._path.open("rb") as handle:
            check_start(self._path, handle.read(4))
            handle.seek(0)
            lines = _Lines(handle, len(BOM) if handle.read(len(BOM)) == BOM else 0)
            reader = self._reader(lines)
            while True:
                place = lines.place
                try:
                    fields = next(reader, None)
                except csv.Error:
                    raise self._fault(lines.number, "malformed quotes or line ends") from None
                except ValueError as fault:
                    raise self._fault(lines.number, str(fault)) from None
                if fields is None:
                    break
                if not fields:
                    continue
                if with_header:
                    self._names, with_header = tuple(name.strip() for name in fields), False
                    self._refuse_twins()
                    continue
                if len(fields) != len(self._names):
                    text = f"has {len(fields)} fields where the header has {len(self._names)}"
                    raise self._fault(lines.number, text)
                offsets.append(place)
                numbers.append(lines.number)
        return np.asarray(offsets, dtype=np.int64), np.asarray(numbers, dtype=np.int64)

    def _refuse_twins(self) -> None:
        refuse_twins([name for name in self._names if name], self._path)

    def _fault(self, number: int, text: str) -> DataError:
        return DataError(f"{Origin(str(self._path), number)}: {text}; content withheld")


class _Lines(Iterator[str]):
    """Decoded lines of an open file; `place` is the byte after the last one, `number` its count."""

    def __init__(self, handle: BinaryIO, place: int) -> None:
        """Start at byte `place`."""
        handle.seek(place)
        self._handle, self.place, self.number = handle, place, 0

    def __next__(self) -> str:
        """Return the next line with its end.

        Raises:
            ValueError: if it is not UTF-8.
        """
        raw = self._handle.readline()
        if not raw:
            raise StopIteration
        self.place += len(raw)
        self.number += 1
        return decode(raw)


class ParquetStore:
    """Records of a Parquet file; row groups are decoded when read and kept up to a number of bytes."""

    def __init__(self, path: Path, keep_bytes: int | None = None) -> None:
        """Read the file's footer only.

        Raises:
            DataError: if pyarrow is missing or the file is not Parquet.
        """
        self._path, self._keep = path, PARQUET_BYTES if keep_bytes is None else keep_bytes
        self._file = WatchedFile(path)
        self._groups: OrderedDict[int, Any] = OrderedDict()
        footer = self._open().metadata
        sizes = [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self.columns = tuple(self._open().schema_arrow.names)
        refuse_twins(self.columns, path)

    def __len__(self) -> int:
        """Return the number of records."""
        return int(self._ends[-1]) if len(self._ends) > 0 else 0

    def __getstate__(self) -> dict[str, Any]:
        """Leave decoded groups out of a copy for another process."""
        return {**self.__dict__, "_groups": OrderedDict()}

    def read(self, index: int) -> Row:
        """Return one record."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        place = index - (int(self._ends[number - 1]) if number > 0 else 0)
        group = self._group(number)
        return {name: group[name][place].as_py() for name in self.columns}

    def column(self, name: str) -> list[Any]:
        """Return one column without reading the others."""
        opened = self._open()
        try:
            return list(opened.read(columns=[name])[name].to_pylist())
        except Exception as fault:
            raise self._fault(fault) from None

    def origin(self, index: int) -> Origin:
        """Return the file and the row."""
        return Origin(str(self._path), index + 1)

    def _open(self) -> Any:
        try:
            import pyarrow.parquet as parquet
        except ImportError as fault:
            raise DataError("reading Parquet needs pyarrow; run: pip install 'fedlora[data]'") from fault
        self._file.check()
        try:
            # Not mapped: a mapped file that is cut while it is read ends the process.
            return parquet.ParquetFile(self._path, memory_map=False)
        except Exception as fault:
            raise self._fault(fault) from None

    def _fault(self, fault: Exception) -> DataError:
        return DataError(f"{self._path}: is not a readable Parquet file ({type(fault).__name__})")

    def _group(self, number: int) -> Any:
        if number not in self._groups:
            try:
                group = self._open().read_row_group(number)
            except MemoryError:  # the groups that are kept are only there to save time
                self._groups.clear()
                group = self._open().read_row_group(number)
            room = self._keep - group.nbytes
            while self._groups and sum(kept.nbytes for kept in self._groups.values()) > room:
                self._groups.popitem(last=False)
            self._groups[number] = group
        self._groups.move_to_end(number)
        return self._groups[number]
