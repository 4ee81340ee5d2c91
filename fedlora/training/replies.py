"""Replies kept for repeated requests: the same bytes again, never fresh noise."""

from __future__ import annotations

import hashlib
import json
from typing import Protocol

from fedlora.training.requests import ClientReply
from fedlora.wire.fingerprint import payload_fingerprint


def release_digest(reply: ClientReply) -> str:
    """Return sha256 (hex) over what a reply releases: update, event and steps."""
    payload = "" if reply.payload is None else payload_fingerprint(reply.payload)
    record = [reply.client, payload, reply.event, reply.steps]
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Replies(Protocol):
    """Keeps each client's last reply until the next round's is kept."""

    def keep(self, run_id: str, server_round: int, reply: ClientReply) -> str:
        """Keep a reply (durably, where the keeper is durable) and return its release digest."""

    def find(self, run_id: str, server_round: int, client: str, digest: str | None) -> ClientReply | None:
        """Return the kept reply of a round if its digest is the one the ledger committed."""


class NoReplies:
    """Keeps nothing: a repeated round is refused (simulations)."""

    def keep(self, run_id: str, server_round: int, reply: ClientReply) -> str:
        """Return the digest only."""
        del run_id, server_round
        return release_digest(reply)

    def find(self, run_id: str, server_round: int, client: str, digest: str | None) -> ClientReply | None:
        """Return None."""
        del run_id, server_round, client, digest
        return None


class MemoryReplies:
    """Keeps the last reply of each client in memory."""

    def __init__(self) -> None:
        """Start empty."""
        self._last: dict[str, tuple[str, int, str, ClientReply]] = {}

    def keep(self, run_id: str, server_round: int, reply: ClientReply) -> str:
        """Keep a reply and return its digest."""
        digest = release_digest(reply)
        self._last[reply.client] = (run_id, server_round, digest, reply)
        return digest

    def find(self, run_id: str, server_round: int, client: str, digest: str | None) -> ClientReply | None:
        """Return the kept reply of this round, if the digest agrees."""
        kept = self._last.get(client)
        if kept is None or kept[:2] != (run_id, server_round) or (digest or kept[2]) != kept[2]:
            return None
        return kept[3]
