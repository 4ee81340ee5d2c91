"""Smaller numbers for the wire: bf16 and int8 with stochastic rounding (post-processing).

The int8 error of one number is below its row's scale max|row| / 127, with mean zero
(Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
Section 3.1, with the maximum norm).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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


def _is_tall(shape: Sequence[int]) -> bool:
    return len(shape) == 2 and shape[0] > shape[1]


def rows_of(shape: Sequence[int]) -> int:
    """Number of scales of a block: one a row along the shorter side of a matrix (a rank component), one a vector.

    Example:
        >>> rows_of((4096, 8)), rows_of((8, 4096)), rows_of((3,))
        (8, 8, 1)
    """
    if _is_tall(shape):
        return int(shape[1])
    return int(shape[0]) if len(shape) > 1 else 1


def _rows(block: npt.NDArray[Any], shape: Sequence[int]) -> npt.NDArray[Any]:
    """View a block as (scales, numbers of one scale)."""
    if _is_tall(shape):
        return block.T
    rows = rows_of(shape)
    return block.reshape(rows, math.prod(shape) // max(rows, 1))


def to_int8_rows(values: Float, rng: np.random.Generator) -> tuple[npt.NDArray[np.int8], Float]:
    """Quantise each row to [-127, 127] times its scale, rounding up or down at random without bias.

    A row with a non-finite number gets a NaN scale, so that the receiver's check rejects it.

    Args:
        values: float32 of any shape; see `rows_of` for what a row is.
        rng: coins of the rounding.

    Returns: (codes int8 of the same shape, scales float32 (rows,)).
    """
    table = _rows(np.ascontiguousarray(values, dtype=np.float32), values.shape)
    if table.size == 0:
        return np.zeros(values.shape, dtype=np.int8), np.zeros(table.shape[0], dtype=np.float32)
    peak = np.abs(table).max(axis=1)
    scales = np.where(np.isfinite(peak), peak / np.float32(127.0), np.float32(np.nan)).astype(np.float32)
    usable = np.isfinite(scales) & (scales > 0)
    safe = np.where(usable, scales, np.float32(1.0))[:, None]
    scaled = np.where(usable[:, None], table, np.float32(0.0)) / safe
    low = np.floor(scaled)
    whole = low + (rng.random(size=table.shape, dtype=np.float32) < scaled - low)
    codes = np.clip(whole, -127, 127).astype(np.int8)
    return np.ascontiguousarray(codes.T if _is_tall(values.shape) else codes.reshape(values.shape)), scales


def from_int8_rows(codes: npt.NDArray[np.int8], scales: Float) -> Float:
    """Undo `to_int8_rows` up to its rounding: codes times their row's scale."""
    table = _rows(codes, codes.shape).astype(np.float32) * scales[:, None]
    return np.ascontiguousarray(table.T if _is_tall(codes.shape) else table.reshape(codes.shape))
