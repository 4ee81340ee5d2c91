"""Total variation of a composition: with delta at or above it, epsilon is 0 without any distribution.

Total variation is the divergence at epsilon 0. Under adaptive composition it is at most 1 - prod (1 - TV) of the steps
(maximal couplings, one after the other). Poisson sampling multiplies it by the rate (the two mixtures share the
component without the record). For two Gaussians at squared distance mu it is 2 Phi(sqrt(mu) / 2) - 1, which is concave
in mu: for a noisy projection the mean of mu, at most the largest kappa^2 r / d under one clip and their sum under
separate clips, may take its place (Jensen's inequality).
"""

from __future__ import annotations

import math

from fedlora.accounting import pld
from fedlora.accounting.events import Event, NoisyProjectionEvent, ProjectionGroup
from fedlora.accounting.reports import Adjacency

SAMPLING_ALONE = (
    "warning: delta is at least the chance that a record is used at all, so that sampling alone meets it at any noise; "
    "the guarantee lets a record that is used be revealed in full; choose a delta well below sample_rate times steps"
)


def _mean(group: ProjectionGroup) -> float:
    """Mean squared distance of one group, kappa^2 r / d; kappa^2 without projection."""
    share = 1.0 if group.width is None or group.rank is None else group.rank / group.width
    return group.kappa**2 * share


def _step(event: Event, gain: float) -> float:
    shape = pld.envelope(event)
    if shape is None or not shape[0] > 0.0:
        return 1.0
    sigma, rate = shape
    mean = 1.0 / sigma**2
    if isinstance(event, NoisyProjectionEvent):
        means = [_mean(group) for group in event.groups]
        mean = max(means) if event.clip == "shared" else sum(means)
    return min(1.0, rate * math.erf(math.sqrt(gain * mean / 8.0)))


def total_variation(parts: pld.Parts, adjacency: Adjacency) -> float:
    """Return an upper bound on the total variation distance of a composition; 1 where nothing is known.

    Args:
      parts: basic events with counts.
      adjacency: neighbouring relation.
    """
    gain = 4.0 if adjacency is Adjacency.REPLACE_ONE else 1.0
    steps = [(_step(event, gain), count) for event, count in parts]
    if any(one >= 1.0 for one, _ in steps):
        return 1.0
    total = -math.expm1(sum(count * math.log1p(-one) for one, count in steps))
    return min(1.0, total * (1.0 + 1e-12))


def chance_of_use(parts: pld.Parts) -> float:
    """Return a lower bound on the probability that a record takes part in any step; 1 where nothing is sampled."""
    log_never = 0.0
    for event, count in parts:
        shape = pld.envelope(event)
        if shape is None or shape[1] >= 1.0:
            return 1.0
        log_never += count * math.log1p(-shape[1])
    return -math.expm1(log_never)


__all__ = ["SAMPLING_ALONE", "chance_of_use", "total_variation"]
