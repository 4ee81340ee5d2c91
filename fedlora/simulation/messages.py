"""Packets to Flower records and back."""

from __future__ import annotations

import json

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedlora.errors import WireError
from fedlora.names import ARRAYS, K_SCHEMA, META, WIRE_SCHEMA
from fedlora.training.port import Packet

HEADER = "packet-header"


def to_record(packet: Packet) -> RecordDict:
    """Put a packet into Flower's records."""
    text = json.dumps(dict(packet.header), separators=(",", ":"), allow_nan=False)
    arrays = {name: Array(array) for name, array in packet.arrays.items()}
    return RecordDict(
        {ARRAYS: ArrayRecord(arrays), META: ConfigRecord({K_SCHEMA: WIRE_SCHEMA, HEADER: text})}
    )


def from_record(content: RecordDict) -> Packet:
    """Take a packet out of Flower's records.

    Raises:
        WireError: if the records are not fedlora's.
    """
    if META not in content or HEADER not in content[META]:
        raise WireError("message: no fedlora packet in it; server and client must run the same app")
    header = json.loads(str(content[META][HEADER]))
    arrays = content.array_records.get(ARRAYS, ArrayRecord())
    return Packet(header, {str(name): array.numpy() for name, array in arrays.items()})
