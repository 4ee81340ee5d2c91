"""A weighted sum of payloads whose memory does not grow with the number of clients.

Up to `GROUP` payloads are held by reference and added together in cache-sized pieces, in float32
within the group (pairwise) and in float64 across groups: a client costs about two memory copies of
its bytes, and the relative rounding error stays below (log2 GROUP + 1) 2^-24 = 2.4e-7 of the sum of
magnitudes. The order of the additions is the order of `add`: sorted clients give repeatable bits.
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
    scratch = np.empty((len(parts), min(_PIECE, max(total.size, 1))), dtype=np.float32)
    for start in range(0, total.size, _PIECE):
        piece = slice(start, start + _PIECE)
        width = min(_PIECE, total.size - start)
        terms: list[npt.NDArray[np.float32]] = []
        for row, (part, weight) in enumerate(parts):
            if weight == 1.0:
                terms.append(part[piece])
            else:
                terms.append(np.multiply(part[piece], np.float32(weight), out=scratch[row, :width]))
        target = total[piece]
        np.add(target, _pairwise(terms, scratch[:, :width]), out=target)


def _pairwise(
    terms: list[npt.NDArray[np.float32]], scratch: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    while len(terms) > 1:
        merged = [np.add(terms[i], terms[i + 1], out=scratch[i // 2]) for i in range(0, len(terms) - 1, 2)]
        if len(terms) % 2:
            merged.append(terms[-1])
        terms = merged
    return terms[0]
