"""The relay: no torch, no data, and a message whatever happens."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from client.app import app
from fedlora.errors import TrainerUnreachableError
from fedlora.simulation.grid import number_message
from fedlora.simulation.identity import assume_identity
from fedlora.simulation.messages import from_record, to_record
from fedlora.training.local import find_port, register_port, unregister_port
from fedlora.training.port import FAILURE, Packet, hello_packet

ROOT = Path(__file__).resolve().parents[2]
NODE = 777


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("FEDLORA_TRAINER_SOCKET", raising=False)
    assume_identity(5, 1)
    yield
    unregister_port(NODE)


def ask(content: RecordDict, kind: str = "train") -> Message:
    message = number_message(Message(content, NODE, kind), "m1")
    context = Context(run_id=5, node_id=NODE, node_config={}, state=RecordDict(), run_config={})
    return app(message, context)


class Port:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def exchange(self, packet: Packet) -> Packet:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return Packet({"op": "echo", **dict(packet.header)}, packet.arrays)


def test_the_relay_imports_no_torch() -> None:
    code = (
        "import sys, client.app, fedlora.training.service; "
        "bad = {'torch', 'transformers', 'peft', 'ray', 'sqlalchemy', 'fedlora.ledger'} & set(sys.modules); "
        "sys.exit(f'imported: {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["train", "evaluate", "query"])
def test_every_handler_passes_packets_through(kind: str) -> None:
    register_port(NODE, Port(None))
    reply = ask(to_record(hello_packet()), kind)
    assert from_record(reply.content).header["op"] == "hello"
    assert reply.metadata.reply_to_message_id == "m1"


@pytest.mark.parametrize("kind", ["train", "evaluate", "query"])
@pytest.mark.parametrize(
    "error", [RuntimeError("secret row"), ValueError("secret row"), OSError("secret row")]
)
def test_every_handler_answers_when_the_port_raises(kind: str, error: Exception) -> None:
    register_port(NODE, Port(error))
    header = from_record(ask(to_record(hello_packet()), kind).content).header
    assert header["op"] == FAILURE
    assert "secret" not in str(dict(header))


def test_without_a_trainer_the_answer_says_so() -> None:
    header = from_record(ask(to_record(hello_packet())).content).header
    assert (header["op"], header["error"]) == (FAILURE, "TrainerUnreachableError")
    with pytest.raises(TrainerUnreachableError, match="FEDLORA_TRAINER_SOCKET"):
        find_port(NODE)


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"meta": ConfigRecord({"x": 1})}),
        RecordDict({"meta": ConfigRecord({"packet-header": "not json"}), "adapter": ArrayRecord()}),
    ],
)
def test_foreign_messages_are_answered(content: RecordDict) -> None:
    register_port(NODE, Port(None))
    assert from_record(ask(content).content).header["op"] == FAILURE
