"""Payload updates to the one vector that secure aggregation sums, and back (linear modes)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from fedlora.aggregation.client_privacy import ClientPlan
from fedlora.aggregation.secagg_field import FixedPoint
from fedlora.aggregation.types import Float64
from fedlora.errors import InconsistentRepliesError, LayoutMismatchError
from fedlora.wire.layout import expected_blocks
from fedlora.wire.payload import AdapterLayout, AdapterPayload, PayloadKind

COMPLETE_GRAPH_UP_TO: Final = 64
"""Up to so many clients everybody masks with everybody; above, each with so many neighbours."""
NOISE_TAIL: Final = 6.0
"""Numbers are clipped at the clipping norm plus so many standard deviations of a share of noise."""


def share_limit(plan: ClientPlan) -> float:
    """Return the bound of one number of an update that is clipped and has its share of noise."""
    return plan.clipping_norm + NOISE_TAIL * plan.share_stddev


def update_shapes(layout: AdapterLayout, kind: PayloadKind) -> dict[str, tuple[int, ...]]:
    """Return update block to shape in the order of the vector (sorted names).

    Raises:
        InconsistentRepliesError: if sums of such updates mean nothing.
    """
    if kind not in ("lora_b", "tangent"):
        raise InconsistentRepliesError(f"secure aggregation sums lora_b or tangent updates, not {kind!r}")
    shapes = expected_blocks(layout.modules, layout.extra, kind)
    return {name: shapes[name] for name in sorted(shapes)}


def update_vector(payload: AdapterPayload, current: AdapterPayload) -> npt.NDArray[np.float32]:
    """Return a client's update (new - old) as one float32 vector, blocks in the order of their names.

    Args:
        payload: lora_b values or tangent updates (noised by the client where the run is private).
        current: the global adapter that it started from.
    """
    parts = []
    for name in sorted(payload.blocks):
        block = payload.blocks[name]
        values = block if payload.kind == "tangent" else block - current.blocks[name]
        parts.append(values.reshape(-1))
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)


def vector_blocks(vector: Float64, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Float64]:
    """Cut a summed vector into blocks.

    Raises:
        LayoutMismatchError: if the lengths differ.
    """
    total = sum(math.prod(shape) for shape in shapes.values())
    if vector.shape != (total,):
        raise LayoutMismatchError(f"secure sum has {vector.shape} numbers; the layout needs {total}")
    blocks, offset = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        blocks[name] = vector[offset : offset + size].reshape(shape)
        offset += size
    return blocks


def encoding_for(limit: float, clients: int) -> FixedPoint:
    """Return the ring for updates whose numbers stay within `limit`: 32 bits while that leaves 16 bits each.

    Args:
        limit: public bound of one number: the clipping norm plus 6 standard deviations of a share of noise.
        clients: most clients in a sum.
    """
    return FixedPoint(limit, clients, 32 if clients <= 2**15 else 64)
