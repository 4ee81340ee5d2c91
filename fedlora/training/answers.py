"""What a trainer answers: checked updates, refusals and failures by name, sums of a node's updates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from fedlora.aggregation import reduce_payloads
from fedlora.config.schema import ClientPrivacy, FedLoraConfig, NoPrivacy, RecordPrivacy
from fedlora.errors import AccountingError, DuplicateRoundError, FedLoraError
from fedlora.ledger import filter_metrics
from fedlora.ledger.types import Refusal
from fedlora.training.charging import Standing, charged_event
from fedlora.training.port import error_record, where_it_failed
from fedlora.training.replies import Replies, release_digest
from fedlora.training.requests import ClientReply, RoundReply, RoundRequest
from fedlora.training.session import Workbench

_LOG = logging.getLogger(__name__)

Signer = Callable[[Mapping[str, Any]], Mapping[str, Any]]
_PRIVACY_CODES = range(20, 35)
"""Exit codes of privacy errors: the data owner's own decision, told as a refusal."""


def checked_update(bench: Workbench, client: str, steps: int, update: Any) -> ClientReply:
    """Return a client's reply if exactly what was reserved ran.

    Args:
        bench: the session's workbench.
        client: logical client id.
        steps: steps reserved.
        update: what the engine returned (`ClientUpdate`).

    Raises:
        AccountingError: if the optimiser's counter or the event that ran differ from the reservation.
    """
    if update is None:
        raise AccountingError(f"client {client}: the engine gave no result; nothing is released")
    if update.steps != steps:
        raise AccountingError(
            f"client {client}: the optimiser took {update.steps} steps, {steps} were reserved; "
            "nothing is released"
        )
    privacy = bench.config.privacy
    ran = charged_event(bench.config, update.event) if isinstance(privacy, RecordPrivacy) else bench.event
    if ran.key() != bench.event.key():
        raise AccountingError(
            f"client {client}: the event that ran differs from the reserved one; nothing is released"
        )
    event = (
        None if isinstance(privacy, ClientPrivacy) else bench.event.to_json()
    )  # there the release is the server's
    return ClientReply(client, "ok", update.payload, event, update.steps)


def with_examples(reply: ClientReply, config: FedLoraConfig, count: int) -> ClientReply:
    """Note the number of a client's records on its update, and let only those notes leave that may.

    Under any privacy the one gate (`filter_metrics`) keeps the count and every other value back that is not known to
    be public, whoever put it there. Without privacy, weights by examples need the count, and a client without
    records is then skipped by name.
    """
    if reply.payload is None:
        return reply
    found = filter_metrics(
        {**reply.payload.notes, "num_examples": count}, private=not isinstance(config.privacy, NoPrivacy)
    )
    return replace(reply, payload=replace(reply.payload, notes=found.sent))


def stamped(
    reply: ClientReply, request: RoundRequest, standing: Standing | None, sign: Signer | None
) -> ClientReply:
    """Add the account's standing and the site's signed receipt to a reply."""
    if standing is not None:
        reply = replace(reply, epsilon=standing.epsilon, ledger_head=standing.head)
    if sign is None or reply.status != "ok":
        return reply
    claim = {
        "run_id": request.run_id,
        "round": request.server_round,
        "client": reply.client,
        "digest": release_digest(reply),
        "event": reply.event,
        "steps": reply.steps,
        "ledger_head": reply.ledger_head,
    }
    return replace(reply, receipt=sign(claim))


def refused(
    client: str, refusal: Refusal, replies: Replies, request: RoundRequest, *, may_repeat: bool
) -> ClientReply:
    """Return the refusal, or the kept reply of a repeated round.

    Args:
        client: logical client id.
        refusal: the ledger's.
        replies: kept replies.
        request: what the round is asked for with.
        may_repeat: False where a repeated reply would draw a second share of noise.
    """
    error = refusal.error
    if refusal.reason == "duplicate-round":
        kept = replies.find(refusal, request) if may_repeat else None
        if kept is not None:
            return kept
        error = error if isinstance(error, DuplicateRoundError) else DuplicateRoundError(str(error))
    return ClientReply(client=client, status="refused", error=error_record(error))


def failed(client: str, error: Exception) -> ClientReply:
    """Return a failure; details go to the trainer's own log only."""
    detail = str(error) if isinstance(error, FedLoraError) else where_it_failed(error)
    _LOG.error("client %s failed: %s", client, detail)
    return ClientReply(client=client, status="failed", error=error_record(error))


def same_answer(request: RoundRequest, error: Exception) -> tuple[ClientReply, ...]:
    """Give every asked client the same refusal (privacy errors) or failure."""
    privacy = isinstance(error, FedLoraError) and error.exit_code in _PRIVACY_CODES
    status: Literal["refused", "failed"] = "refused" if privacy else "failed"
    record = error_record(error)
    return tuple(
        ClientReply(client=client, status=status, error=record) for client in dict.fromkeys(request.clients)
    )


def reduced_reply(
    bench: Workbench | None,
    request: RoundRequest,
    replies: tuple[ClientReply, ...],
    timings: Mapping[str, float],
) -> RoundReply:
    """Build the node's answer; where the server asks for it, its clients' updates are summed here."""
    plain = RoundReply(request.run_id, request.server_round, replies, timings=timings)
    updates = {one.client: one.payload for one in replies if one.payload is not None}
    if bench is None or not request.reduce or len(updates) < 2:
        return plain
    kind = bench.mechanism.uplink
    if kind not in ("lora_b", "tangent", "projected"):
        return plain
    total, used, _ = reduce_payloads(updates, bench.layout, request.payload.recipe, kind)
    if total is None:
        return plain
    summed = set(used)
    bare = tuple(replace(one, payload=None) if one.client in summed else one for one in replies)
    return replace(plain, replies=bare, reduced=total, reduced_clients=used)
