"""Local files as row stores: lines, CSV and TSV by byte offset, Parquet by row group, JSON as a whole.

All text is UTF-8 (with or without a byte-order mark), whatever the platform's locale says.
A file in another encoding, or a record that does not parse, is refused with its file and row;
what it contains is never shown.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedlora.data.rows import (
    ConcatStore,
    Index,
    ListStore,
    Origin,
    Row,
    RowStore,
    is_text_valid,
)
from fedlora.data.tables import DelimitedStore, ParquetStore
from fedlora.data.utf8 import BOM, check_start, decode
from fedlora.data.watch import WatchedFile
from fedlora.errors import DataError

FORMATS: Final = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
}


_TWICE: Final = "an object names a field twice"


class LineStore:
    """Lines of a UTF-8 file by byte offset; only the offsets (8 bytes a line) stay in memory."""

    def __init__(self, path: Path, parse: Callable[[str], Row | None]) -> None:
        """Index and check every line once, holding one line at a time.

        Args:
            path: the file.
            parse: turns a line into a record, or None for a line to leave out; ValueError if malformed.

        Raises:
            DataError: naming file and row of the first bad line.
        """
        self._path, self._file = path, WatchedFile(path)
        self._parse = parse
        self._offsets, self._numbers, self.columns = _index_lines(path, parse)
        self._file.check()

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._offsets)

    def read(self, index: int) -> Row:
        """Read and parse one line.

        Raises:
            DataError: if the file changed since it was indexed.
        """
        return next(self.read_many([index]))

    def read_many(self, indices: Sequence[int]) -> Iterator[Row]:
        """Read and parse many lines, opening the file once.

        Raises:
            DataError: if the file changed since it was indexed, or while it is read.
        """
        for handle, index in self._file.each(indices):
            handle.seek(int(self._offsets[index]))
            yield self._parsed(handle.readline(), index)

    def column(self, name: str) -> list[Any]:
        """Return one column of all records in one pass over the file.

        Raises:
            DataError: naming the first record that lacks it, or if the file changed.
        """
        found: list[Any] = []
        with self._file.open() as handle:
            for index, offset in enumerate(self._offsets.tolist()):
                handle.seek(offset)
                row = self._parsed(handle.readline(), index)
                if name not in row:
                    raise DataError(f"{self.origin(index)}: column {name!r} is missing")
                found.append(row[name])
        return found

    def _parsed(self, raw: bytes, index: int) -> Row:
        try:
            row = self._parse(raw.decode("utf-8").rstrip("\r\n"))
        except ValueError:
            row = None
        if row is None:
            raise DataError(f"{self.origin(index)}: the file changed while it was in use")
        return row

    def origin(self, index: int) -> Origin:
        """Return the file and its line number."""
        return Origin(str(self._path), int(self._numbers[index]))


def parse_json_line(line: str) -> Row | None:
    """Parse one JSONL line; empty lines are left out.

    Raises:
        ValueError: if it is not a JSON object or has an unpaired surrogate.
    """
    if not line.strip():
        return None
    row = _parse_json(line)
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    if not is_text_valid(row):
        raise ValueError("a text has an unpaired surrogate (half an emoji, say)")
    return row


class _NoJson(ValueError):
    """A text that is not JSON; `line` is where it stops to be."""

    def __init__(self, line: int) -> None:
        """Keep the line, and nothing of the text."""
        super().__init__("not valid JSON")
        self.line = line


def _parse_json(text: str) -> Any:
    """Parse JSON whose objects name no field twice.

    Raises:
        ValueError: saying what is wrong, without the text.
    """
    try:
        return _decoder.decode(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except json.JSONDecodeError as fault:
        raise _NoJson(fault.lineno) from None
    except ValueError as fault:
        raise ValueError(_TWICE if str(fault) == _TWICE else "holds a number that is too long") from None


def _unique(pairs: list[tuple[str, Any]]) -> Row:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(_TWICE)
    return found


_decoder = json.JSONDecoder(object_pairs_hook=_unique)


def parse_text_line(line: str) -> Row | None:
    """Return a text line as a record with the column `text`; blank lines are left out."""
    return {"text": line} if line.strip() else None


def expand_paths(patterns: Sequence[str]) -> list[Path]:
    """Return the files that the patterns name, sorted within each pattern, none twice however its path is spelt.

    Raises:
        DataError: naming a pattern that matches nothing.
    """
    found: dict[tuple[int, int], Path] = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_file():
            matches = [path]
        else:
            base = Path(path.anchor) if path.is_absolute() else Path()
            relative = str(path.relative_to(path.anchor)) if path.is_absolute() else str(path)
            matches = sorted(match for match in base.glob(relative) if match.is_file())
        if not matches:
            where = (
                "" if path.is_absolute() else f" in {Path.cwd()} (paths count from the folder you start in)"
            )
            raise DataError(f"data.source.paths: {pattern!r} matches no file{where}")
        for match in matches:
            status = match.stat()
            found.setdefault((status.st_dev, status.st_ino), match)
    return list(found.values())


def read_file(path: Path, kind: str = "auto", header: Sequence[str] | None = None) -> RowStore:
    """Open one file as a row store.

    Args:
        path: the file.
        kind: "auto" goes by the ending.
        header: column names of a CSV or TSV file that has none.

    Raises:
        DataError: for an unknown format, a bad encoding or a malformed record.
    """
    if kind == "auto":
        kind = FORMATS.get(path.suffix.lower(), "")
        if not kind:
            raise DataError(f"{path}: unknown ending {path.suffix!r}; set data.source.format")
    if kind == "jsonl":
        return LineStore(path, parse_json_line)
    if kind == "text":
        return LineStore(path, parse_text_line)
    if kind == "json":
        return _read_json(path)
    if kind == "parquet":
        return ParquetStore(path)
    return DelimitedStore(path, "," if kind == "csv" else "\t", header)


def read_files(paths: Sequence[Path], kind: str, header: Sequence[str] | None) -> tuple[RowStore, list[int]]:
    """Open several files as one store; also return how many records each has."""
    stores = [read_file(path, kind, header) for path in paths]
    sizes = [len(store) for store in stores]
    return (stores[0] if len(stores) == 1 else ConcatStore(stores)), sizes


def _index_lines(path: Path, parse: Callable[[str], Row | None]) -> tuple[Index, Index, tuple[str, ...]]:
    offsets, numbers = array("q"), array("q")
    columns: dict[str, None] = {}
    with path.open("rb") as handle:
        check_start(path, handle.read(4))
        handle.seek(0)
        place = len(BOM) if handle.read(3) == BOM else 0
        handle.seek(place)
        for number, raw in enumerate(handle, start=1):
            try:
                row = parse(decode(raw).rstrip("\r\n"))
            except ValueError as fault:
                raise DataError(f"{Origin(str(path), number)}: {fault}; content withheld") from None
            if row is not None:
                offsets.append(place)
                numbers.append(number)
                columns.update(dict.fromkeys(row))
            place += len(raw)
    return np.asarray(offsets, dtype=np.int64), np.asarray(numbers, dtype=np.int64), tuple(columns)


def _read_text(path: Path) -> str:
    raw = path.read_bytes()
    check_start(path, raw[:4])
    try:
        return decode(raw.removeprefix(BOM))
    except ValueError:
        for number, line in enumerate(raw.split(b"\n"), start=1):
            try:
                decode(line)
            except ValueError as fault:
                raise DataError(f"{Origin(str(path), number)}: {fault}; content withheld") from None
        raise DataError(f"{path}: is not valid UTF-8; convert the file to UTF-8") from None


def _read_json(path: Path) -> RowStore:
    text = _read_text(path)
    try:
        found = _parse_json(text)
    except _NoJson as fault:
        raise DataError(f"{path}, line {fault.line}: not valid JSON; content withheld") from None
    except ValueError as fault:
        raise DataError(f"{path}: {fault}; content withheld") from None
    if not isinstance(found, list):
        raise DataError(f"{path}: must be a JSON list of objects (for one object a line use format: jsonl)")
    for number, row in enumerate(found, start=1):
        if not isinstance(row, dict):
            raise DataError(f"{Origin(str(path), number)}: not a JSON object; content withheld")
        if not is_text_valid(row):
            raise DataError(
                f"{Origin(str(path), number)}: a text has an unpaired surrogate; content withheld"
            )
    return ListStore(found, str(path))
