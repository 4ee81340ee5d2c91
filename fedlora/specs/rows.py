"""Rows of a dock's file, checked when they are read: the file may come from somebody else or be damaged."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from fedlora.errors import DataError, FedLoraError
from fedlora.specs.types import MAX_DIMENSION, DockDamagedError, PrivacyStatement, Specification

DOCK_SCHEMA: Final = 1
MAX_METADATA_BYTES: Final = 16_384
KINDS: Final = ("model", "task")
_MAX_PAYLOAD: Final = 4 * MAX_DIMENSION + 1024
"""Bytes of the longest vector with its safetensors header."""
_NORM_ERROR: Final = 1e-3
_COLUMNS: Final = (
    "name, kind, base_fingerprint, recipe, projection, dimension, licence, metadata, privacy, payload"
)
INSERT: Final = f"INSERT INTO specification ({_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?)"  # noqa: S608

_TABLES: Final = """
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


def open_file(path: Path, *, create: bool) -> sqlite3.Connection:
    """Open a dock's file; no other database is ever changed.

    Args:
        path: the file.
        create: make an empty dock where there is no file.

    Raises:
        DataError: if the file is missing, no dock, or of another schema.
    """
    if not create and not path.is_file():
        raise DataError(f"{path}: there is no such dock; `fedlora dock add` makes one")
    try:
        connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables and not {"dock", "specification"} <= tables:
            connection.close()
            raise DataError(f"{path} is a database of something else, not a dock; name another file")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.executescript(_TABLES)
        row = connection.execute("SELECT schema FROM dock").fetchone()
        if row is None:
            connection.execute("INSERT INTO dock (schema) VALUES (?)", (DOCK_SCHEMA,))
    except sqlite3.DatabaseError as error:
        raise DataError(f"{path} is not a dock ({error}); name another file") from error
    if row is not None and row[0] != DOCK_SCHEMA:
        connection.close()
        raise DataError(f"{path} has dock schema {row[0]!r:.20}; this version reads {DOCK_SCHEMA}")
    return connection


def to_row(specification: Specification) -> tuple[Any, ...]:
    """Return what `INSERT` stores.

    Raises:
        DataError: if the metadata is too large.
    """
    metadata = json.dumps(dict(specification.metadata), sort_keys=True, allow_nan=False)
    if len(metadata.encode()) > MAX_METADATA_BYTES:
        raise DataError(f"metadata of {specification.name!r} has more than {MAX_METADATA_BYTES} bytes")
    return (
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


def from_row(row: tuple[Any, ...]) -> Specification:
    """Return a stored specification (columns in the order of `INSERT`), checked as a new one is.

    Raises:
        DockDamagedError: naming the entry, if a part of it is damaged.
    """
    name, kind, base, recipe, projection, dimension, licence, metadata, privacy, payload = row
    try:
        return Specification(
            name=name,
            vector=stored_vector(payload, name, dimension),
            kind=kind,
            base_fingerprint=base,
            recipe=recipe,
            projection=projection,
            privacy=stored_statement(privacy, name),
            licence=licence,
            metadata=stored_metadata(metadata, name),
        )
    except FedLoraError as error:
        raise DockDamagedError(f"the stored specification {name!r:.80} is damaged: {error}") from error


def read_one(connection: sqlite3.Connection, column: str, value: str | int) -> Specification | None:
    """Return the stored specification with this "name" or "id"; None where there is none.

    Raises:
        DockDamagedError: if it is damaged.
    """
    where = {"name": "name = ?", "id": "id = ?"}[column]
    row = connection.execute(f"SELECT {_COLUMNS} FROM specification WHERE {where}", (value,)).fetchone()  # noqa: S608
    return None if row is None else from_row(row)


def stored_vector(payload: Any, name: Any, dimension: Any) -> npt.NDArray[np.float32]:
    """Decode a safetensors payload of bounded size: one float32 vector of the stated length.

    Raises:
        DockDamagedError: for anything else.
    """
    damaged = f"the stored vector of specification {name!r:.80} is damaged"
    if not isinstance(payload, bytes) or len(payload) > _MAX_PAYLOAD:
        raise DockDamagedError(f"{damaged}: not at most {_MAX_PAYLOAD} bytes")
    try:
        tensors = load_safetensors(payload)
    except Exception as error:
        raise DockDamagedError(damaged) from error
    vector = tensors.get("vector")
    if vector is None or len(tensors) != 1 or vector.dtype != np.float32 or vector.shape != (dimension,):
        raise DockDamagedError(f"{damaged}: one float32 vector of {dimension!r:.20} numbers is expected")
    return vector


def stored_statement(text: Any, name: Any) -> PrivacyStatement:
    """Decode a stored privacy statement.

    Raises:
        DockDamagedError: if it is not one, or one of the noise-free analysis, which no dock accepts.
    """
    try:
        fields = json.loads(text)
        statement = PrivacyStatement(**{**fields, "conditions": tuple(fields["conditions"])})
    except (FedLoraError, ValueError, TypeError, KeyError) as error:
        raise DockDamagedError(f"the stored privacy statement of {name!r:.80} is damaged") from error
    if statement.guarantee == "conditional":
        raise DockDamagedError(
            f"the stored privacy statement of {name!r:.80} is conditional; no dock accepts that"
        )
    return statement


def stored_metadata(text: Any, name: Any) -> dict[str, Any]:
    """Decode stored metadata.

    Raises:
        DockDamagedError: if it is not a JSON object.
    """
    try:
        fields = json.loads(text)
    except (ValueError, TypeError) as error:
        raise DockDamagedError(f"the stored metadata of {name!r:.80} is damaged") from error
    if not isinstance(fields, dict):
        raise DockDamagedError(f"the stored metadata of {name!r:.80} is damaged")
    return fields


def require_units(rows: npt.NDArray[np.float32], path: Path) -> None:
    """Require finite vectors of unit norm; one that is not would come before every true match.

    Args:
        rows: (entries, dimension).
        path: the dock's file, for the message.

    Raises:
        DockDamagedError: if one is not.
    """
    norms = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    if not bool(np.all(np.abs(norms - 1.0) < _NORM_ERROR)):
        raise DockDamagedError(f"{path} holds a vector that is not of unit norm: the file is damaged")
