"""Durable, tamper-evident privacy budgets, enforced where the data is."""

from __future__ import annotations

from fedlora.ledger.keyfile import load_or_create_secret, load_secret
from fedlora.ledger.ledger import Ledger, open_ledger
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
    "Ledger",
    "LedgerReport",
    "Pending",
    "Refusal",
    "Reservation",
    "ReserveRequest",
    "RoundRow",
    "VerifyReport",
    "load_or_create_secret",
    "load_secret",
    "open_ledger",
]
