"""fedlora's Flower strategies: thin classes over the pure functions of `fedlora.aggregation`."""

from __future__ import annotations

from strategies.fedlora_strategy import FedLoraStrategy, RunFacts
from strategies.records import RoundRecord
from strategies.sampling import ClientSampler

__all__ = ["ClientSampler", "FedLoraStrategy", "RoundRecord", "RunFacts"]
