"""The server's own ledger under client-level privacy: each release is on disk before it exists."""

from __future__ import annotations

import json
from typing import Any

from fedlora.accounting import Event, compose, epsilon_of
from fedlora.config.client_terms import client_terms
from fedlora.config.schema import ClientPrivacy, FedLoraConfig, NoPrivacy
from fedlora.errors import LedgerError
from fedlora.ledger import Ledger
from fedlora.ledger.types import Account, CommitRequest, LedgerReport, ReserveRequest
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
        report = self.report()
        return None if report is None else report.epsilon

    def report(self, *, with_rounds: bool = False) -> LedgerReport | None:
        """Return the federation's account, or None if nothing was charged yet."""
        account = Account(FEDERATION, self._config.data.name)
        if self._ledger is None or account not in self._ledger.accounts():
            return None
        return self._ledger.report(account, with_rounds=with_rounds)

    def table(self) -> dict[str, Any]:
        """Return what this run charged, as the mirror's table: events with their counts, and epsilon from them alone.

        Earlier runs over the same data set are in `epsilon_reported` and not in the events.
        """
        report, privacy = self.report(with_rounds=True), self._config.privacy
        if report is None or isinstance(privacy, NoPrivacy):
            return {}
        counts: dict[str, int] = {}
        for row in report.rounds:
            if row.run_id == self._run_id and row.steps_charged > 0:
                counts[row.event_json] = counts.get(row.event_json, 0) + row.steps_charged
        events = [(Event.from_json(json.loads(text)), steps) for text, steps in counts.items()]
        alone = None
        if events:
            alone = epsilon_of(
                compose(events),
                privacy.budget.delta,
                adjacency=privacy.adjacency,
                accountant=privacy.accountant,
            ).epsilon
        entry = {
            "events": [{"event": json.loads(text), "steps": steps} for text, steps in counts.items()],
            "epsilon_from_events": alone,
            "epsilon_reported": report.epsilon,
        }
        return {FEDERATION: entry}
