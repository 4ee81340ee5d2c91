"""The server's own ledger under client-level privacy: each release is on disk before it exists."""

from __future__ import annotations

from fedlora.accounting import Event
from fedlora.config.client_terms import client_terms
from fedlora.config.schema import ClientPrivacy, FedLoraConfig
from fedlora.errors import LedgerError
from fedlora.ledger import Ledger
from fedlora.ledger.types import Account, CommitRequest, ReserveRequest
from fedlora.training.charging import budget_terms

FEDERATION = "federation"
"""The account's client name: all clients of the data set together."""


class ServerCharge:
    """Writes each round's client-level event before the release.

    Args:
        ledger: the server's ledger; None refuses every charge.
        config: resolved configuration.
        run_id: unique name of the run.
    """

    def __init__(self, ledger: Ledger | None, config: FedLoraConfig, run_id: str) -> None:
        """Bind the ledger."""
        self._ledger, self._config, self._run_id = ledger, config, run_id
        self._round = 0
        privacy = config.privacy
        self._terms = client_terms(privacy, config.federation) if isinstance(privacy, ClientPrivacy) else None

    def start_round(self, server_round: int) -> None:
        """Say which round pays next."""
        self._round = server_round

    def __call__(self, event: Event) -> None:
        """Reserve and commit one release.

        Raises:
            BudgetExceededError: if it would pass the budget.
            LedgerError: if there is no ledger or it cannot be written.
        """
        if self._ledger is None or self._terms is None:
            raise LedgerError("client-level privacy: the server has no ledger to charge; nothing is released")
        request = ReserveRequest(
            account=Account(FEDERATION, self._config.data.name),
            budget=budget_terms(self._config),
            run_id=self._run_id,
            server_round=self._round,
            event=event,
            steps=1,
            assumptions=self._terms.conditions(),
        )
        reservation = self._ledger.reserve_one(request)
        self._ledger.commit([CommitRequest(reservation, 1, event)])

    def epsilon(self) -> float | None:
        """Return what all clients' data set has spent, or None if nothing was charged yet."""
        account = Account(FEDERATION, self._config.data.name)
        if self._ledger is None or account not in self._ledger.accounts():
            return None
        return self._ledger.report(account, with_rounds=False).epsilon
