"""Replies kept for repeated requests: the same bytes again, never fresh noise.

A server that lost its newest checkpoint can ask for a round again with another global adapter. lora_B of a common
lora_A is averaged as it is; tangent blocks and factors mean something only at the adapter that they were made at, and
are not sent again then.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Protocol

from fedlora.ledger import Ledger
from fedlora.ledger.types import Refusal, Reservation
from fedlora.training.port import decode_packet, encode_packet, pack_reply, unpack_reply
from fedlora.training.requests import ClientReply, RoundReply, RoundRequest
from fedlora.wire.fingerprint import payload_fingerprint

_HEADER = b"fedlora reply at "


def place_of(reply: ClientReply, request: RoundRequest) -> str:
    """Return the fingerprint of the only global adapter at which an update has a meaning; "" where any will do."""
    free = reply.payload is None or reply.payload.kind == "lora_b"
    return "" if free else request.adapter


def release_digest(reply: ClientReply) -> str:
    """Return sha256 (hex) over what a reply releases: update, event and steps."""
    payload = "" if reply.payload is None else payload_fingerprint(reply.payload)
    record = [reply.client, payload, reply.event, reply.steps]
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Replies(Protocol):
    """Keeps each client's last reply until the next round's is kept."""

    def keep(self, reservation: Reservation, reply: ClientReply, request: RoundRequest) -> str:
        """Keep a reply to a request (durably, where the keeper is durable); return the digest to commit."""

    def find(self, refusal: Refusal, request: RoundRequest) -> ClientReply | None:
        """Return the kept reply of a refused duplicate round, if it was committed and fits the request's adapter."""


class NoReplies:
    """Keeps nothing: a repeated round is refused (simulations)."""

    def keep(self, reservation: Reservation, reply: ClientReply, request: RoundRequest) -> str:
        """Return the digest only."""
        del reservation, request
        return release_digest(reply)

    def find(self, refusal: Refusal, request: RoundRequest) -> ClientReply | None:
        """Return None."""
        del refusal, request
        return None


class MemoryReplies:
    """Keeps the last reply of each client in memory."""

    def __init__(self) -> None:
        """Start empty."""
        self._last: dict[str, tuple[str, int, str, str, ClientReply]] = {}

    def keep(self, reservation: Reservation, reply: ClientReply, request: RoundRequest) -> str:
        """Keep a reply and return its digest."""
        digest, place = release_digest(reply), place_of(reply, request)
        self._last[reply.client] = (reservation.run_id, reservation.server_round, digest, place, reply)
        return digest

    def find(self, refusal: Refusal, request: RoundRequest) -> ClientReply | None:
        """Return the kept reply of this round, if the committed digest agrees and it fits the request's adapter."""
        kept = self._last.get(refusal.account.client)
        if kept is None or kept[:2] != (refusal.run_id, refusal.server_round):
            return None
        *_, digest, place, reply = kept
        return reply if refusal.reply_digest == digest and place == place_of(reply, request) else None


class LedgerReplies:
    """Keeps replies beside the ledger, durably: a trainer that restarts still sends the same bytes."""

    def __init__(self, ledger: Ledger) -> None:
        """Use the ledger's own folder of replies."""
        self._ledger = ledger

    def keep(self, reservation: Reservation, reply: ClientReply, request: RoundRequest) -> str:
        """Store the reply's bytes, behind the adapter that they were made at, and return their sha256."""
        bare = replace(reply, epsilon=None, ledger_head=None, receipt=None, ledger_receipts=None)
        whole = RoundReply(reservation.run_id, reservation.server_round, (bare,))
        header = _HEADER + place_of(reply, request).encode() + b"\n"
        return self._ledger.store_reply(reservation, header + encode_packet(pack_reply(whole)))

    def find(self, refusal: Refusal, request: RoundRequest) -> ClientReply | None:
        """Return the committed reply of this round, or None if it is not kept or was made at another adapter."""
        data = self._ledger.load_reply(refusal.account, refusal.run_id, refusal.server_round)
        if data is None or not data.startswith(_HEADER):  # an earlier version did not say where it was made
            return None
        header, _, packet = data.partition(b"\n")
        reply = unpack_reply(decode_packet(packet)).replies[0]
        return reply if header == _HEADER + place_of(reply, request).encode() else None
