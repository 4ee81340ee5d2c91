"""What counts in a budget's window: its first period does, earlier ones do not, however many events there are."""

from __future__ import annotations

import pytest

from fedlora.ledger.projection import first_period, multiset_of

NOW = 2026 * 12 + 7  # August


@pytest.mark.parametrize(
    ("window", "first"),
    [("calendar-month", NOW), ("calendar-quarter", 2026 * 12 + 6), ("calendar-year", 2026 * 12)],
)
@pytest.mark.parametrize("events", [1, 2, 3])
def test_the_first_period_of_a_window_counts_and_the_one_before_does_not(
    window: str, first: int, events: int
) -> None:
    assert first_period(window, NOW) == first
    at_start = {(event, first): 10 + event for event in range(events)}
    before = {(event, first - 1): 500 for event in range(events)}
    expected = tuple((event, 10 + event) for event in range(events))
    assert multiset_of(at_start, first) == expected
    assert multiset_of({**at_start, **before}, first) == expected
    assert multiset_of(before, first) == ()
    assert multiset_of({**at_start, **before}, None) == tuple((event, 510 + event) for event in range(events))
