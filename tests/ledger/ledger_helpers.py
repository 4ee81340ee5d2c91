"""Requests and constants that the ledger's tests share."""

from __future__ import annotations

import itertools
from typing import Any

from fedlora.accounting import Event, GaussianEvent
from fedlora.ledger import Account, Budget, Ledger, Reservation, ReserveRequest

SECRET = b"0123456789abcdef0123456789abcdef"
SITE = Account("site-1", "news-2026")
EVENT = GaussianEvent(10.0)
BUDGET = Budget(epsilon=8.0, delta=1e-5)

_counter = itertools.count(1)


def ask(
    server_round: int | None = None,
    *,
    account: Account = SITE,
    budget: Budget = BUDGET,
    run_id: str = "run-1",
    event: Event = EVENT,
    steps: int = 4,
    **more: Any,
) -> ReserveRequest:
    """Return a request; rounds count up where none is given."""
    number = next(_counter) if server_round is None else server_round
    return ReserveRequest(account, budget, run_id, number, event, steps, **more)


def spend(ledger: Ledger, server_round: int | None = None, *, digest: str = "", **more: Any) -> Reservation:
    """Reserve and commit one round in full."""
    request = ask(server_round, **more)
    reservation = ledger.reserve_one(request)
    ledger.mark_started([reservation])
    ledger.commit([(reservation, reservation.steps, request.event, digest)])
    return reservation
