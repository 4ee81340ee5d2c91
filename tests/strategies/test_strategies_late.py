"""A straggler reads the same in a round's record however the SuperLink tells that its time was over."""

from __future__ import annotations

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message
from test_strategies_rounds import make

from strategies.records import EXPIRED

TEXT = "Error: Message Unavailable - The requested message could not be found in the database."


def round_with_error(code: int, age: float) -> tuple[tuple[str, ...], dict[str, str]]:
    """Play one round in which one node's message, of an age in lifetimes, is answered by an error of the SuperLink."""
    strategy, grid, _ = make(nodes=6)
    messages = list(strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid))
    replies = grid.send_and_receive(messages)
    metadata = messages[2].metadata
    metadata.__dict__["_created_at"] = metadata.created_at - age * metadata.ttl
    replies[2] = Message(Error(code=code, reason=TEXT), reply_to=messages[2])
    strategy.aggregate_train(1, replies)
    record = strategy.rounds[-1]
    assert len(record.accepted) == 5
    return record.missing, dict(record.rejected)


@pytest.mark.parametrize("code", EXPIRED)
def test_a_message_that_expired_before_the_deadline_reads_no_answer_in_time(code: int) -> None:
    missing, rejected = round_with_error(code, age=1.0)
    assert missing == ("client-02",)
    assert rejected == {}


@pytest.mark.parametrize(("code", "age"), [(3, 0.0), (4, 0.0), (5, 1.0)])
def test_any_other_error_of_the_superlink_is_named(code: int, age: float) -> None:
    missing, rejected = round_with_error(code, age)
    assert missing == ()
    assert list(rejected) == ["client-02"]
    assert TEXT in rejected["client-02"]
