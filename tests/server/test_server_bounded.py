"""The stragglers' deadline holds, also against a reply whose upload has begun and never ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from flwr.serverapp import Grid

from server.bounded import BoundedGrid


class Flower(Grid):
    """Stands for Flower's grid: message ids name what happens to the reply."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.asked: list[str] = []

    @property
    def run(self) -> Any:
        return "run"

    def set_run(self, run: Any) -> None:
        del run

    def create_message(self, *args: Any, **kwargs: Any) -> Any:
        del kwargs
        return args

    def get_node_ids(self) -> Iterable[int]:
        return [1, 2]

    def push_messages(self, messages: Iterable[Any]) -> Iterable[str]:
        return list(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Any]:
        (one,) = message_ids
        self.asked.append(one)
        if one == "half":
            self.released.wait(300)
            return ["half, too late"]
        if one == "broken":
            raise OSError("connection lost")
        return [] if one == "mute" else [f"reply to {one}"]

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> Iterable[Any]:
        return [f"{one} {timeout}" for one in messages]


@pytest.fixture
def flower() -> Iterator[Flower]:
    made = Flower()
    yield made
    made.released.set()


def test_replies_come_back_at_once_when_all_are_there(flower: Flower) -> None:
    began = time.monotonic()
    found = BoundedGrid(flower).send_and_receive(["a", "b"], timeout=200)  # type: ignore[list-item]
    assert sorted(map(str, found)) == ["reply to a", "reply to b"]
    assert time.monotonic() - began < 100  # not at the deadline


@pytest.mark.parametrize("straggler", ["half", "mute"])
def test_a_straggler_costs_the_deadline_and_no_more(flower: Flower, straggler: str) -> None:
    began = time.monotonic()
    found = BoundedGrid(flower).send_and_receive(["a", straggler, "b"], timeout=3.0)  # type: ignore[list-item]
    assert sorted(map(str, found)) == ["reply to a", "reply to b"]
    assert 2.9 < time.monotonic() - began < 100  # the half reply would hold it for 300 s


def test_a_reply_that_is_complete_too_late_is_dropped(
    flower: Flower, caplog: pytest.LogCaptureFixture
) -> None:
    grid = BoundedGrid(flower)
    assert list(grid.send_and_receive(["half"], timeout=0.2)) == []  # type: ignore[list-item]
    flower.released.set()
    deadline = time.monotonic() + 120
    while "after the deadline" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "after the deadline" in caplog.text
    assert list(grid.send_and_receive(["a"], timeout=60)) == ["reply to a"]  # type: ignore[list-item]


def test_what_flowers_grid_raises_is_raised(flower: Flower) -> None:
    with pytest.raises(OSError, match="connection lost"):
        BoundedGrid(flower).send_and_receive(["broken"], timeout=60)  # type: ignore[list-item]


def test_everything_else_is_passed_on(flower: Flower) -> None:
    grid = BoundedGrid(flower)
    assert list(grid.get_node_ids()) == [1, 2]
    assert grid.run == "run"
    assert list(grid.send_and_receive(["a"])) == ["a None"]  # type: ignore[list-item]
