"""Durable, tamper-evident privacy budgets, enforced where the data is."""

from __future__ import annotations

from fedlora.ledger.contribution import ContributionBound, bound_contributions, person_event, person_key
from fedlora.ledger.fingerprints import (
    Overlap,
    RecordSketch,
    find_overlaps,
    fingerprint_records,
    hash_records,
    record_bytes,
    sketch_hashes,
    sketch_records,
)
from fedlora.ledger.keyfile import load_or_create_secret, load_secret
from fedlora.ledger.ledger import Ledger
from fedlora.ledger.opening import open_ledger
from fedlora.ledger.outgoing import OutgoingMetrics, filter_metrics, metric_event, noise_metric
from fedlora.ledger.register import register_of
from fedlora.ledger.reports import VerifyReport
from fedlora.ledger.types import (
    Account,
    Budget,
    CommitRequest,
    LedgerReport,
    Pending,
    Refusal,
    Reservation,
    ReserveRequest,
    RoundRow,
)

__all__ = [
    "Account",
    "Budget",
    "CommitRequest",
    "ContributionBound",
    "Ledger",
    "LedgerReport",
    "OutgoingMetrics",
    "Overlap",
    "Pending",
    "RecordSketch",
    "Refusal",
    "Reservation",
    "ReserveRequest",
    "RoundRow",
    "VerifyReport",
    "bound_contributions",
    "filter_metrics",
    "find_overlaps",
    "fingerprint_records",
    "hash_records",
    "load_or_create_secret",
    "load_secret",
    "metric_event",
    "noise_metric",
    "open_ledger",
    "person_event",
    "person_key",
    "record_bytes",
    "register_of",
    "sketch_hashes",
    "sketch_records",
]
