"""A lower bound on the noisy projection's epsilon, and the table that sets it beside our bounds and the published one.

Lower bound: differences of rank one are a valid pair of neighbours, and given the projection they give a (sampled)
Gaussian pair at squared distance kappa^2 X, X ~ Beta(r/2, (d-r)/2). A smaller distance is a post-processing, so that X
may be rounded down; and delta grows with the loss, so that losses may be rounded down. What is left composes with a
bounded error (`tilted`), which is taken off.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import betainc, betaincinv, ndtr

from fedlora.accounting import pld, theorem5, tilted
from fedlora.accounting.accountant import epsilon_of
from fedlora.accounting.events import GaussianEvent, NoisyProjectionEvent, PoissonGaussianEvent
from fedlora.accounting.hypergeometric import FloatArray
from fedlora.accounting.tilted import Law

ROWS: tuple[tuple[float, float, int, int, int, int], ...] = (
    (1.0, 0.5, 1, 2000, 16, 10),
    (1.0, 0.3, 1, 4096, 16, 4096),
    (1.0, 1.0, 1, 768, 8, 768),
    (0.0205, 0.3, 2000, 2048, 32, 10),
    (0.01, 0.2, 1000, 768, 8, 768),
    (0.01, 0.3, 1000, 768, 16, 768),
    (0.05, 0.5, 300, 384, 8, 384),
)
"""(sampling rate, noise multiplier, steps, width, rank, out-width) of the documented table; delta is 1e-5."""


def _nodes(width: int, rank: int) -> tuple[FloatArray, FloatArray]:
    """Values of X rounded down to bin edges, with the bins' masses."""
    a, b = rank / 2.0, (width - rank) / 2.0
    tail = np.geomspace(1e-12, 0.01, 150)
    edges = np.concatenate(
        [[0.0], betaincinv(a, b, np.linspace(0.005, 0.99, 200)), 1.0 - betaincinv(b, a, tail)]
    )
    x = np.unique(edges)
    return x, np.diff(np.concatenate([betainc(a, b, x), [1.0]]))


def _above(thresholds: FloatArray, x: FloatArray, mass: FloatArray, kappa: float, rate: float) -> FloatArray:
    """P(loss > threshold) with the record against without it."""
    inner = (np.expm1(thresholds) + rate) / rate
    result = np.zeros_like(thresholds)
    tilt = np.log(np.maximum(inner, 1e-300))
    for value, weight in zip(x, mass, strict=True):
        mu = kappa * math.sqrt(float(value))
        if mu == 0.0:
            result += weight * (thresholds < 0.0)
            continue
        cut = tilt / mu + mu / 2.0
        result += weight * ((1.0 - rate) * ndtr(-cut) + rate * ndtr(mu - cut))
    return np.asarray(np.where(inner > 0.0, result, 1.0))


def epsilon_lower(
    event: NoisyProjectionEvent, steps: int, delta: float, *, interval: float | None = None
) -> float:
    """Return a lower bound on the epsilon of `steps` steps under add-or-remove.

    Args:
      event: one projected group.
      steps: T >= 1.
      delta: in (0, 1).
      interval: rounding of losses; every step loses about half of it.
    """
    group = event.groups[0]
    rate = 1.0 if event.sample_rate is None else event.sample_rate
    step = interval or min(1e-3, max(2e-5, 2e-2 / steps))
    x, mass = _nodes(group.width or 1, group.rank or 1)
    reach = float(x[np.cumsum(mass[::-1])[::-1] > 1e-11][-1])
    mu = group.kappa * math.sqrt(reach)
    # Losses beyond this hardly add.
    cap = epsilon_of(event.times(steps), delta, accountant="moment").epsilon + 8.0
    top = min(40.0, cap, math.log1p(rate * math.expm1(min(600.0, mu * mu / 2.0 + 7.0 * mu))))
    low = math.log1p(-rate) if rate < 1.0 else -min(40.0, mu * mu / 2.0 + 7.0 * mu)
    first, last = math.floor(low / step) - 1, math.ceil(top / step) + 1
    grid: FloatArray = np.arange(first, last + 1, dtype=np.float64) * np.float64(step)
    tail = _above(grid, x, mass, group.kappa, rate)
    masses = np.append(tail[:-1] - tail[1:], tail[-1])
    law = Law(np.maximum(masses, 0.0), first, 0.0)
    value, _ = pld.on_a_grid_that_fits(
        lambda factor: tilted.epsilon([(_coarser(law, int(factor)), steps)], step * factor, delta, sign=-1.0)
    )
    return 0.0 if math.isnan(value) else value


def _coarser(law: Law, factor: int) -> Law:
    """The law with losses rounded down to a grid `factor` times coarser."""
    index = (law.first + np.arange(law.masses.size)) // factor
    masses = np.bincount(index - index[0], law.masses).astype(np.float64)
    return Law(masses, int(index[0]), 0.0)


def row(
    rate: float, noise: float, steps: int, width: int, rank: int, out: int, delta: float
) -> dict[str, float]:
    """Return one line of the table: parameters, published bound, Theorem A, smallest bound, lower bound, Gaussian."""
    event = NoisyProjectionEvent.single(width, rank, noise, None if rate == 1.0 else rate, out)
    plain = GaussianEvent(noise) if rate == 1.0 else PoissonGaussianEvent(noise, rate)
    single = steps == 1 and rate == 1.0
    run = event.times(steps)
    return {
        "sample_rate": rate,
        "noise_multiplier": noise,
        "steps": steps,
        "width": width,
        "rank": rank,
        "out_width": out,
        "published": theorem5.one_shot(event, delta) if single else theorem5.composed(event, steps, delta),
        "moments": epsilon_of(run, delta, accountant="rdp").epsilon,
        "smallest": epsilon_of(run, delta).epsilon,
        "lower_bound": epsilon_lower(event, steps, delta),
        "gaussian": epsilon_of(plain.times(steps), delta).epsilon,
    }


def table(delta: float = 1e-5) -> list[dict[str, float]]:
    """Return the documented table."""
    return [row(*values, delta) for values in ROWS]


__all__ = ["ROWS", "epsilon_lower", "row", "table"]
