"""The dock: a store of specifications with exact top-K retrieval.

Metadata and privacy statements lie in SQLite; each vector is a safetensors payload in the same row.
On opening, the vectors of each comparable group (same base, recipe and projection) form one float32
matrix: 100 000 x 1024 is 400 MB and one matrix-vector product takes about 20 ms, so retrieval is
exact and needs no index.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from fedlora.errors import DataError
from fedlora.specs.entries import MAX_TOP_K
from fedlora.specs.intrinsic import refuse_intrinsic
from fedlora.specs.types import (
    DockFullError,
    NameTakenError,
    NotInDockError,
    PrivacyStatement,
    Specification,
)

DOCK_SCHEMA = 1
MAX_METADATA_BYTES = 16_384
MAX_ENTRIES = 1_000_000
"""A dock takes so many entries (4 GB of vectors in memory) unless told otherwise."""
_KINDS = ("model", "task")

_TABLES = """
CREATE TABLE IF NOT EXISTS dock (schema INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS specification (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL,
    base_fingerprint TEXT NOT NULL,
    recipe TEXT NOT NULL,
    projection TEXT NOT NULL,
    dimension INTEGER NOT NULL,
    licence TEXT NOT NULL,
    metadata TEXT NOT NULL,
    privacy TEXT NOT NULL,
    payload BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS comparable ON specification (base_fingerprint, recipe, projection, dimension);
"""


@dataclass(frozen=True)
class Match:
    """One retrieved entry: cosine in the compact space, licence and privacy statement."""

    name: str
    cosine: float
    licence: str
    privacy: PrivacyStatement
    metadata: dict[str, Any]


@dataclass
class _Group:
    """Vectors that may be compared with each other; the arrays have spare room so that adding is amortised."""

    rows: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.int8]
    count: int = 0

    @classmethod
    def empty(cls, dimension: int, room: int = 0) -> _Group:
        """Make an empty group with room for so many vectors."""
        return cls(np.empty((room, dimension), np.float32), np.empty(room, np.int64), np.empty(room, np.int8))

    def append(self, identity: int, kind: str, vector: npt.NDArray[np.float32]) -> None:
        """Add one vector."""
        room = self.rows.shape[0]
        if self.count == room:
            more = max(64, room // 2)
            self.rows = np.concatenate([self.rows, np.empty((more, self.rows.shape[1]), np.float32)])
            self.ids = np.concatenate([self.ids, np.empty(more, np.int64)])
            self.kinds = np.concatenate([self.kinds, np.empty(more, np.int8)])
        self.rows[self.count] = vector
        self.ids[self.count] = identity
        self.kinds[self.count] = _KINDS.index(kind)
        self.count += 1

    def best(
        self, query: npt.NDArray[np.float32], top_k: int, kind: str | None, exclude: int | None
    ) -> list[tuple[int, float]]:
        """(id, cosine) of the nearest vectors of a kind, best first, ties in order of addition."""
        scores = self.rows[: self.count] @ query
        allowed = (
            np.ones(self.count, bool) if kind is None else self.kinds[: self.count] == _KINDS.index(kind)
        )
        if exclude is not None:
            allowed &= self.ids[: self.count] != exclude
        places = np.flatnonzero(allowed)
        order = places[_largest(scores[places], min(top_k, places.size))]
        return [(int(self.ids[place]), float(scores[place])) for place in order]


class Dock:
    """A store of specifications.

    Example:
        >>> import tempfile
        >>> dock = Dock(Path(tempfile.mkdtemp()) / "dock.sqlite")
        >>> len(dock)
        0
        >>> dock.close()

    Raises:
        DataError: if the file is not a dock or of a newer schema.
    """

    def __init__(self, path: Path, *, max_entries: int = MAX_ENTRIES) -> None:
        """Open or create the dock at `path` and read its vectors into memory."""
        self.path, self.max_entries = Path(path), max_entries
        self._lock = threading.RLock()
        self._groups: dict[tuple[str, str, str, int], _Group] = {}
        self._last_id, self._version = 0, -1
        try:
            self._connection = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=FULL")
            self._connection.executescript(_TABLES)
            self._check_schema()
            self._refresh()
        except sqlite3.DatabaseError as error:
            raise DataError(f"{self.path} is not a dock ({error}); name another file") from error

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
        metadata = json.dumps(dict(specification.metadata), sort_keys=True, allow_nan=False)
        if len(metadata.encode()) > MAX_METADATA_BYTES:
            raise DataError(f"metadata of {specification.name!r} has more than {MAX_METADATA_BYTES} bytes")
        row = (
            specification.name,
            specification.kind,
            specification.base_fingerprint,
            specification.recipe,
            specification.projection,
            specification.vector.size,
            specification.licence,
            metadata,
            json.dumps(asdict(specification.privacy), sort_keys=True, allow_nan=False),
            save_safetensors({"vector": specification.vector}),
        )
        with self._lock:
            self._refresh()
            if self._count() >= self.max_entries:
                raise DockFullError(f"the dock holds {self.max_entries} specifications and takes no more")
            try:
                cursor = self._connection.execute(
                    "INSERT INTO specification (name, kind, base_fingerprint, recipe, projection, dimension,"
                    " licence, metadata, privacy, payload) VALUES (?,?,?,?,?,?,?,?,?,?)",
                    row,
                )
            except sqlite3.IntegrityError as error:
                raise NameTakenError(
                    f"the dock already has a specification named {specification.name!r}; choose another name"
                ) from error
            self._read_new()
        return int(cursor.lastrowid or 0)

    def get(self, name: str) -> Specification:
        """Read one specification by name.

        Raises:
            NotInDockError: if there is none of that name.
        """
        with self._lock, closing(self._connection.cursor()) as cursor:
            row = cursor.execute(
                "SELECT name, kind, base_fingerprint, recipe, projection, licence, metadata, privacy, payload"
                " FROM specification WHERE name = ?",
                (name,),
            ).fetchone()
        if row is None:
            raise NotInDockError(f"the dock has no specification named {name!r:.80}")
        return Specification(
            name=row[0],
            vector=self._vector(row[8], row[0]),
            kind=row[1],
            base_fingerprint=row[2],
            recipe=row[3],
            projection=row[4],
            privacy=_statement(row[7]),
            licence=row[5],
            metadata=json.loads(row[6]),
        )

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
        if kind is not None and kind not in _KINDS:
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
            return [self._match(identity, score) for identity, score in ranked]

    def _match(self, identity: int, score: float) -> Match:
        name, licence, privacy, metadata = self._connection.execute(
            "SELECT name, licence, privacy, metadata FROM specification WHERE id = ?", (identity,)
        ).fetchone()
        return Match(name, score, licence, _statement(privacy), json.loads(metadata))

    def _count(self) -> int:
        return sum(group.count for group in self._groups.values())

    def _check_schema(self) -> None:
        row = self._connection.execute("SELECT schema FROM dock").fetchone()
        if row is None:
            self._connection.execute("INSERT INTO dock (schema) VALUES (?)", (DOCK_SCHEMA,))
        elif row[0] != DOCK_SCHEMA:
            raise DataError(f"{self.path} has dock schema {row[0]}; this version reads {DOCK_SCHEMA}")

    def _refresh(self) -> None:
        """Take in what another process added since the last look."""
        version = int(self._connection.execute("PRAGMA data_version").fetchone()[0])
        if version != self._version:
            self._version = version
            self._read_new()

    def _read_new(self) -> None:
        """Read the vectors of entries that are not in memory yet."""
        after = (self._last_id,)
        sizes = self._connection.execute(
            "SELECT base_fingerprint, recipe, projection, dimension, COUNT(*) FROM specification WHERE id > ?"
            " GROUP BY base_fingerprint, recipe, projection, dimension",
            after,
        ).fetchall()
        for *key, count in sizes:
            self._groups.setdefault((key[0], key[1], key[2], key[3]), _Group.empty(key[3], count))
        cursor = self._connection.execute(
            "SELECT id, name, kind, base_fingerprint, recipe, projection, dimension, payload FROM specification"
            " WHERE id > ? ORDER BY id",
            after,
        )
        for identity, name, kind, base, recipe, projection, dimension, payload in cursor:
            group = self._groups[(base, recipe, projection, dimension)]
            group.append(identity, kind, self._vector(payload, name, dimension))
            self._last_id = identity

    @staticmethod
    def _vector(payload: bytes, name: str, dimension: int | None = None) -> npt.NDArray[np.float32]:
        try:
            vector = load_safetensors(payload)["vector"].astype(np.float32, copy=False)
        except Exception as error:
            raise DataError(f"the stored vector of specification {name!r} is damaged") from error
        if dimension is not None and vector.shape != (dimension,):
            raise DataError(f"the stored vector of specification {name!r} is damaged: shape {vector.shape}")
        return vector


def _key(specification: Specification) -> tuple[str, str, str, int]:
    return (
        specification.base_fingerprint,
        specification.recipe,
        specification.projection,
        specification.vector.size,
    )


def _statement(text: str) -> PrivacyStatement:
    fields = json.loads(text)
    return PrivacyStatement(**{**fields, "conditions": tuple(fields["conditions"])})


def _largest(scores: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """Indices of the `count` largest scores, best first, ties by position."""
    if count >= scores.size:
        return np.argsort(-scores, kind="stable")
    part = np.argpartition(scores, scores.size - count)[scores.size - count :]
    return part[np.lexsort((part, -scores[part]))]
