"""Privacy loss distributions of Gaussian events through dp_accounting, as upper bounds.

Full-batch Gaussians in a composition are one Gaussian exactly. The others are discretised pessimistically ("connect the
dots", Doroshenko et al., arXiv:2207.04380v1) at an interval chosen from the size of the answer, composed, and read at
delta; a margin covers the rounding of the discretised masses. Imports of dp_accounting are inside functions: it takes
half a second to load (`lean_import`).
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import numpy as np

from fedlora.accounting.events import Event, GaussianEvent, NoisyProjectionEvent, PoissonGaussianEvent
from fedlora.accounting.lean_import import load_pld
from fedlora.accounting.reports import Adjacency

Parts = tuple[tuple[Event, int], ...]
SMALLEST_DELTA = 1.0e-13
_NICE = (1.0, 2.0, 5.0)
_BLOCK = 1_000_000
FAILURES = (ArithmeticError, MemoryError, ValueError, TypeError, IndexError)
"""What dp_accounting's arithmetic ends in at extreme scales: the tool does not apply there, other bounds decide."""
_MOST_REFINED = 4_000_000
"""Beyond this many steps the grid gets no finer: the composed one would not fit; the bound is looser, never invalid."""


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
    """Return the discretisation: 1e-4, finer for small epsilons, coarser where the grid would not fit.

    Args:
      widest: largest width of a single step's privacy loss.
      epsilon: a rough upper bound on the answer.
      count: number of steps; each adds a variance of up to interval^2 / 4, which must stay small beside epsilon^2.
    """
    epsilon = min(epsilon, 1.0e9)
    wanted = min(1.0e-4, max(epsilon, 1e-6) / 2000.0) if epsilon < 20.0 else epsilon / 2.0e5
    if epsilon < 20.0:
        wanted = min(wanted, max(epsilon / 5.0e5, epsilon * math.sqrt(4.0e-5 / count)))
    return nice(max(wanted, widest / 3.0e5))


def nice(value: float) -> float:
    """Return the next number of the form 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    for digit in _NICE:
        if value <= digit * power * (1.0 + 1e-9):
            return digit * power
    return 10.0 * power


@functools.lru_cache(maxsize=64)
def step(sigma: float, rate: float, interval: float, adjacency: Adjacency, pessimistic: bool) -> Any:
    """Return dp_accounting's distribution of one sampled Gaussian step."""
    privacy_loss_distribution = load_pld()
    from dp_accounting import privacy_accountant

    relation = privacy_accountant.NeighboringRelation
    return privacy_loss_distribution.from_gaussian_mechanism(
        sigma,
        pessimistic_estimate=pessimistic,
        value_discretization_interval=interval,
        sampling_prob=rate,
        use_connect_dots=pessimistic,
        neighboring_relation=(
            relation.REPLACE_ONE if adjacency is Adjacency.REPLACE_ONE else relation.ADD_OR_REMOVE_ONE
        ),
    )


def repeat(one: Any, count: int) -> Any:
    """Return a distribution composed `count` times, in blocks where dp_accounting would raise a size to that power."""
    if count == 1:
        return one
    blocks, rest = divmod(count, _BLOCK)
    if blocks == 0:
        return one.self_compose(count)
    many = repeat(one.self_compose(_BLOCK), blocks)
    return many if rest == 0 else many.compose(repeat(one, rest))


@functools.lru_cache(maxsize=32)
def _composed(
    full: float,
    sampled: tuple[tuple[float, float, int], ...],
    interval: float,
    adjacency: Adjacency,
    pessimistic: bool,
) -> Any:
    steps = [((1.0 / math.sqrt(full)), 1.0, 1)] if full > 0.0 else []
    total = None
    for sigma, rate, count in (*steps, *sampled):
        one = step(sigma, rate, interval, adjacency, pessimistic)
        many = repeat(one, count)
        total = many if total is None else total.compose(many)
    return total


def _plan(
    parts: Parts, adjacency: Adjacency, rough: float, delta: float = 1.0e-6, coarse: float = 1.0
) -> tuple[Any, float, float] | None:
    split = gaussian_parts(parts)
    if split is None or not math.isfinite(split[0]) or math.isnan(rough):
        return None
    full, sampled = split
    steps = [(1.0 / math.sqrt(full), 1.0, 1)] if full > 0.0 else []
    steps.extend(sampled)
    if not steps:
        return None
    widths = [loss_range(sigma, rate, adjacency) for sigma, rate, _ in steps]
    # below 1e-10 the rounding of many small masses weighs more than the discretisation
    total = min(sum(count for _, _, count in steps), _MOST_REFINED) if delta >= 1.0e-10 else 1
    interval = nice(choose_interval(max(widths), rough, total) * coarse)
    rounding = sum(
        4.0e-16 * count * (width / interval) ** 1.5
        for width, (_, _, count) in zip(widths, steps, strict=True)
    )
    return (full, sampled), interval, rounding


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
      The bound (rounding margin included), or None where this tool does not apply.
    """
    if delta < SMALLEST_DELTA:
        return None
    best = math.inf
    for _ in range(4):
        plan = _plan(parts, adjacency, min(rough, best), delta, coarse)
        if plan is None:
            return None
        (full, sampled), interval, rounding = plan
        value = _read_epsilon(full, sampled, interval, adjacency, True, delta)
        guess = min(rough, best)
        if not math.isnan(value):
            best = min(best, max(0.0, value) + rounding)
        if (
            not best < guess / 2.0
            or choose_interval_changed(plan, _plan(parts, adjacency, best, delta, coarse)) is False
        ):
            break
    return None if math.isinf(best) else best


def _read_epsilon(
    full: float,
    sampled: tuple[tuple[float, float, int], ...],
    interval: float,
    adjacency: Adjacency,
    pessimistic: bool,
    delta: float,
) -> float:
    """The composed distribution's epsilon, NaN where dp_accounting's arithmetic overflows or runs out of memory."""
    try:
        with _quiet():
            return float(
                _composed(full, sampled, interval, adjacency, pessimistic).get_epsilon_for_delta(delta)
            )
    except FAILURES:
        return math.nan


def choose_interval_changed(before: tuple[Any, float, float], after: tuple[Any, float, float] | None) -> bool:
    """Whether another pass would use a finer grid."""
    return after is not None and after[1] < before[1]


def epsilon_lower(parts: Parts, delta: float, adjacency: Adjacency, rough: float) -> float | None:
    """Return the optimistic counterpart of `epsilon`: a lower bound, for checking other tools."""
    plan = _plan(parts, adjacency, rough, delta)
    if plan is None or delta < SMALLEST_DELTA:
        return None
    (full, sampled), interval, rounding = plan
    value = _read_epsilon(full, sampled, interval, adjacency, False, delta)
    return None if not math.isfinite(value) else max(0.0, value - rounding)


def delta(parts: Parts, epsilon_at: float, adjacency: Adjacency, rough: float) -> float | None:
    """Return an upper bound on delta at epsilon, or None where this tool does not apply."""
    plan = _plan(parts, adjacency, rough)
    if plan is None:
        return None
    (full, sampled), interval, rounding = plan
    try:
        with _quiet():
            composed = _composed(full, sampled, interval, adjacency, True)
            value = float(composed.get_delta_for_epsilon(max(0.0, epsilon_at - rounding)))
    except FAILURES:
        return None
    if math.isnan(value):
        return None
    return min(1.0, max(0.0, value) + SMALLEST_DELTA)


class _quiet:
    """dp_accounting warns through absl when masses are truncated; the truncated mass is counted, so that is no news."""

    def __enter__(self) -> None:
        self._level = logging.getLogger("absl").level
        logging.getLogger("absl").setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("absl").setLevel(self._level)
