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
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from fedlora.errors import DataError
from fedlora.specs.types import PrivacyStatement, Specification, refuse_intrinsic

DOCK_SCHEMA = 1
MAX_METADATA_BYTES = 16_384
MAX_TOP_K = 1_000

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
    """Vectors that may be compared with each other; `rows` has spare room so that adding is amortised."""

    rows: npt.NDArray[np.float32]
    ids: list[int]

    def append(self, identity: int, vector: npt.NDArray[np.float32]) -> None:
        if len(self.ids) == self.rows.shape[0]:
            grown = np.empty((max(64, 2 * self.rows.shape[0]), self.rows.shape[1]), np.float32)
            grown[: len(self.ids)] = self.rows[: len(self.ids)]
            self.rows = grown
        self.rows[len(self.ids)] = vector
        self.ids.append(identity)


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

    def __init__(self, path: Path) -> None:
        """Open or create the dock at `path` and read its vectors into memory."""
        self.path = Path(path)
        self._lock = threading.RLock()
        self._groups: dict[tuple[str, str, str, int], _Group] = {}
        try:
            self._connection = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=FULL")
            self._connection.executescript(_TABLES)
            self._check_schema()
            self._read_vectors()
        except sqlite3.DatabaseError as error:
            raise DataError(f"{self.path} is not a dock ({error}); name another file") from error

    def __len__(self) -> int:
        """Number of specifications."""
        return sum(len(group.ids) for group in self._groups.values())

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def add(self, specification: Specification) -> int:
        """Store one specification, durably, and return its id.

        Raises:
            DataError: if the name is taken or the metadata is too large.
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
            try:
                cursor = self._connection.execute(
                    "INSERT INTO specification (name, kind, base_fingerprint, recipe, projection, dimension,"
                    " licence, metadata, privacy, payload) VALUES (?,?,?,?,?,?,?,?,?,?)",
                    row,
                )
            except sqlite3.IntegrityError as error:
                raise DataError(
                    f"the dock already has a specification named {specification.name!r}"
                ) from error
            identity = int(cursor.lastrowid or 0)
            self._group_of(specification).append(identity, specification.vector)
        return identity

    def get(self, name: str) -> Specification:
        """Read one specification by name.

        Raises:
            DataError: if there is none of that name.
        """
        with self._lock, closing(self._connection.cursor()) as cursor:
            row = cursor.execute(
                "SELECT name, kind, base_fingerprint, recipe, projection, licence, metadata, privacy, payload"
                " FROM specification WHERE name = ?",
                (name,),
            ).fetchone()
        if row is None:
            raise DataError(f"the dock has no specification named {name!r:.80}")
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
            DataError: if top_k is out of range or nothing comparable is stored.

        Source: "PAVE Specifications of Learnwares Yield Intrinsic Privacy-Preserving Capabilities", Eq. 3.
        """
        if isinstance(top_k, bool) or not 1 <= top_k <= MAX_TOP_K:
            raise DataError(f"top_k must lie in 1..{MAX_TOP_K}; got {top_k!r:.40}")
        key = _key(query)
        with self._lock:
            group = self._groups.get(key)
            if group is None:
                raise DataError(
                    f"nothing in the dock is comparable with {query.name!r}: same base model, lora_A recipe and "
                    f"projection are needed, and it holds {len(self)} specifications of others"
                )
            scores = group.rows[: len(group.ids)] @ query.vector
            order = _largest(scores, min(len(group.ids), 4 * top_k + 16))
            found = self._matches([(group.ids[i], float(scores[i])) for i in order], query.name, kind, top_k)
            if len(found) < min(top_k, len(group.ids)) and len(order) < len(group.ids):
                order = np.argsort(-scores, kind="stable")
                found = self._matches(
                    [(group.ids[i], float(scores[i])) for i in order], query.name, kind, top_k
                )
        return found

    def _matches(
        self, ranked: Sequence[tuple[int, float]], exclude: str, kind: str | None, top_k: int
    ) -> list[Match]:
        found: list[Match] = []
        for identity, score in ranked:
            name, entry_kind, licence, privacy, metadata = self._connection.execute(
                "SELECT name, kind, licence, privacy, metadata FROM specification WHERE id = ?", (identity,)
            ).fetchone()
            if name == exclude or (kind is not None and entry_kind != kind):
                continue
            found.append(Match(name, score, licence, _statement(privacy), json.loads(metadata)))
            if len(found) == top_k:
                break
        return found

    def _check_schema(self) -> None:
        row = self._connection.execute("SELECT schema FROM dock").fetchone()
        if row is None:
            self._connection.execute("INSERT INTO dock (schema) VALUES (?)", (DOCK_SCHEMA,))
        elif row[0] != DOCK_SCHEMA:
            raise DataError(f"{self.path} has dock schema {row[0]}; this version reads {DOCK_SCHEMA}")

    def _read_vectors(self) -> None:
        for key, count in self._sizes():
            self._groups[key] = _Group(np.empty((count, key[3]), np.float32), [])
        cursor = self._connection.execute(
            "SELECT id, name, base_fingerprint, recipe, projection, dimension, payload FROM specification ORDER BY id"
        )
        for identity, name, base, recipe, projection, dimension, payload in cursor:
            self._groups[(base, recipe, projection, dimension)].append(identity, self._vector(payload, name))

    def _sizes(self) -> list[tuple[tuple[str, str, str, int], int]]:
        rows = self._connection.execute(
            "SELECT base_fingerprint, recipe, projection, dimension, COUNT(*) FROM specification"
            " GROUP BY base_fingerprint, recipe, projection, dimension"
        ).fetchall()
        return [
            ((base, recipe, projection, dimension), count)
            for base, recipe, projection, dimension, count in rows
        ]

    def _group_of(self, specification: Specification) -> _Group:
        key = _key(specification)
        return self._groups.setdefault(key, _Group(np.empty((0, specification.vector.size), np.float32), []))

    @staticmethod
    def _vector(payload: bytes, name: str) -> npt.NDArray[np.float32]:
        try:
            return load_safetensors(payload)["vector"].astype(np.float32, copy=False)
        except Exception as error:
            raise DataError(f"the stored vector of specification {name!r} is damaged") from error


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
