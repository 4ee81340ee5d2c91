"""The running figure of a run: the largest epsilon that any client has reported, also when that client is silent."""

from __future__ import annotations

from types import SimpleNamespace

from fedlora.training.requests import ClientReply
from server.mirror import LedgerMirror

EVENT = {"kind": "gaussian", "noise_multiplier": 1.0}


def reply(client: str, epsilon: float | None) -> ClientReply:
    return ClientReply(client, "ok", None, EVENT, 1, epsilon, "head")


def test_the_figure_does_not_fall_when_the_client_that_spent_most_is_silent() -> None:
    mirror = LedgerMirror(SimpleNamespace(privacy=None))  # type: ignore[arg-type]
    told = []
    for round_ in ({"a": 1.0, "b": 0.5}, {"a": 2.0, "b": 1.0}, {"b": 1.5}, {}, {"b": None}, {"a": 3.0}):
        mirror.start_round()
        for client, epsilon in round_.items():
            mirror.note(reply(client, epsilon))
        told.append(mirror.said_so_far)
    assert told == [1.0, 2.0, 2.0, None, None, 3.0]


def test_the_figure_is_carried_over_a_restart() -> None:
    first = LedgerMirror(SimpleNamespace(privacy=None))  # type: ignore[arg-type]
    first.note(reply("a", 2.0))
    second = LedgerMirror(SimpleNamespace(privacy=None))  # type: ignore[arg-type]
    second.restore(first.memory())
    second.start_round()
    assert second.said_so_far is None
    second.note(reply("b", 1.0))
    assert second.said_so_far == 2.0
