"""The one place that touches Flower's internals: who sends a message.

Flower 1.42 takes the sender of a new `Message` from `TaskIdentity`, which only its own runtime sets.
Flower's compatibility layer (`flwr.server.compat.app`) sets it the same way. The version is checked
here, so that another Flower fails with one clear line.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, Final

from flwr.app import Message, Metadata

from fedlora.errors import SimulationError

SUPPORTED: Final = ("1.42.",)
SERVER_NODE: Final = 1
"""Flower's own number for the server's side."""


def check_flower() -> None:
    """Require a Flower version whose internals are known.

    Raises:
        SimulationError: naming the version found and the ones supported.
    """
    found = version("flwr")
    if not found.startswith(SUPPORTED):
        raise SimulationError(
            f"flwr: got {found}; fedlora's grid supports {SUPPORTED[0]}x; pip install 'flwr~=1.42'"
        )


def assume_identity(run_id: int, node_id: int) -> None:
    """Let messages that this process makes come from a node of a run."""
    check_flower()
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id = 1
    TaskIdentity.run_id = run_id
    TaskIdentity.node_id = node_id


def make_run(run_id: int) -> Any:
    """Return Flower's run record for a grid."""
    from flwr.supercore.run import Run

    return Run.create_empty(run_id)


def number_message(message: Message, message_id: str) -> Message:
    """Give a message its number (the SuperLink's task in a deployment)."""
    metadata: Metadata = message.metadata
    metadata.__dict__["_message_id"] = message_id
    return message
