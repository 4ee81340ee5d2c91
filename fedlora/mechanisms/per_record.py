"""The engine: one forward, one backward, per-record gradients in the mechanism's coordinates."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from fedlora.adapters.adapted import AdaptedModel
from fedlora.adapters.blocks import FlatBlocks
from fedlora.adapters.deferred import DeferredGradient
from fedlora.adapters.records import RecordAxis
from fedlora.adapters.session import TapSession
from fedlora.adapters.views import LayerView
from fedlora.errors import ModelError
from fedlora.mechanisms.coordinates import Coordinates
from fedlora.mechanisms.stages import Metric, PerRecordGradients

LossFn = Callable[[], torch.Tensor]
"""Runs the model's forward and returns (records,) losses, each of one record only."""


def per_record_gradients(
    adapted: AdaptedModel,
    coordinates: Coordinates,
    metric: Metric,
    views: Mapping[str, LayerView],
    extras: Mapping[str, torch.Tensor],
    records: RecordAxis,
    losses: LossFn,
    left_out: Mapping[str, torch.Tensor] | None = None,
) -> PerRecordGradients:
    """Run one forward and backward and return every record's gradient.

    Formal guarantee: a record's gradient depends on that record only; records whose gradient is not finite
    are zero in every block and norm.

    Args:
        adapted: the model; its taps route the pass.
        coordinates: what is collected.
        metric: how blocks are grouped for the norms.
        views: module path to its view for this step.
        extras: trained extra parameters (K, *shape), compute dtype.
        records: SENSITIVE. The batch's record axis, at least one record.
        losses: SENSITIVE. Forward of the batch; each record's loss over its own tokens only.
        left_out: PUBLIC. See `Mechanism.left_out`.

    Returns:
        SENSITIVE per-record gradients.

    Raises:
        ModelError: if the loss is not one number per record, or a tapped layer was never reached.
    """
    wide, device = adapted.accumulate_dtype, adapted.device
    count = records.num_records
    flat = torch.empty(count, coordinates.stored.size, dtype=wide, device=device)
    anchor = torch.zeros((), device=device, requires_grad=True)
    blocks = FlatBlocks(coordinates.stored, flat)
    session = TapSession(records, views, extras, blocks, anchor, left_out or {})
    adapted.prepare_pass()
    with adapted.taps.open(session), torch.enable_grad():
        loss = losses()
        if loss.shape != (count,):
            raise ModelError(
                f"loss: shape {tuple(loss.shape)}; expected one number for each of {count} records"
            )
        if loss.requires_grad:
            torch.autograd.backward(loss.sum())
    deferred = session.deferred()
    _fill_unreached(session, coordinates, deferred)
    return _finish(session, metric, deferred)


def _fill_unreached(
    session: TapSession, coordinates: Coordinates, deferred: Mapping[str, DeferredGradient]
) -> None:
    """Blocks that no gradient reached are zero; if none was reached at all, the model is not adapted.

    Raises:
        ModelError: if no tap wrote anything.
    """
    if not session.written and not deferred:
        raise ModelError(
            "adapter: no tapped layer was reached by the loss; allowed is a model whose adapted layers are used; "
            "check target_modules and that the forward runs the adapted model"
        )
    for name in coordinates.stored.shapes:
        if name not in session.written:
            session.blocks[name].zero_()


def _finish(
    session: TapSession, metric: Metric, deferred: Mapping[str, DeferredGradient]
) -> PerRecordGradients:
    """Compute norms per group and drop records that are not finite."""
    squared = _squared_norms(session, metric, deferred)
    total = torch.stack(tuple(squared.values())).sum(0)
    keep = torch.isfinite(total)
    blocks = session.blocks
    if blocks.flat.is_cuda or not bool(keep.all()):
        blocks.flat.masked_fill_(~keep.unsqueeze(1), 0.0)
        squared = {group: torch.where(keep, value, 0.0) for group, value in squared.items()}
        deferred = {name: value.masked(keep) for name, value in deferred.items()}
    return PerRecordGradients(blocks, squared, session.records, deferred)


def _squared_norms(
    session: TapSession, metric: Metric, deferred: Mapping[str, DeferredGradient]
) -> dict[str, torch.Tensor]:
    """Return group to (records,): sums of squares of the blocks, and Gram norms."""
    table, flat = session.blocks.table, session.blocks.flat
    plain: dict[str, list[str]] = {}
    squared: dict[str, torch.Tensor] = {}

    def add(group: str, value: torch.Tensor) -> None:
        squared[group] = value if group not in squared else squared[group] + value

    for name, group in metric.group_of.items():
        if name in session.gram_norms:
            add(group, session.gram_norms[name])
        elif name in deferred:
            add(group, deferred[name].squared_norms())
        elif name in table.shapes:
            plain.setdefault(group, []).append(name)
    for group, names in plain.items():
        for first, end in table.spans(names):
            add(group, _sum_squares(flat[:, first:end]))
    return squared


def _sum_squares(rows: torch.Tensor) -> torch.Tensor:
    """Return (records,) sums of squares with pairwise summation."""
    if rows.is_cuda:
        norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1)
        return norms.square()
    total = torch.zeros(rows.shape[0], dtype=rows.dtype)
    for chunk in torch.split(rows, 65536, dim=1):
        total += chunk.square().sum(1)
    return total
