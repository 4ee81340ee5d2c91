"""The accountant: the smallest valid upper bound among the tools that apply, cached by multiset of events."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Literal

import numpy as np

from fedlora.accounting import _checks, gaussian, pld, projection_profile, prv, rdp
from fedlora.accounting.conditional import M1Event, PaveEvent, SketchEvent, VectorProjectionEvent
from fedlora.accounting.events import Event, NonPrivateEvent
from fedlora.accounting.hypergeometric import FloatArray
from fedlora.accounting.reports import Adjacency, EpsilonReport, merge
from fedlora.errors import AccountingError, PrivacyParameterError, UnsupportedEventError

AccountantName = Literal["best", "moment", "pld", "rdp", "prv"]
Events = Event | Iterable[Event] | Iterable[tuple[Event, int]]
Parts = pld.Parts
_NAMES = ("best", "moment", "pld", "rdp", "prv")
_TOOLS = {
    "analytic": "exact Gaussian profile",
    "pld": "dp_accounting PLD, pessimistic",
    "rdp": "Renyi moments",
    "prv": "Opacus PRV, upper end",
    "profile": "projection profile, composed PLD",
}


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
) -> EpsilonReport:
    """Return a valid upper bound on epsilon of events composed adaptively on the same data.

    Args:
      events: one event, several, or (event, count) pairs. PUBLIC.
      delta: in (0, 1).
      adjacency: neighbouring relation.
      accountant: "best" takes the smallest bound of every tool that applies and names it; "moment" does so without
        the projection profile (fast); "pld", "rdp" and "prv" ask for one tool.
      unit: what one neighbour differs in, copied into the report.

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
    conditions = dict.fromkeys(text for event, _ in parts for text in event.conditions)
    relation = _relation_for(parts, relation)
    if not all(event.chargeable for event, _ in parts):
        conditions["conditional analysis: it never pays for a release"] = None
    try:
        epsilon, tool, alternatives = _cached(_keys(parts), _Parts(parts), probability, relation, name)
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


@functools.lru_cache(maxsize=65536)
def _cached(
    keys: tuple[tuple[str, int], ...], boxed: _Parts, delta: float, adjacency: Adjacency, name: str
) -> tuple[float, str, tuple[tuple[str, float], ...]]:
    del keys
    return _evaluate(boxed.parts, delta, adjacency, name)


def _evaluate(
    parts: Parts, delta: float, adjacency: Adjacency, name: str
) -> tuple[float, str, tuple[tuple[str, float], ...]]:
    if not parts:
        return 0.0, "nothing was released", ()
    if any(isinstance(event, NonPrivateEvent) for event, _ in parts):
        return math.inf, "no finite bound", ()
    if any(isinstance(event, (VectorProjectionEvent, M1Event)) for event, _ in parts):
        return _special(parts, delta)
    bounds = _bounds(parts, delta, adjacency, name)
    if not bounds:
        raise UnsupportedEventError(f"accountant {name}: does not apply to these events; use best")
    tool = min(bounds, key=lambda key: (bounds[key], _order(key)))
    _confirm(tool, bounds[tool], parts, delta)
    return (
        bounds[tool],
        _TOOLS[tool],
        tuple((_TOOLS[key], value) for key, value in bounds.items() if key != tool),
    )


def _order(tool: str) -> int:
    return tuple(_TOOLS).index(tool)


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
        total = sum(
            (count * rdp.moment(event, orders, adjacency) for event, count in parts), np.zeros_like(orders)
        )
        value = min(value, rdp.epsilon_from_moments(orders, total, delta)[0])
    return value


def _finite_orders(parts: Parts, order: float) -> FloatArray:
    top = 2.0 * order + 10.0
    for event, _ in parts:
        if isinstance(event, PaveEvent):
            top = min(top, *(1.0 + 1.0 / x.gamma for x in event.layers if x.gamma > 0.0), math.inf)
        if isinstance(event, SketchEvent):
            top = min(top, event.gamma)
    if not math.isfinite(top):
        top = 2.0 * order + 10.0
    return 1.0 + np.linspace(0.0, 1.0, 20002)[1:-1] * (top - 1.0)


def _bounds(parts: Parts, delta: float, adjacency: Adjacency, name: str) -> dict[str, float]:
    bounds: dict[str, float] = {}
    renyi = rdp_epsilon(parts, delta, adjacency)
    if name in ("best", "moment", "rdp"):
        bounds["rdp"] = renyi
    if name == "prv":
        bounds["prv"] = prv.epsilon(parts, delta, adjacency)
        _check_prv(bounds["prv"], parts, delta, adjacency, renyi)
        return bounds
    if name == "best":
        value = projection_profile.epsilon(parts, delta, adjacency, renyi)
        if value is not None:
            bounds["profile"] = value
    quick = name in ("best", "moment")
    split = pld.gaussian_parts(parts)
    if split is None or (name == "pld" and not pld.is_exact(parts)):
        return bounds
    exact = pld.is_exact(parts)
    gain = 2.0 if adjacency is Adjacency.REPLACE_ONE else 1.0
    if quick and not split[1]:
        bounds["analytic"] = gaussian.epsilon_of_gaussian(delta, gain * math.sqrt(split[0]))
        if not math.isinf(bounds["analytic"]) and exact and bounds["analytic"] > renyi * (1.0 + 1e-9) + 1e-9:
            raise AccountingError(
                _contradiction("the exact profile", bounds["analytic"], "Renyi moments", renyi)
            )
        return bounds
    if name == "pld" or (quick and (exact or _envelope_near(parts, delta, adjacency))):
        _add_pld(bounds, parts, delta, adjacency, renyi, exact)
    return bounds


def _add_pld(
    bounds: dict[str, float], parts: Parts, delta: float, adjacency: Adjacency, renyi: float, exact: bool
) -> None:
    value = pld.epsilon(parts, delta, adjacency, renyi)
    if value is None:
        return
    bounds["pld"] = value
    if exact and renyi < value:
        lower = pld.epsilon_lower(parts, delta, adjacency, renyi)
        if lower is not None and renyi < lower * (1.0 - 1e-6) - 1e-9:
            raise AccountingError(_contradiction("the optimistic PLD", lower, "Renyi moments", renyi))


def _check_prv(value: float, parts: Parts, delta: float, adjacency: Adjacency, renyi: float) -> None:
    """Opacus states an error of EPS_ERROR on both sides; beyond it, one of the two tools is wrong."""
    upper = pld.epsilon(parts, delta, adjacency, renyi)
    lower = pld.epsilon_lower(parts, delta, adjacency, min(renyi, math.inf if upper is None else upper))
    if upper is not None and value > upper * 1.001 + 2.0 * prv.EPS_ERROR:
        raise AccountingError(
            _contradiction("Opacus PRV less its stated error", value, "the pessimistic PLD", upper)
        )
    if lower is not None and value < lower * 0.999:
        raise AccountingError(_contradiction("the optimistic PLD", lower, "Opacus PRV", value))


def _envelope_near(parts: Parts, delta: float, adjacency: Adjacency) -> bool:
    """Whether giving up the projections could still win: their moments are near the Gaussians' at the best order."""
    total = moments(parts, adjacency)
    order = max(2, math.ceil(rdp.epsilon_from_moments(rdp.ORDERS, total, delta)[1]))
    if order > rdp.ORDERS[-1] or order > 20_000:
        return False
    ours, plain = float(np.interp(order, rdp.ORDERS, total)), 0.0
    for event, count in parts:
        shape = pld.envelope(event)
        if shape is None:
            return False
        plain += count * rdp.gaussian_at(order, *shape, adjacency)
    return not plain > 2.0 * ours


def _contradiction(first: str, low: float, second: str, high: float) -> str:
    return (
        f"accountants contradict each other: {first} gives at least {low:.9g}, {second} gives at most {high:.9g}; "
        "nothing may be released on either figure - report the events and versions"
    )


def _confirm(tool: str, epsilon: float, parts: Parts, delta: float) -> None:
    """A bound of exactly 0 is accepted only where total variation is really below delta."""
    if math.isnan(epsilon) or epsilon < 0.0:
        raise AccountingError(f"accountant {tool}: got epsilon {epsilon}, allowed is >= 0; report the events")
    if epsilon == 0.0 and delta < 1e-12:
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
    gain = 2.0 if relation is Adjacency.REPLACE_ONE else 1.0
    if not split[1]:
        return min(best, gaussian.delta_of_gaussian(budget, gain * math.sqrt(split[0])))
    if not pld.is_exact(parts):
        return best
    other = pld.delta(parts, budget, relation, rdp.epsilon_from_moments(rdp.ORDERS, total, 1e-9)[0])
    return best if other is None else min(best, other)


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
