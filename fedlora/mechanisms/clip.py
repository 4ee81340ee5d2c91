"""Clip per-record gradients and sum them per client."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from fedlora.adapters.blocks import BlockTable, FlatBlocks
from fedlora.adapters.records import RecordAxis
from fedlora.errors import PrivacyParameterError, SensitivityMismatchError
from fedlora.mechanisms.stages import ClippedSum, Metric, PerRecordGradients


def clip_and_sum(
    gradients: PerRecordGradients, table: BlockTable, metric: Metric, max_grad_norm: float
) -> ClippedSum:
    """Scale every record's gradient to norm <= max_grad_norm in the metric and sum per client.

    Formal guarantee: adding or removing one record moves its client's sum by at most `max_grad_norm` in the metric
    (in every group alone under `metric.per_layer`); records that are not finite contribute zero.

    Args:
        gradients: SENSITIVE.
        table: blocks of the sum, stored blocks first.
        metric: the norm; the noise stage must use the same one.
        max_grad_norm: C > 0; infinity sums without clipping (for runs without record-level privacy).

    Returns:
        SENSITIVE sums, (K, *shape) each.

    Raises:
        PrivacyParameterError: if max_grad_norm is not positive.
        SensitivityMismatchError: if the gradients' groups are not the metric's.
    Reference: Abadi et al., Deep Learning with Differential Privacy, arXiv:1607.00133v2, Algorithm 1.
    """
    if math.isnan(max_grad_norm) or not (max_grad_norm > 0.0):
        raise PrivacyParameterError(
            f"max_grad_norm: got {max_grad_norm}; allowed above 0; set privacy.max_grad_norm"
        )
    if not set(metric.group_of.values()) >= set(gradients.squared_norms):
        raise SensitivityMismatchError(
            "clip: gradients were grouped in another metric; use the mechanism's own"
        )
    factors = clip_factors(gradients.squared_norms, metric, max_grad_norm)
    return ClippedSum(_weighted_sums(gradients, table, metric, factors), max_grad_norm, metric)


def clip_factors(
    squared_norms: Mapping[str, torch.Tensor], metric: Metric, max_grad_norm: float
) -> dict[str, torch.Tensor]:
    """Return group to (records,) factors in [0, 1]; one common factor unless `metric.per_layer`. SENSITIVE."""
    weighted = {group: value * metric.weight(group) ** 2 for group, value in squared_norms.items()}
    if metric.per_layer:
        return {group: _factor(value, max_grad_norm) for group, value in weighted.items()}
    common = _factor(torch.stack(tuple(weighted.values())).sum(0), max_grad_norm)
    return dict.fromkeys(weighted, common)


def _factor(squared: torch.Tensor, bound: float) -> torch.Tensor:
    """min(1, C / norm), a few rounding units on the private side; 0 where the norm is not finite."""
    norm = squared.clamp_min(0.0).sqrt()
    margin = 1.0 - 8.0 * torch.finfo(squared.dtype).eps
    factor = torch.where(norm > bound, bound * margin / norm, 1.0)
    return torch.where(torch.isfinite(norm), factor, 0.0)


def _weighted_sums(
    gradients: PerRecordGradients, table: BlockTable, metric: Metric, factors: Mapping[str, torch.Tensor]
) -> FlatBlocks:
    records, stored = gradients.records, gradients.blocks
    flat = stored.flat.new_zeros(records.num_clients, table.size)
    if metric.per_layer:
        for group in factors:
            names = [name for name in metric.blocks_of(group) if name in stored.table.shapes]
            for first, end in stored.table.spans(names):
                flat[:, first:end] = records.sum(factors[group], stored.flat[:, first:end])
    else:
        common = next(iter(factors.values()))
        flat[:, : stored.table.size] = records.sum(common, stored.flat)
    out = FlatBlocks(table, flat)
    for name, gradient in gradients.deferred.items():
        out[name].copy_(gradient.weighted_sum(factors[metric.group_of[name]], records))
    return out


def zero_sum(
    table: BlockTable, records: RecordAxis, metric: Metric, bound: float, like: torch.Tensor
) -> ClippedSum:
    """Return the sum of no records: what an empty draw gives. `like` sets dtype and device."""
    flat = torch.zeros(records.num_clients, table.size, dtype=like.dtype, device=like.device)
    return ClippedSum(FlatBlocks(table, flat), bound, metric)


def add_sums(first: ClippedSum, second: ClippedSum) -> ClippedSum:
    """Add sums of disjoint micro-batches of one logical batch.

    Raises:
        SensitivityMismatchError: if they were clipped to different bounds or in different metrics.
    """
    if first.bound != second.bound or first.metric is not second.metric:
        raise SensitivityMismatchError(
            "micro-batches: clipped in different metrics or bounds; use one mechanism"
        )
    return ClippedSum(first.blocks.like(first.blocks.flat + second.blocks.flat), first.bound, first.metric)
