"""One forward and backward pass under observation: where taps read their views and write their blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from fedlora.adapters.blocks import FlatBlocks
from fedlora.adapters.deferred import DeferredGradient, LookupGradient, OuterGradient
from fedlora.adapters.records import RecordAxis
from fedlora.adapters.views import LayerView
from fedlora.errors import ModelError


@dataclass
class TapSession:
    """SENSITIVE. State of one pass; made by the engine, dropped after the backward.

    Attributes:
        records: the record axis of the batch.
        views: module path to its view.
        extras: payload name of a trained extra parameter to its values (K, *shape), compute dtype.
        blocks: per-record blocks, accumulation dtype (float32 or float64).
        anchor: a scalar that requires grad, so that taps under a frozen input are reached.
        left_out: name of a trained matrix to a unit vector (in,) of its input's space in which it does not move.
    """

    records: RecordAxis
    views: Mapping[str, LayerView]
    extras: Mapping[str, torch.Tensor]
    blocks: FlatBlocks
    anchor: torch.Tensor
    left_out: Mapping[str, torch.Tensor] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    gram_norms: dict[str, torch.Tensor] = field(default_factory=dict)
    _outer: dict[str, list[OuterGradient]] = field(default_factory=dict)
    _lookup: dict[str, list[LookupGradient]] = field(default_factory=dict)

    @property
    def accumulate(self) -> torch.dtype:
        """Dtype of norms and sums."""
        return self.blocks.flat.dtype

    def tokens(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return a layer input as (records, tokens, width).

        Raises:
            ModelError: if its first axis is not the record axis.
        """
        if x.dim() < 2 or x.shape[0] != self.records.num_records:
            raise ModelError(
                f"layer {name}: its input's first axis has {x.shape[0] if x.dim() else 0} rows for "
                f"{self.records.num_records} records; allowed are layers that keep records apart on the first axis; "
                "leave this layer out of target_modules and modules_to_save (routed experts, packed or windowed layers)"
            )
        return x if x.dim() == 3 else x.reshape(x.shape[0], -1, x.shape[-1])

    def write(self, name: str, left: torch.Tensor, right: torch.Tensor, scale: float = 1.0) -> None:
        """Add scale * left @ right per record to block `name`; left (n, p, t), right (n, t, q)."""
        target = self.blocks[name]
        beta = 1.0 if name in self.written else 0.0
        self.written.add(name)
        if left.dtype == target.dtype:
            if target.is_contiguous() or left.is_cuda:
                target.baddbmm_(left, right, beta=beta, alpha=scale)
            elif beta == 0.0:
                torch.mul(torch.bmm(left, right), scale, out=target)
            else:
                target.add_(torch.bmm(left, right), alpha=scale)
            return
        if left.is_cuda and beta == 0.0 and scale == 1.0:
            torch.bmm(left, right, out_dtype=torch.float32, out=target)
            return
        if left.is_cuda:
            product = torch.bmm(left, right, out_dtype=torch.float32)
        else:
            product = torch.bmm(left.to(target.dtype), right.to(target.dtype))
        if beta == 0.0:
            torch.mul(product, scale, out=target)
        else:
            target.add_(product, alpha=scale)

    def write_rows(self, name: str, rows: torch.Tensor) -> None:
        """Add rows (records, *shape) to block `name`."""
        target = self.blocks[name]
        if name in self.written:
            target.add_(rows)
        else:
            target.copy_(rows)
        self.written.add(name)

    def keep_gram(self, name: str, squared: torch.Tensor) -> None:
        """Keep a block's squared norm that does not follow from the block itself.

        Raises:
            ModelError: if the layer ran twice in this pass, where the norms of the two calls do not add.
        """
        if name in self.gram_norms:
            raise ModelError(
                f"layer of block {name}: ran twice in one pass; allowed is once under noisy_projection; "
                "leave shared layers out of target_modules"
            )
        self.gram_norms[name] = squared

    def keep_outer(self, name: str, g: torch.Tensor, x: torch.Tensor, transposed: bool) -> None:
        """Keep the factors of a Linear's weight gradient, without what `left_out` says."""
        wide = x.detach().to(self.accumulate)
        if name in self.left_out:
            wide = without_direction(wide, self.left_out[name])
        self._outer.setdefault(name, []).append(
            OuterGradient(g.detach().to(self.accumulate), wide, transposed)
        )

    def keep_lookup(self, name: str, g: torch.Tensor, ids: torch.Tensor, num_rows: int) -> None:
        """Keep the rows of an embedding's gradient."""
        self._lookup.setdefault(name, []).append(
            LookupGradient(g.detach().to(self.accumulate), ids, num_rows)
        )

    def deferred(self) -> dict[str, DeferredGradient]:
        """Return what was kept; calls of one layer are joined along the tokens, so that tied uses are summed."""
        kept: dict[str, DeferredGradient] = {}
        for name, outers in self._outer.items():
            kept[name] = (
                outers[0]
                if len(outers) == 1
                else OuterGradient(
                    torch.cat([part.g for part in outers], 1),
                    torch.cat([part.x for part in outers], 1),
                    outers[0].transposed,
                )
            )
        for name, lookups in self._lookup.items():
            kept[name] = (
                lookups[0]
                if len(lookups) == 1
                else LookupGradient(
                    torch.cat([part.g for part in lookups], 1),
                    torch.cat([part.ids for part in lookups], 1),
                    lookups[0].num_rows,
                )
            )
        return kept


def without_direction(rows: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    """Return rows (..., width) less their part along a unit vector (width,), taken off twice against rounding."""
    for _ in range(2):
        rows = rows - (rows @ direction).unsqueeze(-1) * direction
    return rows
