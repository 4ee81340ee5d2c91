"""What a ledger says about specifications: which client paid for which release, and what each one promises."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from fedlora.accounting import Event, epsilon_of
from fedlora.accounting.reports import json_number
from fedlora.ledger import Ledger
from fedlora.ledger.types import RoundRow
from fedlora.specs.release import RUN_PREFIX


def paid_specifications(ledger: Ledger, dataset: str, clients: Collection[str]) -> list[dict[str, Any]]:
    """Return one JSON-ready entry per specification that these clients paid for, in account order.

    Each epsilon is recomputed from the charged events of that release alone; the account's own figure adds them to
    everything else that was charged.

    Args:
        ledger: the clients' ledger.
        dataset: whose accounts.
        clients: the run's clients.
    """
    found = []
    for account in ledger.accounts_of_runs(RUN_PREFIX):
        if account.dataset != dataset or account.client not in clients:
            continue
        stated = ledger.report(account, with_rounds=False)
        terms = stated.budget
        releases: dict[str, list[RoundRow]] = {}
        for row in ledger.rounds(account):
            if row.run_id.startswith(RUN_PREFIX) and row.steps_charged > 0:
                releases.setdefault(row.run_id, []).append(row)
        for run_id, rows in releases.items():
            events = [(Event.from_json(json.loads(row.event_json)), row.steps_charged) for row in rows]
            report = epsilon_of(
                events, terms.delta, adjacency=terms.adjacency, accountant=terms.accountant, unit=terms.unit
            )
            found.append({
                "client": account.client,
                "name": run_id.removeprefix(RUN_PREFIX).rpartition(":")[0],
                "state": rows[-1].state,
                "steps": sum(row.steps_charged for row in rows),
                "epsilon": json_number(report.epsilon),
                "delta": report.delta,
                "unit": terms.unit,
                "adjacency": str(report.adjacency),
                "accountant": report.accountant,
                "adversary": stated.adversary,
                "sampling": stated.sampling_assumption,
            })  # fmt: skip
    return found
