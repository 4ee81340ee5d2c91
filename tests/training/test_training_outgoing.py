"""What leaves a client: noised updates and public facts; no metric, whoever asks and whichever way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trainer_helpers import World, make_world

from fedlora.config.schema import NoPrivacy
from fedlora.training.answers import with_examples
from fedlora.training.policy import Policy
from fedlora.training.port import Packet, pack_request, serve_packet
from fedlora.training.requests import ClientReply
from fedlora.wire.payload import AdapterPayload

REPLY_KEYS = {"client", "status", "payload", "event", "steps", "epsilon", "ledger_head", "receipt", "error"}
REPLY_KEYS |= {"ledger_receipts"}
ROUND_KEYS = {"schema", "op", "run_id", "round", "replies", "reduced_clients", "timings", "reduced"}
PRIVATE = {"loss": 0.3, "accuracy": 1.0, "num_examples": 7, "batch_size": 3, "grad_norm": 2.0}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("outgoing"))


def payload(world: World, **notes: Any) -> AdapterPayload:
    return replace(world.bench.initial_payload(), notes=notes)


def test_h19_a_private_answer_holds_nothing_but_public_fields(world: World, tmp_path: Path) -> None:
    trainer, _, _ = world.trainer(tmp_path)
    answer = serve_packet(trainer, pack_request(world.request(1)))
    assert set(answer.header) == ROUND_KEYS
    assert answer.header["timings"] == {}
    for reply in answer.header["replies"]:
        assert set(reply) == REPLY_KEYS
        assert json.loads(reply["payload"]["header"])["notes"] == {}
        assert (reply["receipt"], reply["error"]) == (None, None)


@pytest.mark.parametrize("unit", ["record", "client"])
def test_h19_a_metric_that_a_mechanism_adds_stays_on_the_client(world: World, unit: str) -> None:
    privacy = world.config.privacy.model_copy(update={"unit": unit})
    config = world.config.model_copy(update={"privacy": privacy})
    reply = ClientReply("c", "ok", payload(world, projection_seed="ab", dropped_norm=0.5, **PRIVATE), {}, 1)
    out = with_examples(reply, config, 7)
    assert out.payload is not None
    assert dict(out.payload.notes) == {"projection_seed": "ab", "dropped_norm": 0.5}


def test_h19_without_privacy_counts_travel_for_weights(world: World) -> None:
    config = world.config.model_copy(update={"privacy": NoPrivacy(unit="none")})
    out = with_examples(ClientReply("c", "ok", payload(world, loss=0.3), {}, 1), config, 7)
    assert out.payload is not None
    assert dict(out.payload.notes) == {"loss": 0.3, "num_examples": 7}


@pytest.mark.parametrize("records", [range(30), range(2), range(0)])
def test_h19_the_answers_form_does_not_tell_how_many_records_there_are(
    world: World, tmp_path: Path, records: range
) -> None:
    import numpy as np

    other = replace(world, parts={"client-0000": np.asarray(records, dtype=np.int64)})
    trainer, _, _ = other.trainer(tmp_path)
    answer = serve_packet(trainer, pack_request(world.request(1, clients=("client-0000",))))
    reply = answer.header["replies"][0]
    assert reply["status"] == "ok"
    sizes = sorted((name, array.shape) for name, array in answer.arrays.items())
    whole, _, _ = world.trainer(tmp_path / "whole")
    usual = serve_packet(whole, pack_request(world.request(1, clients=("client-0000",))))
    assert sizes == sorted((name, array.shape) for name, array in usual.arrays.items())
    assert {key: reply[key] for key in ("event", "steps", "epsilon")} == {
        key: usual.header["replies"][0][key] for key in ("event", "steps", "epsilon")
    }


def evaluation_packets(world: World) -> dict[str, Packet]:
    good = pack_request(world.request(1))
    return {
        "evaluate": Packet({**good.header, "op": "evaluate"}, good.arrays),
        "metrics": Packet({**good.header, "op": "metrics"}, good.arrays),
        "no op": Packet({key: value for key, value in good.header.items() if key != "op"}, good.arrays),
    }


@pytest.mark.parametrize("kind", ["evaluate", "metrics", "no op"])
def test_h19_nobody_evaluates_on_private_records(world: World, tmp_path: Path, kind: str) -> None:
    trainer, shelf, book = world.trainer(tmp_path, policy=Policy.simulation())
    answer = serve_packet(trainer, evaluation_packets(world)[kind])
    assert answer.header["op"] == "failure"
    assert shelf.loads == 0
    assert shelf.opened == []
    assert book.accounts() == ()
    assert "loss" not in json.dumps(answer.header)


def test_h19_an_evaluation_message_that_asks_for_a_round_is_charged_like_one(
    world: World, tmp_path: Path
) -> None:
    """Flower's own evaluation messages reach the same trainer; it answers by what the packet asks, and charges."""
    from flwr.app import Context, Message, MessageType, RecordDict

    import client.app
    from fedlora.simulation.identity import assume_identity, number_message
    from fedlora.simulation.messages import from_record, to_record
    from fedlora.training.local import register_port, unregister_port
    from fedlora.training.port import LocalPort

    trainer, _, book = world.trainer(tmp_path)
    register_port(41, LocalPort(trainer))
    try:
        assume_identity(7, 1)
        message = Message(to_record(pack_request(world.request(1))), 41, MessageType.EVALUATE, ttl=60.0)
        number_message(message, "m1")
        assume_identity(7, 41)
        context = Context(run_id=7, node_id=41, node_config={}, state=RecordDict(), run_config={})
        reply = client.app.app(message, context)
    finally:
        unregister_port(41)
    assert set(reply.content.metric_records) == set()
    answer = from_record(reply.content)
    assert {one["status"] for one in answer.header["replies"]} == {"ok"}
    assert all(set(one) == REPLY_KEYS for one in answer.header["replies"])
    for account in book.accounts():
        assert book.report(account).num_events == 1
    assert len(book.accounts()) == 2
