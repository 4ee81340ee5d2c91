"""Broken messages against the packet decoder: never a crash, never more memory, nothing accepted half."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc

import numpy as np
import pytest

from fedlora.errors import FedLoraError
from fedlora.training.port import (
    HELLO,
    Packet,
    decode_packet,
    encode_packet,
    hello_packet,
    pack_reply,
    pack_request,
    serve_packet,
    unpack_hello,
    unpack_reply,
    unpack_request,
)
from fedlora.training.requests import ClientReply, RoundReply, RoundRequest
from fedlora.wire.payload import AdapterPayload, ModuleSpec

LIMIT = 1 << 20
INPUTS = 10_000
BASE = "0" * 64


def payload() -> AdapterPayload:
    blocks = {"a|lora_B": np.ones((4, 2), np.float32), "b|lora_B": np.zeros((3, 2), np.float32)}
    modules = {"a": ModuleSpec(4, 5, 2, 1.0), "b": ModuleSpec(3, 5, 2, 1.0)}
    return AdapterPayload("lora_b", blocks, modules, "1" * 64, BASE)


def samples() -> list[bytes]:
    request = RoundRequest("run", 1, {"schema": 1, "x": [1, 2]}, "c" * 64, payload(), ("a", "b"), 2)
    replies = (
        ClientReply("a", "ok", payload(), {"kind": "x"}, 2, 1.5, "h"),
        ClientReply("b", "refused", error={"error": "BudgetExceededError", "exit_code": 25, "message": "no"}),
    )
    return [
        encode_packet(p)
        for p in (hello_packet(), pack_request(request), pack_reply(RoundReply("run", 1, replies)))
    ]


def mutate(data: bytes, draw: random.Random) -> bytes:
    """Return a damaged copy: flipped, cut, doubled, or with an edited JSON header."""
    out = bytearray(data)
    kind = draw.randrange(6)
    if kind == 0:
        for _ in range(draw.randrange(1, 8)):
            out[draw.randrange(len(out))] = draw.randrange(256)
    elif kind == 1:
        del out[draw.randrange(len(out)) :]
    elif kind == 2:
        at = draw.randrange(len(out))
        out[at:at] = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 40)))
    elif kind == 3:
        struct.pack_into(
            ">IQ", out, 4, draw.choice([0, 1, 2**32 - 1, 50]), draw.choice([0, 7, 2**40, 2**64 - 1])
        )
    else:
        return edit_header(data, draw)
    return bytes(out)


def edit_header(data: bytes, draw: random.Random) -> bytes:
    """Put odd values into the header's JSON and repair the lengths, so that the damage is deeper."""
    _, size, body = struct.unpack(">4sIQ", data[:16])
    record = json.loads(data[16 : 16 + size])
    odd = draw.choice(
        [None, -1, 2**70, 1e308, "", "x" * 300, [], {}, [[]], True, {"name": 1}, [0, -5], "float64"]
    )
    node = record
    for _ in range(draw.randrange(1, 6)):
        keys = (
            list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
        )
        if not keys:
            break
        key = draw.choice(keys)
        if draw.random() < 0.4 or not isinstance(node[key], dict | list):
            if draw.random() < 0.2 and isinstance(node, dict):
                del node[key]
            else:
                node[key] = odd
            break
        node = node[key]
    text = json.dumps(record).encode()
    return struct.pack(">4sIQ", b"FLRP", len(text), body) + text + data[16 + size :]


class Recorder:
    """A trainer that must never be reached by a broken request."""

    def __init__(self) -> None:
        self.seen: list[RoundRequest] = []

    def hello(self) -> object:
        raise FedLoraError("not asked here")

    def handle(self, request: RoundRequest) -> RoundReply:
        self.seen.append(request)
        return RoundReply(request.run_id, request.server_round, ())


@pytest.mark.parametrize("seed", [0, 1])
def test_ten_thousand_damaged_messages_raise_only_our_errors(seed: int) -> None:
    draw = random.Random(seed)
    good = samples()
    tracemalloc.start()
    refused = 0
    for _ in range(INPUTS // 2):
        data = mutate(draw.choice(good), draw)
        try:
            packet = decode_packet(data, LIMIT)
        except FedLoraError:
            refused += 1
            continue
        for unpack in (unpack_hello, unpack_request, unpack_reply):
            try:
                unpack(packet)
            except FedLoraError:
                refused += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > INPUTS // 4
    assert peak < 20_000_000


def test_what_is_accepted_is_finite_and_of_the_announced_shape() -> None:
    draw = random.Random(7)
    good = samples()[1]
    trainer = Recorder()
    for _ in range(2000):
        try:
            packet = decode_packet(edit_header(good, draw), LIMIT)
        except FedLoraError:
            continue
        answer = serve_packet(trainer, packet)  # type: ignore[arg-type]
        assert answer.header["op"] in {"failure", "round", HELLO}
    for request in trainer.seen:
        assert type(request.server_round) is int
        assert type(request.steps) is int
        for name, block in request.payload.blocks.items():
            assert isinstance(name, str)
            assert block.dtype == np.float32
            assert block.size < LIMIT


def test_the_untouched_messages_are_accepted() -> None:
    hello, request, reply = (decode_packet(data, LIMIT) for data in samples())
    assert hello.header["op"] == HELLO
    assert unpack_request(request).clients == ("a", "b")
    assert [one.status for one in unpack_reply(reply).replies] == ["ok", "refused"]
    assert isinstance(hello, Packet)
