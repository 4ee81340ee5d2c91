"""The server's mirror of what clients spent in this run: recomputed from events, never trusted.

The client's own ledger binds (it also knows other runs); the mirror shows when a client claims less
than the events that the server saw imply.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fedlora.accounting import Event, compose, epsilon_of
from fedlora.config.schema import FedLoraConfig, NoPrivacy
from fedlora.training.requests import ClientReply

Spent = tuple[tuple[str, int], ...]


class LedgerMirror:
    """Counts events per client and recomputes epsilon from them."""

    def __init__(self, config: FedLoraConfig) -> None:
        """Start empty."""
        self._config = config
        self._spent: dict[str, dict[str, int]] = {}
        self._said: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._known: dict[Spent, float] = {}
        self._fresh = False

    def memory(self) -> dict[str, Any]:
        """Return everything as JSON-ready values."""
        said = {client: str(value) for client, value in self._said.items()}
        last = {client: str(value) for client, value in self._last.items()}
        return {"spent": self._spent, "said": said, "last": last}

    def restore(self, memory: Mapping[str, Any]) -> None:
        """Take back what `memory` returned."""
        self._spent = {client: dict(counts) for client, counts in memory["spent"].items()}
        self._said = {client: float(said) for client, said in memory["said"].items()}
        self._last = {client: float(said) for client, said in memory.get("last", memory["said"]).items()}

    def note(self, reply: ClientReply) -> None:
        """Count one accepted or rejected update: it was released, so it is spent."""
        if reply.event is None or reply.steps < 1:
            return
        key = json.dumps(reply.event, sort_keys=True, separators=(",", ":"))
        counts = self._spent.setdefault(reply.client, {})
        counts[key] = counts.get(key, 0) + reply.steps
        if reply.epsilon is not None:
            self._said[reply.client] = max(reply.epsilon, self._said.get(reply.client, 0.0))
            self._last[reply.client] = reply.epsilon
            self._fresh = True
        else:
            self._last.pop(reply.client, None)

    def start_round(self) -> None:
        """Forget which figures are new."""
        self._fresh = False

    @property
    def said_so_far(self) -> float | None:
        """Largest epsilon reported until now; None if nobody reported one since `start_round`.

        A client that stays silent has still spent what it reported last.
        """
        return self.largest_said if self._fresh else None

    @property
    def largest_said(self) -> float | None:
        """Largest epsilon that a client's own ledger ever reported; a lower figure later does not replace it."""
        return max(self._said.values()) if self._said else None

    def largest(self) -> float | None:
        """Largest epsilon recomputed from this run's events; None without privacy or events."""
        privacy = self._config.privacy
        if isinstance(privacy, NoPrivacy) or not self._spent:
            return None
        return max(self._epsilon(client) for client in self._spent)

    def differences(self) -> list[str]:
        """Return one line per client that claims less than its events imply."""
        if isinstance(self._config.privacy, NoPrivacy):
            return []
        lines = []
        for client, said in sorted(self._last.items()):
            implied = self._epsilon(client)
            if not (said >= implied - 1e-9 * max(1.0, implied)):
                lines.append(f"client {client} reports epsilon {said:.6g}, its events imply {implied:.6g}")
        return lines

    def _epsilon(self, client: str) -> float:
        privacy = self._config.privacy
        if isinstance(privacy, NoPrivacy):
            return float("inf")
        key: Spent = tuple(sorted(self._spent.get(client, {}).items()))
        if not key:
            return 0.0
        if key not in self._known:
            event = compose([(Event.from_json(json.loads(text)), count) for text, count in key])
            report = epsilon_of(
                event, privacy.budget.delta, adjacency=privacy.adjacency, accountant=privacy.accountant
            )
            self._known[key] = report.epsilon
        return self._known[key]

    def table(self) -> dict[str, Any]:
        """Return the mirror as a table for the run folder."""
        return {
            client: {
                "events": [{"event": json.loads(text), "steps": count} for text, count in counts.items()],
                "epsilon_from_events": None
                if isinstance(self._config.privacy, NoPrivacy)
                else self._epsilon(client),
                "epsilon_reported": self._said.get(client),
            }
            for client, counts in sorted(self._spent.items())
        }
