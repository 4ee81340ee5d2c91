"""Small updates in the linear modes: checked, copied into one row and summed with few calls.

Below a megabyte the calls per block cost more than the bytes. Here an update that is exactly what was agreed becomes
one row of a small matrix: one copy, one dot product for the finite check, and one matrix-vector product for every
`GROUP` updates. Whatever is not exactly as agreed is left to `fedlora.wire.checks`, which names the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Final

import numpy as np

from fedlora.aggregation.running_sum import GROUP
from fedlora.aggregation.types import Float64
from fedlora.wire.payload import AdapterLayout, AdapterPayload, Array, PayloadKind

LARGEST: Final = 2_000_000
"""Updates of at most so many bytes are packed; `GROUP` of them are held at a time."""
_SURE: Final = 0.998
_PIECE: Final = 1 << 15
_FLOAT32: Final = np.dtype(np.float32)


class PackedUpdates:
    """One round's sum of small updates of one layout.

    Args:
        layout: PUBLIC shapes.
        recipe: recipe that every update must name, or None where the kind shares none.
        kind: coordinates of the updates.
        shapes: update block to shape.
        max_norm: largest norm of an update, or None.
    """

    def __init__(
        self,
        layout: AdapterLayout,
        recipe: str | None,
        kind: PayloadKind,
        shapes: Mapping[str, tuple[int, ...]],
        max_norm: float | None,
    ) -> None:
        """Start at zero."""
        self._kind, self._base, self._modules = kind, layout.base_fingerprint, layout.modules
        self._needs_recipe, self._recipe = kind in ("lora_b", "projected"), recipe
        self._shapes, self._sizes = dict(shapes), tuple(shapes.values())
        names = tuple(shapes)
        get: Any = itemgetter(*names)
        self._get = get if len(names) > 1 else lambda blocks: (get(blocks),)
        self._most = math.inf if max_norm is None else _SURE * max_norm * max_norm
        size = sum(math.prod(shape) for shape in self._sizes)
        self.nbytes = 4 * size
        width = -(-size // 1024) * 1024 + 144  # rows a multiple of 4096 bytes apart would share cache sets
        self._rows = np.empty((GROUP, width), dtype=np.float32)[:, :size]
        self._weights = np.empty(GROUP, dtype=np.float32)
        self._held = 0
        self._part = np.empty(min(_PIECE, size), dtype=np.float32)
        self._total: Float64 = np.zeros(size)
        self.weight = 0.0

    def takes(self, payload: AdapterPayload) -> bool:
        """Copy an update to the next row; False if it is not surely good, and then nothing has happened.

        The squares' sum over all blocks is finite only if every block's is; near any limit the slow checks decide.
        """
        blocks = payload.blocks
        if (
            payload.kind != self._kind
            or payload.base_fingerprint != self._base
            or (self._needs_recipe and (self._recipe is None or payload.recipe != self._recipe))
            or (payload.modules is not self._modules and payload.modules != self._modules)
            or blocks.keys() != self._shapes.keys()
        ):
            return False
        arrays: tuple[Array, ...] = self._get(blocks)
        for array, shape in zip(arrays, self._sizes, strict=True):
            if type(array) is not np.ndarray or array.dtype is not _FLOAT32 or array.shape != shape:
                return False
        row = self._rows[self._held]
        np.concatenate(arrays, axis=None, out=row)
        with np.errstate(over="ignore", invalid="ignore"):
            return bool(np.dot(row, row) < self._most)

    def keep(self, weight: float) -> None:
        """Count the row that `takes` has just filled."""
        self._weights[self._held] = weight
        self._held += 1
        self.weight += weight
        if self._held == GROUP:
            self.flush()

    def flush(self) -> None:
        """Add the held rows to the float64 sum: float32 within the group, float64 across groups."""
        if self._held == 0:
            return
        weights, rows = self._weights[: self._held], self._rows[: self._held]
        for start in range(0, self._total.size, _PIECE):
            piece = slice(start, start + _PIECE)
            target = self._total[piece]
            part = np.matmul(weights, rows[:, piece], out=self._part[: target.size])
            np.add(target, part, out=target)
        self._held = 0

    def blocks(self) -> dict[str, Float64]:
        """Return the weighted sum as blocks (views)."""
        self.flush()
        found, start = {}, 0
        for name, shape in self._shapes.items():
            size = math.prod(shape)
            found[name] = self._total[start : start + size].reshape(shape)
            start += size
        return found
