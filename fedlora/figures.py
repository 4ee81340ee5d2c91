"""How figures are written: an epsilon never below its value, what is left never above; what JSON and terminals hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any


def at_least(value: float, places: int = 4) -> str:
    """Return a figure with so many decimal places, rounded up: what an epsilon is shown as.

    Args:
        value: any float; infinities and NaN are written as they are.
        places: digits after the point.

    Example:
        >>> at_least(7.999546), at_least(7.9995), at_least(0.5, 2), at_least(float("inf"))
        ('7.9996', '7.9995', '0.50', 'inf')
    """
    return _fixed(value, places, ROUND_CEILING)


def at_most(value: float, places: int = 4) -> str:
    """Return a figure with so many decimal places, rounded down: what a remaining budget is shown as.

    Example:
        >>> at_most(0.00046), at_most(1.0)
        ('0.0004', '1.0000')
    """
    return _fixed(value, places, ROUND_FLOOR)


def at_least_digits(value: float, digits: int = 4) -> str:
    """Return a figure with so many significant digits, rounded up.

    Example:
        >>> at_least_digits(8.00011), at_least_digits(0.5), at_least_digits(1234567.0, 6)
        ('8.001', '0.5', '1.23457e+06')
    """
    return _significant(value, digits, ROUND_CEILING)


def at_most_digits(value: float, digits: int = 4) -> str:
    """Return a figure with so many significant digits, rounded down: what a lower bound is shown as.

    Example:
        >>> at_most_digits(0.99999), at_most_digits(0.5)
        ('0.9999', '0.5')
    """
    return _significant(value, digits, ROUND_FLOOR)


def _significant(value: float, digits: int, rounding: str) -> str:
    if not math.isfinite(value):
        return str(value)
    rounded = Context(prec=digits, rounding=rounding).create_decimal(Decimal(repr(float(value))))
    return f"{float(rounded):.{digits}g}"


def _fixed(value: float, places: int, rounding: str) -> str:
    if not abs(value) < 1e15:  # infinities and NaN too
        return str(value)
    shortest = Decimal(
        repr(float(value))
    )  # the digits that a reader sees elsewhere, not the binary tail behind them
    return str(shortest.quantize(Decimal(1).scaleb(-places), rounding=rounding))


def finite(value: Any) -> Any:
    """Return a value that strict JSON can hold: infinite and undefined numbers become text."""
    if isinstance(value, Mapping):
        return {str(key): finite(child) for key, child in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [finite(child) for child in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return str(value)


def printable(text: str) -> str:
    """Return text of foreign origin for a terminal: what could steer it becomes a question mark."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
