"""Both factors trained: DP-LoRA with one joint clip (`factor`), and ordinary LoRA (`none`).

"PRISM: Gauge-Invariant Tangent-Space Differentially Private LoRA", Eq. 3; "LoRA and Privacy: When Random Projections
Help (and When They Don't)", Appendix E. The baseline whose noise depends on the gauge.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedlora.adapters.adapted import AdaptedModel
from fedlora.adapters.blocks import FlatBlocks
from fedlora.adapters.records import RecordAxis
from fedlora.adapters.views import LayerView
from fedlora.config.schema import FedLoraConfig, RecordPrivacy
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
    build_metric,
    build_schedule,
    close_values,
    euclidean_update,
    first_state,
    open_values,
    spread,
)
from fedlora.mechanisms.coordinates import Coordinates
from fedlora.names import LORA_A, LORA_B, block_name
from fedlora.wire.payload import AdapterLayout, AdapterPayload


def _initial(mechanism: Mechanism, adapted: AdaptedModel) -> AdapterPayload:
    return adapted.write_factors()


def _open(
    mechanism: Mechanism, adapted: AdaptedModel, payload: AdapterPayload, num_clients: int
) -> LocalState:
    table = mechanism.coordinates.table
    values = open_values(adapted, payload, mechanism.layout, table, "factors", num_clients)
    return first_state(mechanism, values, payload, {})


def _views(
    mechanism: Mechanism, state: LocalState, low: FlatBlocks, records: RecordAxis
) -> Mapping[str, LayerView]:
    blocks = spread(low, mechanism.coordinates.adapters, records)
    return {
        module: LayerView(
            "factors",
            spec.scaling,
            down=blocks[block_name(module, LORA_A)],
            up=blocks[block_name(module, LORA_B)],
        )
        for module, spec in mechanism.layout.modules.items()
    }


def _close(mechanism: Mechanism, state: LocalState) -> list[AdapterPayload]:
    return close_values(mechanism, state, "factors", None)


FACTOR_STAGES = Stages(
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
    """Build `factor` or `none`.

    Raises:
        UnsupportedCombinationError: for `none` under record-level privacy.
    """
    kind = config.mechanism.kind
    if kind == "none" and isinstance(config.privacy, RecordPrivacy):
        raise UnsupportedCombinationError(
            "mechanism.kind: none neither clips nor adds noise, but privacy.unit is record; choose lora_fa, prism, "
            "factor or noisy_projection, or privacy.unit: none"
        )
    coordinates = Coordinates.of(layout, "factors")
    metric = build_metric(config, coordinates, "euclidean")
    privacy, schedule = StepPrivacy.of(config), build_schedule(config)
    return Mechanism(
        kind, config, layout, coordinates, metric, privacy, schedule, "factors", "factors", FACTOR_STAGES
    )
