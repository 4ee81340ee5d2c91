"""Gaussians that cover a noisy projection outside a set of rare projections (docs/accounting.md, Theorem E).

Theorem 5 of "LoRA and Privacy: When Random Projections Help (and When They Don't)" gives up a share of delta for
projections that show too much, with a union over the directions of a difference. Here the rare set is bounded by
Markov's inequality for (mu - b)_+, which is convex, so that Jensen's inequality applies as in Theorem A: no direction,
no layer and no group is counted, and the level is a conditional value at risk. For three directions or more this is
never above the published bound.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import betaincc, betainccinv

from fedlora.accounting import pld
from fedlora.accounting.events import Event, GaussianEvent, NoisyProjectionEvent, PoissonGaussianEvent
from fedlora.accounting.events import ProjectionGroup as Group
from fedlora.accounting.hypergeometric import FloatArray
from fedlora.accounting.reports import Adjacency, merge

SHARES = (0.1, 0.5)
_FACTORS = np.geomspace(0.02, 50.0, 41)
_MARGIN = 1.0e-10


def _unprojected(group: Group) -> bool:
    return group.width is None or group.rank is None or group.rank == group.width


def _shape(group: Group) -> tuple[float, float]:
    return (group.rank or 0) / 2.0, ((group.width or 0) - (group.rank or 0)) / 2.0


def _excess(group: Group, level: FloatArray) -> FloatArray:
    """E (kappa^2 X - level)_+ from above, X ~ Beta(r/2, (d-r)/2), X = 1 without projection."""
    scale = group.kappa**2
    if _unprojected(group):
        return np.maximum(scale - level, 0.0)
    a, b = _shape(group)
    x = np.clip(level / scale, 0.0, 1.0)
    first, second = a / (a + b) * betaincc(a + 1.0, b, x), x * betaincc(a, b, x)
    inside = scale * np.maximum(first - second + _MARGIN * (first + second), 0.0)
    return np.asarray(np.where(level < scale, inside, 0.0))


def _levels(group: Group, failure: float) -> FloatArray:
    """Trial levels around the quantile, where the optimum lies; every level is valid."""
    scale = np.array([group.kappa**2])
    if _unprojected(group):
        return scale
    tails = np.minimum(failure * _FACTORS, 1.0)
    return np.concatenate([scale * betainccinv(*_shape(group), tails), scale])


def squared_distance(event: NoisyProjectionEvent, failure: float) -> float:
    """Return L such that mu > L with probability at most `failure`, for every difference within the clip.

    P(mu > L) <= E (mu - b)_+ / (L - b), and E (mu - b)_+ is at most its largest value over groups (one clip), or with
    b = sum of b_g the sum over groups (separate clips); L = b + that / failure, smallest over trial levels b.

    Args:
      event: one step; kappa^2 are squared distances at the sensitivity of one record.
      failure: in (0, 1). PUBLIC.

    Returns:
      L, at most the squared distance without projections.
    """
    if event.clip == "separate":
        return sum(_smallest((group,), failure) for group in event.groups)
    return _smallest(event.groups, failure)


def _smallest(groups: tuple[Group, ...], failure: float) -> float:
    trial = np.unique(np.concatenate([_levels(group, failure) for group in groups]))
    worst = np.max(np.stack([_excess(group, trial) for group in groups]), axis=0)
    top = max(group.kappa**2 for group in groups)
    return min(top, float(np.min(trial + worst / failure)))


def _releases(event: Event, count: int, adjacency: Adjacency) -> int:
    """How many rare sets a part pays for; a replaced and sampled record has two directions, its own and the other's."""
    if not isinstance(event, NoisyProjectionEvent) or all(_unprojected(group) for group in event.groups):
        return 0
    sampled = event.sample_rate is not None and event.sample_rate < 1.0
    return count * (2 if sampled and adjacency is Adjacency.REPLACE_ONE else 1)


def applies(parts: pld.Parts) -> bool:
    """Whether every event is Gaussian or a noisy projection, and a projection is worth it."""
    return pld.gaussian_parts(parts) is not None and not pld.is_exact(parts)


def gaussians(parts: pld.Parts, spent: float, adjacency: Adjacency) -> pld.Parts:
    """Return the Gaussian events that cover `parts` outside rare projections of total probability `spent`.

    Args:
      parts: Gaussian events and noisy projections with counts (`applies` holds).
      spent: share of delta that pays for the rare projections, in (0, 1); equal for all steps.
      adjacency: neighbouring relation.
    """
    total = sum(_releases(event, count, adjacency) for event, count in parts)
    result: list[tuple[Event, int]] = []
    for event, count in parts:
        if isinstance(event, NoisyProjectionEvent):
            level = squared_distance(event, spent / total) if total else 0.0
            if not _releases(event, count, adjacency):
                level = (1.0 / (pld.envelope(event) or (0.0, 1.0))[0]) ** 2
            result.append((_gaussian(1.0 / math.sqrt(level), event.sample_rate), count))
        else:
            result.append((event, count))
    return merge(result)


def envelopes(parts: pld.Parts) -> pld.Parts:
    """Return the Gaussian events that the projections post-process, other events as they are."""
    result: list[tuple[Event, int]] = []
    for event, count in parts:
        shape = pld.envelope(event)
        if isinstance(event, NoisyProjectionEvent) and shape is not None:
            result.append((_gaussian(*shape), count))
        else:
            result.append((event, count))
    return merge(result)


def _gaussian(sigma: float, rate: float | None) -> Event:
    return GaussianEvent(sigma) if rate in (None, 1.0) else PoissonGaussianEvent(sigma, float(rate or 1.0))


__all__ = ["SHARES", "applies", "envelopes", "gaussians", "squared_distance"]
