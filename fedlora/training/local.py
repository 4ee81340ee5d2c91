"""Where the relay finds its trainer: registered in this process, or behind a Unix socket.

No torch in here: the relay imports this module in every process that Flower starts.
"""

from __future__ import annotations

import os

from fedlora.errors import TrainerUnreachableError
from fedlora.names import ENV_TRAINER_SOCKET
from fedlora.training.port import PacketPort

_PORTS: dict[int, PacketPort] = {}


def register_port(node_id: int, port: PacketPort) -> None:
    """Make a trainer in this process answer for a node (simulations)."""
    _PORTS[node_id] = port


def unregister_port(node_id: int) -> None:
    """Forget a node's trainer."""
    _PORTS.pop(node_id, None)


def is_registered(node_id: int) -> bool:
    """Return whether a trainer in this process answers for a node."""
    return node_id in _PORTS


def find_port(node_id: int) -> PacketPort:
    """Return the trainer that answers for a node.

    Raises:
        TrainerUnreachableError: if none is registered and no socket is named by the environment.
    """
    port = _PORTS.get(node_id)
    if port is not None:
        return port
    socket_path = os.environ.get(ENV_TRAINER_SOCKET)
    if not socket_path:
        raise TrainerUnreachableError(
            f"trainer: none in this process and {ENV_TRAINER_SOCKET} is not set; start 'fedlora trainer' and "
            "give its socket to 'fedlora client'"
        )
    from fedlora.training.service import SocketPort

    found: PacketPort = SocketPort(socket_path)
    return found
