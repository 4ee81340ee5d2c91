"""What a trainer keeps between rounds of one configuration: base model, adapter, mechanism, engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedlora.accounting import Event, NonPrivateEvent
from fedlora.adapters.adapted import AdaptedModel
from fedlora.adapters.heads import uncoupled_width
from fedlora.adapters.inject import inject
from fedlora.adapters.models import LoadedBase, load_base
from fedlora.aggregation.client_privacy import client_event
from fedlora.config import config_container, config_from_container
from fedlora.config.resolve import check_derived, config_hash
from fedlora.config.schema import (
    ClientPrivacy,
    FedLoraConfig,
    LoraFaMechanism,
    NoisyProjectionMechanism,
    NoPrivacy,
)
from fedlora.data import Task, build_task
from fedlora.errors import ConfigError, LayoutMismatchError, ModelError, StaleRoundError, WireError
from fedlora.mechanisms.base import Mechanism, build_mechanism
from fedlora.mechanisms.projection_rules import head_figures
from fedlora.training.charging import charged_event
from fedlora.training.heads import center_heads, start_heads_at_typical_size
from fedlora.training.requests import RoundRequest
from fedlora.wire.payload import AdapterLayout, AdapterPayload


@dataclass(frozen=True)
class Workbench:
    """A loaded base model with its adapter, task and mechanism; the server and trainers share this step.

    Attributes:
        config: resolved configuration.
        base: frozen base model and tokenizer.
        task: encoding, loss and evaluation.
        adapted: the model with injected adapters.
        mechanism: the bound stages.
        event: accounting event of one step of one client, from the mechanism itself, for the unit that is protected.
    """

    config: FedLoraConfig
    base: LoadedBase
    task: Task
    adapted: AdaptedModel
    mechanism: Mechanism
    event: Event

    @property
    def layout(self) -> AdapterLayout:
        """Public shapes of the adapter."""
        return self.adapted.layout

    def initial_payload(self) -> AdapterPayload:
        """Return the adapter that a run starts from."""
        return self.mechanism.initial_payload(self.adapted)


@dataclass(frozen=True)
class Parts:
    """A loaded base model with task and injected adapter; independent of the privacy section."""

    base: LoadedBase
    task: Task
    adapted: AdaptedModel


def load_parts(config: FedLoraConfig) -> Parts:
    """Load the base model, build the task and inject the adapter.

    Raises:
        ModelError: if the base model cannot be loaded.
        ConfigError: if adapter patterns match nothing.
    """
    base = load_base(config.model, config.model.num_labels)
    task = build_task(config.model, config.data, base.tokenizer)
    adapt: Literal["lora", "full"] = "full" if config.mechanism.kind == "dp_sgd" else "lora"
    adapted = inject(
        base.model, config.adapter, seed=config.run.seed, fingerprint=base.fingerprint, adapt=adapt
    )
    if config.adapter.head_input == "centered":
        center_heads(config, task, adapted)
    if config.adapter.head_start == "typical":
        start_heads_at_typical_size(config, task, adapted)
    return Parts(base, task, adapted)


def bind(config: FedLoraConfig, parts: Parts) -> Workbench:
    """Bind loaded parts to a resolved configuration.

    Raises:
        UnsupportedCombinationError: if the configuration's parts make no sense together.
        ModelError: if a private run's records may be so long that they couple.
    """
    if not isinstance(config.privacy, NoPrivacy):
        _refuse_wide(parts)
    mechanism = build_mechanism(config, parts.adapted.layout, parts.adapted.left_out)
    event = step_event(config, parts.adapted.layout)
    return Workbench(config, parts.base, parts.task, parts.adapted, mechanism, event)


def _refuse_wide(parts: Parts) -> None:
    limit = uncoupled_width(parts.adapted.model)
    if limit is not None and parts.task.window > limit:
        raise ModelError(
            f"data.max_length: records may have {parts.task.window} tokens, and beyond {limit} one record changes the "
            f"positions of its whole batch in this model (longrope, dynamic); set data.max_length to {limit} or less"
        )


def build_workbench(config: FedLoraConfig) -> Workbench:
    """Load the base model and bind everything that one configuration needs.

    Args:
        config: resolved configuration (number of labels and noise multiplier set).
    """
    return bind(config, load_parts(config))


def step_event(config: FedLoraConfig, layout: AdapterLayout) -> Event:
    """Return what one step of one client releases under a configuration, from the mechanism that will run.

    With `privacy.group_by` it covers a whole person (see `charged_event`). Under client-level privacy it is what one
    round releases, from the aggregator's own plan.
    """
    if isinstance(config.privacy, NoPrivacy):
        return NonPrivateEvent()
    if isinstance(config.privacy, ClientPrivacy):
        return client_event(config.privacy, config.federation)
    return charged_event(config, build_mechanism(config, layout).step_event())


def noise_alone(bench: Workbench) -> tuple[float, ...]:
    """Return the noise multiplier of each part that one step clips alone; one part where one clip covers everything."""
    privacy, mechanism = bench.config.privacy, bench.config.mechanism
    if isinstance(privacy, NoPrivacy) or privacy.noise_multiplier is None:
        return ()
    if isinstance(mechanism, LoraFaMechanism) and bench.mechanism.metric.per_layer:
        return (privacy.noise_multiplier,) * len(set(bench.mechanism.metric.group_of.values()))
    if isinstance(mechanism, NoisyProjectionMechanism) and bench.layout.extra:
        return (privacy.noise_multiplier, head_figures(mechanism)[1])
    return (privacy.noise_multiplier,)


def check_claims(bench: Workbench) -> None:
    """Recompute the epsilon that a configuration claims, with this side's own accountant and mechanism.

    Raises:
        ConfigError: if it claims less than it spends, or was never resolved.
    """
    check_derived(bench.config, lambda config: step_event(config, bench.layout))


def read_config(container: Mapping[str, Any], claimed_hash: str) -> FedLoraConfig:
    """Validate a configuration that came over the wire.

    Raises:
        WireError: if the hash does not fit the content.
        ConfigError: listing every problem.
    """
    config = config_from_container(container, what="configuration of the round request")
    actual = config_hash(config)
    if actual != claimed_hash:
        raise WireError(
            f"config hash: request says {claimed_hash[:16]}, its content gives {actual[:16]}; "
            "server and trainer must run the same fedlora version"
        )
    return config


def check_request(bench: Workbench, request: RoundRequest) -> None:
    """Check what a round request says of the base model, the round and the steps.

    Raises:
        LayoutMismatchError: if the server trains another base model.
        StaleRoundError: if round or steps are below 1.
    """
    mine, theirs = bench.adapted.layout.base_fingerprint, request.payload.base_fingerprint
    if mine != theirs:
        raise LayoutMismatchError(
            f"base model: the server trains {theirs[:16]}, this site loaded {mine[:16]}; "
            "use the same model.name_or_path and revision on both sides"
        )
    if request.server_round < 1 or request.steps < 1:
        raise StaleRoundError(
            f"round request: round {request.server_round}, steps {request.steps}; both must be >= 1"
        )


def same_container(config: FedLoraConfig, container: Mapping[str, Any]) -> bool:
    """Return whether a container is exactly this configuration."""
    return config_container(config) == container


def check_clients(clients: Sequence[str]) -> None:
    """Require distinct, non-empty client ids.

    Raises:
        ConfigError: naming the first repeated id.
    """
    seen: set[str] = set()
    for client in clients:
        if client in seen or not client:
            raise ConfigError(
                f"round request: client {client!r} is empty or asked twice; ask each client once"
            )
        seen.add(client)
