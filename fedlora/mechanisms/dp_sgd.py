"""DP-SGD on the full matrices of the target modules: the baseline without low rank.

Abadi et al., Deep Learning with Differential Privacy, arXiv:1607.00133v2, Algorithm 1. Per-record norms come
from token Gram matrices and the clipped sum from one product per matrix; no per-record out x in gradient is formed.
The adapted model has no LoRA layers (`inject(..., adapt="full")`): whole weights are its trained extra parameters and
travel as values.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedlora.adapters.adapted import AdaptedModel
from fedlora.adapters.blocks import FlatBlocks
from fedlora.adapters.records import RecordAxis
from fedlora.adapters.views import LayerView
from fedlora.config.schema import FedLoraConfig
from fedlora.errors import UnsupportedCombinationError
from fedlora.mechanisms.base import (
    LocalState,
    Mechanism,
    Stages,
    StepPrivacy,
    usual_clip,
    usual_event,
    usual_noise,
    usual_prepare,
)
from fedlora.mechanisms.build import (
    build_schedule,
    close_values,
    euclidean_update,
    first_state,
    open_values,
)
from fedlora.mechanisms.coordinates import Coordinates
from fedlora.mechanisms.stages import Metric
from fedlora.names import GROUP_ADAPTERS
from fedlora.wire.payload import AdapterLayout, AdapterPayload


def _initial(mechanism: Mechanism, adapted: AdaptedModel) -> AdapterPayload:
    return AdapterPayload("factors", adapted.extra_values(), {}, None, adapted.layout.base_fingerprint)


def _open(
    mechanism: Mechanism, adapted: AdaptedModel, payload: AdapterPayload, num_clients: int
) -> LocalState:
    table = mechanism.coordinates.table
    values = open_values(adapted, payload, mechanism.layout, table, "factors", num_clients)
    return first_state(mechanism, values, payload, {})


def _views(
    mechanism: Mechanism, state: LocalState, low: FlatBlocks, records: RecordAxis
) -> Mapping[str, LayerView]:
    return {}


def _close(mechanism: Mechanism, state: LocalState) -> list[AdapterPayload]:
    return close_values(mechanism, state, "factors", None)


_STAGES = Stages(
    initial=_initial,
    open=_open,
    views=_views,
    update=euclidean_update,
    close=_close,
    prepare=usual_prepare,
    clip=usual_clip,
    noise=usual_noise,
    event=usual_event,
)


def build(config: FedLoraConfig, layout: AdapterLayout) -> Mechanism:
    """Build the baseline.

    Raises:
        UnsupportedCombinationError: if the layout still has LoRA layers.
    """
    if layout.modules:
        raise UnsupportedCombinationError(
            "mechanism dp_sgd: the model carries LoRA layers; allowed is a model adapted with adapt='full'"
        )
    coordinates = Coordinates.of(layout, "lora_b")
    group_of = dict.fromkeys(coordinates.table.shapes, GROUP_ADAPTERS)
    metric = Metric("ambient", {GROUP_ADAPTERS: 1.0}, group_of)
    privacy, schedule = StepPrivacy.of(config), build_schedule(config)
    return Mechanism(
        "dp_sgd", config, layout, coordinates, metric, privacy, schedule, "factors", "factors", _STAGES
    )
