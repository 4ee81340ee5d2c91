"""Validation of privacy parameters that NaN, infinities, bools and text cannot walk through."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from fedlora.errors import PrivacyParameterError


def _refuse(name: str, got: object, allowed: str) -> PrivacyParameterError:
    return PrivacyParameterError(
        f"{name}: got {got!r}, allowed is {allowed}; pass a plain number in that range"
    )


def real(
    name: str,
    value: Any,
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    at_most: float = math.inf,
    below: float = math.inf,
) -> float:
    """Return `value` as a finite Python float inside the range, or raise.

    Args:
      name: the parameter's name, for the message.
      value: int, float or numpy scalar; bool, text, None, NaN and infinities are refused. PUBLIC.
      above: exclusive lower bound.
      at_least: inclusive lower bound.
      at_most: inclusive upper bound.
      below: exclusive upper bound.

    Returns:
      The value as a float.

    Raises:
      PrivacyParameterError: if the value is not a finite number in the range.
    """
    allowed = _describe(above, at_least, at_most, below)
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise _refuse(name, value, allowed)
    try:
        number = float(value)
    except (OverflowError, ValueError):
        raise _refuse(name, "a number beyond float range", allowed) from None
    inside = number > above and number >= at_least and number <= at_most and number < below
    if not (math.isfinite(number) and inside):
        raise _refuse(name, number, allowed)
    return number


def integer(name: str, value: Any, *, at_least: int = 1, at_most: int = 10**15) -> int:
    """Return `value` as a Python int inside the range, or raise.

    Args:
      name: the parameter's name, for the message.
      value: int or numpy integer; bool, floats and text are refused. PUBLIC.
      at_least: inclusive lower bound.
      at_most: inclusive upper bound.

    Returns:
      The value as an int.

    Raises:
      PrivacyParameterError: if the value is not an integer in the range.
    """
    allowed = f"an integer from {at_least} to {at_most}"
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise _refuse(name, value, allowed)
    number = int(value)
    if not at_least <= number <= at_most:
        raise _refuse(name, number, allowed)
    return number


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Return `value` if it is one of the allowed texts, or raise.

    Raises:
      PrivacyParameterError: if it is not.
    """
    if not isinstance(value, str) or value not in allowed:
        raise _refuse(name, value, " | ".join(allowed))
    return value


def delta(value: Any) -> float:
    """Return a delta in (0, 1), or raise PrivacyParameterError."""
    return real("delta", value, above=0.0, below=1.0)


def _describe(above: float, at_least: float, at_most: float, below: float) -> str:
    parts = ["a finite number"]
    if math.isfinite(above):
        parts.append(f"> {above:g}")
    if math.isfinite(at_least):
        parts.append(f">= {at_least:g}")
    if math.isfinite(at_most):
        parts.append(f"<= {at_most:g}")
    if math.isfinite(below):
        parts.append(f"< {below:g}")
    return " ".join(parts)
