"""Checked fields of a message's header: what came from another machine is read by these or not at all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from fedlora.errors import WireError

BROKEN: Final = (KeyError, AttributeError, TypeError, ValueError, OverflowError, RecursionError)
"""What odd values of a header can raise; none of it may leave a reader as it is."""
_MOST: Final = 2**31


def count(value: object, what: str) -> int:
    """Return a count from 0 to 2^31.

    Raises:
        WireError: for anything else (texts, floats, booleans, negative numbers).
    """
    if type(value) is not int or not 0 <= value <= _MOST:
        raise WireError(f"{what}: {str(value)[:40]!r} is no count")
    return value


def spent(value: object, what: str) -> float | None:
    """Return an epsilon: None, a finite number of at least 0, or infinity written as the text "inf".

    Raises:
        WireError: for anything else; NaN above all, which would pass every later comparison.
    """
    if value is None:
        return None
    if value == "inf":
        return math.inf
    if type(value) not in (int, float) or not 0 <= value < math.inf:  # type: ignore[operator]
        raise WireError(f"{what}: {str(value)[:40]!r} is no epsilon")
    return float(value)  # type: ignore[arg-type]


def text(value: object, what: str) -> str | None:
    """Return a text or None.

    Raises:
        WireError: for anything else.
    """
    if value is not None and not isinstance(value, str):
        raise WireError(f"{what}: {type(value).__name__}; expected a text")
    return value


def mapping(value: object, what: str) -> Mapping[str, Any] | None:
    """Return a JSON object or None.

    Raises:
        WireError: for anything else.
    """
    if value is not None and not isinstance(value, Mapping):
        raise WireError(f"{what}: {type(value).__name__}; expected an object")
    return value


def seconds(value: object, what: str) -> dict[str, float]:
    """Return durations by name, finite and not negative.

    Raises:
        WireError: for anything else.
    """
    found = mapping(value, what) or {}
    if not all(type(one) in (int, float) and 0 <= one < math.inf for one in found.values()):
        raise WireError(f"{what}: a duration is no finite number of at least 0")
    return {str(name): float(one) for name, one in found.items()}
