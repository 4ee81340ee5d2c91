"""Signed receipts of a deployment's clients: asked before sending, taken with each reply, compared, never lowered.

`server.mirror.LedgerMirror` counts what replies say of one run; the receipts here are signed with each site's identity
key, kept over all runs beside the run folders and carry the head that detects an older ledger put back.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fedlora.accounting import Event
from fedlora.config.schema import FedLoraConfig, RecordPrivacy
from fedlora.errors import BudgetExceededError, PolicyRefusedError
from fedlora.ledger import Account
from fedlora.ledger.mirror import Mirror
from fedlora.ledger.mirror_types import MirrorReport
from fedlora.training.requests import ClientReply
from fedlora.training.witness import MAX_RECEIPTS, Known

_LOG = logging.getLogger(__name__)
_NOTHING_SPENT: Final = (BudgetExceededError.__name__, PolicyRefusedError.__name__)
"""Refusals that a trainer gives before it reserves; after every other one the round counts as spent."""
UNSIGNED: Final = "unsigned"
FOREIGN: Final = "foreign-receipt"
TOO_MANY: Final = "too-many-receipts"


class ReceiptDesk:
    """Asks, takes and compares receipts of one run.

    Args:
        mirror: durable store; it outlives runs.
        config: resolved configuration.
        run_id: the run.
        event: event of one step, from this server's own mechanism.
    """

    def __init__(self, mirror: Mirror, config: FedLoraConfig, run_id: str, event: Event) -> None:
        """Bind the parts."""
        self._mirror, self._config, self._run_id, self._event = mirror, config, run_id, event
        self._round = 0

    def close(self) -> None:
        """Close the mirror."""
        self._mirror.close()

    def ask(self, server_round: int, clients: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Remember durably what is about to be asked, and return what to tell each client.

        Args:
            server_round: round number.
            clients: who is asked.

        Returns:
            Client to the JSON of `Known`.

        Raises:
            LedgerError: if the mirror cannot be written; then nothing may be sent.
        """
        self._round = server_round
        known = {
            client: Known(self._mirror.known_head(client), self._mirror.missing(client, self._run_id))
            for client in clients
        }
        steps = self._config.training.local_steps
        accounts = [self._account(client) for client in clients]
        self._mirror.asked_all(accounts, self._run_id, server_round, self._event, steps)
        return {client: one.to_json() for client, one in known.items()}

    def note(self, reply: ClientReply) -> None:
        """Take the receipts of one reply; differences are logged and kept."""
        free = reply.status == "refused" and (reply.error or {}).get("error") in _NOTHING_SPENT
        if free and self._round not in _rounds_of(reply):
            self._mirror.declined(reply.client, self._run_id, self._round)
        if reply.status == "ok" and not reply.ledger_receipts:
            text = "answered without a signed receipt; its rounds count as asked for"
            self._mirror.flag(reply.client, self._account(reply.client).dataset, UNSIGNED, text)
        self._take(reply.client, list(reply.ledger_receipts or ()))

    def _take(self, client: str, items: list[Mapping[str, Any]]) -> None:
        """Take a reply's receipts; one in another client's name could pin that client to a foreign key."""
        own = [data for data in items if _named(data) == client]
        account = self._account(client)
        if len(own) < len(items):
            names = sorted({str(_named(data))[:64] for data in items if _named(data) != client})
            text = f"sent a receipt in the name of {names[0]!r}; it was not taken"
            self._mirror.flag(client, account.dataset, FOREIGN, text)
            _LOG.warning("client %s: %s", client, text)
        if len(own) > MAX_RECEIPTS:
            text = f"sent more than {MAX_RECEIPTS} receipts with one reply; only the last were taken"
            self._mirror.flag(client, account.dataset, TOO_MANY, text)
        for flag in self._mirror.record_all(own[-MAX_RECEIPTS:]):
            _LOG.warning("ledger mirror: client %s: %s: %s", flag.client, flag.code, flag.text)

    def _account(self, client: str) -> Account:
        return Account(client, self._mirror.data_set(client) or self._config.data.name)

    def reports(self) -> list[MirrorReport]:
        """Return what this server may say about every account of this run's clients."""
        privacy = self._config.privacy
        if not isinstance(privacy, RecordPrivacy):
            return []
        asked = self._mirror.asked_in(self._run_id)
        return [
            self._mirror.report(account, delta=privacy.budget.delta, adjacency=privacy.adjacency)
            for account in self._mirror.accounts()
            if account.client in asked
        ]

    def largest(self) -> float | None:
        """Return the largest epsilon that stands; None before anything was asked."""
        return max((one.epsilon for one in self.reports()), default=None)

    def differences(self) -> list[str]:
        """Return one line per difference, and one per client with rounds that it never answered."""
        lines = []
        for report in self.reports():
            who = f"client {report.account.client}"
            lines += [f"{who}: {flag.code}: {flag.text}" for flag in report.flags]
            here = [number for run, number in report.unanswered if run == self._run_id]
            if here:
                lines.append(f"{who}: no receipt for round {_ranges(here)}; counted as spent in full")
        return lines

    def table(self) -> dict[str, Any]:
        """Return each account's figures for the run folder."""
        return {
            f"{report.account.client}/{report.account.dataset}": {
                "client": report.account.client,
                "epsilon": _plain(report.epsilon),
                "epsilon_claimed": _plain(report.claimed),
                "epsilon_from_receipts": _plain(report.recomputed),
                "delta": report.delta,
                "adjacency": report.adjacency,
                "unit": report.unit,
                "unanswered": [list(one) for one in report.unanswered],
                "head": report.head,
                "flags": [{"code": flag.code, "text": flag.text} for flag in report.flags],
            }
            for report in self.reports()
        }


def _named(data: Mapping[str, Any]) -> Any:
    receipt = data.get("receipt")
    return receipt.get("client") if isinstance(receipt, Mapping) else None


def _rounds_of(reply: ClientReply) -> set[Any]:
    """Return the rounds that a reply's receipts name (unchecked; the mirror judges them)."""
    found = [one.get("receipt") for one in reply.ledger_receipts or ()]
    return {one.get("server_round") for one in found if isinstance(one, Mapping) and _is_round(one)}


def _is_round(receipt: Mapping[str, Any]) -> bool:
    return type(receipt.get("server_round")) is int


def _plain(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"


def _ranges(numbers: Collection[int]) -> str:
    shown = ", ".join(str(number) for number in sorted(numbers)[:5])
    return shown if len(numbers) <= 5 else f"{shown} and {len(numbers) - 5} more"


def open_desk(
    config: FedLoraConfig, run_id: str, folder: Path, event: Event, *, simulated: bool
) -> ReceiptDesk | None:
    """Open the mirror beside the run folders; None where clients have no ledger or identity of their own.

    Args:
        config: resolved configuration.
        run_id: the run.
        folder: the run's folder.
        event: event of one step.
        simulated: in a simulation one ledger serves all clients, and its driver is this very process.
    """
    if simulated or not isinstance(config.privacy, RecordPrivacy):
        return None
    return ReceiptDesk(Mirror(folder.parent / "ledger-mirror.sqlite"), config, run_id, event)
