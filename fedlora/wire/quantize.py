"""Smaller numbers for the wire: bf16 and int8 with stochastic rounding (post-processing).

The int8 error of one number is below its row's scale max|row| / 127, with mean zero
(Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
Section 3.1, with the maximum norm).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float32]


def to_bf16(values: Float) -> npt.NDArray[np.uint16]:
    """Round float32 to bfloat16 (nearest, ties to even); NaN stays NaN, infinity stays infinity.

    Returns: uint16 bit patterns, same shape.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    out = (rounded >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(values)
    return np.where(nan, np.uint16(0x7FC0), out) if bool(nan.any()) else out


def from_bf16(patterns: npt.NDArray[np.uint16]) -> Float:
    """Widen bfloat16 bit patterns to float32 (exact)."""
    return (np.ascontiguousarray(patterns).astype(np.uint32) << np.uint32(16)).view(np.float32)


def rows_of(shape: Sequence[int]) -> int:
    """Rows of a block, each with its own scale: the first dimension of a matrix, 1 of a vector or number."""
    return int(shape[0]) if len(shape) > 1 else 1


def to_int8_rows(values: Float, rng: np.random.Generator) -> tuple[npt.NDArray[np.int8], Float]:
    """Quantise each row to [-127, 127] times its scale, rounding up or down at random without bias.

    A row with a non-finite number gets a NaN scale, so that the receiver's check rejects it.

    Args:
        values: float32 of any shape; rows along the first dimension (a vector is one row).
        rng: coins of the rounding.

    Returns: (codes int8 of the same shape, scales float32 (rows,)).
    """
    rows = rows_of(values.shape)
    columns = values.size // max(rows, 1)
    table = np.ascontiguousarray(values, dtype=np.float32).reshape(rows, columns)
    if table.size == 0:
        return np.zeros(values.shape, dtype=np.int8), np.zeros(table.shape[0], dtype=np.float32)
    peak = np.abs(table).max(axis=1)
    scales = np.where(np.isfinite(peak), peak / np.float32(127.0), np.float32(np.nan)).astype(np.float32)
    usable = np.isfinite(scales) & (scales > 0)
    safe = np.where(usable, scales, np.float32(1.0))[:, None]
    scaled = np.where(usable[:, None], table, np.float32(0.0)) / safe
    low = np.floor(scaled)
    codes = low + (rng.random(size=table.shape, dtype=np.float32) < scaled - low)
    return np.clip(codes, -127, 127).astype(np.int8).reshape(values.shape), scales


def from_int8_rows(codes: npt.NDArray[np.int8], scales: Float) -> Float:
    """Undo `to_int8_rows` up to its rounding: codes times their row's scale."""
    rows = rows_of(codes.shape)
    table = codes.reshape(rows, math.prod(codes.shape) // max(rows, 1)).astype(np.float32)
    return (table * scales[:, None]).reshape(codes.shape)
