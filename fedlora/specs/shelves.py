"""Who owns the records of a specification: a configuration's own data, or a site with its policy and ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from fedlora.config.schema import FedLoraConfig, FileSource, NoPrivacy
from fedlora.config.trainer import TrainerConfig
from fedlora.data import Rows, Task, load_rows, partition_rows
from fedlora.data.files import expand_paths
from fedlora.errors import ConfigError, DataError, PrivacyError
from fedlora.ledger import Ledger
from fedlora.simulation.prepare import bounded
from fedlora.training.charging import LedgerKeeper
from fedlora.training.policy import Policy
from fedlora.training.replies import LedgerReplies, MemoryReplies
from fedlora.training.service_site import Site, build_site
from fedlora.training.shelf import LazyRecords, Records, Shelf
from fedlora.training.trainer import Trainer

Target = Literal["label", "constant"]
CONSTANT: Final = 1.0
"""The public number that every record's output is drawn to under the constant target."""


class ClientShelf:
    """One client's records; rows are loaded, split and bounded at the first `open`, after the reservation."""

    def __init__(self, config: FedLoraConfig, client: str) -> None:
        """Keep the configuration; nothing is read."""
        self._config, self._client = config, client

    def clients(self) -> Sequence[str]:
        """Return the one client's id."""
        return (self._client,)

    def open(self, client: str, task: Task) -> Records:
        """Read the client's records.

        Raises:
            DataError: if the partition has no such client.
        """
        rows: Rows = load_rows(self._config.data)
        index = np.arange(len(rows), dtype=np.int64)
        if self._config.data.partition is not None:
            parts = partition_rows(rows, self._config.data.partition, self._config.run.seed)
            if client not in parts:
                raise DataError(f"client {client}: not in the partition; it has {len(parts)} clients")
            index = np.asarray(parts[client], dtype=np.int64)
        return LazyRecords(rows, bounded(self._config, rows, index), task)


class ConstantShelf:
    """A shelf whose records all have the same public target: no label is read."""

    def __init__(self, inner: Shelf) -> None:
        """Wrap a shelf."""
        self._inner = inner
        self._task: tuple[Task, Any] | None = None

    def clients(self) -> Sequence[str]:
        """Return the inner shelf's clients."""
        return self._inner.clients()

    def open(self, client: str, task: Task) -> Records:
        """Open records that are encoded with the constant target."""
        if self._task is None or self._task[0] is not task:
            self._task = (task, _ConstantTask(task))
        encoder: Any = self._task[1]
        return self._inner.open(client, encoder)


class _ConstantTask:
    """A task that encodes every record with the constant as its label."""

    def __init__(self, inner: Task) -> None:
        self._inner = inner

    def encode(self, row: Any) -> Any:
        return self._inner.encode({**row, "label": CONSTANT})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def check_target(config: FedLoraConfig, target: Target) -> None:
    """Require a model whose head has one number as its output where the target is constant.

    Raises:
        ConfigError: with what to set.
    """
    if target == "constant" and (
        config.model.task != "sequence-classification" or config.model.num_labels != 1
    ):
        raise ConfigError(
            "target constant: the head must give one number; set model.task: sequence-classification, "
            "model.num_labels: 1 and leave data.labels out"
        )


def local_trainer(config: FedLoraConfig, client: str, ledger: Ledger | None, target: Target) -> Trainer:
    """Return a trainer over the configuration's own data, paid from a ledger (None: nothing is charged).

    That its files exist is looked up here, so that a misspelt path costs nothing; they are opened after the charge.

    Raises:
        DataError: if a file pattern matches nothing.
        PrivacyError: if a private configuration comes without a ledger.
    """
    if isinstance(config.data.source, FileSource):
        expand_paths(config.data.source.paths)
    shelf: Shelf = ClientShelf(config, client)
    if target == "constant":
        shelf = ConstantShelf(shelf)
    if ledger is not None:
        keeper, replies = LedgerKeeper(ledger), LedgerReplies(ledger)
        return Trainer(shelf, Policy.simulation(), keeper, replies=replies)
    if not isinstance(config.privacy, NoPrivacy):
        raise PrivacyError("ledger: none was given; a private specification is charged before data is read")
    return Trainer(shelf, Policy.simulation(), _NoKeeper(), replies=MemoryReplies())


def open_site(config: TrainerConfig, config_file: Path, target: Target) -> Site:
    """Open a site's ledger and data description; reads no record of a one-client site.

    Its trainer has the site's own policy, terms, ledger and key.
    """
    return build_site(config, config_file, wrap=ConstantShelf if target == "constant" else None)


class _NoKeeper:
    """Refuses to spend: for configurations without privacy."""

    def _refuse(self, *_: Any) -> Any:
        raise PrivacyError("ledger: nothing may be charged in a run without privacy")

    reserve: Callable[..., Any] = _refuse
    commit: Callable[..., Any] = _refuse
    standing: Callable[..., Any] = _refuse
