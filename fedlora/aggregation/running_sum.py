"""A weighted sum of payloads whose memory does not grow with the number of clients.

Up to `GROUP` payloads are held by reference and added together in cache-sized pieces, in float32
within the group and in float64 across groups: a client costs about two memory copies of its bytes, and
the relative rounding error stays below GROUP 2^-24 = 4.8e-7 of the sum of magnitudes. The order of the
additions is the order of `add`: sorted clients give repeatable bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from fedlora.aggregation.types import Blocks, Float64

GROUP: Final = 8
_PIECE: Final = 1 << 15


class RunningSum:
    """Sum over clients of weight * block, block by block; blocks may come from some clients only."""

    def __init__(self) -> None:
        """Start at zero."""
        self._sums: dict[str, Float64] = {}
        self._weights: dict[str, float] = {}
        self._held: list[tuple[Blocks, float]] = []

    def add(self, blocks: Blocks, weight: float = 1.0, *, count: float | None = None) -> None:
        """Add one update; it is read at the next flush, so it must not be changed meanwhile.

        Args:
            blocks: float32, contiguous, finite.
            weight: finite, above 0.
            count: what the update weighs in `weights`, if it is itself a sum; `weight` otherwise.
        """
        self._held.append((blocks, weight))
        for name in blocks:
            self._weights[name] = self._weights.get(name, 0.0) + (weight if count is None else count)
        if len(self._held) >= GROUP:
            self.flush()

    def add_sums(self, sums: Mapping[str, Float64], weight: float) -> None:
        """Add sums that were formed elsewhere, of updates with this weight in all."""
        for name, block in sums.items():
            self._weights[name] = self._weights.get(name, 0.0) + weight
            if name in self._sums:
                np.add(self._sums[name], block, out=self._sums[name])
            else:
                self._sums[name] = block.copy()

    def flush(self) -> None:
        """Add the held updates to the float64 sums and let go of them."""
        held, self._held = self._held, []
        names = dict.fromkeys(name for blocks, _ in held for name in blocks)
        for name in names:
            parts = [(blocks[name], weight) for blocks, weight in held if name in blocks]
            if name not in self._sums:
                self._sums[name] = np.zeros(parts[0][0].shape)
            _add_group(self._sums[name].reshape(-1), [(p.reshape(-1), w) for p, w in parts])

    @property
    def weights(self) -> Mapping[str, float]:
        """Sum of the weights per block."""
        return self._weights

    def total(self) -> dict[str, Float64]:
        """Return the sums, float64 (the object's own arrays: copy before changing)."""
        self.flush()
        return self._sums

    def mean(self) -> dict[str, Float64]:
        """Return each block's sum over its own sum of weights."""
        return {name: block / self._weights[name] for name, block in self.total().items()}


def _add_group(total: Float64, parts: Sequence[tuple[npt.NDArray[np.float32], float]]) -> None:
    """Add weighted parts to `total`, one cache-sized piece at a time."""
    width = min(_PIECE, total.size)
    group, scaled = np.empty((2, width), dtype=np.float32)
    for start in range(0, total.size, _PIECE):
        piece = slice(start, start + _PIECE)
        target = total[piece]
        partial, other = group[: target.size], scaled[: target.size]
        first, weight = parts[0]
        np.multiply(first[piece], np.float32(weight), out=partial)
        for part, weight in parts[1:]:
            if weight == 1.0:
                np.add(partial, part[piece], out=partial)
            else:
                np.add(partial, np.multiply(part[piece], np.float32(weight), out=other), out=partial)
        np.add(target, partial, out=target)
