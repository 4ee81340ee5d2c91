"""A packet (a JSON header and a few NumPy arrays) as bytes, without pickle; every length is checked first."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fedlora.errors import PayloadTooLargeError, WireError

_MAGIC: Final = b"FLRP"
_PREFIX: Final = struct.Struct(">4sIQ")
_DTYPES: Final = frozenset(
    {"float32", "float64", "float16", "uint8", "uint16", "uint32", "uint64", "int8", "int32", "int64"}
)
DEFAULT_MAX_BYTES: Final = 1_100_000_000
"""Largest packet that `decode_packet` accepts unless told otherwise, in bytes."""

AnyArray = npt.NDArray[Any]


@dataclass(frozen=True)
class Packet:
    """PUBLIC (or already released). A JSON header and its arrays by name."""

    header: Mapping[str, Any]
    arrays: Mapping[str, AnyArray] = field(default_factory=dict)


def packet_bytes(packet: Packet) -> int:
    """Bytes of a packet's arrays and header on the wire, without the transport's own framing."""
    header = json.dumps(dict(packet.header), separators=(",", ":"))
    return sum(int(array.nbytes) for array in packet.arrays.values()) + len(header.encode())


def encode_packet(packet: Packet) -> bytes:
    """Encode a packet as bytes: magic, header length, total length, JSON header, raw arrays."""
    chunks: list[bytes] = []
    specs: list[dict[str, Any]] = []
    for name, array in packet.arrays.items():
        if array.dtype.name not in _DTYPES:
            raise WireError(f"packet: dtype {array.dtype.name} does not travel; allowed: {sorted(_DTYPES)}")
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        chunks.append(little.tobytes())
        specs.append({"name": name, "dtype": array.dtype.name, "shape": list(array.shape)})
    text = json.dumps({"header": dict(packet.header), "arrays": specs}, allow_nan=False).encode()
    body = b"".join(chunks)
    return b"".join([_PREFIX.pack(_MAGIC, len(text), len(body)), text, body])


PREFIX_BYTES: Final = _PREFIX.size
"""Length of the fixed prefix that starts every encoded packet."""


def packet_length(prefix: bytes, max_bytes: int = DEFAULT_MAX_BYTES) -> int:
    """Return how many bytes follow the prefix (for readers of a stream).

    Raises:
        WireError: if the prefix is not fedlora's.
        PayloadTooLargeError: if the packet is larger than `max_bytes`.
    """
    if len(prefix) != _PREFIX.size:
        raise WireError(f"packet: prefix of {len(prefix)} bytes; {_PREFIX.size} needed")
    magic, header_bytes, body_bytes = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise WireError("packet: not a fedlora packet (wrong first bytes)")
    total = int(header_bytes) + int(body_bytes)
    if total > max_bytes:
        raise PayloadTooLargeError(f"packet: {total} bytes; limit {max_bytes}; raise max_payload_bytes")
    return total


def decode_packet(data: bytes, max_bytes: int = DEFAULT_MAX_BYTES) -> Packet:
    """Decode a packet; every length is checked before anything is read.

    Raises:
        WireError: if the bytes are cut short, too long or malformed.
        PayloadTooLargeError: if they are more than `max_bytes`.
    """
    total = packet_length(data[: _PREFIX.size], max_bytes)
    if len(data) != _PREFIX.size + total:
        raise WireError(f"packet: {len(data) - _PREFIX.size} bytes after the prefix; {total} announced")
    _, header_bytes, _ = _PREFIX.unpack(data[: _PREFIX.size])
    try:
        record = json.loads(data[_PREFIX.size : _PREFIX.size + header_bytes])
        header, specs = dict(record["header"]), list(record["arrays"])
        arrays = _read_arrays(specs, memoryview(data)[_PREFIX.size + header_bytes :])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as problem:
        raise WireError(f"packet: malformed header ({type(problem).__name__})") from None
    return Packet(header, arrays)


def _read_arrays(specs: Sequence[Any], body: memoryview) -> dict[str, AnyArray]:
    arrays: dict[str, AnyArray] = {}
    offset = 0
    for spec in specs:
        shape = tuple(int(size) for size in spec["shape"])
        if spec["dtype"] not in _DTYPES or any(size < 0 for size in shape):
            raise ValueError("array spec")
        dtype = np.dtype(spec["dtype"]).newbyteorder("<")
        count = math.prod(shape)
        end = offset + count * dtype.itemsize
        if end > len(body):
            raise ValueError("array outside the packet")
        arrays[str(spec["name"])] = np.frombuffer(body[offset:end], dtype=dtype).reshape(shape)
        offset = end
    if offset != len(body):
        raise ValueError("trailing bytes")
    return arrays
