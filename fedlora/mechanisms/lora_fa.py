"""DP-LoRA-FA: lora_A frozen and common, lora_B trained with per-record clipping and Gaussian noise.

"LoRA and Privacy: When Random Projections Help (and When They Don't)", Algorithm 2. The per-record gradient of
lora_B is scaling * G_i lora_A^T; it is clipped in the coordinates that receive the noise. With `per_layer_clip`
every module is clipped to C alone, as in "PAVE Specifications of Learnwares Yield Intrinsic
Privacy-Preserving Capabilities", Algorithm 1, and accounted as one Gaussian of sensitivity
sqrt(modules) C.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedlora.adapters.adapted import AdaptedModel
from fedlora.adapters.blocks import FlatBlocks
from fedlora.adapters.records import RecordAxis
from fedlora.adapters.views import LayerView
from fedlora.config.schema import FedLoraConfig, LoraFaMechanism
from fedlora.errors import LayoutMismatchError, UnsupportedCombinationError
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
from fedlora.names import LORA_B, block_name
from fedlora.wire.payload import AdapterLayout, AdapterPayload


def _initial(mechanism: Mechanism, adapted: AdaptedModel) -> AdapterPayload:
    factors = adapted.write_factors()
    blocks = {name: factors.blocks[name] for name in mechanism.coordinates.table.shapes}
    fingerprint = adapted.layout.base_fingerprint
    return AdapterPayload("lora_b", blocks, dict(factors.modules), adapted.recipe.sha256, fingerprint)


def _open(
    mechanism: Mechanism, adapted: AdaptedModel, payload: AdapterPayload, num_clients: int
) -> LocalState:
    if payload.recipe != adapted.recipe.sha256:
        raise LayoutMismatchError(
            f"lora_A recipe: payload has {str(payload.recipe)[:12]}, this side drew {adapted.recipe.sha256[:12]}; "
            "use the same seed, ranks and fedlora version"
        )
    table = mechanism.coordinates.table
    values = open_values(adapted, payload, mechanism.layout, table, "lora_b", num_clients)
    fixed = {module: adapted.shared_a(module) for module in mechanism.layout.modules}
    return first_state(mechanism, values, payload, fixed)


def _views(
    mechanism: Mechanism, state: LocalState, low: FlatBlocks, records: RecordAxis
) -> Mapping[str, LayerView]:
    blocks = spread(low, mechanism.coordinates.adapters, records)
    return {
        module: LayerView(
            "lora_b", spec.scaling, down=state.fixed[module], up=blocks[block_name(module, LORA_B)]
        )
        for module, spec in mechanism.layout.modules.items()
    }


def _close(mechanism: Mechanism, state: LocalState) -> list[AdapterPayload]:
    return close_values(mechanism, state, "lora_b", state.base.recipe)


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
    """Build DP-LoRA-FA.

    Raises:
        UnsupportedCombinationError: if lora_A depends on the base weights and so has no recipe.
    """
    if config.adapter.init == "spectral":
        raise UnsupportedCombinationError(
            "adapter.init: spectral with lora_fa, whose lora_A is drawn from a recipe and does not travel; "
            "allowed are gaussian, kaiming, orthonormal; or choose mechanism factor or prism"
        )
    per_layer = isinstance(config.mechanism, LoraFaMechanism) and config.mechanism.per_layer_clip
    coordinates = Coordinates.of(layout, "lora_b")
    metric = build_metric(config, coordinates, "euclidean", per_layer)
    privacy, schedule = StepPrivacy.of(config), build_schedule(config)
    return Mechanism(
        "lora_fa", config, layout, coordinates, metric, privacy, schedule, "lora_b", "lora_b", _STAGES
    )
