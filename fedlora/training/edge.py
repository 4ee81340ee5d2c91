"""The logical clients of an edge site: who they are, and that no person sits at two of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedlora.config.schema import FilesPartition
from fedlora.config.trainer import SiteDataConfig
from fedlora.data import Rows, partition_rows
from fedlora.errors import DataError
from fedlora.ledger import person_key

Index = npt.NDArray[np.int64]


def edge_clients(rows: Rows, data: SiteDataConfig) -> dict[str, Index]:
    """Divide a site's records into its logical clients.

    Args:
        rows: SENSITIVE. The site's records.
        data: the site's own description of them; `partition` is set.

    Returns:
        Client id to positions in `rows`. Ids go to the server and name accounts in the ledger: values of the column, or
        names of files without folder and ending, so that a moved folder keeps what was spent.

    Raises:
        DataError: if two clients would have one id, or (with `group_by`) a person's records sit at several clients,
            whose figures would each hold for a part of the person only.
    """
    parts = dict(partition_rows(rows, data.partition, 0))
    if isinstance(data.partition, FilesPartition):
        parts = _by_file_name(parts)
    if data.group_by is not None:
        _refuse_shared_people(rows.column(data.group_by), parts, data.group_by)
    return parts


def _by_file_name(parts: Mapping[str, Index]) -> dict[str, Index]:
    names = [Path(place).stem for place in parts]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise DataError(
            f"data.partition: two files are called {double[0]}; each logical client is named after its file, so give "
            "them different names"
        )
    return dict(zip(names, parts.values(), strict=True))


def _refuse_shared_people(people: list[object], parts: Mapping[str, Index], column: str) -> None:
    """Count people of several clients; nobody is named."""
    home: dict[str, str] = {}
    shared = set()
    for client, index in parts.items():
        for place in index:
            person = person_key(people[int(place)], int(place))
            if home.setdefault(person, client) != client:
                shared.add(person)
    if shared:
        raise DataError(
            f"data.partition: {len(shared)} people (data.group_by {column}) have records at more than one logical "
            "client, where a budget per person cannot hold; partition so that a person is at one, or leave partition "
            "out"
        )
