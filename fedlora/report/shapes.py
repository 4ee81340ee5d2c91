"""What the files of a run folder look like; anything else is damage, and is named instead of shown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fedlora.errors import DataError

_LARGEST: Final = 1e300
"""No figure of a run is larger; a chart could not hold it."""


@dataclass(frozen=True)
class Leaf:
    """One value.

    Attributes:
        kind: "number" (finite, or the text of an infinite one), "count" (whole, >= 0), "amount" (finite, >= 0),
            "text", or "anything".
        needed: whether it may not be left out.
    """

    kind: str
    needed: bool = False


@dataclass(frozen=True)
class MapOf:
    """An object with any keys."""

    of: Shape


@dataclass(frozen=True)
class ListOf:
    """A list of any length."""

    of: Shape


Shape = Leaf | MapOf | ListOf | Mapping[str, "Shape"]

NUMBER, AMOUNT, COUNT = Leaf("number"), Leaf("amount"), Leaf("count")
TEXT, ANYTHING = Leaf("text"), Leaf("anything")

ROUND: Final[Shape] = {
    "round": Leaf("count", needed=True),
    "asked": COUNT,
    "accepted": COUNT,
    "refused": MapOf(ANYTHING),
    "failed": MapOf(ANYTHING),
    "epsilon": NUMBER,
    "epsilon_by_client": MapOf(NUMBER),
    "residual": NUMBER,
    "metrics": MapOf(NUMBER),
    "seconds": MapOf(AMOUNT),
    "bytes_up": COUNT,
    "bytes_down": COUNT,
    "diagnostics": MapOf(NUMBER),
}
_BUDGET: Final[Shape] = {"epsilon": NUMBER, "delta": NUMBER}
SUMMARY: Final[Shape] = {
    "rounds": COUNT,
    "metrics": MapOf(NUMBER),
    "epsilon": NUMBER,
    "statement": {"delta": NUMBER, "budget": _BUDGET, "epsilon_from_this_runs_events": NUMBER},
    "seconds": MapOf(NUMBER),
    "warnings": ListOf(TEXT),
}
MIRROR: Final[Shape] = MapOf(
    {"events": ListOf({"steps": COUNT}), "epsilon_from_events": NUMBER, "epsilon_reported": NUMBER}
)
_ACCOUNT: Final[Shape] = {
    "account": MapOf(ANYTHING),
    "epsilon": NUMBER,
    "budget": _BUDGET,
    "left": NUMBER,
    "conditions": ListOf(TEXT),
}
LEDGER: Final[Shape] = {"accounts": ListOf(_ACCOUNT)}
RECEIPTS: Final[Shape] = MapOf(
    {
        **dict.fromkeys(("epsilon", "epsilon_claimed", "epsilon_from_receipts", "delta"), NUMBER),
        "client": TEXT,
        "unanswered": ListOf(ANYTHING),
        "flags": ListOf(MapOf(ANYTHING)),
    }
)
AUDIT: Final[Shape] = {
    **dict.fromkeys(("claimed_epsilon", "lower_bound", "confidence", "power", "delta"), NUMBER),
    "conditions": MapOf(ANYTHING),
    "figures": MapOf(ANYTHING),
}
PARTITION: Final[Shape] = {"clients": MapOf(MapOf(COUNT))}
SPECIFICATIONS: Final[Shape] = {"specifications": ListOf({"delta": NUMBER})}


def require(value: Any, shape: Shape, place: str) -> None:
    """Refuse what a file of a run cannot hold.

    Args:
        value: parsed JSON; None stands for what is not known.
        shape: what it should be; keys that the shape does not name may hold anything.
        place: file (and line) for the error.

    Raises:
        DataError: naming the first place that is wrong.
    """
    wrong = _fault(value, shape)
    if wrong is not None:
        raise DataError(f"{place}: {wrong}; the file is damaged")


def _fault(value: Any, shape: Shape) -> str | None:
    if isinstance(shape, Leaf):
        return _leaf_fault(value, shape)
    if value is None:
        return None
    if isinstance(shape, ListOf):
        if not isinstance(value, Sequence) or isinstance(value, str):
            return "a list is needed"
        return _first((f"[{i}]", one, shape.of) for i, one in enumerate(value))
    if not isinstance(value, Mapping):
        return "an object is needed"
    if isinstance(shape, MapOf):
        return _first((str(name), one, shape.of) for name, one in value.items())
    return _first((name, value.get(name), one) for name, one in shape.items())


def _first(parts: Any) -> str | None:
    for name, value, shape in parts:
        wrong = _fault(value, shape)
        if wrong is not None:
            return f"{name!r}: {wrong}"
    return None


def _leaf_fault(value: Any, leaf: Leaf) -> str | None:
    if value is None:
        return "is missing" if leaf.needed else None
    if leaf.kind == "anything":
        return None
    if leaf.kind == "text":
        return None if isinstance(value, str) else "text is needed"
    if leaf.kind == "number" and value in ("inf", "-inf"):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST:
        return "a number is needed"
    if leaf.kind == "number":
        return None
    if leaf.kind == "count":
        return None if isinstance(value, int) and value >= 0 else "a whole number >= 0 is needed"
    return None if value >= 0 else "a number >= 0 is needed"


def finite_number(value: Any) -> float | None:
    """Return a finite number, or None for whatever else stands in its place."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if plain and math.isfinite(value) else None
