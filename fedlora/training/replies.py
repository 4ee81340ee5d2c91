"""Replies kept for repeated requests: the same bytes again, never fresh noise."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Protocol

from fedlora.ledger import Ledger
from fedlora.ledger.types import Refusal, Reservation
from fedlora.training.port import decode_packet, encode_packet, pack_reply, unpack_reply
from fedlora.training.requests import ClientReply, RoundReply
from fedlora.wire.fingerprint import payload_fingerprint


def release_digest(reply: ClientReply) -> str:
    """Return sha256 (hex) over what a reply releases: update, event and steps."""
    payload = "" if reply.payload is None else payload_fingerprint(reply.payload)
    record = [reply.client, payload, reply.event, reply.steps]
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Replies(Protocol):
    """Keeps each client's last reply until the next round's is kept."""

    def keep(self, reservation: Reservation, reply: ClientReply) -> str:
        """Keep a reply (durably, where the keeper is durable) and return the digest to commit."""

    def find(self, refusal: Refusal) -> ClientReply | None:
        """Return the kept reply of a refused duplicate round, if it is the one that was committed."""


class NoReplies:
    """Keeps nothing: a repeated round is refused (simulations)."""

    def keep(self, reservation: Reservation, reply: ClientReply) -> str:
        """Return the digest only."""
        del reservation
        return release_digest(reply)

    def find(self, refusal: Refusal) -> ClientReply | None:
        """Return None."""
        del refusal
        return None


class MemoryReplies:
    """Keeps the last reply of each client in memory."""

    def __init__(self) -> None:
        """Start empty."""
        self._last: dict[str, tuple[str, int, str, ClientReply]] = {}

    def keep(self, reservation: Reservation, reply: ClientReply) -> str:
        """Keep a reply and return its digest."""
        digest = release_digest(reply)
        self._last[reply.client] = (reservation.run_id, reservation.server_round, digest, reply)
        return digest

    def find(self, refusal: Refusal) -> ClientReply | None:
        """Return the kept reply of this round, if the committed digest agrees."""
        kept = self._last.get(refusal.account.client)
        if kept is None or kept[:2] != (refusal.run_id, refusal.server_round):
            return None
        return kept[3] if refusal.reply_digest == kept[2] else None


class LedgerReplies:
    """Keeps replies beside the ledger, durably: a trainer that restarts still sends the same bytes."""

    def __init__(self, ledger: Ledger) -> None:
        """Use the ledger's own folder of replies."""
        self._ledger = ledger

    def keep(self, reservation: Reservation, reply: ClientReply) -> str:
        """Store the reply's bytes and return their sha256."""
        bare = replace(reply, epsilon=None, ledger_head=None, receipt=None, ledger_receipts=None)
        whole = RoundReply(reservation.run_id, reservation.server_round, (bare,))
        return self._ledger.store_reply(reservation, encode_packet(pack_reply(whole)))

    def find(self, refusal: Refusal) -> ClientReply | None:
        """Return the committed reply of this round, or None if it is not kept."""
        data = self._ledger.load_reply(refusal.account, refusal.run_id, refusal.server_round)
        if data is None:
            return None
        return unpack_reply(decode_packet(data)).replies[0]
