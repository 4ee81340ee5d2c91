"""Packets to Flower records and back."""

from __future__ import annotations

import json
import math
from io import BytesIO
from typing import Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedlora.errors import WireError
from fedlora.names import ARRAYS, K_SCHEMA, META, WIRE_SCHEMA
from fedlora.training.packets import AnyArray
from fedlora.training.port import Packet

HEADER = "packet-header"
_BROKEN: Final = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    IndexError,
    OverflowError,
    RecursionError,
    MemoryError,
    EOFError,
)
"""What foreign bytes can raise in the readers of JSON and NumPy's format."""


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
    try:
        header = json.loads(str(content[META][HEADER]))
        if not isinstance(header, dict):
            raise WireError(f"message: its header is {type(header).__name__}; expected an object")
        arrays = content.array_records.get(ARRAYS, ArrayRecord())
        return Packet(header, {str(name): _array(array) for name, array in arrays.items()})
    except _BROKEN as problem:
        raise WireError(f"message: malformed ({type(problem).__name__})") from None


def _array(array: Array) -> AnyArray:
    """Read an array; its header must announce exactly the bytes that came, so no more memory is used.

    Raises:
        WireError: if it does not.
    """
    stream = BytesIO(array.data)
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    shape, _, dtype = read[version](stream)
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(array.data) - stream.tell():
        raise WireError("message: an array's header does not fit its bytes")
    return array.numpy()
