"""The types of one private step; only `noise` turns a ClippedSum into a NoisyUpdate.

Every stage is written for a cohort: tensors of per-client values carry a leading client
axis K >= 1, and a single client is a cohort of one. Per-record values carry a leading
record axis, and `client_of_record` says whose each record is.

```
per_record -> PerRecordGradients   SENSITIVE
clip       -> ClippedSum           SENSITIVE   carries bound and metric
noise      -> NoisyUpdate          PUBLIC      carries the accounting event; on disk before it exists
direction  -> Direction            PUBLIC
apply      -> new local state      PUBLIC
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedlora.accounting import Event

Blocks = Mapping[str, torch.Tensor]
"""Payload name ("<module>|<block>") to tensor."""


@dataclass(frozen=True)
class Metric:
    """The norm in which records are clipped and in which the noise is isotropic.

    Attributes:
        kind: "euclidean" (plain coordinates), "tangent" (PRISM frames), or "ambient" (full
            matrices; norms by token Gram matrices).
        group_weights: public weight w_g > 0 per group; the clipped norm is
            sqrt(sum_g w_g^2 ||g||^2) and group g receives noise sigma C / w_g.
        group_of: group of each block.
        per_layer: each module is clipped to the bound alone (sensitivity sqrt(modules) C).
    """

    kind: str
    group_weights: Mapping[str, float]
    group_of: Mapping[str, str]
    per_layer: bool = False


@dataclass(frozen=True)
class PerRecordGradients:
    """SENSITIVE. Per-record gradients of one batch in the mechanism's coordinates.

    Attributes:
        blocks: (records, *shape) each, float32 or better; non-finite records already zeroed.
        squared_norms: (groups, records), the metric's squared norm per group, unweighted.
        client_of_record: (records,) int64 in [0, num_clients).
        num_clients: K.
    """

    blocks: Blocks
    squared_norms: Mapping[str, torch.Tensor]
    client_of_record: torch.Tensor
    num_clients: int


@dataclass(frozen=True)
class ClippedSum:
    """SENSITIVE. Per-client sums of clipped gradients: one record moves client k's sum by <= bound.

    Attributes:
        blocks: (clients, *shape) each.
        bound: C, in the metric.
        metric: the norm that was clipped.
    """

    blocks: Blocks
    bound: float
    metric: Metric


@dataclass(frozen=True)
class NoisyUpdate:
    """PUBLIC. Noised sums with the event that accounts for them (per client, per step).

    Attributes:
        blocks: (clients, *shape) each.
        noise_stddev: absolute standard deviation per group (sigma C / w_g).
        event: what one step of one client released.
    """

    blocks: Blocks
    noise_stddev: Mapping[str, float]
    event: Event


@dataclass(frozen=True)
class Direction:
    """PUBLIC. A descent direction in the mechanism's coordinates; W changes by -lr times it."""

    blocks: Blocks
