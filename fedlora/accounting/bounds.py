"""Every valid bound on a composition's epsilon, by tool; the accountant takes the smallest and names it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from fedlora.accounting import floor, gaussian, pld, projection_profile, prv, truncation, variation
from fedlora.accounting.reports import Adjacency
from fedlora.errors import AccountingError

TOOLS = {
    "variation": "total variation of all steps",
    "analytic": "exact Gaussian profile",
    "pld": "dp_accounting PLD, pessimistic",
    "rdp": "Renyi moments",
    "prv": "Opacus PRV, upper end",
    "profile": "projection profile, composed PLD",
    "envelope": "Gaussian that the projections post-process",
    "truncated": "Gaussian outside rare projections (Theorem 5 without a union)",
}
QUICK = ("best", "moment")


@dataclass(frozen=True)
class Question:
    """What is asked: a composition, delta, neighbouring relation and tool.

    Attributes:
      parts: basic events with counts. PUBLIC.
      delta: in (0, 1).
      adjacency: neighbouring relation.
      name: the accountant asked for.
      renyi: the composition's Renyi bound.
      coarse: factor >= 1 on the discretisation; larger is quicker and looser, never invalid.
      hint: a guess of the answer, to choose the first discretisation; never a bound.
    """

    parts: pld.Parts
    delta: float
    adjacency: Adjacency
    name: str
    renyi: float
    coarse: float = 1.0
    hint: float = math.inf


@dataclass
class Bounds:
    """Bounds found so far by tool, with more precise labels for some."""

    values: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def smallest(self) -> float:
        """The smallest bound so far."""
        return min(self.values.values(), default=math.inf)

    def label(self, tool: str) -> str:
        """Return the name of a tool for reports."""
        return self.labels.get(tool, TOOLS[tool])


Evaluate = Callable[[pld.Parts, float, float, float], tuple[float, str]]
"""(Gaussian parts, delta, coarseness, hint) -> (best bound, its tool's name), at the question's relation."""
_SCOUT = 10.0
_QUICK = 3.0
_NEAR = 1.02
_TINY = 1.0e-9
"""Covers are looked at on a coarse grid first; in full only where they come near the smallest bound."""
_LARGE, _RUDE = 30.0, 5.0
"""Where the moments give no more than a figure beyond this, the quick answer takes the profile too, on a rude grid."""
_FLOOR = 4.0
"""The answer lies between the floor and a few times the floor: that many times the floor is the first guess."""


def order(tool: str) -> int:
    """Rank of a tool among equal figures."""
    return tuple(TOOLS).index(tool)


def collect(asked: Question, evaluate: Evaluate) -> Bounds:
    """Return every bound that the accountant asked for may use.

    Raises:
      AccountingError: if two valid tools contradict each other.
    """
    found = Bounds()
    if asked.name in (*QUICK, "rdp"):
        found.values["rdp"] = asked.renyi
    if asked.name in QUICK and variation.total_variation(asked.parts, asked.adjacency) <= asked.delta:
        found.values["variation"] = 0.0
        return found
    if asked.name == "prv":
        found.values["prv"] = prv.epsilon(asked.parts, asked.delta, asked.adjacency)
        _check_prv(found.values["prv"], asked)
        return found
    hopeless = asked.name == "moment" and asked.renyi > _LARGE
    if asked.name == "best" or hopeless:
        coarse = max(_RUDE, asked.coarse) if hopeless else asked.coarse
        value = projection_profile.epsilon(
            asked.parts, asked.delta, asked.adjacency, asked.renyi, coarse=coarse
        )
        if value is not None:
            found.values["profile"] = value
    if pld.gaussian_parts(asked.parts) is None or asked.name not in (*QUICK, "pld"):
        return found
    if pld.is_exact(asked.parts):
        _add_gaussian(found, asked)
    elif asked.name in QUICK:
        _add_covers(found, asked, evaluate)
    return found


def _add_gaussian(found: Bounds, asked: Question) -> None:
    """The exact profile of full-batch Gaussians, the distribution of sampled ones."""
    full, sampled = pld.gaussian_parts(asked.parts) or (math.inf, ())
    if sampled or asked.name == "pld":
        _add_pld(found, asked)
        return
    gain = 2.0 if asked.adjacency is Adjacency.REPLACE_ONE else 1.0
    value = found.values["analytic"] = gaussian.epsilon_of_gaussian(asked.delta, gain * math.sqrt(full))
    if not math.isinf(value) and value > asked.renyi * (1.0 + 1e-9) + 1e-9:
        raise AccountingError(contradiction("the exact profile", value, "Renyi moments", asked.renyi))


def _add_pld(found: Bounds, asked: Question) -> None:
    rough = min(asked.renyi, asked.hint)
    if rough == asked.renyi:
        low = floor.epsilon_floor(asked.parts, asked.delta, asked.adjacency)
        rough = _guess(low, asked.renyi)
    value = pld.epsilon(asked.parts, asked.delta, asked.adjacency, rough, coarse=asked.coarse)
    if value is None:
        return
    found.values["pld"] = value
    if asked.renyi < value and asked.coarse == 1.0:
        lower = pld.epsilon_lower(asked.parts, asked.delta, asked.adjacency, asked.renyi)
        if lower is not None and asked.renyi < lower * (1.0 - 1e-6) - 1e-9:
            raise AccountingError(contradiction("the optimistic PLD", lower, "Renyi moments", asked.renyi))


def _guess(low: float, upper: float) -> float:
    """A guess of an answer between a lower and an upper bound; the upper one while they are near."""
    return _FLOOR * low if 0.0 < 2.0 * _FLOOR * low < upper else upper


@dataclass(frozen=True)
class _Cover:
    """A composition of Gaussians that covers the asked one, the delta left for it, and a lower bound on its epsilon."""

    tool: str
    parts: pld.Parts
    left: float
    low: float


def _cover(asked: Question, share: float) -> _Cover:
    """The Gaussians outside rare projections that a share of delta pays for; share 0 is the envelope."""
    spent = share * asked.delta
    if share == 0.0:
        tool, parts = "envelope", truncation.envelopes(asked.parts)
    else:
        tool, parts = "truncated", truncation.gaussians(asked.parts, spent, asked.adjacency)
    left = asked.delta - spent
    return _Cover(tool, parts, left, floor.epsilon_floor(parts, left, asked.adjacency))


def _add_covers(found: Bounds, asked: Question, evaluate: Evaluate) -> None:
    """Gaussians that cover the projections: always, or outside rare projections that a share of delta pays for."""
    quick = asked.name == "moment"
    near: list[tuple[float, _Cover]] = []
    for share in (truncation.SHARES[0], 0.0) if quick else (0.0, *truncation.SHARES):
        cover = _cover(asked, share)
        if not (found.smallest > _TINY and cover.low < found.smallest):
            continue
        if quick and share:
            _take(found, cover, evaluate, max(_QUICK, asked.coarse), _guess(cover.low, found.smallest))
            continue
        guess = _guess(cover.low, found.smallest)
        near.append((evaluate(cover.parts, cover.left, max(_SCOUT, asked.coarse), guess)[0], cover))
    limit = _NEAR * min([found.smallest, *(scout for scout, _ in near)])
    for scout, cover in near:
        if scout <= limit:
            _take(found, cover, evaluate, asked.coarse, scout)


def _take(found: Bounds, cover: _Cover, evaluate: Evaluate, coarse: float, hint: float) -> None:
    value, inner = evaluate(cover.parts, cover.left, coarse, hint)
    if value < found.values.get(cover.tool, math.inf):
        found.values[cover.tool], found.labels[cover.tool] = value, f"{TOOLS[cover.tool]}: {inner}"


def _check_prv(value: float, asked: Question) -> None:
    """Opacus states an error of EPS_ERROR on both sides; beyond it, one of the two tools is wrong."""
    upper = pld.epsilon(asked.parts, asked.delta, asked.adjacency, asked.renyi)
    rough = min(asked.renyi, math.inf if upper is None else upper)
    lower = pld.epsilon_lower(asked.parts, asked.delta, asked.adjacency, rough)
    if upper is not None and value > upper * 1.001 + 2.0 * prv.EPS_ERROR:
        raise AccountingError(
            contradiction("Opacus PRV less its stated error", value, "the pessimistic PLD", upper)
        )
    if lower is not None and value < lower * 0.999:
        raise AccountingError(contradiction("the optimistic PLD", lower, "Opacus PRV", value))


def contradiction(first: str, low: float, second: str, high: float) -> str:
    """Return the message of two bounds that cannot both hold."""
    return (
        f"accountants contradict each other: {first} gives at least {low:.9g}, {second} gives at most {high:.9g}; "
        "nothing may be released on either figure - report the events and versions"
    )


def delta_bounds(parts: pld.Parts, epsilon: float, adjacency: Adjacency, best: float, rough: float) -> float:
    """Return the smallest bound on delta at epsilon that distributions and Gaussian covers give.

    Args:
      parts: Gaussian events and noisy projections with counts.
      epsilon: >= 0.
      adjacency: neighbouring relation.
      best: a valid bound on delta already known.
      rough: an upper bound on the epsilon of interest, to choose a discretisation.
    """
    best = min(best, variation.total_variation(parts, adjacency))
    if pld.is_exact(parts):
        return min(best, _gaussian_delta(parts, epsilon, adjacency, rough))
    value = projection_profile.delta(parts, epsilon, adjacency, rough)
    best = best if value is None else min(best, value)
    for share in (0.0, 0.3, 0.1, 0.1):
        spent = share * best
        if not spent < best < 1.0 + share:
            break
        cover = truncation.gaussians(parts, spent, adjacency) if spent else truncation.envelopes(parts)
        if floor.epsilon_floor(cover, min(best - spent, 0.999), adjacency) <= epsilon:
            best = min(best, spent + _gaussian_delta(cover, epsilon, adjacency, rough))
    return best


def _gaussian_delta(parts: pld.Parts, epsilon: float, adjacency: Adjacency, rough: float) -> float:
    split = pld.gaussian_parts(parts)
    if split is None or math.isinf(split[0]):
        return 1.0
    if not split[1]:
        gain = 2.0 if adjacency is Adjacency.REPLACE_ONE else 1.0
        return gaussian.delta_of_gaussian(epsilon, gain * math.sqrt(split[0]))
    value = pld.delta(parts, epsilon, adjacency, rough)
    return 1.0 if value is None else value


__all__ = ["QUICK", "TOOLS", "Bounds", "Question", "collect", "contradiction", "delta_bounds", "order"]
