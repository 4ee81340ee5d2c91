"""Records or people that sit at several clients of one simulation: for them no single client's figure holds.

A record at m clients is protected by the m ledgers together. The partitions split positions, not content, so equal
records (or one person's records) can land at several clients; a simulation's driver sees all rows and says so.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fedlora.config.schema import FedLoraConfig, RecordPrivacy
from fedlora.data import Rows
from fedlora.ledger import (
    Account,
    RecordSketch,
    find_overlaps,
    hash_records,
    person_key,
    record_bytes,
    sketch_hashes,
)

Index = npt.NDArray[np.int64]
MAX_RECORDS: Final = 200_000
"""Beyond this many records the search costs more than it tells; the report then says that it was not made."""
MAX_PAIRS: Final = 10_000
"""Pairs of clients are named only where there are at most so many."""


@dataclass(frozen=True)
class Sharing:
    """SENSITIVE: simulation only. What clients share.

    Attributes:
        what: "records" or "people".
        shared: number that sit at two clients or more; None if it was not looked for.
        most_clients: largest number of clients that one of them sits at.
        clients: every client that shares one.
        example: the pair that shares most, with its number; None if there is none or there are too many pairs.
        fingerprints: client to the keyed fingerprint of its records (or people); none without the ledger's key.
        moved: clients that hold other records than in earlier runs of the ledger.
    """

    what: str
    shared: int | None
    most_clients: int
    clients: frozenset[str]
    example: tuple[str, str, int] | None
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    moved: int = 0

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences for the run's report."""
        return (*self._overlaps(), *self._moves())

    def _moves(self) -> tuple[str, ...]:
        if self.moved == 0:
            return ()
        return (
            f"{self.moved} clients hold other {self.what} than in earlier runs of this ledger (other data, or "
            "dealt out anew); what was spent stays spent, and one that moved has spent at each of its clients: the "
            "largest figure covers it only if every client takes part in every round alike",
        )

    def _overlaps(self) -> tuple[str, ...]:
        if self.shared is None:
            return (
                f"overlap between clients was not looked for (more than {MAX_RECORDS} records); where "
                f"{self.what} sit at several clients, their figures add up",
            )
        if self.shared == 0:
            return ()
        pair = (
            "" if self.example is None else f" ({self.example[0]} and {self.example[1]}: {self.example[2]})"
        )
        return (
            f"{self.shared} {self.what} sit at several of {len(self.clients)} clients, one at "
            f"{self.most_clients}{pair}: for them the clients' figures add up, the largest figure "
            "of one client does not cover them",
        )

    def conditions(self) -> Mapping[str, str]:
        """Return the sentence for each sharing client's own account."""
        text = f"shares {self.what} with other clients of the simulation: for those the figures add up"
        return dict.fromkeys(self.clients, text)


def find_sharing(
    config: FedLoraConfig,
    rows: Rows,
    parts: Mapping[str, Index],
    *,
    secret: bytes | None = None,
    earlier: Mapping[Account, str] | None = None,
) -> Sharing | None:
    """Look for records (or people, where `privacy.group_by` is set) at several clients, and for changed ones.

    Args:
        config: the run's configuration.
        rows: all rows, SENSITIVE.
        parts: client to the positions of its training rows.
        secret: the ledger's key, SENSITIVE, for fingerprints that later runs can compare; None for none.
        earlier: fingerprints that the ledger holds.

    Returns:
        None where clients' accounts are not charged per record.
    """
    privacy = config.privacy
    if not isinstance(privacy, RecordPrivacy) or (len(parts) < 2 and secret is None):
        return None
    what = "records" if privacy.group_by is None else "people"
    total = sum(len(index) for index in parts.values())
    if total > MAX_RECORDS:
        return Sharing(what, None, 0, frozenset(), None)
    people = None if privacy.group_by is None else rows.column(privacy.group_by)
    key = secrets.token_bytes(32) if secret is None else secret
    largest = max(1, max(len(index) for index in parts.values()))
    sketches = {
        client: sketch_hashes(hashes, size=largest)
        for client, hashes in _hashes(rows, people, parts, key).items()
    }
    prints = {} if secret is None else {client: sketch.fingerprint() for client, sketch in sketches.items()}
    known = {client: text for client, text in prints.items() if text is not None}
    held = earlier or {}
    moved = sum(held.get(Account(client, config.data.name), text) != text for client, text in known.items())
    return replace(_summary(what, sketches), fingerprints=known, moved=moved)


def _hashes(
    rows: Rows, people: list[Any] | None, parts: Mapping[str, Index], key: bytes
) -> dict[str, list[int]]:
    """Return the keyed hash of every client's records (or people); the records are read in one pass, in file order."""
    places = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *parts.values()])).tolist()
    hashes = dict(zip(places, hash_records(_content(rows, people, places), key), strict=True))
    return {client: [hashes[place] for place in index.tolist()] for client, index in parts.items()}


def _content(rows: Rows, people: list[Any] | None, places: list[int]) -> Iterator[bytes]:
    if people is None:
        return (record_bytes(row) for row in rows.read_many(places))
    return (person_key(people[place], place).encode("utf-8", "surrogatepass") for place in places)


def _summary(what: str, sketches: Mapping[str, RecordSketch]) -> Sharing:
    counts = Counter(value for sketch in sketches.values() for value in sketch.hashes)
    shared = {value: count for value, count in counts.items() if count > 1}
    clients = frozenset(
        client for client, sketch in sketches.items() if any(value in shared for value in sketch.hashes)
    )
    example = None
    if 0 < sum(count * (count - 1) // 2 for count in shared.values()) <= MAX_PAIRS:
        only = {
            client: replace(
                sketches[client], hashes=tuple(filter(shared.__contains__, sketches[client].hashes))
            )
            for client in clients
        }
        worst = max(find_overlaps(only), key=lambda pair: pair.shared)
        example = (worst.first, worst.second, worst.shared)
    return Sharing(what, len(shared), max(shared.values(), default=0), clients, example)
