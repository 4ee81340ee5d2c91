"""Packets: exact round trips, no pickle, hostile bytes refused, errors without foreign messages."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from fedlora.errors import BudgetExceededError, PayloadTooLargeError, SchemaVersionError, WireError
from fedlora.training.port import (
    Hello,
    LocalPort,
    Packet,
    decode_packet,
    encode_packet,
    error_record,
    hello_packet,
    pack_hello,
    pack_reply,
    pack_request,
    serve_packet,
    unpack_hello,
    unpack_reply,
    unpack_request,
)
from fedlora.training.requests import ClientReply, RoundReply, RoundRequest
from fedlora.wire.payload import AdapterPayload, ModuleSpec


def payload(value: float = 1.0) -> AdapterPayload:
    blocks = {
        "q|lora_B": np.full((6, 2), value, dtype=np.float32),
        "head|weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    }
    return AdapterPayload("lora_b", blocks, {"q": ModuleSpec(6, 4, 2, 2.0)}, "r" * 64, "f" * 64)


def request() -> RoundRequest:
    return RoundRequest("run", 3, {"a": {"b": [1, 2]}}, "h" * 64, payload(), ("c1", "c2"), 2)


def same(left: AdapterPayload, right: AdapterPayload) -> bool:
    return (
        left.kind == right.kind
        and left.recipe == right.recipe
        and dict(left.modules) == dict(right.modules)
        and left.blocks.keys() == right.blocks.keys()
        and all(np.array_equal(left.blocks[name], right.blocks[name]) for name in left.blocks)
    )


def test_request_survives_bytes() -> None:
    back = unpack_request(decode_packet(encode_packet(pack_request(request()))))
    assert (back.run_id, back.server_round, back.clients, back.steps) == ("run", 3, ("c1", "c2"), 2)
    assert back.config == {"a": {"b": [1, 2]}}
    assert same(back.payload, payload())


@pytest.mark.parametrize("epsilon", [None, 0.0, 3.25, math.inf])
def test_reply_survives_bytes_for_every_status(epsilon: float | None) -> None:
    replies = (
        ClientReply("a", "ok", payload(2.0), {"kind": "x"}, 4, epsilon, "head", {"sig": "s"}),
        ClientReply("b", "refused", error={"error": "BudgetExceededError", "exit_code": 25, "message": "m"}),
        ClientReply("c", "ok", payload(3.0), {"kind": "x"}, 4, epsilon),
    )
    back = unpack_reply(decode_packet(encode_packet(pack_reply(RoundReply("run", 1, replies)))))
    assert [one.status for one in back.replies] == ["ok", "refused", "ok"]
    first, third = back.replies[0].payload, back.replies[2].payload
    assert first is not None
    assert third is not None
    assert same(first, payload(2.0))
    assert same(third, payload(3.0))
    assert back.replies[0].epsilon == epsilon
    assert back.replies[1].error == replies[1].error


@pytest.mark.parametrize("cut", [0, 3, 15, 16, 40, -1])
def test_truncated_bytes_are_refused(cut: int) -> None:
    data = encode_packet(pack_request(request()))
    with pytest.raises(WireError):
        decode_packet(data[:cut])


@pytest.mark.parametrize("change", ["magic", "longer", "json", "dtype", "negative"])
def test_altered_bytes_are_refused(change: str) -> None:
    data = encode_packet(pack_request(request()))
    if change == "magic":
        data = b"XXXX" + data[4:]
    elif change == "longer":
        data += b"0"
    elif change == "json":
        data = data[:16] + b"!" + data[17:]
    elif change == "dtype":
        data = data.replace(b'"float32"', b'"object_"', 1)
    else:
        data = data.replace(b'"shape": [', b'"shape": -', 1)
    with pytest.raises(WireError):
        decode_packet(data)


def test_h34_a_packet_above_the_limit_is_refused_with_both_numbers() -> None:
    data = encode_packet(pack_request(request()))
    with pytest.raises(PayloadTooLargeError, match=rf"{len(data) - 16} bytes; limit 100"):
        decode_packet(data, max_bytes=100)


def test_object_arrays_do_not_travel() -> None:
    with pytest.raises(WireError, match="dtype"):
        encode_packet(Packet({}, {"x": np.array([None])}))


@pytest.mark.parametrize("field", ["run_id", "round", "clients", "steps", "payload", "config"])
def test_a_request_without_a_field_is_refused(field: str) -> None:
    packet = pack_request(request())
    header = {key: value for key, value in packet.header.items() if key != field}
    with pytest.raises(WireError):
        unpack_request(Packet(header, packet.arrays))


@pytest.mark.parametrize(("field", "value"), [("round", "1"), ("steps", True), ("clients", "abc")])
def test_a_request_with_a_field_of_another_type_is_refused(field: str, value: object) -> None:
    packet = pack_request(request())
    with pytest.raises(WireError, match=field):
        unpack_request(Packet({**packet.header, field: value}, packet.arrays))


def test_another_schema_is_refused_with_both_versions() -> None:
    packet = pack_request(request())
    with pytest.raises(SchemaVersionError, match="99"):
        unpack_request(Packet({**packet.header, "schema": 99}, packet.arrays))


class _Raises:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def hello(self) -> Hello:
        raise self._error

    def handle(self, request: RoundRequest) -> RoundReply:
        raise self._error


def test_h19_messages_of_foreign_errors_stay_with_the_trainer() -> None:
    secret = "the patient is called Ada"
    answer = LocalPort(_Raises(ValueError(secret))).exchange(hello_packet())
    assert secret not in json.dumps(dict(answer.header))
    assert answer.header["error"] == "ValueError"
    own = error_record(BudgetExceededError("spent 7", spent=7.0, projected=8.1, budget=8.0))
    assert own == {"error": "BudgetExceededError", "exit_code": 25, "message": "spent 7"}


def test_every_error_becomes_an_answer() -> None:
    answer = serve_packet(_Raises(RuntimeError("x")), pack_request(request()))
    with pytest.raises(WireError, match="the node failed"):
        unpack_reply(answer)


def test_hello_survives() -> None:
    hello = Hello(("a", "b"), "hash", "id", {"x": 1})
    assert unpack_hello(pack_hello(hello)) == hello
