"""Split one data set over logical clients: by column, Dirichlet label skew, quantity or file.

No record is in two clients. Every partition is a function of the records' order, its
parameters and the experiment seed; noise never comes from this seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedlora.config.schema import (
    ColumnPartition,
    DirichletPartition,
    FilesPartition,
    FlwrPartition,
    Partition,
    QuantityPartition,
)
from fedlora.data.rows import Index, Rows
from fedlora.errors import DataError
from fedlora.ledger import person_key

_PARTITION_STREAM = 1


def client_name(number: int) -> str:
    """Return the id of the numbered logical client.

    Example:
        >>> client_name(7)
        'client-0007'
    """
    return f"client-{number:04d}"


def partition_rows(rows: Rows, partition: Partition | None, seed: int) -> dict[str, Index]:
    """Give every record to at most one client.

    Args:
        rows: the records to split. SENSITIVE.
        partition: how; None makes one client of everything.
        seed: the experiment seed.

    Returns:
        client id to sorted positions in `rows`; clients may be empty under skew.

    Raises:
        DataError: if the column is missing or no client would have any record.
    """
    _refuse_more_clients_than_records(partition, len(rows))
    generator = np.random.Generator(np.random.Philox(key=[seed % 2**64, _PARTITION_STREAM]))
    if partition is None:
        return {client_name(0): np.arange(len(rows), dtype=np.int64)}
    if isinstance(partition, DirichletPartition):
        labels = rows.column(partition.column)
        return dirichlet_partition(labels, partition.clients, partition.alpha, generator)
    if isinstance(partition, QuantityPartition):
        return quantity_partition(len(rows), partition.clients, partition.alpha, generator)
    if isinstance(partition, FilesPartition):
        return _by_value([rows.origin(place).source for place in range(len(rows))])
    if isinstance(partition, FlwrPartition):
        from fedlora.data.partition_flwr import flwr_partition

        return flwr_partition(rows, partition, seed)
    return column_partition(rows.column(partition.column), partition)


def _refuse_more_clients_than_records(partition: Partition | None, num_records: int) -> None:
    asked = getattr(partition, "clients", None)
    if asked is not None and asked > num_records and not isinstance(partition, ColumnPartition):
        raise DataError(
            f"data.partition.clients: got {asked} for {num_records} records; allowed is one client a record at most"
        )


def dirichlet_partition(
    labels: Sequence[Any], clients: int, alpha: float, generator: np.random.Generator
) -> dict[str, Index]:
    """Spread each label's records over the clients by its own Dirichlet(alpha) draw.

    Args:
        labels: one label per record.
        clients: number of clients.
        alpha: > 0; small is skewed, large is even.
        generator: source of the draws.
    """
    names = np.asarray([str(label) for label in labels])
    shares: list[list[Index]] = [[] for _ in range(clients)]
    for label in np.unique(names):
        members = generator.permutation(np.flatnonzero(names == label))
        for client, part in enumerate(_cut(members, _dirichlet(clients, alpha, generator))):
            shares[client].append(part)
    return {
        client_name(client): np.sort(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64)
        for client, parts in enumerate(shares)
    }


def quantity_partition(
    num_records: int, clients: int, alpha: float | None, generator: np.random.Generator
) -> dict[str, Index]:
    """Shuffle the records and cut them into Dirichlet(alpha) or (alpha None) equal shares."""
    order = generator.permutation(num_records).astype(np.int64)
    shares = np.full(clients, 1.0 / clients) if alpha is None else _dirichlet(clients, alpha, generator)
    return {client_name(client): np.sort(part) for client, part in enumerate(_cut(order, shares))}


def column_partition(values: Sequence[Any], partition: ColumnPartition) -> dict[str, Index]:
    """Make one client of each value of a column, keeping the largest `clients` of them.

    Clients below `min_records` are left out. Ids are the values themselves.

    Raises:
        DataError: if none is left.
    """
    groups = {
        client: index
        for client, index in _by_value(values, repr(partition.column)).items()
        if len(index) >= partition.min_records
    }
    if not groups:
        raise DataError(
            f"data.partition: no value of {partition.column!r} has {partition.min_records} records; lower min_records"
        )
    if partition.clients is not None and len(groups) > partition.clients:
        largest = sorted(groups, key=lambda client: (-len(groups[client]), client))[: partition.clients]
        groups = {client: groups[client] for client in sorted(largest)}
    return groups


def check_disjoint(split: Mapping[str, Index], num_records: int) -> None:
    """Refuse a split that gives a record twice or names one that does not exist.

    Raises:
        DataError: with the number of records concerned.
    """
    positions = np.concatenate([*split.values(), np.empty(0, dtype=np.int64)])
    if positions.size > 0 and (positions.min() < 0 or positions.max() >= num_records):
        raise DataError(f"partition: a position lies outside 0..{num_records - 1}")
    twice = int(positions.size - np.unique(positions).size)
    if twice > 0:
        raise DataError(f"partition: {twice} records are given to more than one client")


def bound_groups(groups: Sequence[Any], index: Index, max_records: int) -> Index:
    """Keep at most `max_records` records of each group (person) in one client's share.

    The first ones in the data's order are kept, so that the choice never changes between steps and one
    person's records never decide about another's.

    Args:
        groups: the group of every record of the data set, by position.
        index: one client's positions.
        max_records: >= 1.

    Raises:
        DataError: if a record has no person.
    """
    seen: dict[str, int] = {}
    kept = []
    for place in index:
        group = person_key(groups[int(place)], int(place))
        seen[group] = seen.get(group, 0) + 1
        if seen[group] <= max_records:
            kept.append(int(place))
    return np.asarray(kept, dtype=np.int64)


def partition_table(split: Mapping[str, Index], labels: Sequence[Any]) -> dict[str, dict[str, int]]:
    """Count each client's records per label (for a plot of a simulated partition). SENSITIVE."""
    table: dict[str, dict[str, int]] = {}
    for client, index in split.items():
        counts: dict[str, int] = {}
        for place in index:
            label = str(labels[int(place)])
            counts[label] = counts.get(label, 0) + 1
        table[client] = dict(sorted(counts.items()))
    return table


def _dirichlet(clients: int, alpha: float, generator: np.random.Generator) -> np.ndarray[Any, Any]:
    draws = generator.standard_gamma(np.full(clients, alpha))
    total = float(draws.sum())
    if not (total > 0):  # a tiny alpha underflows every draw: all goes to one client
        draws = np.zeros(clients)
        draws[int(generator.integers(clients))] = total = 1.0
    return draws / total


def _cut(members: np.ndarray[Any, Any], shares: np.ndarray[Any, Any]) -> list[Index]:
    ends = np.rint(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
    return [part.astype(np.int64) for part in np.split(members, ends)]


def _by_value(values: Sequence[Any], what: str = "the file") -> dict[str, Index]:
    groups: dict[str, list[int]] = {}
    for place, value in enumerate(values):
        name = str(value)
        if value is None or value != value or not name.strip() or not name.isprintable() or len(name) > 256:
            raise DataError(
                f"data.partition: record {place + 1}: {what} names no client; allowed: 1 to 256 printable characters; "
                "repair or remove the record; content withheld"
            )
        groups.setdefault(name, []).append(place)
    return {name: np.asarray(groups[name], dtype=np.int64) for name in sorted(groups)}
