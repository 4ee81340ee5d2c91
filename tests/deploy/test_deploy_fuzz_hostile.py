"""Hostile values in every field of a message: only fedlora's errors, little memory, nothing odd accepted."""

from __future__ import annotations

import io
import json
import math
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from test_deploy_fuzz import samples

from fedlora.errors import FedLoraError, WireError
from fedlora.names import ARRAYS, META
from fedlora.simulation.messages import HEADER, from_record, to_record
from fedlora.training.port import decode_packet, unpack_hello, unpack_reply, unpack_request
from fedlora.training.requests import ClientReply, RoundReply, RoundRequest
from fedlora.training.secure import unpack_step

LIMIT = 1 << 20
INPUTS = 10_000
HOSTILE = (
    "1e999",
    "-1e999",
    "NaN",
    "1" + "0" * 400,
    str(2**63),
    str(2**70),
    "-1",
    "0.5",
    "true",
    "null",
    '""',
    '"\\ud800"',
    '"' + "x" * 2000 + '"',
    "[" * 3000 + "]" * 3000,
    '{"a":' * 500 + "1" + "}" * 500,
    "[]",
    "{}",
    "[[0, 4611686018427387904]]",
    '[{"name":"p0000","dtype":"float64","shape":[0,4611686018427387904,4611686018427387904]}]',
    '[{"name":"p0000","dtype":"float32","shape":[1e999]}]',
    '[{"name":"p0000","dtype":"O","shape":[1]}]',
)
MARK = "\x00here\x00"


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All places of a JSON value, the payload header's own JSON text included."""
    if path:
        yield path
    if isinstance(node, str) and node.startswith("{"):
        for inner in places(json.loads(node)):
            yield (*path, "json", *inner)
        return
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in entries:
        yield from places(child, (*path, key))


def replaced(node: Any, path: tuple[Any, ...], text: str) -> str:
    """The JSON text of a value with one place replaced by raw text."""
    if not path:
        return text
    if isinstance(node, str):
        return json.dumps(replaced(json.loads(node), path[1:], text))
    copy = dict(node) if isinstance(node, dict) else list(node)
    inner = replaced(copy[path[0]], path[1:], text)
    copy[path[0]] = MARK
    return json.dumps(copy).replace(json.dumps(MARK), inner)


def hostile(data: bytes, draw: random.Random) -> bytes:
    """A message with one hostile value at a random place, lengths repaired."""
    _, size, body = struct.unpack(">4sIQ", data[:16])
    record = json.loads(data[16 : 16 + size])
    path = draw.choice(list(places(record)))
    text = replaced(record, path, draw.choice(HOSTILE)).encode()
    return struct.pack(">4sIQ", b"FLRP", len(text), body) + text + data[16 + size :]


def count(value: object) -> bool:
    return type(value) is int and value >= 0


def check_reply(reply: RoundReply) -> None:
    assert type(reply.server_round) is int
    assert all(math.isfinite(one) and one >= 0 for one in reply.timings.values())
    for one in reply.replies:
        check_client(one)


def check_client(one: ClientReply) -> None:
    assert isinstance(one.client, str)
    assert count(one.steps)
    assert one.epsilon is None or one.epsilon >= 0
    assert one.ledger_head is None or isinstance(one.ledger_head, str)
    for record in (one.event, one.receipt, one.error):
        assert record is None or isinstance(record, dict)
    if one.payload is not None:
        assert all(block.dtype == np.float32 for block in one.payload.blocks.values())


def check_request(request: RoundRequest) -> None:
    assert type(request.server_round) is int
    assert type(request.steps) is int
    assert all(isinstance(client, str) for client in request.clients)
    assert all(block.size < LIMIT for block in request.payload.blocks.values())
    for spec in request.payload.modules.values():
        assert math.isfinite(spec.scaling)


READERS: tuple[tuple[Callable[[Any], Any], Callable[[Any], None]], ...] = (
    (unpack_hello, lambda hello: None),
    (unpack_request, check_request),
    (unpack_reply, check_reply),
    (unpack_step, lambda step: None),
)


def test_ten_thousand_hostile_fields_are_refused_or_harmless() -> None:
    draw = random.Random(3)
    good = samples()
    refused = 0
    tracemalloc.start()
    for _ in range(INPUTS):
        try:
            packet = decode_packet(hostile(draw.choice(good), draw), LIMIT)
        except FedLoraError:
            refused += 1
            continue
        for read, check in READERS:
            try:
                found = read(packet)
            except FedLoraError:
                refused += 1
            else:
                check(found)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > INPUTS
    assert peak < 20_000_000


def npy(header: str, body: bytes) -> bytes:
    """A file in NumPy's format with any header."""
    text = header.encode() + b" " * (63 - (len(header) + 10) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + body


def record(
    data: bytes, header: str = '{"schema": 1, "op": "hello"}', stype: str = "numpy.ndarray"
) -> RecordDict:
    array = Array("float32", (1,), stype, data)
    return RecordDict({ARRAYS: ArrayRecord({"p0000": array}), META: ConfigRecord({HEADER: header})})


def saved(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


ARRAYS_NOBODY_SENDS = {
    "a terabyte announced": npy(
        "{'descr': '<f4', 'fortran_order': False, 'shape': (274877906944,), }", b"1234"
    ),
    "beyond any integer": npy(
        "{'descr': '<f4', 'fortran_order': False, 'shape': (0, 10000000000000000000000), }", b""
    ),
    "a negative size": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }", b""),
    "an object array": saved(np.array([{"a": 1}], dtype=object)),
    "a pickle": b"\x80\x04\x95\x0c\x00\x00\x00\x00\x00\x00\x00\x8c\x08builtins",
    "cut short": saved(np.zeros(9, np.float32))[:-3],
    "too long": saved(np.zeros(9, np.float32)) + b"more",
    "nothing": b"",
    "a zip archive": b"PK\x03\x04" + b"\0" * 60,
    "code for a header": npy("__import__('os').getcwd()", b""),
    "another version": b"\x93NUMPY\x09\x00" + b"\0" * 60,
}


@pytest.mark.parametrize("name", list(ARRAYS_NOBODY_SENDS))
def test_hostile_arrays_in_a_flower_message_are_refused_without_memory(name: str) -> None:
    tracemalloc.start()
    with pytest.raises(WireError):
        from_record(record(ARRAYS_NOBODY_SENDS[name]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000


@pytest.mark.parametrize("header", ["", "no", "[]", "[" * 100_000, "1" * 10_000, '{"a":' * 100_000])
def test_hostile_headers_in_a_flower_message_are_refused(header: str) -> None:
    with pytest.raises(WireError):
        from_record(record(saved(np.zeros(1, np.float32)), header))


def test_an_array_of_another_kind_is_refused() -> None:
    with pytest.raises(WireError):
        from_record(record(saved(np.zeros(1, np.float32)), stype="torch.tensor"))


def test_honest_messages_still_pass() -> None:
    for data in samples():
        packet = decode_packet(data, LIMIT)
        back = from_record(to_record(packet))
        assert back.header == packet.header
        for name, array in packet.arrays.items():
            assert np.array_equal(back.arrays[name], array)


@pytest.mark.parametrize("value", ["NaN", "-1.0", "1e999", '"1"', "true", "[]"])
def test_an_epsilon_that_is_no_epsilon_is_refused(value: str) -> None:
    data = samples()[2]
    _, size, body = struct.unpack(">4sIQ", data[:16])
    text = data[16 : 16 + size].decode().replace('"epsilon": 1.5', f'"epsilon": {value}').encode()
    packet = decode_packet(struct.pack(">4sIQ", b"FLRP", len(text), body) + text + data[16 + size :], LIMIT)
    with pytest.raises(WireError):
        unpack_reply(packet)
