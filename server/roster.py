"""Which logical clients live at which node: known in a simulation, asked from the nodes otherwise."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

import fedlora
from fedlora.errors import FedLoraError, SimulationError, TooFewRepliesError
from fedlora.names import ENV_ROSTER
from fedlora.simulation.messages import from_record, to_record
from fedlora.training.port import hello_packet, unpack_hello

_LOG = logging.getLogger(__name__)
ASK_SECONDS = 60.0
"""Bound of one question to the nodes."""


def allowed_clients(node: int) -> frozenset[str] | None:
    """Return the clients that a node may answer for by the allow-list; None where there is no allow-list.

    A deployment's allow-list that cannot be read allows nobody.
    """
    path = os.environ.get(ENV_ROSTER)
    if not path:
        return None
    try:
        with open(path, encoding="utf-8") as stream:
            clients = json.load(stream)[str(node)]
        return frozenset(str(client) for client in clients)
    except (OSError, ValueError, KeyError, TypeError):
        return frozenset()


class Roster:
    """Keeps node number to logical clients.

    Args:
        grid: Flower's grid.
        known: the whole roster, where it is fixed.
        app_hash: hash of the code that every node of a simulation on Flower's engine must run; a node that does not,
            or that cannot be set up, then ends the run. None asks for the library's version only.
        members: the only clients that take part (`federation.members`); None for all.
    """

    def __init__(
        self,
        grid: Grid,
        known: Mapping[int, Sequence[str]] | None,
        app_hash: str | None = None,
        members: Sequence[str] | None = None,
    ) -> None:
        """Start with what is known."""
        self._app_hash = app_hash
        self._members = None if members is None else frozenset(members)
        self._grid, self._fixed = grid, known is not None
        self._clients: dict[int, tuple[str, ...]] = {
            node: tuple(clients) for node, clients in (known or {}).items()
        }

    @property
    def clients(self) -> Mapping[int, Sequence[str]]:
        """Node number to its logical clients."""
        return self._clients

    def count(self) -> int:
        """Return the number of logical clients."""
        return sum(len(clients) for clients in self._clients.values())

    def refresh(self) -> None:
        """Ask nodes that are not known yet, and forget those that went away."""
        if self._fixed:
            return
        online = set(self._grid.get_node_ids())
        self._clients = {node: clients for node, clients in self._clients.items() if node in online}
        new = sorted(online - set(self._clients))
        messages = [
            Message(to_record(hello_packet()), node, MessageType.QUERY, ttl=ASK_SECONDS) for node in new
        ]
        if not messages:
            return
        for reply in self._grid.send_and_receive(messages, timeout=ASK_SECONDS):
            self._take(reply)

    def _take(self, reply: Message) -> None:
        node = reply.metadata.src_node_id
        if reply.has_error():
            _LOG.warning("node %s does not answer: %s", node, reply.error.reason)
            return
        try:
            hello = unpack_hello(from_record(reply.content))
        except (FedLoraError, KeyError, ValueError) as error:
            if self._app_hash is not None:
                raise SimulationError(f"simulation: {error}") from None
            _LOG.warning("node %s cannot take part: %s", node, error)
            return
        if hello.code_hash != fedlora.__version__:
            _LOG.warning(
                "node %s runs fedlora %s, the server %s; it cannot take part",
                node,
                hello.code_hash,
                fedlora.__version__,
            )
            return
        if self._app_hash is not None and (found := hello.facts.get("app")) != self._app_hash:
            raise SimulationError(
                f"simulation: node {node} runs other code ({str(found)[:12]}) than the server "
                f"({self._app_hash[:12]}), or is none of the simulation's; "
                "stop flower-superlink and start again from an empty folder"
            )
        allowed = allowed_clients(node)
        foreign = [] if allowed is None else [client for client in hello.clients if client not in allowed]
        if foreign:
            _LOG.warning("node %s may not answer for %s; left out (see the allow-list)", node, foreign[:3])
            return
        taken = {client for clients in self._clients.values() for client in clients}
        double = [client for client in hello.clients if client in taken]
        if double:
            _LOG.warning("node %s announces clients of another node (%s); left out", node, double[:3])
            return
        self._clients[node] = tuple(
            client for client in hello.clients if self._members is None or client in self._members
        )

    def wait_for(self, clients: int, timeout_seconds: float) -> None:
        """Wait until so many logical clients are known.

        Raises:
            TooFewRepliesError: if they are not there in time.
        """
        deadline = time.monotonic() + timeout_seconds
        self.refresh()
        while self.count() < clients:
            if time.monotonic() >= deadline:
                raise TooFewRepliesError(
                    f"clients: {self.count()} of {clients} needed are online after {timeout_seconds:.0f} s; start "
                    "the others, or lower federation.min_replies"
                )
            time.sleep(1.0)
            self.refresh()
