"""Pure aggregation functions on factors, frames and tangents, shared by server and nodes."""

from __future__ import annotations

from fedlora.aggregation.build import aggregation_problems, build_aggregator, build_mode, client_sampling
from fedlora.aggregation.client_privacy import ClientPlan, client_plan, clip_and_share
from fedlora.aggregation.factors import reduce_rank
from fedlora.aggregation.reduce import reduce_payloads
from fedlora.aggregation.round import Aggregator, RoundRules
from fedlora.aggregation.types import AggregateResult, NormalSource

__all__ = [
    "AggregateResult",
    "Aggregator",
    "ClientPlan",
    "NormalSource",
    "RoundRules",
    "aggregation_problems",
    "build_aggregator",
    "build_mode",
    "client_plan",
    "client_sampling",
    "clip_and_share",
    "reduce_payloads",
    "reduce_rank",
]
