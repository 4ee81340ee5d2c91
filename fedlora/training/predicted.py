"""Bytes of a round before it is run: the very packets are packed around zeros and measured.

One client a node is assumed, as in a deployment: a node of several clients gets one copy of the adapter, and may answer
with one sum. Numbers in headers differ by a few digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from fedlora.accounting import Event, NonPrivateEvent
from fedlora.aggregation.secagg_blocks import COMPLETE_GRAPH_UP_TO, encoding_for, update_shapes
from fedlora.aggregation.secagg_client import SecAggPlan
from fedlora.aggregation.secagg_round import Body
from fedlora.config import config_container, config_hash
from fedlora.config.schema import FedLoraConfig, NoPrivacy, RecordPrivacy
from fedlora.training.packets import packet_bytes
from fedlora.training.port import compression_of, pack_reply, pack_request
from fedlora.training.requests import ClientReply, RoundReply, RoundRequest
from fedlora.training.secure import pack_step
from fedlora.wire.layout import expected_blocks
from fedlora.wire.payload import AdapterLayout, AdapterPayload, PayloadKind

_HASH: Final = "0" * 64
_SEALED_SHARE: Final = 612
_SHARE: Final = "0x" + "f" * 131
_SIGNATURE: Final = 128
_RUN_ID: Final = "run-20260101-000000-00000000"


@dataclass(frozen=True)
class RoundBytes:
    """PUBLIC. Predicted bytes of one client in one round, without the transport's own framing.

    Attributes:
        down: request with the global adapter, and the questions of secure aggregation.
        up: answer with the update, or the masked vector and the answers of secure aggregation.
        clients: clients of a round.
    """

    down: int
    up: int
    clients: int


def predict_round(
    config: FedLoraConfig,
    layout: AdapterLayout,
    start: AdapterPayload,
    uplink: PayloadKind,
    event: Event,
    clients: Sequence[str],
    *,
    signed: bool = False,
) -> RoundBytes:
    """Predict what one client sends and gets in a round.

    Args:
        config: resolved configuration.
        layout: PUBLIC shapes.
        start: the global adapter that the run starts from.
        uplink: coordinates of the clients' updates.
        event: what one step costs, as the answer states it.
        clients: clients of one round.
        signed: the sites have identity keys: receipts travel up, and keys of secure aggregation are signed.
    """
    client = max(clients, key=len, default="client")
    secure = config.federation.secure_aggregation
    request = RoundRequest(
        run_id=_RUN_ID,
        server_round=1,
        config=config_container(config),
        config_hash=config_hash(config),
        payload=start,
        clients=(client,),
        steps=config.training.local_steps,
        withhold=secure,
    )
    down = packet_bytes(pack_request(request))
    reply = _reply(config, layout, start, uplink, event, client, signed)
    up = packet_bytes(pack_reply(RoundReply(_RUN_ID, 1, (reply,)), compression_of(request)))
    if secure:
        more_down, more_up = _secure_bytes(layout, uplink, list(clients), client, signed)
        down, up = down + more_down, up + more_up
    return RoundBytes(down, up, len(clients))


def _reply(
    config: FedLoraConfig,
    layout: AdapterLayout,
    start: AdapterPayload,
    uplink: PayloadKind,
    event: Event,
    client: str,
    signed: bool,
) -> ClientReply:
    shapes = expected_blocks(layout.modules, layout.extra, uplink)
    blocks = {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}
    update = replace(start, kind=uplink, blocks=blocks, notes={})
    if uplink == "projected" and update.recipe is None:
        update = replace(update, recipe=_HASH)
    private = not isinstance(config.privacy, NoPrivacy)
    record = isinstance(config.privacy, RecordPrivacy)
    reply = ClientReply(
        client=client,
        status="ok",
        payload=None if config.federation.secure_aggregation else update,
        event=event.to_json() if record else None if private else NonPrivateEvent().to_json(),
        steps=config.training.local_steps,
        epsilon=math.pi if record else None,
        ledger_head="0" * 100 if record else None,
    )
    if not signed:
        return reply
    claim = {"digest": _HASH, "event": reply.event, "ledger_head": reply.ledger_head, "run_id": _RUN_ID}
    receipt = {"claim": {**claim, "client": client, "round": 1, "steps": 1}, "public_key": _HASH}
    whole = {"receipt": {**claim, "text": "0" * 400}, "public_key": _HASH, "signature": "0" * _SIGNATURE}
    return replace(
        reply,
        receipt={**receipt, "signature": "0" * _SIGNATURE},
        ledger_receipts=(whole,) if record else (),
    )


def _secure_bytes(
    layout: AdapterLayout, uplink: PayloadKind, clients: Sequence[str], client: str, signed: bool
) -> tuple[int, int]:
    """Return (down, up) of the masking steps of one client, from packets of the right lengths."""
    count = sum(math.prod(shape) for shape in update_shapes(layout, uplink).values())
    plan = SecAggPlan(_RUN_ID, 1, encoding_for(1.0 + 1 / 3, max(len(clients), 2)))
    near = [one for one in clients if one != client][:COMPLETE_GRAPH_UP_TO]
    signature = "0" * (_SIGNATURE if signed else 0)
    keys = {"client": client, "mask": _HASH, "seal": _HASH, "signature": signature}
    sealed = {"sealed": dict.fromkeys(near, "0" * _SEALED_SHARE)}
    lists: dict[str, Any] = {"answered": list(clients), "dropped": []}
    told = {**lists, "confirmed": dict.fromkeys(clients, signature)} if signed else lists
    shares = {"seeds": dict.fromkeys(near, _SHARE), "keys": {}}
    vector = {"vector": np.zeros(count, dtype=plan.encoding.dtype)}
    steps: list[tuple[str, Body, Body]] = [
        ("keys", {}, keys),
        ("shares", {"neighbours": [{**keys, "client": one} for one in near]}, sealed),
        ("masked", sealed, vector),
        ("unmask", told, shares),
    ]
    if signed:
        steps.append(("confirm", lists, {"signature": signature}))
    down = sum(packet_bytes(pack_step(plan, step, {client: question})) for step, question, _ in steps)
    up = sum(packet_bytes(pack_step(plan, step, {client: answer})) for step, _, answer in steps)
    return down, up


def clients_of_a_round(config: FedLoraConfig, clients: int) -> list[str]:
    """Return placeholder names of one round's clients, of which there are `clients` in all."""
    asked = config.federation.clients_per_round
    number = clients
    if isinstance(asked, float):
        number = round(asked * clients)
    elif asked != "all":
        number = min(asked, clients)
    return [f"client-{index:03d}" for index in range(max(1, number))]
