"""A round's releases where memory ran out in the self-check: those of the attempts that went through, in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedlora.errors import PrivacyError
from fedlora.training.scalecheck import Energies, went_through


def heard(*attempts: tuple[str, list[str]]) -> list[tuple[Any, Energies]]:
    """Return releases named by client and step: each attempt has its clients and the steps that it took."""
    found = []
    for clients, steps in attempts:
        for step in steps:
            rows = np.array([[float(ord(client)), float(step)] for client in clients])
            found.append((rows, Energies(rows[:, :1], np.array([1]), ("a",))))
    return found


@pytest.mark.parametrize(
    "attempts",
    [
        [("AB", ["1", "2"])],
        [("AB", ["1"]), ("A", ["1", "2"]), ("B", ["1", "2"])],
        [("AB", ["1", "2"]), ("A", ["1", "2"]), ("B", ["1", "2"])],
        [("AB", []), ("A", ["1", "2"]), ("B", ["1", "2"])],
    ],
)
def test_a_round_s_releases_are_whole_and_in_order_wherever_memory_ran_out(attempts: list[Any]) -> None:
    kept = went_through(heard(*attempts), 2, 2)
    rows = np.concatenate([one for one, _ in kept]).tolist()
    assert rows == [[65.0, 1.0], [66.0, 1.0], [65.0, 2.0], [66.0, 2.0]]
    assert np.concatenate([one.found for _, one in kept]).ravel().tolist() == [65.0, 66.0, 65.0, 66.0]


def test_releases_that_are_missing_are_no_pass() -> None:
    with pytest.raises(PrivacyError, match="fewer releases"):
        went_through(heard(("A", ["1", "2"])), 2, 2)
