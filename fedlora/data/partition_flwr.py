"""Split one data set with the partitioners of flwr-datasets, from a configuration or with an object of one's own."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection
from typing import Any

import numpy as np

from fedlora.config.schema import FlwrPartition
from fedlora.data.partition import check_disjoint, client_name
from fedlora.data.rows import Index, Rows
from fedlora.errors import DataError, FedLoraError

_POSITION = "__position__"


def flwr_partition(rows: Rows, partition: FlwrPartition, seed: int) -> dict[str, Index]:
    """Split with a partitioner of flwr-datasets that a configuration names.

    Args:
        rows: the records. SENSITIVE: no message of the partitioner about them is passed on.
        partition: class and arguments.
        seed: the experiment seed, for a partitioner that takes one and is given none.

    Raises:
        DataError: if flwr-datasets is not installed, has no such class, refuses the arguments or cannot split.
    """
    made = _make(partition, seed)
    named = {value for value in partition.arguments.values() if isinstance(value, str)}
    try:
        return partition_with(made, rows, columns=named & set(rows.columns))
    except FedLoraError:
        raise
    except Exception as fault:
        raise DataError(
            f"data.partition: {partition.partitioner} cannot split these records ({type(fault).__name__}); check its "
            f"arguments against the columns {', '.join(rows.columns)}; content withheld"
        ) from None


def _make(partition: FlwrPartition, seed: int) -> Any:
    try:
        module: Any = importlib.import_module("flwr_datasets.partitioner")
    except ImportError as fault:
        raise DataError(
            f"data.partition: kind flwr needs flwr-datasets ({fault}); run: pip install flwr-datasets"
        ) from None
    found = getattr(module, partition.partitioner, None)
    if not inspect.isclass(found):
        known = sorted(
            name for name in vars(module) if name.endswith("Partitioner") and name != "Partitioner"
        )
        raise DataError(
            f"data.partition.partitioner: flwr-datasets has no {partition.partitioner}; it has {', '.join(known)}"
        )
    arguments = dict(partition.arguments)
    if "seed" in inspect.signature(found).parameters:
        arguments.setdefault("seed", seed)
    try:
        return found(**arguments)
    except Exception as fault:  # nothing but the configuration's own values is in this message
        text = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
        raise DataError(f"data.partition.arguments: {partition.partitioner} refuses them: {text}") from None


def partition_with(partitioner: Any, rows: Rows, columns: Collection[str] | None = None) -> dict[str, Index]:
    """Split with a partitioner of flwr-datasets (anything with `dataset`, `num_partitions` and `load_partition`).

    Args:
        partitioner: for example `flwr_datasets.partitioner.DirichletPartitioner(...)`.
        rows: the records.
        columns: what the partitioner may look at; every column where None.

    Returns:
        client id to sorted positions in `rows`; some may be empty.

    Raises:
        DataError: if it gives a record to two clients.
    """
    import datasets

    seen = rows.columns if columns is None else sorted(columns)
    content = {name: rows.column(name) for name in seen}
    content[_POSITION] = list(range(len(rows)))
    partitioner.dataset = datasets.Dataset.from_dict(content)
    count = int(partitioner.num_partitions)
    split = {
        client_name(number): np.sort(
            np.asarray(partitioner.load_partition(number)[_POSITION], dtype=np.int64)
        )
        for number in range(count)
    }
    check_disjoint(split, len(rows))
    return split
