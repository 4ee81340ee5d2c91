"""Keyed, order-free fingerprints of records, and overlap between clients of one simulation.

A fingerprint is evidence that content changed; it is never the key of an account, so editing
records does not reset what was spent. Without the secret it says nothing about content.
"""

from __future__ import annotations

import hashlib
import heapq
import hmac
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from fedlora.errors import LedgerError
from fedlora.ledger import chain

_MODULUS_BITS: Final = 512
SKETCH_SIZE: Final = 4096


def _hash_512(key: bytes, row: bytes) -> int:
    return int.from_bytes(hmac.digest(key, row, "sha512"), "big")


def record_bytes(record: Mapping[str, Any]) -> bytes:
    """Return a record's canonical bytes: JSON with sorted keys; images and other arrays by their bytes (SENSITIVE)."""
    return _canonical.encode(record).encode()


def _text_of(value: Any) -> str:
    data = value.tobytes() if hasattr(value, "tobytes") else value
    return data.hex() if isinstance(data, bytes | bytearray) else repr(data)


_canonical: Final = json.JSONEncoder(sort_keys=True, ensure_ascii=False, default=_text_of)


def fingerprint_records(rows: Iterable[bytes], secret: bytes) -> str:
    """Return the keyed fingerprint of a multiset of records: 64 hex digits, the same in every order.

    The sum of keyed hashes modulo 2^512 is hashed once more together with the number of records,
    so repetition counts and neither sum nor count is shown.

    Args:
        rows: each record's canonical bytes, SENSITIVE.
        secret: the client's key, SENSITIVE.

    Returns: text that reveals equality of whole data sets to the key's owner only.

    Raises:
        LedgerError: if a row is not bytes.

    Reference: Clarke, Devadas, van Dijk, Gassend & Suh, "Incremental Multiset Hash Functions and
        Their Application to Memory Integrity Checking", ASIACRYPT 2003, section 5 (MSet-Add-Hash).

    Example:
        >>> key = bytes(32)
        >>> fingerprint_records([b"a", b"b"], key) == fingerprint_records([b"b", b"a"], key)
        True
        >>> fingerprint_records([b"a"], key) == fingerprint_records([b"a", b"a"], key)
        False
    """
    key = chain.derive_key(secret, "fingerprint")
    total, count = 0, 0
    for row in rows:
        total += _hash_512(key, _as_bytes(row))
        count += 1
    body = (total % (1 << _MODULUS_BITS)).to_bytes(64, "big") + count.to_bytes(8, "big")
    return hmac.digest(key, b"final/" + body, "sha256").hex()


def _as_bytes(row: object) -> bytes:
    if not isinstance(row, bytes | bytearray | memoryview):
        raise LedgerError(
            f"fingerprint: got a row of type {type(row).__name__}; allowed: bytes; encode each record"
        )
    return bytes(row)


@dataclass(frozen=True)
class RecordSketch:
    """The smallest keyed hashes of one client's distinct records (SENSITIVE: simulation only).

    Attributes:
        hashes: sorted distinct 64-bit hashes, at most the sketch's size.
        complete: True if all distinct records are in it, so that overlaps are exact.
    """

    hashes: tuple[int, ...]
    complete: bool

    def fingerprint(self) -> str | None:
        """Return the keyed fingerprint of the distinct records (64 hex digits), None if none or not all are here.

        Under one key it is the same for the same records in every order; without the key it tells nothing.
        """
        if not self.complete or not self.hashes:
            return None
        return hashlib.sha256(b"".join(value.to_bytes(8, "big") for value in self.hashes)).hexdigest()


@dataclass(frozen=True)
class Overlap:
    """Records (or people) that two clients share.

    Attributes:
        first: client.
        second: client.
        shared: number of shared distinct records: exact if `exact`, else a lower bound.
        exact: whether both sketches were complete.
    """

    first: str
    second: str
    shared: int
    exact: bool


def sketch_records(rows: Iterable[bytes], secret: bytes, *, size: int = SKETCH_SIZE) -> RecordSketch:
    """Return a bottom-k sketch of a client's distinct records, under a key common to the simulation.

    Args:
        rows: canonical bytes of records, or of people's ids to find shared people, SENSITIVE.
        secret: one key for all clients of the simulation.
        size: hashes kept, >= 1.

    Raises:
        LedgerError: if a row is not bytes or size < 1.
    """
    return sketch_hashes(hash_records(rows, secret), size=size)


def hash_records(rows: Iterable[bytes], secret: bytes) -> Iterator[int]:
    """Yield each record's keyed 64-bit hash, in the order given: what sketches are made of (SENSITIVE).

    Args:
        rows: as for `sketch_records`.
        secret: as for `sketch_records`.

    Raises:
        LedgerError: if a row is not bytes.
    """
    key = chain.derive_key(secret, "overlap")
    for row in rows:
        yield int.from_bytes(hmac.digest(key, _as_bytes(row), "sha256")[:8], "big")


def sketch_hashes(hashes: Iterable[int], *, size: int = SKETCH_SIZE) -> RecordSketch:
    """Return the sketch of a client's records from their hashes under one key; see `sketch_records`.

    Raises:
        LedgerError: if size < 1.
    """
    if not size >= 1:
        raise LedgerError(f"sketch size: got {size!r}; allowed: >= 1; use {SKETCH_SIZE}")
    distinct = set(hashes)
    kept = heapq.nsmallest(size, distinct)
    return RecordSketch(tuple(kept), len(distinct) <= size)


def find_overlaps(sketches: Mapping[str, RecordSketch]) -> list[Overlap]:
    """Return every pair of clients that share a record, in client order.

    A person or record at two clients is protected by the two ledgers together, not by the larger
    of the two figures, so a report must name these pairs.
    """
    owners: dict[int, list[str]] = {}
    for client in sorted(sketches):
        for value in sketches[client].hashes:
            owners.setdefault(value, []).append(client)
    shared: dict[tuple[str, str], int] = {}
    for clients in owners.values():
        for index, first in enumerate(clients):
            for second in clients[index + 1 :]:
                shared[(first, second)] = shared.get((first, second), 0) + 1
    return [
        Overlap(first, second, count, sketches[first].complete and sketches[second].complete)
        for (first, second), count in sorted(shared.items())
    ]
