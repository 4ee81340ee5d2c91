"""Which blocks a payload of each kind must have, their shapes, and the bytes they take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedlora.names import CORE, FRAME_IN, FRAME_OUT, LORA_A, LORA_B, TANGENT_IN, TANGENT_OUT, block_name
from fedlora.wire.codec import Compression
from fedlora.wire.payload import AdapterLayout, AdapterPayload, ModuleSpec, PayloadKind
from fedlora.wire.quantize import rows_of

Shapes = dict[str, tuple[int, ...]]


def module_blocks(spec: ModuleSpec, kind: PayloadKind) -> Shapes:
    """Block to shape for one module, in the coordinates `kind` (see `fedlora.wire.payload`).

    Example:
        >>> module_blocks(ModuleSpec(6, 4, 2, 1.0), "factors")
        {'lora_A': (2, 4), 'lora_B': (6, 2)}
    """
    out, inn, rank = spec.out_features, spec.in_features, spec.rank
    if kind in ("lora_b", "projected"):
        return {LORA_B: (out, rank)}
    if kind == "factors":
        return {LORA_A: (rank, inn), LORA_B: (out, rank)}
    if kind == "frames":
        return {FRAME_OUT: (out, rank), CORE: (rank, rank), FRAME_IN: (inn, rank)}
    return {TANGENT_OUT: (out, rank), TANGENT_IN: (inn, rank)}


def expected_blocks(
    modules: Mapping[str, ModuleSpec], extra: Mapping[str, tuple[int, ...]], kind: PayloadKind
) -> Shapes:
    """Every block name of a payload with its shape, adapted modules first, extras after."""
    shapes: Shapes = {}
    for path, spec in modules.items():
        for block, shape in module_blocks(spec, kind).items():
            shapes[block_name(path, block)] = shape
    shapes.update({name: tuple(shape) for name, shape in extra.items()})
    return shapes


@dataclass(frozen=True)
class PayloadSize:
    """Bytes of one payload: `numbers` of the packed arrays and `header` of its JSON text."""

    numbers: int
    header: int

    @property
    def total(self) -> int:
        """Bytes on the wire, without the transport's own framing."""
        return self.numbers + self.header


def predict_size(layout: AdapterLayout, kind: PayloadKind, compression: Compression = "none") -> PayloadSize:
    """Predict one payload's bytes from shapes alone, before a model is loaded or trained.

    Args:
        layout: PUBLIC shapes.
        kind: coordinates of the payload.
        compression: encoding of the numbers.

    Returns: the exact bytes of the numbers, and of the header up to a few digits.
    """
    shapes = expected_blocks(layout.modules, layout.extra, kind)
    total = sum(math.prod(shape) for shape in shapes.values())
    width = {"none": 4, "bf16": 2, "int8": 1}[compression]
    scales = 4 * sum(rows_of(shape) for shape in shapes.values()) if compression == "int8" else 0
    header = 260 + sum(len(path) + 28 for path in layout.modules)
    header += sum(len(name) + 6 + sum(len(str(n)) + 1 for n in shape) for name, shape in shapes.items())
    return PayloadSize(total * width + scales, header)


def measured_size(
    header: str, arrays: Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]
) -> PayloadSize:
    """Bytes of a packed payload as it is."""
    return PayloadSize(sum(int(array.nbytes) for array in arrays.values()), len(header.encode()))


def payload_bytes(payload: AdapterPayload) -> int:
    """Bytes of a payload's blocks in memory."""
    return sum(int(block.nbytes) for block in payload.blocks.values())
