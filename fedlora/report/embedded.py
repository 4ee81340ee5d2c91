"""What a run's page embeds and what it computes from the run's files; bounded for runs with very many clients.

Up to `MOST_CLIENTS` clients and `MOST_ENTRIES` entries by client and round everything is embedded. Beyond that the page
keeps the clients with the largest epsilon and says what it leaves to the run folder's own files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fedlora.report.figures import epsilon_curves, round_seconds, time_percent, time_totals
from fedlora.report.risks import risk_rows
from fedlora.report.run_data import RunData

MOST_CLIENTS: Final = 500
MOST_ENTRIES: Final = 100_000
NAMED: Final = 6
"""Clients of a round that are named with their reason; the others are counted."""
_BY_CLIENT: Final = ("epsilon_by_client", "refused", "failed")


def embedded_data(data: RunData) -> dict[str, Any]:
    """Return the numbers behind the page."""
    shown = shown_clients(data)
    rounds, cut = _embedded_rounds(data.rounds)
    found = {
        "summary": dict(data.summary),
        "rounds": rounds,
        "clients": _of(data.clients, shown),
        "ledger": _ledger(data, shown),
        "receipts": dict(data.receipts) if shown is None else {},
        "audits": list(data.audits),
        "partition": _partition(data, shown),
        "specifications": dict(data.specifications),
        "specification_risks": risk_rows(data),
        "environment": dict(data.environment),
        "derived": derived(data, shown),
    }
    left_out = {"clients": "all but those with the largest epsilon"} if shown is not None else {}
    left_out |= {"rounds": "what is about single clients"} if cut else {}
    if left_out:
        found["left_out"] = {**left_out, "where": "the run folder's own files have all of it"}
    return found


def derived(data: RunData, shown: set[str] | None = None) -> dict[str, Any]:
    """Return what the page computes from the run's files.

    Sums over rounds, each client's steps and budget left; of a run that did not end, epsilon so far and what it means.

    Args:
        data: the run's files.
        shown: clients to keep; None keeps all.
    """
    rounds, curves = epsilon_curves(data)
    return {
        "epsilon": data.epsilon,
        "statement": dict(data.statement),
        "bytes_up": sum(int(record.get("bytes_up") or 0) for record in data.rounds),
        "bytes_down": sum(int(record.get("bytes_down") or 0) for record in data.rounds),
        "seconds": time_totals(data.rounds),
        "seconds_percent": time_percent(data.rounds),
        "seconds_per_round": [round_seconds(record) for record in data.rounds],
        "refusals": sum(len(record.get("refused") or {}) for record in data.rounds),
        "failures": sum(len(record.get("failed") or {}) for record in data.rounds),
        "refused_per_round": [len(record.get("refused") or {}) for record in data.rounds],
        "failed_per_round": [len(record.get("failed") or {}) for record in data.rounds],
        "partition": {
            client: sum(row.values())
            for client, row in ((data.partition or {}).get("clients") or {}).items()
            if shown is None or client in shown
        },
        "clients": {
            str(row[0]): row[1:] for row in client_rows(data) if shown is None or str(row[0]) in shown
        },
        "by_receipts": _of(data.receipts_by_client(), shown),
        "epsilon_curves": {"rounds": rounds, "curves": curves},
    }


def shown_clients(data: RunData) -> set[str] | None:
    """Return the clients that the page keeps of very many; None for all."""
    every, kept = client_rows(data), most_spent(data)
    return {str(row[0]) for row in kept} if len(kept) < len(every) else None


def client_rows(data: RunData) -> list[list[Any]]:
    """Return client, steps, epsilon by its ledger and recomputed, budget and what is left of it.

    What is left comes from the clients' ledger where the run folder has it (simulations), else from the run's terms
    and the largest figure that is known, unanswered rounds counted in full (deployments).
    """
    accounts, receipts, rows = data.accounts(), data.receipts_by_client(), []
    terms = (data.statement.get("budget") or {}).get("epsilon")
    for client in sorted({*data.clients, *accounts, *receipts}):
        entry, account = data.clients.get(client) or {}, accounts.get(client) or {}
        said, stands = entry.get("epsilon_reported"), receipts.get(client)
        allowed, left = (account.get("budget") or {}).get("epsilon", terms), account.get("left")
        known = [float(one) for one in (said, stands) if one is not None]
        if not account and isinstance(allowed, int | float) and known:
            left = max(0.0, allowed - max(known))
        steps = sum(int(one.get("steps") or 0) for one in entry.get("events") or ())
        spent = account.get("epsilon", said)
        rows.append([client, steps, spent, entry.get("epsilon_from_events"), allowed, left])
    return rows


def most_spent(data: RunData) -> list[list[Any]]:
    """Return the rows of at most `MOST_CLIENTS` clients, in the order of their names: those that spent most."""
    rows = client_rows(data)
    if len(rows) <= MOST_CLIENTS:
        return rows

    receipts = data.receipts_by_client()

    def spent(row: list[Any]) -> float:
        known = (row[2], row[3], receipts.get(row[0]))
        return max((float(one) for one in known if one is not None), default=-math.inf)

    return sorted(sorted(rows, key=spent, reverse=True)[:MOST_CLIENTS], key=lambda row: str(row[0]))


def _embedded_rounds(rounds: Sequence[Mapping[str, Any]]) -> tuple[list[Any], bool]:
    """Return the rounds and whether maps by client were cut to the clients that the page names."""
    entries = sum(len(record.get(key) or ()) for record in rounds for key in _BY_CLIENT)
    if entries <= MOST_ENTRIES:
        return list(rounds), False
    cut = []
    for record in rounds:
        kept = {name: value for name, value in record.items() if name != "epsilon_by_client"}
        for key in ("refused", "failed"):
            kept[key] = dict(list((record.get(key) or {}).items())[:NAMED])
        cut.append(kept)
    return cut, True


def _of(values: Mapping[str, Any], shown: set[str] | None) -> dict[str, Any]:
    return {name: value for name, value in values.items() if shown is None or name in shown}


def _ledger(data: RunData, shown: set[str] | None) -> dict[str, Any]:
    if shown is None:
        return dict(data.ledger)
    kept = [account for client, account in data.accounts().items() if client in shown]
    return {**data.ledger, "accounts": kept}


def _partition(data: RunData, shown: set[str] | None) -> Mapping[str, Any] | None:
    if shown is None or data.partition is None:
        return data.partition
    return {**data.partition, "clients": _of(data.partition.get("clients") or {}, shown)}
