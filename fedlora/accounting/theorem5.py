"""The published bound for M2: Theorem 5 and its composition recipe, for comparison and on request.

"LoRA and Privacy: When Random Projections Help (and When They Don't)", Theorem 5, Lemma 17, Appendix F.2. The
mean of the privacy loss under P is +mu/2 (Lemma 16 prints the other sign) and its variance mu (the last display of
its proof halves
it); T(eps; mu) is a two-sided tail, larger than the exact Gaussian profile.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from scipy.special import betaincc, betainccinv, ndtr

from fedlora.accounting import _checks, gaussian
from fedlora.accounting.accountant import epsilon_of
from fedlora.accounting.events import Event, NoisyProjectionEvent, PoissonGaussianEvent, ProjectionGroup
from fedlora.accounting.reports import Adjacency
from fedlora.errors import UnsupportedEventError

PROJECTION_SHARE = 0.1


def tail(epsilon: float, mu: float) -> float:
    """Return T(eps; mu) = Phi((-eps + mu/2) / sqrt(mu)) + 1 - Phi((eps + mu/2) / sqrt(mu)), 0 at mu = 0."""
    if mu == 0.0:
        return 0.0
    root = math.sqrt(mu)
    return float(ndtr((-epsilon + mu / 2.0) / root) + ndtr((-epsilon - mu / 2.0) / root))


def directions(group: ProjectionGroup) -> int:
    """Return s = min(out, d) of Theorem 5; 0 for a group without projection.

    Raises:
      UnsupportedEventError: if the group states no out-width: it may stand for several layers, whose directions the
        union has to count one by one.
    """
    if group.width is None:
        return 0
    if group.out_width is None:
        raise UnsupportedEventError(
            f"theorem 5: group {group.name} states no out_width, so that the directions of its layers cannot be "
            "counted; give one group with its out_width for each layer, or use another bound"
        )
    return min(group.width, group.out_width)


def one_layer(event: NoisyProjectionEvent) -> NoisyProjectionEvent:
    """Return the event with the most directions a layer can have where a group states no out-width.

    Only for groups that are known to be one layer each, such as those of a command line.
    """
    groups = (
        replace(group, out_width=group.width) if group.out_width is None else group for group in event.groups
    )
    return replace(event, groups=tuple(groups))


def failure(group: ProjectionGroup, alpha: float) -> float:
    """Return s [1 - I_alpha(r/2, (d-r)/2)] (Lemma 17); 0 for a group without projection."""
    if group.width is None or group.rank is None or group.rank == group.width:
        return 0.0 if alpha >= 1.0 or group.width is None else 1.0
    return directions(group) * float(betaincc(group.rank / 2.0, (group.width - group.rank) / 2.0, alpha))


def smallest_alpha(group: ProjectionGroup, budget: float) -> float:
    """Return the smallest alpha whose failure probability is at most the budget, rounded up; 1 if none is smaller."""
    if group.width is None or group.rank is None or group.rank == group.width:
        return 1.0
    share = budget / directions(group)
    alpha = float(betainccinv(group.rank / 2.0, (group.width - group.rank) / 2.0, share)) * (1.0 + 1e-12)
    for _ in range(60):
        if alpha >= 1.0 or failure(group, alpha) <= budget:
            break
        alpha *= 1.0 + 1e-9
    return min(1.0, alpha) if failure(group, min(1.0, alpha)) <= budget else 1.0


def one_shot(
    event: NoisyProjectionEvent,
    delta: float,
    *,
    exact_profile: bool = False,
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE,
) -> float:
    """Return Theorem 5's epsilon of one full-batch release, minimised over alpha.

    Args:
      event: one projected group, no sampling.
      delta: in (0, 1).
      exact_profile: replace the tail T by the exact Gaussian profile (a valid improvement).
      adjacency: neighbouring relation.

    Raises:
      UnsupportedEventError: if the event has several groups or is sampled.
    """
    if len(event.groups) != 1 or event.sample_rate not in (None, 1.0):
        raise UnsupportedEventError(
            "theorem 5, one shot: got several groups or sampling; use the composition recipe"
        )
    group, budget = event.groups[0], _checks.delta(delta)
    gain = 4.0 if adjacency is Adjacency.REPLACE_ONE else 1.0
    best = math.inf
    for share in np.geomspace(1e-8, 0.9999, 60):
        alpha = smallest_alpha(group, float(share) * budget)
        left = budget - (failure(group, alpha) if alpha < 1.0 else 0.0)
        mu = alpha * group.kappa**2 * gain
        exact = gaussian.epsilon_of_gaussian(left, math.sqrt(mu))
        best = min(best, exact if exact_profile else _tail_epsilon(mu, left, exact))
    return best


def _tail_epsilon(mu: float, delta: float, start: float) -> float:
    low, high = start, max(start, 1e-9)
    while tail(high, mu) > delta:
        low, high = high, 2.0 * high
    while high - low > 1e-10 * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if tail(middle, mu) > delta else (low, middle)
    return high


def composed_gaussian(
    event: NoisyProjectionEvent,
    steps: int,
    delta: float,
    *,
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE,
) -> tuple[Event, float]:
    """Return the Gaussian event of the recipe and the delta left for it.

    A tenth of delta pays for bad projections, split over steps and groups; each group then counts as a Gaussian with
    sensitivity sqrt(alpha) times its clip. Under one clip the largest group counts, with separate clips the root of the
    sum of squares. Under replace-one with sampling the directions of both records must be good, which costs twice.
    """
    budget = _checks.delta(delta)
    count = _checks.integer("steps", steps)
    projected = [g for g in event.groups if g.width is not None and g.rank != g.width]
    rate = 1.0 if event.sample_rate is None else event.sample_rate
    records = 2 if rate < 1.0 and adjacency is Adjacency.REPLACE_ONE else 1
    share = PROJECTION_SHARE * budget / (count * records * max(1, len(projected)))
    spent, squares = 0.0, []
    for group in event.groups:
        alpha = smallest_alpha(group, share) if group in projected else 1.0
        spent += share * records if alpha < 1.0 else 0.0
        squares.append(alpha * group.kappa**2)
    kappa = math.sqrt(max(squares) if event.clip == "shared" else sum(squares))
    return PoissonGaussianEvent(1.0 / kappa, rate).times(count), budget - spent * count


def composed(
    event: NoisyProjectionEvent,
    steps: int,
    delta: float,
    *,
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE,
    accountant: str = "best",
    coarse: float = 1.0,
) -> float:
    """Return the epsilon of the published recipe over `steps` steps; arguments as in `epsilon_of`."""
    gaussian_event, left = composed_gaussian(event, steps, delta, adjacency=adjacency)
    return epsilon_of(gaussian_event, left, adjacency=adjacency, accountant=accountant, coarse=coarse).epsilon
