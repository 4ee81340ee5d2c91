"""The types of one private step; only `noise` turns a ClippedSum into a NoisyUpdate.

Every stage is written for a cohort: tensors of per-client values carry a leading client
axis K >= 1, and a single client is a cohort of one. Per-record values carry a leading
record axis, and a `RecordAxis` says whose each record is.

```
per_record -> PerRecordGradients   SENSITIVE
clip       -> ClippedSum           SENSITIVE   carries bound and metric
noise      -> NoisyUpdate          PUBLIC      carries the accounting event; on disk before it exists
direction  -> Direction            PUBLIC
apply      -> new local state      PUBLIC
```
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from fedlora.accounting import Event
from fedlora.adapters.blocks import FlatBlocks
from fedlora.adapters.deferred import DeferredGradient
from fedlora.adapters.records import RecordAxis
from fedlora.errors import PrivacyParameterError

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
        per_layer: each group is clipped to the bound alone (sensitivity sqrt(groups) C); a group is
            then one module.
    """

    kind: str
    group_weights: Mapping[str, float]
    group_of: Mapping[str, str]
    per_layer: bool = False

    def weight(self, group: str) -> float:
        """Return w_g.

        Raises:
            PrivacyParameterError: if it is not known, or not finite and positive.
        """
        value = self.group_weights.get(group)
        if value is None or not math.isfinite(value) or not (value > 0.0):
            raise PrivacyParameterError(
                f"group weight of {group!r}: got {value}; allowed finite and above 0; resolve privacy.group_weights "
                "(auto needs the model and public sequences)"
            )
        return value

    def blocks_of(self, group: str) -> tuple[str, ...]:
        """Return the blocks of one group, in order."""
        return tuple(name for name, owner in self.group_of.items() if owner == group)


@dataclass(frozen=True)
class PerRecordGradients:
    """SENSITIVE. Per-record gradients of one batch in the mechanism's coordinates.

    Attributes:
        blocks: (records, *shape) each, float32 or better; non-finite records already zeroed. One flat
            tensor underneath (`blocks.flat`, (records, size)).
        deferred: trained matrices (heads, embeddings) that stay factored; same record axis.
        squared_norms: group to (records,), sums of squares of the group's blocks, unweighted; norms of full
            gradients for `projected`. See `Mechanism.measured` for the metric's norm.
        records: the record axis (whose each record is).
    """

    blocks: FlatBlocks
    squared_norms: Mapping[str, torch.Tensor]
    records: RecordAxis
    deferred: Mapping[str, DeferredGradient] = field(default_factory=dict)

    @property
    def client_of_record(self) -> torch.Tensor:
        """(records,) int64 in [0, num_clients)."""
        return self.records.client

    @property
    def num_clients(self) -> int:
        """K."""
        return self.records.num_clients


@dataclass(frozen=True)
class ClippedSum:
    """SENSITIVE. Per-client sums of clipped gradients: one record moves client k's sum by <= bound.

    Attributes:
        blocks: (clients, *shape) each, over one flat tensor (clients, size).
        bound: C, in the metric (each group's own under `per_layer`); infinity where nothing was clipped.
        metric: the norm that was clipped.
    """

    blocks: FlatBlocks
    bound: float
    metric: Metric


@dataclass(frozen=True)
class NoisyUpdate:
    """PUBLIC. Noised sums with the event that accounts for them (per client, per step).

    Attributes:
        blocks: (clients, *shape) each, over one flat tensor.
        noise_stddev: absolute standard deviation per group (sigma C / w_g); 0 without privacy.
        event: what one step of one client released.
    """

    blocks: FlatBlocks
    noise_stddev: Mapping[str, float]
    event: Event


@dataclass(frozen=True)
class Direction:
    """PUBLIC. A descent direction in the mechanism's coordinates; W changes by -lr times it."""

    blocks: FlatBlocks
