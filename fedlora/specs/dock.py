"""The dock: a store of specifications with exact top-K retrieval.

Metadata and privacy statements lie in SQLite; each vector is a safetensors payload in the same row.
On opening, the vectors of each comparable group (same base, recipe and projection) form one float32
matrix in blocks: 100 000 x 1024 is 400 MB and its product with a query takes about 20 ms, so retrieval is
exact and needs no index.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedlora.errors import DataError
from fedlora.specs.entries import MAX_TOP_K
from fedlora.specs.intrinsic import refuse_intrinsic
from fedlora.specs.rows import INSERT, KINDS, open_file, read_one, require_units, stored_vector, to_row
from fedlora.specs.types import (
    MAX_DIMENSION,
    DockBusyError,
    DockDamagedError,
    DockFullError,
    NameTakenError,
    NotInDockError,
    PrivacyStatement,
    Specification,
)

MAX_ENTRIES = 1_000_000
"""A dock takes so many entries (4 GB of vectors in memory) unless told otherwise."""
_BLOCK = 4096
"""Vectors of a full block (16 MB at 1024 numbers)."""
_FIRST = 64


@dataclass(frozen=True)
class Match:
    """One retrieved entry: cosine in the compact space, licence and privacy statement."""

    name: str
    cosine: float
    licence: str
    privacy: PrivacyStatement
    metadata: dict[str, Any]


class _Group:
    """Vectors that may be compared with each other, in blocks: one more never moves those that are there."""

    def __init__(self, dimension: int) -> None:
        """Make an empty group."""
        self._dimension = dimension
        self._blocks: list[npt.NDArray[np.float32]] = []
        self._ids, self._kinds = np.empty(0, np.int64), np.empty(0, np.int8)
        self.count = 0

    def append(self, identity: int, kind: str, vector: npt.NDArray[np.float32]) -> None:
        """Add one vector."""
        place = self.count % _BLOCK
        if place == 0:
            self._blocks.append(np.zeros((_FIRST, self._dimension), np.float32))
        elif place == len(self._blocks[-1]):  # a block grows until it is full: small groups stay small
            self._blocks[-1] = _longer(self._blocks[-1], min(_BLOCK, 2 * place))
        if self.count == self._ids.size:
            room = max(_FIRST, 2 * self.count)
            self._ids, self._kinds = _longer(self._ids, room), _longer(self._kinds, room)
        self._blocks[-1][place] = vector
        self._ids[self.count] = identity
        self._kinds[self.count] = KINDS.index(kind)
        self.count += 1

    def parts(self, first: int = 0) -> Iterator[npt.NDArray[np.float32]]:
        """Vectors from a place on, as (n, dimension) arrays in order."""
        for number in range(first // _BLOCK, len(self._blocks)):
            start = number * _BLOCK
            yield self._blocks[number][max(first - start, 0) : self.count - start]

    def best(
        self, query: npt.NDArray[np.float32], top_k: int, kind: str | None, exclude: int | None
    ) -> list[tuple[int, float]]:
        """(id, cosine) of the nearest vectors of a kind, best first, ties in order of addition."""
        scores = np.concatenate([part @ query for part in self.parts()] or [np.empty(0, np.float32)])
        ids, kinds = self._ids[: self.count], self._kinds[: self.count]
        allowed = np.ones(self.count, bool) if kind is None else kinds == KINDS.index(kind)
        if exclude is not None:
            allowed &= ids != exclude
        places = np.flatnonzero(allowed)
        order = places[_largest(scores[places], min(top_k, places.size))]
        return [(int(ids[place]), float(scores[place])) for place in order]


def _longer(array: npt.NDArray[Any], room: int) -> npt.NDArray[Any]:
    """Copy an array into one with more rows."""
    made = np.zeros((room, *array.shape[1:]), array.dtype)
    made[: len(array)] = array
    return made


class Dock:
    """A store of specifications.

    Example:
        >>> import tempfile
        >>> dock = Dock(Path(tempfile.mkdtemp()) / "dock.sqlite")
        >>> len(dock)
        0
        >>> dock.close()

    Raises:
        DataError: if the file is missing, not a dock, damaged or of a newer schema.
    """

    def __init__(self, path: Path, *, max_entries: int = MAX_ENTRIES, create: bool = True) -> None:
        """Open the dock at `path` (or create it) and read its vectors into memory."""
        self.path, self.max_entries = Path(path), max_entries
        self._lock = threading.RLock()
        self._groups: dict[tuple[str, str, str, int], _Group] = {}
        self._last_id, self._version = 0, -1
        self._connection = open_file(self.path, create=create)
        try:
            self._refresh()
        except BaseException:
            self._connection.close()
            raise

    def __len__(self) -> int:
        """Number of specifications."""
        with self._lock:
            self._refresh()
            return self._count()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def add(self, specification: Specification) -> int:
        """Store one specification, durably, and return its id.

        Raises:
            NameTakenError: if the dock has an entry of that name.
            DockFullError: if it holds as many entries as it may.
            DataError: if the metadata is too large.
            UnsupportedEventError: if it claims the intrinsic guarantee (the recipe is public here).
        """
        refuse_intrinsic(specification.privacy, recipe_public=True, expanded_released=False)
        row = to_row(specification)
        with self._lock, self._writing():
            self._refresh()
            if self._count() >= self.max_entries:
                raise DockFullError(f"the dock holds {self.max_entries} specifications and takes no more")
            try:
                identity = int(self._connection.execute(INSERT, row).lastrowid or 0)
            except sqlite3.IntegrityError as error:
                raise NameTakenError(
                    f"the dock already has a specification named {specification.name!r}; choose another name"
                ) from error
        with self._lock:
            self._read_new()
        return identity

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the file for one change, so that what was counted still holds when it is written."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise DockBusyError(f"{self.path} cannot be written now ({error}); try again later") from error

    def get(self, name: str) -> Specification:
        """Read one specification by name.

        Raises:
            NotInDockError: if there is none of that name.
        """
        with self._lock:
            found = read_one(self._connection, "name", name)
        if found is None:
            raise NotInDockError(f"the dock has no specification named {name!r:.80}")
        return found

    def match(self, query: Specification, top_k: int = 5, *, kind: str | None = "model") -> list[Match]:
        """The `top_k` stored specifications with the largest cosine (Eq. 3), exact, best first.

        Only entries with the query's base model, lora_A recipe and projection are comparable; an entry
        of the query's own name is left out.

        Raises:
            DataError: if top_k is out of range or the kind is unknown.
            NotInDockError: if nothing comparable is stored.

        Source: "PAVE Specifications of Learnwares Yield Intrinsic Privacy-Preserving Capabilities", Eq. 3.
        """
        if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= MAX_TOP_K:
            raise DataError(f"top_k must lie in 1..{MAX_TOP_K}; got {top_k!r:.40}")
        if kind is not None and kind not in KINDS:
            raise DataError(f"kind must be model, task or none of them; got {kind!r:.40}")
        with self._lock:
            self._refresh()
            group = self._groups.get(_key(query))
            if group is None:
                raise NotInDockError(
                    f"nothing in the dock is comparable with {query.name!r}: same base model, lora_A recipe and "
                    f"projection are needed, and it holds {self._count()} specifications of others"
                )
            own = self._connection.execute(
                "SELECT id FROM specification WHERE name = ?", (query.name,)
            ).fetchone()
            ranked = group.best(query.vector, top_k, kind, None if own is None else int(own[0]))
            if not ranked:
                others = "" if kind is None else f" of kind {kind}; another kind, or any, may have some"
                raise NotInDockError(f"the dock has no other entry to compare {query.name!r} with{others}")
            return [self._match(identity, score) for identity, score in ranked]

    def _match(self, identity: int, score: float) -> Match:
        found = read_one(self._connection, "id", identity)
        if found is None:
            raise DockDamagedError(f"{self.path}: an entry is gone; the file was changed from outside")
        cosine = min(1.0, max(-1.0, score))
        return Match(found.name, cosine, found.licence, found.privacy, dict(found.metadata))

    def _count(self) -> int:
        return sum(group.count for group in self._groups.values())

    def _refresh(self) -> None:
        """Take in what another process added since the last look."""
        version = int(self._connection.execute("PRAGMA data_version").fetchone()[0])
        if version != self._version:
            self._version = version
            self._read_new()

    def _read_new(self) -> None:
        """Read the vectors of entries that are not in memory yet.

        Raises:
            DockDamagedError: if a row is damaged.
        """
        try:
            self._read_rows()
        except sqlite3.OperationalError as error:
            self._forget()
            raise DockBusyError(f"{self.path} cannot be read now ({error}); try again later") from error
        except sqlite3.DatabaseError as error:
            self._forget()
            raise DockDamagedError(f"{self.path} cannot be read ({error})") from error
        except BaseException:
            self._forget()
            raise

    def _forget(self) -> None:
        """Drop what was read, so that the next call reads, and fails, again."""
        self._groups, self._last_id, self._version = {}, 0, -1

    def _read_rows(self) -> None:
        newest = self._connection.execute("SELECT MAX(id) FROM specification").fetchone()[0] or 0
        span = (self._last_id, newest)  # both queries see the same entries, whatever others add meanwhile
        cursor = self._connection.execute(
            "SELECT DISTINCT base_fingerprint, recipe, projection, dimension FROM specification"
            " WHERE id > ? AND id <= ?",
            span,
        )
        keys = [self._group((row[0], row[1], row[2], row[3])) for row in cursor]
        firsts = {key: self._groups[key].count for key in keys}
        self._read_vectors(span)
        for key, first in firsts.items():
            for part in self._groups[key].parts(first):
                require_units(part, self.path)

    def _group(self, key: tuple[Any, Any, Any, Any]) -> tuple[str, str, str, int]:
        """Make sure that there is a group of these facts."""
        dimension = key[3]
        if not isinstance(dimension, int) or not 1 <= dimension <= MAX_DIMENSION:
            raise DockDamagedError(
                f"{self.path} is damaged: a vector is said to have {dimension!r:.20} numbers"
            )
        self._groups.setdefault(key, _Group(dimension))
        return key

    def _read_vectors(self, span: tuple[int, int]) -> None:
        cursor = self._connection.execute(
            "SELECT id, name, kind, base_fingerprint, recipe, projection, dimension, payload FROM specification"
            " WHERE id > ? AND id <= ? ORDER BY id",
            span,
        )
        for identity, name, kind, base, recipe, projection, dimension, payload in cursor:
            if kind not in KINDS:
                raise DockDamagedError(f"{self.path} is damaged: specification {name!r:.80} has no kind")
            group = self._groups[(base, recipe, projection, dimension)]
            group.append(identity, kind, stored_vector(payload, name, dimension))
            self._last_id = identity


def _key(specification: Specification) -> tuple[str, str, str, int]:
    return (
        specification.base_fingerprint,
        specification.recipe,
        specification.projection,
        specification.vector.size,
    )


def _largest(scores: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """Indices of the `count` largest scores, best first, ties by position."""
    if count >= scores.size:
        return np.argsort(-scores, kind="stable")
    part = np.argpartition(scores, scores.size - count)[scores.size - count :]
    return part[np.lexsort((part, -scores[part]))]
