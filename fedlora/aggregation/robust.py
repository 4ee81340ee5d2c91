"""Robust means in the linear modes' common coordinates: trimmed mean, median, norm-bounded mean.

Coordinate-wise trimmed mean and median follow "Byzantine-Robust Distributed Learning: Towards
Optimal Statistical Rates" (Yin et al., Definitions 1 and 2). They keep one round's updates in memory.
They have no client-level sensitivity bound and are refused with client-level privacy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import numpy as np

from fedlora.aggregation.client_privacy import ClientMetric
from fedlora.aggregation.types import Blocks, Float64
from fedlora.errors import TooFewRepliesError
from fedlora.wire.payload import AdapterPayload

Robust = Literal["trimmed", "median", "norm_bounded"]
_ROWS: Final = 1 << 16


class RobustRound:
    """Collects one round's updates and combines them; weights are equal."""

    def __init__(
        self, kind: Robust, current: AdapterPayload, trim_fraction: float, bound: float | None
    ) -> None:
        """Start a round at `current`."""
        self._kind, self._trim, self._bound = kind, trim_fraction, bound
        self._metric = ClientMetric(current)
        self._updates: list[Mapping[str, Float64]] = []
        self._sum: dict[str, Float64] = {}
        self._count = 0

    def add(self, blocks: Blocks) -> None:
        """Add one checked update; `norm_bounded` sums at once, the others keep it."""
        self._count += 1
        if self._kind == "norm_bounded" and self._bound is not None:
            for name, block in self._metric.clip(blocks, self._bound).blocks.items():
                self._sum[name] = self._sum[name] + block if name in self._sum else block
        else:
            self._updates.append(self._metric.update_of(blocks))

    def mean(self) -> dict[str, Float64]:
        """Return the robust mean update.

        Raises:
            TooFewRepliesError: if trimming leaves nothing.
        """
        if self._kind == "norm_bounded":
            return {name: block / self._count for name, block in self._sum.items()}
        cut = int(np.ceil(self._trim * self._count)) if self._kind == "trimmed" else 0
        if self._count <= 2 * cut:
            raise TooFewRepliesError(
                f"{self._count} usable answers, {cut} trimmed on either side: nothing is left; lower "
                "federation.aggregation.trim_fraction or sample more clients"
            )
        names = self._updates[0]
        return {name: _combine([u[name] for u in self._updates], cut, self._kind) for name in names}


def _combine(parts: Sequence[Float64], cut: int, kind: str) -> Float64:
    out = np.empty(parts[0].size)
    flats = [part.reshape(-1) for part in parts]
    for start in range(0, out.size, _ROWS):
        table = np.stack([flat[start : start + _ROWS] for flat in flats])
        if kind == "median":
            out[start : start + _ROWS] = np.median(table, axis=0)
        else:
            table.sort(axis=0)
            out[start : start + _ROWS] = table[cut : len(parts) - cut].mean(axis=0)
    return out.reshape(parts[0].shape)
