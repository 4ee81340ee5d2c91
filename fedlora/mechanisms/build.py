"""Parts that several mechanisms share: group metric, schedule, values from payloads and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from fedlora.adapters.adapted import AdaptedModel
from fedlora.adapters.blocks import BlockTable, FlatBlocks
from fedlora.adapters.layout import check_payload_fits
from fedlora.adapters.records import RecordAxis, to_host
from fedlora.config.schema import FedLoraConfig, RecordPrivacy
from fedlora.errors import LayoutMismatchError, PrivacyParameterError
from fedlora.mechanisms.base import LocalState, Mechanism
from fedlora.mechanisms.coordinates import Coordinates
from fedlora.mechanisms.direction import Schedule, direct, empty_slots, euclidean_step
from fedlora.mechanisms.stages import Metric, NoisyUpdate
from fedlora.wire.payload import AdapterLayout, AdapterPayload, Array, PayloadKind


def build_metric(
    config: FedLoraConfig, coordinates: Coordinates, kind: str, per_layer: bool = False
) -> Metric:
    """Return the group metric of a configuration; without record-level privacy every weight is 1.

    `group_weights: auto` needs the model and public sequences (see `fedlora.mechanisms.group_weights`); until the
    configuration holds its numbers, the metric has no weights, and clip and noise refuse it.

    Raises:
        PrivacyParameterError: if the configured groups are not the layout's.
    """
    group_of = coordinates.module_groups() if per_layer else coordinates.two_groups()
    groups = tuple(dict.fromkeys(group_of.values()))
    if per_layer or not isinstance(config.privacy, RecordPrivacy):
        return Metric(kind, dict.fromkeys(groups, 1.0), group_of, per_layer)
    chosen = config.privacy.group_weights
    if chosen == "equal" or len(groups) == 1:
        return Metric(kind, dict.fromkeys(groups, 1.0), group_of)
    if isinstance(chosen, str):
        return Metric(kind, {}, group_of)
    if set(chosen) != set(groups):
        raise PrivacyParameterError(
            f"privacy.group_weights: got {sorted(chosen)}; this model has groups {sorted(groups)}; give each a weight"
        )
    return Metric(kind, dict(chosen), group_of)


def build_schedule(config: FedLoraConfig) -> Schedule:
    """Return the learning rate over all local steps of the run."""
    training = config.training
    return Schedule(training.optimizer.lr, training.schedule, config.federation.rounds * training.local_steps)


def open_values(
    adapted: AdaptedModel,
    payload: AdapterPayload,
    layout: AdapterLayout,
    table: BlockTable,
    kind: PayloadKind,
    num_clients: int,
) -> FlatBlocks:
    """Copy a payload's blocks into (K, size) values.

    Raises:
        LayoutMismatchError: if the payload's kind, names or shapes are not what the mechanism needs.
    """
    if payload.kind != kind:
        raise LayoutMismatchError(
            f"adapter payload: got kind {payload.kind!r}; this mechanism takes {kind!r}"
        )
    check_payload_fits(payload, layout)
    parts = [np.asarray(payload.blocks[name], dtype=np.float32).reshape(-1) for name in table.shapes]
    row = torch.from_numpy(np.concatenate(parts)).to(device=adapted.device, dtype=adapted.accumulate_dtype)
    return FlatBlocks(table, row.repeat(num_clients, 1))


def spread(low: FlatBlocks, names: Sequence[str], records: RecordAxis) -> Mapping[str, torch.Tensor]:
    """Return blocks for the views: (*shape) for one client, else (records, *shape), gathered in one kernel."""
    if records.num_clients == 1:
        return {name: low[name][0] for name in names}
    table = low.table.only(names)
    columns = low.flat[:, : table.size]
    if tuple(low.table.shapes)[: len(names)] != tuple(table.shapes):
        columns = torch.cat([low[name].flatten(1) for name in table.shapes], 1)
    return FlatBlocks(table, columns.index_select(0, records.client))


def euclidean_update(mechanism: Mechanism, state: LocalState, update: NoisyUpdate, lr: float) -> LocalState:
    """Divide by the public batch size, direct, and step in plain coordinates."""
    direction, slots = direct(mechanism.optimizer, state.slots, update, mechanism.privacy.divisor)
    training = mechanism.config.training
    decay, mu = mechanism.optimizer.weight_decay, training.proximal_mu
    values = euclidean_step(state.values, direction, lr, decay, state.start, mu)
    return LocalState(values, slots, state.start, state.base, state.fixed, state.own)


def first_state(
    mechanism: Mechanism, values: FlatBlocks, payload: AdapterPayload, fixed: Mapping[str, torch.Tensor]
) -> LocalState:
    """Return the state before the first local step."""
    return LocalState(values, empty_slots(mechanism.optimizer, values), values.flat, payload, fixed)


def close_values(
    mechanism: Mechanism, state: LocalState, kind: PayloadKind, recipe: str | None
) -> list[AdapterPayload]:
    """Return each client's values as a payload (one transfer from the device)."""
    rows = to_host(state.values.flat.to(torch.float32)).numpy()
    table = state.values.table
    layout = mechanism.layout
    payloads = []
    for row in rows:
        blocks: dict[str, Array] = {}
        for name, shape in table.shapes.items():
            first, end = table.span(name)
            blocks[name] = row[first:end].reshape(shape)
        payloads.append(AdapterPayload(kind, blocks, dict(layout.modules), recipe, layout.base_fingerprint))
    return payloads
