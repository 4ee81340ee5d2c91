"""A mechanism: one frozen record that binds its stages; found through a registry by its kind."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from fedlora.accounting import Event, NonPrivateEvent
from fedlora.adapters.adapted import AdaptedModel
from fedlora.adapters.blocks import FlatBlocks
from fedlora.adapters.records import RecordAxis
from fedlora.adapters.session import without_direction
from fedlora.adapters.views import LayerView
from fedlora.config.schema import FedLoraConfig, OptimizerConfig, RecordPrivacy
from fedlora.errors import PrivacyParameterError
from fedlora.mechanisms.clip import clip_and_sum
from fedlora.mechanisms.coordinates import Coordinates
from fedlora.mechanisms.direction import Schedule, Slots
from fedlora.mechanisms.noise import NoiseSource, add_noise, gaussian_event, pass_through
from fedlora.mechanisms.stages import ClippedSum, Metric, NoisyUpdate, PerRecordGradients
from fedlora.wire.payload import AdapterLayout, AdapterPayload, ModuleSpec, PayloadKind


@dataclass(frozen=True)
class StepPrivacy:
    """PUBLIC. Privacy of one step.

    Attributes:
        record_level: whether records are clipped and noised here.
        max_grad_norm: C; infinity without record-level privacy.
        noise_multiplier: sigma; None while the configuration is not resolved.
        sample_rate: q.
        divisor: the public expected batch size.
    """

    record_level: bool
    max_grad_norm: float
    noise_multiplier: float | None
    sample_rate: float
    divisor: float

    @classmethod
    def of(cls, config: FedLoraConfig) -> StepPrivacy:
        """Read the figures from a configuration."""
        training, privacy = config.training, config.privacy
        rate, divisor = training.sample_rate, float(training.expected_batch_size)
        if not isinstance(privacy, RecordPrivacy):
            return cls(False, math.inf, None, rate, divisor)
        return cls(True, privacy.max_grad_norm, privacy.noise_multiplier, rate, divisor)

    def sigma(self) -> float:
        """Return the noise multiplier.

        Raises:
            PrivacyParameterError: if the configuration is not resolved.
        """
        if self.noise_multiplier is None:
            raise PrivacyParameterError(
                "privacy.noise_multiplier: not known yet; resolve the configuration first "
                "(it follows from target_epsilon)"
            )
        return self.noise_multiplier


@dataclass(frozen=True)
class LocalState:
    """What local training holds between steps, for K clients.

    Attributes:
        values: trained values (K, *shape), adapters first, in the accumulation dtype. PUBLIC after noise.
        slots: optimiser state. PUBLIC after noise.
        start: `values.flat` when the round began.
        base: the payload that came down.
        fixed: tensors that all clients share, in the compute dtype (for example lora_A).
        own: what one mechanism alone needs.
        first_step: number of the round's first step in the run.
    """

    values: FlatBlocks
    slots: Slots
    start: torch.Tensor
    base: AdapterPayload
    fixed: Mapping[str, torch.Tensor] = field(default_factory=dict)
    own: Any = None
    first_step: int = 0


@dataclass(frozen=True)
class Stages:
    """The functions that make a mechanism; each takes the mechanism first.

    Attributes:
        initial: the adapter before the first round.
        open: values, fixed tensors and empty slots for K clients from the payload that came down.
        views: what each adapted layer computes in this step; `low` holds `state.values` in compute dtype.
        update: direction and new values from a noised update at a learning rate.
        close: each client's payload for the way up.
        prepare: called before each step (for example to draw a fresh projection).
        clip, noise, event: the usual ones unless a mechanism needs its own.
        measure: norms that only the present state tells exactly, before the clip.
    """

    initial: Callable[[Mechanism, AdaptedModel], AdapterPayload]
    open: Callable[[Mechanism, AdaptedModel, AdapterPayload, int], LocalState]
    views: Callable[[Mechanism, LocalState, FlatBlocks, RecordAxis], Mapping[str, LayerView]]
    update: Callable[[Mechanism, LocalState, NoisyUpdate, float], LocalState]
    close: Callable[[Mechanism, LocalState], list[AdapterPayload]]
    prepare: Callable[[Mechanism, LocalState], LocalState]
    clip: Callable[[Mechanism, PerRecordGradients], ClippedSum]
    noise: Callable[[Mechanism, LocalState, ClippedSum, Sequence[NoiseSource]], NoisyUpdate]
    event: Callable[[Mechanism, float], Event]
    measure: Callable[[Mechanism, LocalState, PerRecordGradients], PerRecordGradients] | None = None


@dataclass(frozen=True)
class Mechanism:
    """PUBLIC. One local mechanism, built from a validated configuration by `build_mechanism`.

    Attributes:
        kind: its name in the YAML.
        config: the configuration that it was built from.
        layout: names and shapes.
        coordinates: what is collected per record.
        metric: the norm of clip and noise.
        privacy: figures of one step.
        schedule: learning rate over the run.
        downlink: payload kind that comes down.
        uplink: payload kind that goes up.
        stages: its functions.
        left_out: name of a trained matrix (out, in) to a public unit vector u (in,): its gradients are taken as
            G (I - u u^T) before they are clipped, and its noised sums are projected alike: nothing along u is released.
    """

    kind: str
    config: FedLoraConfig
    layout: AdapterLayout
    coordinates: Coordinates
    metric: Metric
    privacy: StepPrivacy
    schedule: Schedule
    downlink: PayloadKind
    uplink: PayloadKind
    stages: Stages
    left_out: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def optimizer(self) -> OptimizerConfig:
        """The direction's settings."""
        return self.config.training.optimizer

    def initial_payload(self, adapted: AdaptedModel) -> AdapterPayload:
        """Return the adapter before the first round."""
        return self.stages.initial(self, adapted)

    def first_state(self, adapted: AdaptedModel) -> LocalState:
        """Return one client's state before the first step of the first round."""
        return self.stages.prepare(self, self.stages.open(self, adapted, self.initial_payload(adapted), 1))

    def step_event(self, noise_multiplier: float | None = None) -> Event:
        """Return what one step of one client releases.

        Args:
            noise_multiplier: asks for another sigma (calibration); the configured one by default.

        Raises:
            PrivacyParameterError: if no noise multiplier is known.
        """
        if not self.privacy.record_level:
            return NonPrivateEvent()
        return self.stages.event(self, self.privacy.sigma() if noise_multiplier is None else noise_multiplier)

    def clip(self, gradients: PerRecordGradients, state: LocalState) -> ClippedSum:
        """Clip and sum per client. SENSITIVE.

        Args:
            gradients: SENSITIVE.
            state: where they were taken; norms are those of what is released there.
        """
        return self.stages.clip(self, self.measured(gradients, state))

    def measured(self, gradients: PerRecordGradients, state: LocalState) -> PerRecordGradients:
        """Return the gradients with their norms in the metric. SENSITIVE.

        Args:
            gradients: SENSITIVE. As the engine formed them.
            state: where they were taken.
        """
        if self.stages.measure is None:
            return gradients
        return self.stages.measure(self, state, gradients)

    def noise(self, state: LocalState, clipped: ClippedSum, sources: Sequence[NoiseSource]) -> NoisyUpdate:
        """Add each client's noise, or pass the sums through (and say so) without record-level privacy."""
        if not self.privacy.record_level:
            return pass_through(clipped)
        noised = self.stages.noise(self, state, clipped, sources)
        for name, direction in self.left_out.items():  # post-processing, of an empty draw's noise too
            block = noised.blocks[name]
            block.copy_(without_direction(block, direction))
        return noised

    def for_modules(self, modules: Mapping[str, ModuleSpec]) -> Mechanism:
        """Return this mechanism for other ranks or scalings of the same modules."""
        if dict(modules) == dict(self.layout.modules):
            return self
        return build_mechanism(self.config, replace(self.layout, modules=dict(modules)), self.left_out)


def usual_prepare(mechanism: Mechanism, state: LocalState) -> LocalState:
    """Change nothing before a step."""
    return state


def usual_clip(mechanism: Mechanism, gradients: PerRecordGradients) -> ClippedSum:
    """One clip over all groups (or per layer, as the metric says)."""
    bound = mechanism.privacy.max_grad_norm
    return clip_and_sum(gradients, mechanism.coordinates.table, mechanism.metric, bound)


def usual_noise(
    mechanism: Mechanism, state: LocalState, clipped: ClippedSum, sources: Sequence[NoiseSource]
) -> NoisyUpdate:
    """Isotropic Gaussian noise in the metric."""
    privacy = mechanism.privacy
    return add_noise(clipped, mechanism.metric, sources, privacy.sigma(), privacy.sample_rate)


def usual_event(mechanism: Mechanism, noise_multiplier: float) -> Event:
    """The subsampled Gaussian that `usual_noise` runs."""
    return gaussian_event(mechanism.metric, noise_multiplier, mechanism.privacy.sample_rate)


_MODULES: Final = {
    "none": "fedlora.mechanisms.factor",
    "factor": "fedlora.mechanisms.factor",
    "lora_fa": "fedlora.mechanisms.lora_fa",
    "prism": "fedlora.mechanisms.prism",
    "noisy_projection": "fedlora.mechanisms.noisy_projection",
    "dp_sgd": "fedlora.mechanisms.dp_sgd",
}
"""Kind to the module whose `build(config, layout)` makes it; a new mechanism is one file and one line."""


def mechanism_kinds() -> tuple[str, ...]:
    """Return every registered kind."""
    return tuple(_MODULES)


def build_mechanism(
    config: FedLoraConfig, layout: AdapterLayout, left_out: Mapping[str, torch.Tensor] | None = None
) -> Mechanism:
    """Build the configured mechanism for a layout; `left_out` as in `Mechanism`.

    Raises:
        UnsupportedCombinationError: if the configuration's parts make no sense together.
    """
    module = importlib.import_module(_MODULES[config.mechanism.kind])
    built: Mechanism = module.build(config, layout)
    return replace(built, left_out=left_out or {})
