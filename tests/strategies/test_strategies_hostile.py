"""One hostile node: whatever its answer holds, the round goes on and the server builds nothing from it."""

from __future__ import annotations

import contextlib
import json
import random
from dataclasses import replace

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message
from test_strategies_rounds import LAYOUT, make, play

from fedlora.simulation.messages import from_record, to_record
from fedlora.training.packets import Packet
from fedlora.wire import ModuleSpec

JUNK = [
    None,
    True,
    -1,
    0,
    1.5,
    2**31,
    2**63,
    10**400,
    1e308,
    "",
    "x" * 2000,
    "\ud800",
    [],
    {},
    [[]],
    [None],
    "inf",
]


def places(value, path=()):
    """Paths to everything inside a JSON value."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*path, key))


def broken(header, rng):
    """A header with one to three odd values; the payload's own header inside it too."""
    head = json.loads(json.dumps(dict(header)))
    inner = head["replies"][0]["payload"]
    inner["header"] = json.loads(inner["header"])
    for _ in range(rng.choice((1, 1, 2, 3))):
        path = rng.choice(list(places(head)))
        spot = head
        try:
            for key in path[:-1]:
                spot = spot[key]
            if rng.random() < 0.75:
                spot[path[-1]] = rng.choice(JUNK)
            else:
                del spot[path[-1]]
        except (KeyError, IndexError, TypeError):
            continue
    with contextlib.suppress(KeyError):
        inner["header"] = json.dumps(inner["header"])
    return head


@pytest.mark.parametrize("kind", ["mean_b", "product"])
def test_odd_values_anywhere_in_an_answer_do_not_end_the_round(kind):
    rng = random.Random(1)
    used = 0
    for _ in range(60):
        strategy, grid, _ = make(kind=kind, nodes=6)
        messages = list(strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid))
        replies = grid.send_and_receive(messages)
        packet = from_record(replies[2].content)
        try:
            content = to_record(Packet(broken(packet.header, rng), packet.arrays))
        except (TypeError, ValueError):
            continue  # what cannot be sent
        replies[2] = Message(content, reply_to=messages[2])
        strategy.aggregate_train(1, replies)
        record = strategy.rounds[-1]
        assert set(record.accepted) >= {f"client-0{i}" for i in (0, 1, 3, 4, 5)}
        used += "client-02" in record.accepted
        for message in strategy.configure_train(2, ArrayRecord(), ConfigRecord(), grid):
            assert message.has_content()
    assert used < 30


SPECS = [
    ModuleSpec(40, 30, 2**30, 2.0),
    ModuleSpec(40, 30, 4, 1e-300),
    ModuleSpec(2**30, 30, 4, 2.0),
    ModuleSpec(40, 30, 31, 2.0),
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", ["a.q", "unknown.module"])
def test_shapes_of_a_rejected_update_are_not_what_the_server_builds_next(spec, name):
    strategy, grid, _ = make(kind="product", nodes=6)

    def forge(answer):
        ones = tuple(
            replace(r, payload=replace(r.payload, modules={**r.payload.modules, name: spec}))
            for r in answer.replies
        )
        return replace(answer, replies=ones)

    grid.trainers[12].faults = {"reply": forge}
    play(strategy, grid)
    assert set(strategy.rounds[-1].rejected) == {"client-02"}
    grid.trainers[12].faults = {}
    play(strategy, grid, 2)
    assert dict(grid.trainers[12].seen[-1].payload.modules) == dict(LAYOUT.modules)
    assert "client-02" in strategy.rounds[-1].accepted
