"""Flower's ClientApp: a thin relay from messages to the trainer.

It holds no data, no ledger and no model, and imports no torch: in a deployment Flower ships this
file from the server and starts it anew for every message, so nothing private may be in its reach. Every
handler returns a message whatever happens: a ClientApp that returns nothing blocks its node.
"""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedlora.simulation.flower import port_of
from fedlora.simulation.messages import from_record, to_record
from fedlora.training.port import Packet, failure_packet

app = ClientApp()


def relay(message: Message, context: Context) -> Message:
    """Pass one packet to the node's trainer and its answer back."""
    try:
        answer: Packet = port_of(context, __file__).exchange(from_record(message.content))
    except Exception as error:
        answer = failure_packet(error)
    return Message(to_record(answer), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train one round."""
    return relay(message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Answer an evaluation request (the trainer refuses what its policy does not allow)."""
    return relay(message, context)


@app.query()
def query(message: Message, context: Context) -> Message:
    """Answer a question about the node (its logical clients, its versions)."""
    return relay(message, context)
