"""A worker that dies before it could take a message up is no reason to give the message up: a lost machine's do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from fedlora.simulation import raygrid
from fedlora.simulation.grid import Pending
from fedlora.simulation.raygrid import RayGrid


class Deaths(RayGrid):
    """A grid whose workers die at once, before they are ready or after."""

    def __init__(self, address: str | None) -> None:
        self._preparing = {7: "preparation"}
        self._crew: Any = SimpleNamespace(config=SimpleNamespace(address=address))
        self._pending = {}
        self.submitted = 0

    def _replace(self, node_id: int) -> None:
        assert node_id == 7

    def _submit(self, pending: Pending) -> None:
        self.submitted += 1

    @staticmethod
    def _error_reply(message: Any, reason: str) -> Any:
        return SimpleNamespace(reason=reason)


def send(grid: Deaths) -> tuple[int, str]:
    """Let every worker of one message die; return how often it was handed on, and what it ended with."""
    pending = Pending(SimpleNamespace(), ())  # type: ignore[arg-type]
    grid._pending["key"] = pending
    for _ in range(20):
        reply: Any = grid._after_death("key", pending, 7)
        if reply is not None:
            return grid.submitted, reply.reason
    raise AssertionError("the message never ends")


@pytest.mark.parametrize(
    ("address", "died", "handed_on", "waited"),
    [
        (None, True, 1, 0.0),
        ("10.0.0.1:6379", True, 6, 31.0),
        (None, False, 1, 0.0),
        ("10.0.0.1:6379", False, 1, 0.0),
    ],
)
def test_workers_of_a_cluster_that_die_while_starting_do_not_use_a_messages_attempts_up(
    monkeypatch: pytest.MonkeyPatch, address: str | None, died: bool, handed_on: int, waited: float
) -> None:
    slept: list[float] = []

    def get(reference: str, timeout: float) -> None:
        assert (reference, timeout) == ("preparation", 0)
        if died:
            raise ray.exceptions.ActorDiedError()

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(raygrid.time, "sleep", slept.append)
    submitted, reason = send(Deaths(address))
    assert (submitted, sum(slept)) == (handed_on, waited)
    assert "died" in reason


def test_a_worker_that_was_ready_before_its_round_died_with_its_message() -> None:
    grid = Deaths("10.0.0.1:6379")
    grid._preparing = {}
    assert send(grid)[0] == 1
