"""From a configuration to what a simulation needs: label names, the partition, complete settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from fedlora.config.resolve import derive_noise
from fedlora.config.schema import FedLoraConfig, RecordPrivacy
from fedlora.data import Rows, bound_groups, label_names, load_rows, partition_rows, split_validation
from fedlora.errors import ConfigError, DataError
from fedlora.training.groups import with_group_weights
from fedlora.training.heads import with_head_rates
from fedlora.training.session import Workbench, bind, load_parts, step_event

Index = npt.NDArray[np.int64]
_HOPELESS: Final = 0.01
"""Rounds with a smaller chance of enough clients mostly cost budgets and change nothing."""


@dataclass(frozen=True)
class Federation:
    """SENSITIVE. A simulated federation: the rows and who owns which.

    Attributes:
        config: the configuration with the (public) label names filled in.
        rows: all rows.
        parts: logical client id to positions of its training rows.
    """

    config: FedLoraConfig
    rows: Rows
    parts: Mapping[str, Index]


def with_labels(config: FedLoraConfig, names: tuple[str, ...] | None) -> FedLoraConfig:
    """Return the configuration with label names and their number stated."""
    if names is None:
        return config
    data = config.data.model_copy(update={"labels": names})
    model = config.model.model_copy(update={"num_labels": len(names)})
    return config.model_copy(update={"data": data, "model": model})


def make_federation(config: FedLoraConfig) -> Federation:
    """Read the rows and split them over logical clients.

    Raises:
        ConfigError: if the configuration has no partition.
        DataError: if rows cannot be read, or a client id occurs twice.
    """
    if config.data.partition is None:
        raise ConfigError("data.partition: missing; a simulation needs to know how clients share the data")
    rows = load_rows(config.data)
    names = label_names(config.model, config.data, rows)
    parts = dict(partition_rows(rows, config.data.partition, config.run.seed))
    if not parts:
        raise DataError("data.partition: gave no client; check the partition's column and sizes")
    parts = _members(config, parts)
    _enough(config, len(parts))
    for client, index in parts.items():
        index = bounded(config, rows, index)
        parts[client], _ = split_validation(index, config.data.validation_fraction, config.run.seed)
    return Federation(with_labels(config, names), rows, parts)


def bounded(config: FedLoraConfig, rows: Rows, index: Index) -> Index:
    """Return the positions that remain when each person's records are bounded (`privacy.group_by`)."""
    privacy = config.privacy
    if not isinstance(privacy, RecordPrivacy) or privacy.group_by is None:
        return index
    return bound_groups(rows.column(privacy.group_by), index, privacy.max_records_per_group)


def _members(config: FedLoraConfig, parts: dict[str, Index]) -> dict[str, Index]:
    """Keep the run's members (`federation.members`); everyone where it is null."""
    members = config.federation.members
    if members is None:
        return parts
    unknown = sorted(set(members) - set(parts))
    if unknown:
        raise ConfigError(
            f"federation.members: {unknown[:3]} are no clients of the partition; correct the names"
        )
    return {client: parts[client] for client in parts if client in set(members)}


def _enough(config: FedLoraConfig, clients: int) -> None:
    """Refuse a run whose rounds could never have enough replies; each would cost its clients' budgets."""
    asked, least = config.federation.clients_per_round, config.federation.min_replies
    if least > clients:
        raise ConfigError(
            f"federation.min_replies: is {least}, but there are {clients} clients; no round could ever finish"
        )
    if isinstance(asked, int) and asked > clients:
        raise ConfigError(
            f"federation.clients_per_round: is {asked}, but there are {clients} clients; lower it"
        )
    if isinstance(asked, float) and chance_of_enough(clients, asked, least) < _HOPELESS:
        raise ConfigError(
            f"federation.clients_per_round: a share of {asked:g} of {clients} clients is {asked * clients:.3g} a round "
            f"on average, so that federation.min_replies {least} would hardly ever be reached; raise the share or "
            "lower min_replies"
        )


def chance_of_enough(clients: int, share: float, least: int) -> float:
    """Return the chance that a round samples at least so many clients, each by its own coin.

    Example:
        >>> round(chance_of_enough(2, 0.5, 1), 9)
        0.75
    """
    if share >= 1.0:
        return float(clients >= least)
    hit, miss, all_ways = math.log(share), math.log1p(-share), math.lgamma(clients + 1)
    fewer = math.fsum(
        math.exp(
            all_ways - math.lgamma(k + 1) - math.lgamma(clients - k + 1) + k * hit + (clients - k) * miss
        )
        for k in range(min(least, clients + 1))
    )
    return max(0.0, 1.0 - fewer)


@dataclass(frozen=True)
class Prepared:
    """A resolved configuration and the workbench that resolving needed."""

    config: FedLoraConfig
    bench: Workbench


def complete(config: FedLoraConfig) -> Prepared:
    """Resolve a configuration: group weights from public sequences, noise from the target (or back).

    Args:
        config: checked configuration; label names or `model.num_labels` stated.

    Returns:
        The resolved configuration and a loaded workbench for it.

    Raises:
        ModelError: if the base model cannot be loaded.
        PrivacyParameterError: if the privacy target cannot be reached.
    """
    config = with_labels(config, config.data.labels)
    parts = load_parts(config)
    config = with_group_weights(with_head_rates(config, parts), parts)
    config = derive_noise(config, lambda asked: step_event(asked, parts.adapted.layout))
    return Prepared(config, bind(config, parts))


def share_out(parts: Mapping[str, Index], nodes: int) -> list[dict[str, Index]]:
    """Deal the logical clients out to nodes, evenly by number, in client-id order.

    Example:
        >>> [sorted(one) for one in share_out({"a": None, "b": None, "c": None}, 2)]
        [['a', 'c'], ['b']]
    """
    names = sorted(parts)
    return [{name: parts[name] for name in names[start::nodes]} for start in range(min(nodes, len(names)))]
