"""What the server asks of a trainer and what it gets back, as plain records.

The relay (Flower's ClientApp) turns messages into these and back; in a deployment they cross a
Unix socket to the resident trainer, in a simulation they are passed in-process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from fedlora.wire.fingerprint import payload_fingerprint
from fedlora.wire.payload import AdapterPayload


@dataclass(frozen=True)
class RoundRequest:
    """Train these logical clients for one round.

    Attributes:
        run_id: unique name of the run (ledger key together with the round).
        server_round: 1, 2, ...
        config: the resolved run configuration as plain JSON values.
        config_hash: sha256 of its canonical JSON.
        payload: the global adapter.
        clients: ids of the logical clients that this node trains in this round.
        steps: optimiser steps per client.
        reduce: the node may answer with the sum of its clients' blocks instead of each one's.
        withhold: answer without updates and keep them for secure aggregation.
        known: client to what the server's mirror knows of its ledger (JSON of `witness.Known`).
    """

    run_id: str
    server_round: int
    config: Mapping[str, Any]
    config_hash: str
    payload: AdapterPayload
    clients: Sequence[str]
    steps: int
    reduce: bool = False
    withhold: bool = False
    known: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @cached_property
    def adapter(self) -> str:
        """Fingerprint of the global adapter; its numbers are hashed once for all clients of a node."""
        return payload_fingerprint(self.payload)


@dataclass(frozen=True)
class ClientReply:
    """One logical client's answer: an update, or a refusal or failure by name; never both.

    Attributes:
        client: logical client id.
        status: "ok", "refused" (budget or policy) or "failed".
        payload: the update, if ok and not reduced on the node.
        event: accounting event of one step (JSON), as derived from the object that ran.
        steps: steps the optimiser took.
        epsilon: what the client's own ledger says after this round (binding).
        ledger_head: head of its hash chain.
        receipt: signed receipt (JSON) where the client has an identity key.
        error: error class, exit code and message for refused or failed.
        ledger_receipts: signed receipts (JSON) of this round and of those that the server misses.
    """

    client: str
    status: Literal["ok", "refused", "failed"]
    payload: AdapterPayload | None = None
    event: Mapping[str, Any] | None = None
    steps: int = 0
    epsilon: float | None = None
    ledger_head: str | None = None
    receipt: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None
    ledger_receipts: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class RoundReply:
    """A node's answer; `reduced` sums the payload blocks of `reduced_clients` (float64 accumulation)."""

    run_id: str
    server_round: int
    replies: Sequence[ClientReply]
    reduced: AdapterPayload | None = None
    reduced_clients: Sequence[str] = field(default_factory=tuple)
    timings: Mapping[str, float] = field(default_factory=dict)
