"""fedlora's Flower strategies: thin classes over the pure functions of `fedlora.aggregation`."""

from __future__ import annotations

from strategies.build import build_strategy
from strategies.fedlora_strategy import FedLoraStrategy, RoundRecord, RunFacts
from strategies.privacy import ClientUnitLedger
from strategies.sampling import ClientSampler

__all__ = [
    "ClientSampler",
    "ClientUnitLedger",
    "FedLoraStrategy",
    "RoundRecord",
    "RunFacts",
    "build_strategy",
]
