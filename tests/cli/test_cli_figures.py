"""Figures that people read: an epsilon is never shown below its value, what is left never above."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlora.figures import at_least, at_least_digits, at_most


@given(st.floats(min_value=0.0, max_value=1e30), st.integers(1, 6))
def test_a_shown_epsilon_is_never_below_the_value(value: float, places: int) -> None:
    assert float(at_least(value, places)) >= value
    assert float(at_least_digits(value, places)) >= value
    assert float(at_most(value, places)) <= value


@given(st.floats(min_value=0.0, max_value=1e6))
def test_a_shown_epsilon_is_close(value: float) -> None:
    assert float(at_least(value)) - value < 1.0001e-4
    assert value - float(at_most(value)) < 1.0001e-4


@pytest.mark.parametrize(
    ("value", "shown"),
    [(7.999546, "7.9996"), (7.9995, "7.9995"), (0.0, "0.0000"), (math.inf, "inf"), (math.nan, "nan")],
)
def test_examples_of_shown_figures(value: float, shown: str) -> None:
    assert at_least(value) == shown
