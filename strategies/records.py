"""What a round leaves behind: its record, its metrics, its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from flwr.app import Array, ArrayRecord, Message, MetricRecord

from fedlora.aggregation import AggregateResult
from fedlora.wire import AdapterPayload, ModuleSpec, to_arrays

EXPIRED: Final = (3, 4)
"""Flower 1.42's error codes for a message, or its reply, that is not (or no longer) in the SuperLink's database."""


@dataclass
class RoundRecord:
    """What happened in one round, for the report; per-client entries only where the run allows them.

    Attributes:
        server_round: 1, 2, ...
        asked: sampled clients in id order.
        accepted: whose update was used.
        refused: client to reason (budget or policy; its own decision).
        rejected: client to reason (failed checks, failed training).
        missing: asked, but no answer in time.
        epsilon: client to what its own ledger says (binding).
        wire_bytes_up: bytes of the answers' packed arrays and headers as they came, masking steps included.
        wire_bytes_down: the same of what was sent.
        result: the aggregate, or None if the round failed.
        silent: why, where clients were asked under client-level privacy and no node answered; else empty.
    """

    server_round: int
    asked: tuple[str, ...]
    accepted: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    epsilon: dict[str, float] = field(default_factory=dict)
    wire_bytes_up: int = 0
    wire_bytes_down: int = 0
    result: AggregateResult | None = None
    silent: str = ""


def plain_specs(specs: Mapping[str, ModuleSpec]) -> dict[str, list[float]]:
    """Return specs as JSON values."""
    return {m: [s.out_features, s.in_features, s.rank, s.scaling] for m, s in specs.items()}


def record_of(payload: AdapterPayload) -> ArrayRecord:
    """Return a payload's packed arrays as Flower's."""
    _, arrays = to_arrays(payload)
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def round_metrics(record: RoundRecord, result: AggregateResult, private: bool) -> MetricRecord:
    """Under client-level privacy who took part is not public, so no counts are given."""
    metrics: dict[str, int | float | list[int] | list[float]] = {"residual": float(result.residual)}
    if not private:
        metrics |= {
            "clients-asked": len(record.asked),
            "clients-accepted": len(result.accepted),
            "clients-refused": len(record.refused),
            "clients-rejected": len(record.rejected),
            "clients-missing": len(record.missing),
            "uplink-bytes": record.wire_bytes_up,
            "downlink-bytes": record.wire_bytes_down,
        }
    return MetricRecord(metrics)


def is_late(error: Message, sent: Message | None, now: float) -> bool:
    """Return whether an error only says that the node's time was over: its message lives as long as the round waits.

    Args:
        error: an error message.
        sent: the message that it answers, if that is known.
        now: seconds since the epoch, by the clock that stamped `sent`.
    """
    if sent is None or error.error.code not in EXPIRED:
        return False
    return now >= sent.metadata.created_at + sent.metadata.ttl
