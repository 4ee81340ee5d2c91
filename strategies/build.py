"""From a resolved configuration to a ready strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedlora.aggregation import build_aggregator
from fedlora.config.schema import ClientPrivacy, FedLoraConfig
from fedlora.errors import UnsupportedEventError
from fedlora.ledger import Ledger
from fedlora.training.requests import ClientReply
from fedlora.wire.payload import AdapterLayout, AdapterPayload, ModuleSpec, PayloadKind
from strategies.fedlora_strategy import FedLoraStrategy, RunFacts
from strategies.privacy import ClientUnitLedger, client_coins, server_noise
from strategies.sampling import ClientSampler


def build_strategy(
    config: FedLoraConfig,
    *,
    run_id: str,
    container: Mapping[str, Any],
    config_hash: str,
    layout: AdapterLayout,
    recipe: str | None,
    payload: AdapterPayload,
    roster: Mapping[int, Sequence[str]],
    uplink: PayloadKind | None = None,
    ledger: Ledger | None = None,
    on_reply: Callable[[ClientReply], None] | None = None,
    specs: Mapping[str, Mapping[str, ModuleSpec]] | None = None,
) -> FedLoraStrategy:
    """Build the strategy of a run.

    Args:
        config: resolved configuration.
        run_id: unique name of the run.
        container: the same configuration as plain JSON values, sent with every request.
        config_hash: its hash.
        layout: PUBLIC shapes of the adapter.
        recipe: sha256 of the shared lora_A recipe, or None.
        payload: the global adapter that the run starts or resumes from.
        roster: node id to its logical clients.
        uplink: what the mechanism's clients send, where it is not the mode's usual kind.
        ledger: the server's own ledger; needed under client-level privacy.
        on_reply: called with every client's answer.
        specs: client to its own ranks and scalings (mixed modes).

    Raises:
        UnsupportedCombinationError: settings that cannot go together, all at once.
        UnsupportedEventError: client-level privacy without a ledger.
    """
    charge = None
    if isinstance(config.privacy, ClientPrivacy):
        if ledger is None:
            raise UnsupportedEventError(
                "privacy.unit: client needs a ledger at the server (pass ledger): nothing is released uncharged"
            )
        charge = ClientUnitLedger(ledger, config, run_id)
    population = config.deployment.expected_clients
    noise = server_noise(config)
    aggregator = build_aggregator(
        config,
        layout,
        recipe,
        num_clients=sum(len(clients) for clients in roster.values()) if population is None else population,
        noise=noise,
        charge=charge,
        uplink=uplink,
    )
    facts = RunFacts(
        run_id=run_id,
        config=container,
        config_hash=config_hash,
        steps=config.training.local_steps,
        timeout_seconds=config.federation.round_timeout_seconds,
        compression=config.federation.compression,
    )
    sampler = ClientSampler(config.federation.clients_per_round, config.run.seed, client_coins(config))
    hooks = tuple(part for part in (noise, charge) if part is not None)
    return FedLoraStrategy(
        facts, aggregator, sampler, payload, roster, on_reply=on_reply, specs=specs, per_round=hooks
    )
