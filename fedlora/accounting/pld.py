"""Privacy loss distributions of Gaussian events through dp_accounting, as upper bounds.

Full-batch Gaussians in a composition are one Gaussian exactly. The others are discretised pessimistically ("connect the
dots", Doroshenko et al., arXiv:2207.04380v1) at an interval chosen from the size of the answer, composed by `tilted`,
and read at delta. Imports of dp_accounting are inside functions: it takes half a second to load (`lean_import`).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedlora.accounting import sampled, tilted
from fedlora.accounting.events import Event, GaussianEvent, NoisyProjectionEvent, PoissonGaussianEvent
from fedlora.accounting.lean_import import load_pld
from fedlora.accounting.reports import Adjacency
from fedlora.accounting.tilted import Law

Parts = tuple[tuple[Event, int], ...]
SMALLEST_DELTA = 1.0e-13
_NICE = (1.0, 2.0, 5.0)
_QUANTILE, _ACCURACY = 7.0, 5.0e-5
COARSER = (1.0, 5.0, 20.0, 100.0)
"""Factors on an interval whose composed window does not fit."""
FAILURES = (ArithmeticError, MemoryError, ValueError, TypeError, IndexError)
"""What dp_accounting's arithmetic ends in at extreme scales: the tool does not apply there, other bounds decide."""
Compositions = tuple[tuple[tuple[Law, int], ...], ...]
"""For each direction of the neighbouring relation, the steps' laws with counts."""


def gaussian_parts(parts: Parts) -> tuple[float, tuple[tuple[float, float, int], ...]] | None:
    """Split a composition into one full-batch Gaussian and Poisson-sampled ones.

    Returns:
      (mu squared of the full-batch part at sensitivity 1, ((noise multiplier, rate, count), ...)), or None if an event
      is not Gaussian. A noisy projection counts as the Gaussian that it post-processes (its envelope).
    """
    full, sampled = 0.0, []
    for event, count in parts:
        shape = envelope(event)
        if shape is None:
            return None
        sigma, rate = shape
        if sigma == 0.0:
            full = math.inf
        elif rate == 1.0:
            full += count / sigma**2
        else:
            sampled.append((sigma, rate, count))
    return full, tuple(sampled)


def envelope(event: Event) -> tuple[float, float] | None:
    """Return (noise multiplier, rate) of the Gaussian mechanism that an event is or post-processes, or None."""
    if isinstance(event, GaussianEvent):
        return event.noise_multiplier, 1.0
    if isinstance(event, PoissonGaussianEvent):
        return event.noise_multiplier, event.sample_rate
    if isinstance(event, NoisyProjectionEvent):
        kappas = [group.kappa for group in event.groups]
        kappa = max(kappas) if event.clip == "shared" else math.sqrt(sum(value * value for value in kappas))
        return 1.0 / kappa, 1.0 if event.sample_rate is None else event.sample_rate
    return None


def is_exact(parts: Parts) -> bool:
    """Whether the envelope of every event is the event itself (no projection is given up)."""
    return all(
        isinstance(event, (GaussianEvent, PoissonGaussianEvent)) or _unprojected_dominates(event)
        for event, _ in parts
    )


def _unprojected_dominates(event: Event) -> bool:
    if not isinstance(event, NoisyProjectionEvent):
        return False
    plain = [group.kappa for group in event.groups if group.width is None or group.rank == group.width]
    if event.clip == "separate":
        return len(plain) == len(event.groups)
    return bool(plain) and max(plain) == max(group.kappa for group in event.groups)


def loss_range(sigma: float, rate: float, adjacency: Adjacency) -> float:
    """Return the width of one step's privacy loss, up to a mass of about 1e-22."""
    mu = (2.0 if adjacency is Adjacency.REPLACE_ONE else 1.0) / sigma
    top = mu * mu / 2.0 + 10.0 * mu
    return top if rate == 1.0 else float(np.logaddexp(math.log1p(-rate), math.log(rate) + top))


def choose_interval(widest: float, epsilon: float, count: int = 1) -> float:
    """Return the discretisation: 1e-4, finer for small epsilons and many steps, coarser where the grid would not fit.

    A step adds up to v = interval^2 / 6 to the variance of the loss and half of that to its mean. With s the deviation
    of a Gaussian loss that has this epsilon at a quantile z, epsilon moves by about count v (1 + z / s) / 2.

    Args:
      widest: largest width of a single step's privacy loss.
      epsilon: a rough upper bound on the answer.
      count: number of steps.
    """
    epsilon = max(min(epsilon, 1.0e9), 1.0e-12)
    deviation = 2.0 * epsilon / (_QUANTILE + math.sqrt(_QUANTILE**2 + 2.0 * epsilon))
    wanted = math.sqrt(12.0 * _ACCURACY * epsilon / (count * (1.0 + _QUANTILE / deviation)))
    largest = min(1.0e-4, max(epsilon, 1e-6) / 2000.0) if epsilon < 20.0 else epsilon / 2.0e5
    return nice(max(min(wanted, largest), widest / 3.0e5))


def nice(value: float) -> float:
    """Return the next number of the form 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    for digit in _NICE:
        if value <= digit * power * (1.0 + 1e-9):
            return digit * power
    return 10.0 * power


@functools.lru_cache(maxsize=64)
def step(
    sigma: float, rate: float, interval: float, adjacency: Adjacency, pessimistic: bool
) -> tuple[Law, ...]:
    """Return dp_accounting's distribution of one sampled Gaussian step, one law for each direction that differs."""
    directions = ["REMOVE"] if rate == 1.0 else ["REMOVE", "ADD"]
    kinds = ["REPLACE"] if adjacency is Adjacency.REPLACE_ONE else directions
    with _quiet():
        found = [_pmf(sigma, rate, interval, kind, pessimistic) for kind in kinds]
    return tuple(_law(pmf.to_dense_pmf()) for pmf in found)


def _pmf(sigma: float, rate: float, interval: float, kind: str, pessimistic: bool) -> Any:
    """One direction's distribution, built by dp_accounting."""
    distribution = load_pld()
    from dp_accounting.pld import privacy_loss_mechanism

    loss = _loss_class()(
        sigma,
        sensitivity=1.0,
        pessimistic_estimate=pessimistic,
        log_mass_truncation_bound=-50.0,
        sampling_prob=rate,
        adjacency_type=privacy_loss_mechanism.AdjacencyType[kind],
    )
    return distribution._create_pld_pmf_from_monotone_privacy_loss(
        loss,
        pessimistic_estimate=pessimistic,
        value_discretization_interval=interval,
        use_connect_dots=pessimistic,
    )


@functools.cache
def _loss_class() -> Any:
    """dp_accounting's Gaussian privacy loss with its cut-offs in vectors (there, one Python call for each of them)."""
    load_pld()
    from dp_accounting.pld import privacy_loss_mechanism

    class GaussianLoss(privacy_loss_mechanism.GaussianPrivacyLoss):  # type: ignore[misc]
        def get_delta_for_epsilon(self, epsilon: Any) -> Any:
            thresholds = np.asarray(epsilon, dtype=np.float64)
            scale, q = self.standard_deviation, self.sampling_prob
            x = sampled.cutoff(thresholds, scale, q, self.adjacency_type.name)
            delta = self.mu_upper_cdf(x) - np.exp(thresholds + self.mu_lower_log_cdf(x))
            return np.clip(np.where(np.isnan(delta), 0.0, delta), 0.0, 1.0)

    return GaussianLoss


def _law(pmf: Any) -> Law:
    return Law(np.asarray(pmf._probs, dtype=np.float64), int(pmf._lower_loss), float(pmf._infinity_mass))


def directions(steps: Sequence[tuple[tuple[Law, ...], int]]) -> Compositions:
    """Return the composition for each direction; a step with one law has the same in both."""
    sides = max(len(laws) for laws, _ in steps)
    return tuple(
        tuple((laws[min(side, len(laws) - 1)], count) for laws, count in steps) for side in range(sides)
    )


@functools.lru_cache(maxsize=32)
def _composed(
    full: float,
    sampled: tuple[tuple[float, float, int], ...],
    interval: float,
    adjacency: Adjacency,
    pessimistic: bool,
) -> Compositions:
    steps = [((1.0 / math.sqrt(full)), 1.0, 1)] if full > 0.0 else []
    return directions(
        [
            (step(sigma, rate, interval, adjacency, pessimistic), count)
            for sigma, rate, count in (*steps, *sampled)
        ]
    )


def _plan(parts: Parts, adjacency: Adjacency, rough: float, coarse: float = 1.0) -> tuple[Any, float] | None:
    split = gaussian_parts(parts)
    if split is None or not math.isfinite(split[0]) or math.isnan(rough):
        return None
    full, sampled = split
    steps = [(1.0 / math.sqrt(full), 1.0, 1)] if full > 0.0 else []
    steps.extend(sampled)
    if not steps:
        return None
    widths = [loss_range(sigma, rate, adjacency) for sigma, rate, _ in steps]
    total = sum(count for _, _, count in steps)
    interval = nice(choose_interval(max(widths), rough, total) * coarse)
    return (full, sampled), interval


def epsilon(
    parts: Parts, delta: float, adjacency: Adjacency, rough: float, *, coarse: float = 1.0
) -> float | None:
    """Return an upper bound on epsilon by privacy loss distributions.

    Args:
      parts: basic events with counts; projections are taken by their Gaussian envelope.
      delta: in (0, 1).
      adjacency: neighbouring relation.
      rough: any upper bound on the answer, to choose the first discretisation; refined while it was far off.
      coarse: factor >= 1 on the discretisation; the bound stays valid.

    Returns:
      The bound (rounding included), or None where this tool does not apply.
    """
    if delta < SMALLEST_DELTA:
        return None
    best = math.inf
    for _ in range(4):
        guess = min(rough, best)
        plan = _plan(parts, adjacency, guess, coarse)
        if plan is None:
            return None
        value, used = _read_epsilon(plan, adjacency, True, delta)
        if not math.isnan(value):
            best = min(best, max(0.0, value))
        finer = choose_interval_changed(plan, _plan(parts, adjacency, best, coarse))
        if used > plan[1] or not best < guess / 2.0 or not finer:
            break
    return None if math.isinf(best) else best


def _read_epsilon(
    plan: tuple[Any, float], adjacency: Adjacency, pessimistic: bool, delta: float
) -> tuple[float, float]:
    """The composed distribution's epsilon and the interval used, coarser than planned where that one does not fit.

    NaN where the arithmetic overflows or runs out of memory.
    """
    (full, sampled), interval = plan
    sign = 1.0 if pessimistic else -1.0

    def read(factor: float) -> float:
        composed = _composed(full, sampled, interval * factor, adjacency, pessimistic)
        return max(tilted.epsilon(laws, interval * factor, delta, sign=sign) for laws in composed)

    value, factor = on_a_grid_that_fits(read)
    return value, interval * factor


def on_a_grid_that_fits(read: Callable[[float], float]) -> tuple[float, float]:
    """Read a composition on the first of some coarser grids whose window fits.

    Args:
      read: factor on the interval to the value read.

    Returns:
      The value and its factor; NaN and 1 where the arithmetic ends or nothing fits.
    """
    for factor in COARSER:
        try:
            return read(factor), factor
        except MemoryError:
            continue
        except FAILURES:
            break
    return math.nan, 1.0


def choose_interval_changed(before: tuple[Any, float], after: tuple[Any, float] | None) -> bool:
    """Whether another pass would use a finer grid."""
    return after is not None and after[1] < before[1]


def epsilon_lower(parts: Parts, delta: float, adjacency: Adjacency, rough: float) -> float | None:
    """Return the optimistic counterpart of `epsilon`: a lower bound, for checking other tools."""
    plan = _plan(parts, adjacency, rough)
    if plan is None or delta < SMALLEST_DELTA:
        return None
    value, _ = _read_epsilon(plan, adjacency, False, delta)
    return None if not math.isfinite(value) else max(0.0, value)


def delta(parts: Parts, epsilon_at: float, adjacency: Adjacency, rough: float) -> float | None:
    """Return an upper bound on delta at epsilon, or None where this tool does not apply."""
    plan = _plan(parts, adjacency, rough)
    if plan is None:
        return None
    (full, sampled), interval = plan

    def read(factor: float) -> float:
        composed = _composed(full, sampled, interval * factor, adjacency, True)
        return max(tilted.delta(laws, interval * factor, epsilon_at) for laws in composed)

    value, _ = on_a_grid_that_fits(read)
    return None if math.isnan(value) else min(1.0, max(0.0, value) + SMALLEST_DELTA)


class _quiet:
    """dp_accounting warns through absl when masses are truncated; the truncated mass is counted, so that is no news."""

    def __enter__(self) -> None:
        self._level = logging.getLogger("absl").level
        logging.getLogger("absl").setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("absl").setLevel(self._level)
