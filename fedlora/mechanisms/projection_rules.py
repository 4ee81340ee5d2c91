"""What a noisy-projection run may be configured to do, and the figures that follow from it."""

from __future__ import annotations

from dataclasses import replace

from peft.utils.other import get_pattern_key

from fedlora.config.schema import FedLoraConfig, NoisyProjectionMechanism, RecordPrivacy, SgdConfig
from fedlora.errors import UnsupportedCombinationError
from fedlora.mechanisms.base import StepPrivacy
from fedlora.mechanisms.coordinates import Coordinates
from fedlora.mechanisms.projection_math import check_unclipped
from fedlora.mechanisms.stages import Metric
from fedlora.names import GROUP_ADAPTERS, GROUP_HEAD
from fedlora.wire.payload import AdapterLayout, ModuleSpec


def rank_cap(settings: NoisyProjectionMechanism, spec: ModuleSpec) -> int:
    """Return the rank that a folded module travels with: the configured cap, else 8 r, never above its sides."""
    wanted = 8 * spec.rank if settings.rank_cap is None else settings.rank_cap
    return min(max(wanted, spec.rank), spec.out_features, spec.in_features)


def head_figures(settings: NoisyProjectionMechanism) -> tuple[float, float]:
    """Return the head's own (clipping norm, noise multiplier).

    Raises:
        UnsupportedCombinationError: if one is missing.
    """
    clip, sigma = settings.head_max_grad_norm, settings.head_noise_multiplier
    if clip is None or sigma is None:
        raise UnsupportedCombinationError(
            "mechanism.head_max_grad_norm, mechanism.head_noise_multiplier: missing; what modules_to_save trains is "
            "not projected and needs its own clip and noise (one clip over both would void the amplification)"
        )
    return clip, sigma


def projected_specs(config: FedLoraConfig, layout: AdapterLayout) -> dict[str, ModuleSpec]:
    """Return the layout's modules with the configuration's ranks, whatever ranks a payload travels with."""
    pattern = dict(config.adapter.rank_pattern)
    specs = {}
    for module, spec in layout.modules.items():
        key = get_pattern_key(list(pattern), module) if pattern else module
        specs[module] = replace(spec, rank=pattern.get(key, config.adapter.rank))
    return specs


def metric_and_privacy(config: FedLoraConfig, coordinates: Coordinates) -> tuple[Metric, StepPrivacy]:
    """Return the metric with an own clip per group, and the step's figures (the stated bound if nothing is clipped).

    The head's weight C / C_h turns its own clip C_h into the common bound C.
    """
    settings, privacy = config.mechanism, StepPrivacy.of(config)
    if not isinstance(settings, NoisyProjectionMechanism):
        raise UnsupportedCombinationError(f"mechanism.kind: got {settings.kind}, expected noisy_projection")
    if not settings.clipping:
        privacy = replace(privacy, max_grad_norm=check_unclipped(settings.gradient_bound))
    weights = {GROUP_ADAPTERS: 1.0}
    if coordinates.extras:
        weights[GROUP_HEAD] = privacy.max_grad_norm / head_figures(settings)[0]
    return Metric("ambient", weights, coordinates.two_groups(), per_layer=True), privacy


def refuse_unfit(config: FedLoraConfig) -> None:
    """Refuse combinations without a meaning or without a bound.

    Raises:
        UnsupportedCombinationError: naming the setting and what to change.
    """
    privacy, optimizer = config.privacy, config.training.optimizer
    if config.adapter.init == "spectral":
        raise UnsupportedCombinationError(
            "adapter.init: spectral with noisy_projection, whose steps go into whole weights; choose another init"
        )
    if not isinstance(privacy, RecordPrivacy):
        raise UnsupportedCombinationError(
            "mechanism.kind: noisy_projection is a record-level mechanism; set privacy.unit: record"
        )
    if isinstance(privacy.group_weights, dict):
        raise UnsupportedCombinationError(
            "privacy.group_weights: noisy_projection clips projected modules and head apart, so weights have no "
            "meaning; use equal, and head_max_grad_norm and head_noise_multiplier"
        )
    if not isinstance(optimizer, SgdConfig) or optimizer.momentum > 0.0:
        raise UnsupportedCombinationError(
            "training.optimizer: steps under different projections have no common coordinates; noisy_projection takes "
            "kind: sgd without momentum"
        )
    if config.training.proximal_mu > 0.0:
        raise UnsupportedCombinationError(
            "training.proximal_mu: not offered with noisy_projection; set it to 0"
        )
    shared = getattr(config.mechanism, "projection_source", "") == "shared"
    if shared and config.training.local_steps != 1:
        raise UnsupportedCombinationError(
            "training.steps_per_round: a shared projection covers one step; set it to 1 or use "
            "projection_source: client"
        )
