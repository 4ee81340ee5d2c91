"""Payload to a JSON header and a few packed arrays, and back, with bounded memory on hostile input.

The numbers of all blocks, in the order of their sorted names, form one flat vector that is cut
into chunks of at most `CHUNK_ELEMENTS` ("p0000", "p0001", ...): few arrays travel fast. The header
names every block and its shape; nothing is allocated before the shapes add up to exactly the numbers
that came. Encodings: float32 (bit-exact), bf16 (uint16 patterns, round to nearest even) and int8
(stochastic rounding, one float32 scale a row in "s0000", unbiased).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from fedlora.errors import LayoutMismatchError, PayloadTooLargeError, SchemaVersionError, WireError
from fedlora.names import WIRE_SCHEMA
from fedlora.wire.payload import AdapterPayload, ModuleSpec, PayloadKind
from fedlora.wire.quantize import from_bf16, from_int8_rows, rows_of, to_bf16, to_int8_rows

Compression = Literal["none", "bf16", "int8"]
Packed = Mapping[str, npt.NDArray[Any]]

CHUNK_ELEMENTS: Final = 8 * 1024 * 1024
MAX_HEADER_BYTES: Final = 8 * 1024 * 1024
MAX_BLOCKS: Final = 100_000
MAX_DIMENSIONS: Final = 8
MAX_DIMENSION: Final = 2**31
MAX_NAME: Final = 1000
MAX_NOTES: Final = 64
MAX_SCALING: Final = 1e300
"""Beyond it a JSON integer is no float; what a run allows is far narrower (`fedlora.wire.checks`)."""
DEFAULT_MAX_BYTES: Final = 1_000_000_000

_DTYPES: Final[dict[str, type[np.generic]]] = {"none": np.float32, "bf16": np.uint16, "int8": np.int8}
_KEYS: Final = frozenset({"schema", "kind", "encoding", "recipe", "base", "modules", "blocks", "notes"})


def to_arrays(
    payload: AdapterPayload,
    *,
    compression: Compression = "none",
    rng: np.random.Generator | None = None,
) -> tuple[str, dict[str, npt.NDArray[Any]]]:
    """Pack a payload for the wire.

    Args:
        payload: what is sent (PUBLIC by the time it is packed: encoding is post-processing).
        compression: "none" (bit-exact float32), "bf16" or "int8".
        rng: randomness of int8's stochastic rounding; a fresh generator from the operating
            system's entropy if None. It needs no secrecy: it only rounds.

    Returns:
        (header, arrays): canonical JSON text, and one-dimensional arrays by name.

    Raises:
        WireError: if a block is not float32 or the compression has no such name.
    """
    if compression not in _DTYPES:
        raise WireError(f"compression is {compression!r}; allowed: {sorted(_DTYPES)}")
    names = sorted(payload.blocks)
    parts: list[npt.NDArray[Any]] = []
    scales: list[npt.NDArray[np.float32]] = []
    generator = np.random.default_rng() if rng is None and compression == "int8" else rng
    for name in names:
        block = payload.blocks[name]
        if block.dtype != np.float32:
            raise WireError(f"block {name!r} is {block.dtype}; allowed: float32; convert it before packing")
        if compression == "none":
            parts.append(np.ascontiguousarray(block).reshape(-1))
        elif compression == "bf16":
            parts.append(to_bf16(block).reshape(-1))
        else:
            codes, row_scales = to_int8_rows(block, cast(np.random.Generator, generator))
            parts.append(codes.reshape(-1))
            scales.append(row_scales)
    arrays = _chunks("p", parts, np.dtype(_DTYPES[compression]))
    if compression == "int8":
        arrays.update(_chunks("s", scales, np.dtype(np.float32)))
    return _header(payload, names, compression), arrays


def _header(payload: AdapterPayload, names: list[str], compression: str) -> str:
    modules = {
        path: [spec.out_features, spec.in_features, spec.rank, spec.scaling]
        for path, spec in payload.modules.items()
    }
    head = {
        "schema": WIRE_SCHEMA,
        "kind": payload.kind,
        "encoding": compression,
        "recipe": payload.recipe,
        "base": payload.base_fingerprint,
        "modules": modules,
        "blocks": [[name, list(payload.blocks[name].shape)] for name in names],
        "notes": dict(payload.notes),
    }
    return json.dumps(head, separators=(",", ":"), allow_nan=False)


def _chunks(prefix: str, parts: list[npt.NDArray[Any]], dtype: np.dtype[Any]) -> dict[str, npt.NDArray[Any]]:
    total = sum(part.size for part in parts)
    flat = np.empty(total, dtype=dtype)
    offset = 0
    for part in parts:
        flat[offset : offset + part.size] = part
        offset += part.size
    cuts = range(0, max(total, 1), CHUNK_ELEMENTS)
    return {f"{prefix}{index:04d}": flat[cut : cut + CHUNK_ELEMENTS] for index, cut in enumerate(cuts)}


def from_arrays(header: str, arrays: Packed, *, max_bytes: int = DEFAULT_MAX_BYTES) -> AdapterPayload:
    """Unpack what `to_arrays` packed; every claim of the header is checked before memory is used.

    Args:
        header: JSON text from the other side (untrusted).
        arrays: arrays by name (untrusted).
        max_bytes: largest total of the arrays, packed and unpacked, in bytes.

    Returns:
        The payload; float32 blocks are views of the arrays where they came in one chunk.

    Raises:
        PayloadTooLargeError: if header or arrays pass their limit (both numbers are given).
        SchemaVersionError: if the header speaks another schema version.
        WireError: if the header is not what `to_arrays` writes.
        LayoutMismatchError: if names, shapes or dtypes do not add up to the arrays.
    """
    head = _parse(header)
    encoding = head["encoding"]
    shapes = _shapes(head["blocks"])
    total = sum(math.prod(shape) for shape in shapes.values())
    itemsize = np.dtype(_DTYPES[encoding]).itemsize
    packed_bytes = sum(int(array.nbytes) for array in arrays.values())
    if packed_bytes > max_bytes or total * max(itemsize, 4) > max_bytes:
        raise PayloadTooLargeError(
            f"payload has {packed_bytes} bytes packed and {total * 4} unpacked; allowed: {max_bytes} "
            "(federation.max_payload_bytes); send the adapter only, or raise the limit"
        )
    flat = _join("p", arrays, total, np.dtype(_DTYPES[encoding]))
    num_scales = sum(rows_of(shape) for shape in shapes.values()) if encoding == "int8" else None
    scales = None if num_scales is None else _join("s", arrays, num_scales, np.dtype(np.float32))
    expected = _chunk_count(total) + (0 if num_scales is None else _chunk_count(num_scales))
    if len(arrays) != expected:
        raise LayoutMismatchError(f"payload has {len(arrays)} arrays, its header needs {expected}")
    return AdapterPayload(
        kind=head["kind"],
        blocks=_unpack(shapes, flat, scales, encoding),
        modules=_modules(head["modules"]),
        recipe=head["recipe"],
        base_fingerprint=head["base"],
        notes=_notes(head["notes"]),
    )


def _parse(header: str) -> dict[str, Any]:
    if not isinstance(header, str):
        raise WireError(f"payload header is {type(header).__name__}; allowed: JSON text")
    if len(header) > MAX_HEADER_BYTES:
        raise PayloadTooLargeError(
            f"payload header has {len(header)} characters; allowed: {MAX_HEADER_BYTES}"
        )
    try:
        head = json.loads(header, parse_constant=_no_constant, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise WireError(f"payload header is not JSON ({type(error).__name__})") from None
    if not isinstance(head, dict):
        raise WireError("payload header is not a JSON object")
    if type(head.get("schema")) is not int or head["schema"] != WIRE_SCHEMA:
        raise SchemaVersionError(
            f"message speaks wire schema {_short(head.get('schema'))}, this installation speaks "
            f"{WIRE_SCHEMA}; install the same fedlora version on both sides"
        )
    if set(head) != _KEYS:
        extra, missing = sorted(set(head) - _KEYS)[:3], sorted(_KEYS - set(head))[:3]
        raise WireError(f"payload header has unknown keys {_short(extra)} and lacks {missing}")
    _check_scalars(head)
    return head


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not allowed")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a name that is given twice: two readers could take different ones."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise LayoutMismatchError(f"payload header names {_short(twice)} twice; each name may stand once")
    return found


def _short(value: object) -> str:
    return repr(value)[:80]


def _check_scalars(head: Mapping[str, Any]) -> None:
    if head["kind"] not in get_args(PayloadKind):
        raise WireError(f"payload kind is {_short(head['kind'])}; allowed: {get_args(PayloadKind)}")
    if not isinstance(head["encoding"], str) or head["encoding"] not in _DTYPES:
        raise WireError(f"payload encoding is {_short(head['encoding'])}; allowed: {sorted(_DTYPES)}")
    for key, optional in (("recipe", True), ("base", False)):
        value = head[key]
        if not (isinstance(value, str) and len(value) <= MAX_NAME) and not (optional and value is None):
            raise WireError(f"payload header's {key!r} is {_short(value)}; allowed: a fingerprint")


def _shapes(entries: object) -> dict[str, tuple[int, ...]]:
    if not isinstance(entries, list) or len(entries) > MAX_BLOCKS:
        raise LayoutMismatchError(f"payload header must list at most {MAX_BLOCKS} blocks")
    shapes: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list)):
            raise LayoutMismatchError("a block entry of the payload header is not [name, shape]")
        name, shape = entry
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or name in shapes:
            raise LayoutMismatchError(f"block name {_short(name)} is empty, too long or given twice")
        if len(shape) > MAX_DIMENSIONS or not all(_is_count(size, 0) for size in shape):
            raise LayoutMismatchError(f"block {_short(name)} has no valid shape: {_short(shape)}")
        shapes[name] = tuple(shape)
    return shapes


def _is_count(value: object, low: int) -> bool:
    return type(value) is int and low <= value <= MAX_DIMENSION


def _modules(entries: object) -> dict[str, ModuleSpec]:
    if not isinstance(entries, dict) or len(entries) > MAX_BLOCKS:
        raise LayoutMismatchError(f"payload header must map at most {MAX_BLOCKS} modules")
    modules = {}
    for path, entry in entries.items():
        good = isinstance(entry, list) and len(entry) == 4 and all(_is_count(n, 1) for n in entry[:3])
        if not good or len(path) > MAX_NAME or type(entry[3]) not in (int, float):
            raise LayoutMismatchError(f"module {_short(path)} has no valid [out, in, rank, scaling]")
        scaling = entry[3]
        if not 0 < scaling < MAX_SCALING:
            raise LayoutMismatchError(
                f"module {_short(path)} has scaling {_short(scaling)}; allowed: finite, above 0"
            )
        modules[path] = ModuleSpec(entry[0], entry[1], entry[2], float(scaling))
    return modules


def _notes(entries: object) -> dict[str, str | int | float]:
    if not isinstance(entries, dict) or len(entries) > MAX_NOTES:
        raise WireError(f"payload notes must be an object of at most {MAX_NOTES} entries")
    for key, value in entries.items():
        fine = type(value) in (int, float, str) and not (type(value) is float and not math.isfinite(value))
        if not fine or len(key) > MAX_NAME or (type(value) is str and len(value) > MAX_NAME):
            raise WireError(f"payload note {_short(key)} is not a short text or a finite number")
    return dict(entries)


def _chunk_count(total: int) -> int:
    return max(1, -(-total // CHUNK_ELEMENTS))


def _join(prefix: str, arrays: Packed, total: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    names = [f"{prefix}{index:04d}" for index in range(_chunk_count(total))]
    parts = []
    for index, name in enumerate(names):
        part = arrays.get(name)
        size = min(CHUNK_ELEMENTS, total - index * CHUNK_ELEMENTS)
        if part is None or part.dtype != dtype or part.shape != (size,):
            got = "missing" if part is None else f"{part.dtype} {part.shape}"
            raise LayoutMismatchError(f"packed array {name} is {got}; the header needs {dtype} ({size},)")
        parts.append(part)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _unpack(
    shapes: Mapping[str, tuple[int, ...]],
    flat: npt.NDArray[Any],
    scales: npt.NDArray[np.float32] | None,
    encoding: str,
) -> dict[str, npt.NDArray[np.float32]]:
    blocks, offset, row = {}, 0, 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        part = flat[offset : offset + size].reshape(shape)
        offset += size
        if encoding == "bf16":
            part = from_bf16(part)
        elif scales is not None:
            rows = rows_of(shape)
            part = from_int8_rows(part, scales[row : row + rows])
            row += rows
        blocks[name] = part
    return blocks
