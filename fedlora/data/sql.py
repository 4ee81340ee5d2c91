"""Rows of one SQL query: by key, so that only keys stay in memory, or all at once without a key."""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import sqlalchemy
from sqlalchemy.exc import SQLAlchemyError

from fedlora.config.schema import SqlSource
from fedlora.data.rows import ListStore, Origin, Row, RowStore, refuse_twins
from fedlora.errors import DataError

NAME: Final = "sql query"
_FETCHED_AT_ONCE: Final = 1000
_ASKED_AT_ONCE: Final = 500
"""Keys in one query; SQLite in its older builds takes 999 at most."""


def open_sql(source: SqlSource) -> RowStore:
    """Open a query as a row store.

    Raises:
        DataError: if the query fails; the message shows neither the address nor values.
    """
    if source.key is not None:
        return SqlStore(source)
    with _connection(source) as connection:
        found = connection.execute(_text(source.query))
        refuse_twins(list(found.keys()), NAME)
        rows = [dict(row) for row in found.mappings()]
    if re.search(r"\border\s+by\b", source.query, flags=re.IGNORECASE) is None:
        # A database may give rows in another order to each process; positions must be the same records everywhere.
        rows.sort(key=lambda row: [repr(value) for value in row.values()])
    return ListStore(rows, NAME)


class SqlStore:
    """Records of a query by the value of a key column; 8 bytes a record stay in memory for numeric keys.

    Records are numbered in the order of their keys, so positions do not depend on the database's plan. A record
    is fetched by its key when it is drawn.
    """

    def __init__(self, source: SqlSource) -> None:
        """Read the keys.

        Raises:
            DataError: if the query fails, or a key is missing, empty or not unique.
        """
        self._source = source
        key: Any = sqlalchemy.column(str(source.key))
        asked = sqlalchemy.select(key).select_from(_table(source)).order_by(key)
        with _connection(source) as connection:
            self.columns = tuple(connection.execute(_all(source).limit(0)).keys())
            refuse_twins(_own_names(self.columns), NAME)
            self._keys = _compact(connection.execution_options(yield_per=_FETCHED_AT_ONCE).scalars(asked))

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._keys)

    def read(self, index: int) -> Row:
        """Fetch one record.

        Raises:
            DataError: if it is no longer there.
        """
        key: Any = sqlalchemy.column(str(self._source.key))
        asked = _all(self._source).where(key == self._keys[index]).limit(2)
        with _connection(self._source) as connection:
            found = [dict(row) for row in connection.execute(asked).mappings()]
        if len(found) != 1:
            raise DataError(f"{self.origin(index)}: the table changed while it was in use")
        return found[0]

    def read_many(self, indices: Sequence[int]) -> Iterator[Row]:
        """Fetch many records with one query for each few hundred of them.

        Raises:
            DataError: if one is no longer there.
        """
        for start in range(0, len(indices), _ASKED_AT_ONCE):
            chosen = indices[start : start + _ASKED_AT_ONCE]
            found = self._by_key([self._keys[index] for index in chosen])
            for index in chosen:
                row = found.get(self._keys[index])
                yield self.read(index) if row is None else dict(row)

    def _by_key(self, keys: Sequence[Any]) -> dict[Any, Row]:
        """Fetch records by their keys; one that is there twice, or under another spelling, is left to `read`."""
        key: Any = sqlalchemy.column(str(self._source.key))
        asked = _all(self._source).where(key.in_(list(dict.fromkeys(keys))))
        found: dict[Any, Row] = {}
        twice: set[Any] = set()
        with _connection(self._source) as connection:
            for row in connection.execute(asked).mappings():
                value = row.get(str(self._source.key))
                if value in found:
                    twice.add(value)
                found[value] = dict(row)
        return {value: row for value, row in found.items() if value not in twice}

    def column(self, name: str) -> list[Any]:
        """Return one column in the order of the keys.

        Raises:
            DataError: if the number of records changed.
        """
        key: Any = sqlalchemy.column(str(self._source.key))
        asked: Any = (
            sqlalchemy.select(sqlalchemy.column(name)).select_from(_table(self._source)).order_by(key)
        )
        with _connection(self._source) as connection:
            found = list(connection.execution_options(yield_per=_FETCHED_AT_ONCE).scalars(asked))
        if len(found) != len(self):
            raise DataError(f"{NAME}: the table changed while it was in use")
        return found

    def origin(self, index: int) -> Origin:
        """Return the record's place in the order of the keys (keys may be personal and are not shown)."""
        return Origin(NAME, index + 1)


def _compact(keys: Iterable[Any]) -> Sequence[Any]:
    """Return keys that come in order: 8 bytes each where all are whole numbers, else a list."""
    numbers, others = array("q"), list[Any]()
    last: Any = None
    for key in keys:
        if key is None:
            raise DataError("data.source.key: a record has no key; choose a column that is never NULL")
        if key == last:
            raise DataError("data.source.key: two records have the same key; choose a unique column")
        last = key
        if not others and isinstance(key, int) and abs(key) < 2**62:
            numbers.append(key)
        else:
            others.append(key)
    return [*numbers, *others] if others else numbers


def _text(query: str) -> Any:
    """Return the query as SQLAlchemy text; a colon in it is never a parameter."""
    plain = query.strip().rstrip(";")
    return sqlalchemy.text(re.sub(r"(?<![:\\]):(?=\w)", r"\\:", plain))


def _table(source: SqlSource) -> Any:
    # The line end closes a comment that ends the query.
    return sqlalchemy.text(f"({_text(source.query).text}\n) AS fedlora_rows")


def _own_names(names: Sequence[str]) -> list[str]:
    """Undo what SQLite makes of a second column of one name inside another query (`text:1`)."""
    plain = {name: re.sub(r":\d+$", "", name) for name in names}
    return [plain[name] if plain[name] in names else name for name in names]


def _all(source: SqlSource) -> Any:
    return sqlalchemy.select(sqlalchemy.text("*")).select_from(_table(source))


_ENGINES: dict[tuple[int, str], Any] = {}
"""One engine per process and address, so that drawing records does not connect anew each time."""


@contextmanager
def _connection(source: SqlSource) -> Iterator[Any]:
    url = source.url
    if url.startswith("$"):
        url = os.environ.get(url[1:], "")
        if not url:
            raise DataError(f"data.source.url: the environment variable {source.url[1:]} is not set")
    try:
        engine = _ENGINES.get((os.getpid(), url))
        if engine is None:
            engine = _ENGINES[os.getpid(), url] = sqlalchemy.create_engine(url)
        with engine.connect() as connection:
            yield connection
    except (SQLAlchemyError, ImportError) as fault:
        # The fault's text may hold the URL's password or values, so only its class is shown.
        raise DataError(
            f"data.source: the SQL query failed ({type(fault).__name__}); check url, driver, table and "
            "columns with your database's own client"
        ) from None
