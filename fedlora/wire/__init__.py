"""Message schema: names, shapes, dtypes, fingerprints and their checks."""

from __future__ import annotations

from fedlora.wire.checks import ReplyGuard, check_names, check_numbers, check_payload
from fedlora.wire.codec import DEFAULT_MAX_BYTES, Compression, from_arrays, to_arrays
from fedlora.wire.fingerprint import payload_fingerprint
from fedlora.wire.layout import (
    PayloadSize,
    expected_blocks,
    measured_size,
    module_blocks,
    payload_bytes,
    predict_size,
)
from fedlora.wire.payload import AdapterLayout, AdapterPayload, Array, ModuleSpec, PayloadKind

__all__ = [
    "DEFAULT_MAX_BYTES",
    "AdapterLayout",
    "AdapterPayload",
    "Array",
    "Compression",
    "ModuleSpec",
    "PayloadKind",
    "PayloadSize",
    "ReplyGuard",
    "check_names",
    "check_numbers",
    "check_payload",
    "expected_blocks",
    "from_arrays",
    "measured_size",
    "module_blocks",
    "payload_bytes",
    "payload_fingerprint",
    "predict_size",
    "to_arrays",
]
