"""The door between the relay and the trainer: one packet in, one packet out, no pickle.

A packet is a JSON header and a few NumPy arrays. In a simulation it is passed in-process; in a
deployment `encode_packet` turns it into bytes for the Unix socket. The relay (Flower's ClientApp)
never looks inside: it copies packets between Flower messages and a `PacketPort`.

```
relay -> PacketPort.exchange(packet) -> ... -> serve_packet(trainer, packet) -> TrainerPort.handle(request)
```
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from fedlora.errors import DataError, FedLoraError, SchemaVersionError, WireError
from fedlora.names import WIRE_SCHEMA
from fedlora.training import fields
from fedlora.training.fields import BROKEN
from fedlora.training.packets import (
    DEFAULT_MAX_BYTES,
    PREFIX_BYTES,
    AnyArray,
    Packet,
    decode_packet,
    encode_packet,
    packet_length,
)
from fedlora.training.requests import ClientReply, RoundReply, RoundRequest
from fedlora.wire.codec import Compression, from_arrays, to_arrays
from fedlora.wire.payload import AdapterPayload

HELLO: Final = "hello"
ROUND: Final = "round"
SECAGG: Final = "secagg"
FAILURE: Final = "failure"
__all__ = [
    "DEFAULT_MAX_BYTES",
    "PREFIX_BYTES",
    "Hello",
    "LocalPort",
    "Packet",
    "PacketPort",
    "TrainerPort",
    "decode_packet",
    "encode_packet",
    "error_record",
    "failure_packet",
    "hello_packet",
    "pack_hello",
    "pack_reply",
    "pack_request",
    "packet_length",
    "serve_packet",
    "unpack_hello",
    "unpack_reply",
    "unpack_request",
    "where_it_failed",
]


@dataclass(frozen=True)
class Hello:
    """What a trainer says about itself; nothing here depends on records.

    Attributes:
        clients: logical client ids that live at this node.
        code_hash: hash of the installed library's version, compared by the server.
        identity: fingerprint of the site's identity key, if it has one.
        facts: further public facts (library versions, model fingerprint once loaded).
    """

    clients: Sequence[str]
    code_hash: str
    identity: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class TrainerPort(Protocol):
    """What a trainer offers: resident (deployment) or in the same process (simulation)."""

    def hello(self) -> Hello:
        """Return public facts about this trainer."""

    def handle(self, request: RoundRequest) -> RoundReply:
        """Train the request's clients; refusals and failures come back per client, by name."""

    def secure(self, packet: Packet) -> Packet:
        """Answer one step of secure aggregation for the updates withheld in this round."""


class PacketPort(Protocol):
    """Anything that answers a packet with a packet."""

    def exchange(self, packet: Packet) -> Packet:
        """Answer one packet; never raises for a trainer's own errors (they come back as `failure`)."""


def error_record(error: BaseException) -> dict[str, Any]:
    """Describe an error for the wire: class, exit code and message of fedlora's own errors only.

    Messages of foreign exceptions may quote records, and fedlora's own about data name files and rows:
    of both only the class name travels.
    """
    if isinstance(error, DataError):
        return {
            "error": type(error).__name__,
            "exit_code": error.exit_code,
            "message": "records cannot be used; details are in the trainer's own log",
        }
    if isinstance(error, FedLoraError):
        return {"error": type(error).__name__, "exit_code": error.exit_code, "message": str(error)}
    return {
        "error": type(error).__name__,
        "exit_code": 1,
        "message": "internal error; details are in the trainer's own log",
    }


def where_it_failed(error: BaseException) -> str:
    """Return class and place of a foreign error for a log, without its message (it may quote records)."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown place"
    return f"{type(error).__name__} at {place}"


def hello_packet() -> Packet:
    """Build the request packet that asks for `Hello`."""
    return Packet({"schema": WIRE_SCHEMA, "op": HELLO})


def pack_hello(hello: Hello) -> Packet:
    """Turn a Hello into its packet."""
    header = {
        "schema": WIRE_SCHEMA,
        "op": HELLO,
        "clients": list(hello.clients),
        "code_hash": hello.code_hash,
        "identity": hello.identity,
        "facts": dict(hello.facts),
    }
    return Packet(header)


def unpack_hello(packet: Packet) -> Hello:
    """Read a Hello from its packet.

    Raises:
        WireError: if the packet holds something else.
    """
    header = _checked_header(packet, HELLO)
    try:
        identity = header.get("identity")
        return Hello(
            clients=tuple(str(client) for client in _typed(header, "clients", list)),
            code_hash=str(header["code_hash"]),
            identity=None if identity is None else str(identity),
            facts=dict(header.get("facts", {})),
        )
    except BROKEN as problem:
        raise WireError(f"hello: malformed ({type(problem).__name__}); update the node") from None


def pack_request(request: RoundRequest) -> Packet:
    """Turn a round request into a packet (the payload's arrays travel beside the header)."""
    payload_header, arrays = to_arrays(request.payload)
    header = {
        "schema": WIRE_SCHEMA,
        "op": ROUND,
        "run_id": request.run_id,
        "round": request.server_round,
        "config": dict(request.config),
        "config_hash": request.config_hash,
        "clients": list(request.clients),
        "steps": request.steps,
        "reduce": request.reduce,
        "withhold": request.withhold,
        "known": {client: dict(one) for client, one in request.known.items()},
        "payload": payload_header,
    }
    return Packet(header, arrays)


def unpack_request(packet: Packet) -> RoundRequest:
    """Read a round request from its packet.

    Raises:
        WireError: if fields are missing or of the wrong type.
    """
    header = _checked_header(packet, ROUND)
    try:
        return RoundRequest(
            run_id=_typed(header, "run_id", str),
            server_round=_typed(header, "round", int),
            config=_typed(header, "config", dict),
            config_hash=_typed(header, "config_hash", str),
            payload=from_arrays(header["payload"], packet.arrays, max_bytes=DEFAULT_MAX_BYTES),
            clients=tuple(str(client) for client in _typed(header, "clients", list)),
            steps=_typed(header, "steps", int),
            reduce=_typed(header, "reduce", bool),
            withhold=_typed(header, "withhold", bool),
            known={str(client): dict(one) for client, one in _typed(header, "known", dict).items()},
        )
    except KeyError as missing:
        raise WireError(f"round request: field {missing} is missing; update the server") from None
    except BROKEN as problem:
        raise WireError(f"round request: malformed ({type(problem).__name__}); update the server") from None


def pack_reply(reply: RoundReply, compression: Compression = "none") -> Packet:
    """Turn a round reply into a packet; each payload's arrays carry a prefix of their own."""
    arrays: dict[str, AnyArray] = {}
    replies = [_pack_client(one, arrays, compression) for one in reply.replies]
    header: dict[str, Any] = {
        "schema": WIRE_SCHEMA,
        "op": ROUND,
        "run_id": reply.run_id,
        "round": reply.server_round,
        "replies": replies,
        "reduced_clients": list(reply.reduced_clients),
        "timings": dict(reply.timings),
        "reduced": None,
    }
    if reply.reduced is not None:
        header["reduced"] = _append(reply.reduced, arrays, compression)
    return Packet(header, arrays)


def unpack_reply(packet: Packet) -> RoundReply:
    """Read a round reply from its packet.

    Raises:
        WireError: if fields are missing, or slices lie outside the packet's arrays.
        FedLoraError: never re-raised from the trainer; a `failure` packet becomes a WireError here.
    """
    if packet.header.get("op") == FAILURE:
        raise WireError(f"the node failed: {packet.header.get('message', 'no message')}")
    header = _checked_header(packet, ROUND)
    try:
        reduced = header["reduced"]
        return RoundReply(
            run_id=_typed(header, "run_id", str),
            server_round=_typed(header, "round", int),
            replies=tuple(_unpack_client(one, packet.arrays) for one in _typed(header, "replies", list)),
            reduced=None if reduced is None else _cut(reduced, packet.arrays),
            reduced_clients=tuple(str(one) for one in _typed(header, "reduced_clients", list)),
            timings=fields.seconds(header["timings"], "timings"),
        )
    except BROKEN as problem:
        raise WireError(f"round reply: malformed ({type(problem).__name__}); update the node") from None


def compression_of(request: RoundRequest) -> Compression:
    """Return how a reply's numbers are encoded: the run's `federation.compression` (post-processing)."""
    asked = request.config.get("federation", {}).get("compression", "none")
    return asked if asked in ("bf16", "int8") else "none"


def failure_packet(error: BaseException) -> Packet:
    """Build the packet that says that the whole request failed."""
    return Packet({"schema": WIRE_SCHEMA, "op": FAILURE, **error_record(error)})


def serve_packet(trainer: TrainerPort, packet: Packet) -> Packet:
    """Answer one packet with a trainer; every error becomes a `failure` packet."""
    try:
        if packet.header.get("op") == HELLO:
            return pack_hello(trainer.hello())
        if packet.header.get("op") == SECAGG:
            return trainer.secure(packet)
        request = unpack_request(packet)
        return pack_reply(trainer.handle(request), compression_of(request))
    except Exception as error:  # the relay must always get an answer
        return failure_packet(error)


@dataclass(frozen=True)
class LocalPort:
    """A trainer in the same process, as a packet port."""

    trainer: TrainerPort

    def exchange(self, packet: Packet) -> Packet:
        """Answer a packet with the trainer."""
        return serve_packet(self.trainer, packet)


def _checked_header(packet: Packet, op: str) -> Mapping[str, Any]:
    header = packet.header
    if type(header.get("schema")) is not int or header["schema"] != WIRE_SCHEMA:
        raise SchemaVersionError(
            f"wire schema: got {header.get('schema')!r}, spoken here {WIRE_SCHEMA}; update the older side"
        )
    if header.get("op") == FAILURE:
        raise WireError(f"the node failed: {header.get('message', 'no message')}")
    if header.get("op") != op:
        raise WireError(f"packet: op {header.get('op')!r}; expected {op!r}")
    return header


def _typed(header: Mapping[str, Any], key: str, kind: type) -> Any:
    value = header[key]
    if type(value) is not kind:
        raise WireError(f"packet: field {key!r} is {type(value).__name__}; expected {kind.__name__}")
    return value


def _append(payload: AdapterPayload, arrays: dict[str, AnyArray], compression: Compression) -> dict[str, Any]:
    header, own = to_arrays(payload, compression=compression)
    prefix = f"{len(arrays)}/"
    arrays.update({prefix + name: array for name, array in own.items()})
    return {"header": header, "names": [prefix + name for name in own]}


def _cut(where: Mapping[str, Any], arrays: Mapping[str, AnyArray]) -> AdapterPayload:
    own: dict[str, AnyArray] = {}
    for name in where["names"]:
        if name not in arrays:
            raise WireError(f"round reply: array {str(name)[:40]!r} is missing")
        own[str(name).partition("/")[2]] = arrays[name]
    return from_arrays(where["header"], own, max_bytes=DEFAULT_MAX_BYTES)


def _pack_client(reply: ClientReply, arrays: dict[str, AnyArray], compression: Compression) -> dict[str, Any]:
    return {
        "client": reply.client,
        "status": reply.status,
        "payload": None if reply.payload is None else _append(reply.payload, arrays, compression),
        "event": None if reply.event is None else dict(reply.event),
        "steps": reply.steps,
        "epsilon": "inf" if reply.epsilon == math.inf else reply.epsilon,
        "ledger_head": reply.ledger_head,
        "receipt": None if reply.receipt is None else dict(reply.receipt),
        "error": None if reply.error is None else dict(reply.error),
        "ledger_receipts": None
        if reply.ledger_receipts is None
        else [dict(one) for one in reply.ledger_receipts],
    }


def _unpack_client(record: Mapping[str, Any], arrays: Mapping[str, AnyArray]) -> ClientReply:
    status = record["status"]
    if status not in ("ok", "refused", "failed"):
        raise WireError(f"round reply: status {status!r}; allowed: ok, refused, failed")
    payload = record["payload"]
    return ClientReply(
        client=_typed(record, "client", str),
        status=status,
        payload=None if payload is None else _cut(payload, arrays),
        event=fields.mapping(record["event"], "event"),
        steps=fields.count(record["steps"], "steps"),
        epsilon=fields.spent(record["epsilon"], "epsilon"),
        ledger_head=fields.text(record["ledger_head"], "ledger_head"),
        receipt=fields.mapping(record["receipt"], "receipt"),
        error=fields.mapping(record["error"], "error"),
        ledger_receipts=_receipts(record["ledger_receipts"]),
    )


def _receipts(value: Any) -> tuple[Mapping[str, Any], ...] | None:
    """Return receipts as plain records; their content and signatures are the mirror's to judge."""
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise WireError("round reply: ledger_receipts are malformed; update the node")
    return tuple(value)
