"""The accountant: the smallest valid upper bound among the tools that apply, cached by multiset of events."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Literal

import numpy as np
from scipy.special import expit

from fedlora.accounting import _checks, bounds, gaussian, pld, rdp, truncation, variation
from fedlora.accounting.conditional import M1Event, PaveEvent, SketchEvent, VectorProjectionEvent
from fedlora.accounting.events import Event, NonPrivateEvent
from fedlora.accounting.hypergeometric import FloatArray
from fedlora.accounting.reports import Adjacency, EpsilonReport, merge
from fedlora.errors import AccountingError, PrivacyParameterError, UnsupportedEventError

AccountantName = Literal["best", "moment", "pld", "rdp", "prv"]
Events = Event | Iterable[Event] | Iterable[tuple[Event, int]]
Parts = pld.Parts
_NAMES = ("best", "moment", "pld", "rdp", "prv")
_FINE = 1500
"""Orders of one pass of a refinement."""


def parts_of(events: Events) -> Parts:
    """Return the basic events of one event, of several, or of (event, count) pairs, equal ones merged."""
    if isinstance(events, Event):
        return merge([(events, 1)])
    pairs: list[tuple[Event, int]] = []
    for item in events:
        pairs.append(item if isinstance(item, tuple) else (item, 1))
    return merge(pairs)


def epsilon_of(
    events: Events,
    delta: float,
    *,
    adjacency: Adjacency | str = Adjacency.ADD_OR_REMOVE,
    accountant: str = "best",
    unit: str | None = None,
    coarse: float = 1.0,
) -> EpsilonReport:
    """Return a valid upper bound on epsilon of events composed adaptively on the same data.

    Args:
      events: one event, several, or (event, count) pairs. PUBLIC.
      delta: in (0, 1).
      adjacency: neighbouring relation.
      accountant: "best" takes the smallest bound of every tool that applies and names it; "moment" does so without
        the projection profile (fast); "pld", "rdp" and "prv" ask for one tool.
      unit: what one neighbour differs in, copied into the report.
      coarse: factor >= 1 on the discretisation of distributions, for charts: quicker and looser, never invalid.

    Returns:
      The report; epsilon is infinite for releases without protection and 0 for no event.

    Raises:
      PrivacyParameterError: for values out of range.
      UnsupportedEventError: if the tool asked for does not apply, or conditional events without a Renyi curve are
        composed.
      AccountingError: if two valid tools contradict each other.
    """
    parts = parts_of(events)
    probability = _checks.delta(delta)
    relation = Adjacency.parse(adjacency)
    name = _checks.choice("accountant", accountant, _NAMES)
    factor = _checks.real("coarse", coarse, at_least=1.0, at_most=1000.0)
    conditions = dict.fromkeys(text for event, _ in parts for text in event.conditions)
    relation = _relation_for(parts, relation)
    if not all(event.chargeable for event, _ in parts):
        conditions["conditional analysis: it never pays for a release"] = None
    if parts and variation.chance_of_use(parts) <= probability:
        conditions[variation.SAMPLING_ALONE] = None
    try:
        epsilon, tool, alternatives = _cached(
            _keys(parts), _Parts(parts), probability, relation, name, factor
        )
    except (OverflowError, ZeroDivisionError) as error:
        raise PrivacyParameterError(
            "events: a parameter is too large or too small for double precision "
            f"({type(error).__name__}); use values between about 1e-100 and 1e100"
        ) from error
    return EpsilonReport(
        epsilon=epsilon,
        delta=probability,
        accountant=tool,
        adjacency=relation,
        conditions=tuple(conditions),
        num_events=sum(count for _, count in parts),
        unit=unit,
        alternatives=dict(alternatives),
    )


def _relation_for(parts: Parts, asked: Adjacency) -> Adjacency:
    """The conditional analyses know replace-one only, so that every part beside one is charged under it."""
    return asked if all(event.chargeable for event, _ in parts) else Adjacency.REPLACE_ONE


def _keys(parts: Parts) -> tuple[tuple[str, int], ...]:
    return tuple((event.key(), count) for event, count in parts)


class _Parts:
    """Events carried past the cache's key; equality is left to the keys."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Parts)


_Answer = tuple[float, str, tuple[tuple[str, float], ...]]


@functools.lru_cache(maxsize=65536)
def _cached(
    keys: tuple[tuple[str, int], ...],
    boxed: _Parts,
    delta: float,
    adjacency: Adjacency,
    name: str,
    coarse: float,
    hint: float = math.inf,
) -> _Answer:
    del keys
    return _evaluate(boxed.parts, delta, adjacency, name, (coarse, hint))


def _evaluate(
    parts: Parts, delta: float, adjacency: Adjacency, name: str, grid: tuple[float, float]
) -> _Answer:
    """The answer on a grid of (coarseness, guess of the answer)."""
    if not parts:
        return 0.0, "nothing was released", ()
    if any(isinstance(event, NonPrivateEvent) for event, _ in parts):
        return math.inf, "no finite bound", ()
    if any(isinstance(event, (VectorProjectionEvent, M1Event)) for event, _ in parts):
        return _special(parts, delta)
    if pld.is_exact(parts):
        parts = truncation.envelopes(parts)  # nothing is projected: plain Gaussians, with all their orders

    def cover(gaussians: Parts, left: float, coarse: float, hint: float) -> tuple[float, str]:
        return _cached(_keys(gaussians), _Parts(gaussians), left, adjacency, "best", coarse, hint)[:2]

    renyi = rdp_epsilon(parts, delta, adjacency)
    found = bounds.collect(bounds.Question(parts, delta, adjacency, name, renyi, *grid), cover)
    if not found.values:
        raise UnsupportedEventError(f"accountant {name}: does not apply to these events; use best")
    tool = min(found.values, key=lambda key: (found.values[key], bounds.order(key)))
    _confirm(tool, found.values[tool], parts, delta)
    others = tuple((found.label(key), value) for key, value in found.values.items() if key != tool)
    return found.values[tool], found.label(tool), others


def _special(parts: Parts, delta: float) -> tuple[float, str, tuple[tuple[str, float], ...]]:
    from fedlora.accounting import m1, vector

    if len(parts) != 1 or parts[0][1] != 1:
        raise UnsupportedEventError(
            "conditional event: a vector projection or M1 has no Renyi curve, so it is analysed alone; "
            "evaluate each event by itself"
        )
    event = parts[0][0]
    if isinstance(event, VectorProjectionEvent):
        report = vector.epsilon_report(event, delta)
    elif isinstance(event, M1Event):
        report = m1.epsilon_report(event, delta)
    else:
        raise UnsupportedEventError(f"event {event.kind!r}: has no analysis of its own")
    return report.epsilon, report.accountant, tuple(report.alternatives.items())


def moments(parts: Parts, adjacency: Adjacency) -> FloatArray:
    """Return the log-moments of a composition on `rdp.ORDERS` (curves are cached by event)."""
    total = np.zeros_like(rdp.ORDERS)
    for event, count in parts:
        total = total + count * rdp.curve(event, adjacency)
    return total


def rdp_epsilon(parts: Parts, delta: float, adjacency: Adjacency) -> float:
    """Return the Renyi bound; narrow orders are refined for conditional events, whose range of orders is bounded."""
    value, order = rdp.epsilon_from_moments(rdp.ORDERS, moments(parts, adjacency), delta)
    if any(isinstance(event, (PaveEvent, SketchEvent)) for event, _ in parts):
        orders = _finite_orders(parts, order)
        for _ in range(2):
            total = sum(
                (count * rdp.moment(event, orders, adjacency) for event, count in parts),
                np.zeros_like(orders),
            )
            found, order = rdp.epsilon_from_moments(orders, total, delta)
            value = min(value, found)
            at = int(np.searchsorted(orders, order))
            orders = np.linspace(orders[max(at - 1, 0)], orders[min(at + 1, orders.size - 1)], _FINE)
    return value


def _finite_orders(parts: Parts, order: float) -> FloatArray:
    """Orders between 1 and the last finite one, dense (in ratio) towards both ends."""
    top = math.inf
    for event, _ in parts:
        if isinstance(event, PaveEvent):
            top = min(top, *(1.0 + 1.0 / x.gamma for x in event.layers if x.gamma > 0.0), math.inf)
        if isinstance(event, SketchEvent):
            top = min(top, event.gamma)
    if not math.isfinite(top):
        top = 2.0 * order + 10.0
    inside = 1.0 + expit(np.linspace(-45.0, 30.0, _FINE)) * (top - 1.0)
    return np.unique(inside[(inside > 1.0) & (inside < top)])


def _confirm(tool: str, epsilon: float, parts: Parts, delta: float) -> None:
    """A bound of exactly 0 is accepted only where total variation is really below delta."""
    if math.isnan(epsilon) or epsilon < 0.0:
        raise AccountingError(f"accountant {tool}: got epsilon {epsilon}, allowed is >= 0; report the events")
    if epsilon == 0.0 and delta < 1e-12 and pld.is_exact(parts):
        split = pld.gaussian_parts(parts)
        if (
            split is not None
            and split[0] > 0.0
            and gaussian.log_delta(0.0, math.sqrt(split[0])) > math.log(delta)
        ):
            raise AccountingError(f"accountant {tool}: got epsilon 0 where the profile does not allow it")


def delta_of(
    events: Events, epsilon: float, *, adjacency: Adjacency | str = Adjacency.ADD_OR_REMOVE
) -> float:
    """Return a valid upper bound on delta at epsilon >= 0; 1 where nothing is guaranteed.

    Args:
      events: as in `epsilon_of`.
      epsilon: >= 0, finite.
      adjacency: neighbouring relation.
    """
    parts = parts_of(events)
    budget = _checks.real("epsilon", epsilon, at_least=0.0)
    relation = Adjacency.parse(adjacency)
    relation = _relation_for(parts, relation)
    if not parts:
        return 0.0
    if any(isinstance(event, NonPrivateEvent) for event, _ in parts):
        return 1.0
    if any(isinstance(event, (VectorProjectionEvent, M1Event)) for event, _ in parts):
        raise UnsupportedEventError(
            "delta_of: vector and M1 events have their own profile functions; use those"
        )
    total = moments(parts, relation)
    best = math.exp(rdp.log_delta_from_moments(rdp.ORDERS, total, budget))
    split = pld.gaussian_parts(parts)
    if split is None or math.isinf(split[0]):
        return best
    rough = rdp.epsilon_from_moments(rdp.ORDERS, total, 1e-9)[0]
    return min(1.0, bounds.delta_bounds(parts, budget, relation, best, rough))


def within_budget(
    events: Events, epsilon: float, delta: float, *, adjacency: Adjacency | str = Adjacency.ADD_OR_REMOVE
) -> bool:
    """Whether events composed adaptively are (epsilon, delta)-DP, by the cheapest valid bound that says so.

    The Renyi bound of cached curves is tried first; privacy loss distributions only where it does not decide.

    Args:
      events: as in `epsilon_of`; conditional events are refused.
      epsilon: the budget, >= 0.
      delta: in (0, 1).
      adjacency: neighbouring relation.

    Raises:
      UnsupportedEventError: if an event is conditional: no budget may pay for it.
    """
    parts = parts_of(events)
    budget = _checks.real("epsilon", epsilon, at_least=0.0)
    probability = _checks.delta(delta)
    relation = Adjacency.parse(adjacency)
    require_chargeable(parts)
    if not parts:
        return True
    if rdp_epsilon(parts, probability, relation) <= budget:
        return True
    if _surely_beyond(parts, budget, probability, relation):
        return False
    return epsilon_of(parts, probability, adjacency=relation).epsilon <= budget


def _surely_beyond(parts: Parts, budget: float, delta: float, adjacency: Adjacency) -> bool:
    """A lower bound: every sampled release contains its own step's profile at the sampling rate."""
    split = pld.gaussian_parts(parts)
    if split is None or not pld.is_exact(parts):
        return False
    gain = 2.0 if adjacency is Adjacency.REPLACE_ONE else 1.0
    full = split[0]
    return full > 0.0 and gaussian.delta_of_gaussian(budget, gain * math.sqrt(full)) > delta


def require_chargeable(parts: Parts) -> None:
    """Raise UnsupportedEventError if an event is a conditional analysis."""
    for event, _ in parts:
        if not event.chargeable:
            raise UnsupportedEventError(
                f"event {event.kind!r}: is a conditional analysis and can never pay for a release; "
                "use a mechanism that adds noise"
            )


def clear_caches() -> None:
    """Forget computed figures (for tests and timing)."""
    _cached.cache_clear()


__all__ = [
    "AccountantName",
    "PrivacyParameterError",
    "clear_caches",
    "delta_of",
    "epsilon_of",
    "moments",
    "parts_of",
    "rdp_epsilon",
    "require_chargeable",
    "within_budget",
]
