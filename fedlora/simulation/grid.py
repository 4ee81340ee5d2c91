"""Flower's Grid without Flower's runtime: messages go to nodes that fedlora hosts itself.

`InProcessGrid` runs the nodes in the driver (tests, tiny runs); `RayGrid` (its own module) runs them
in Ray actors. Both hand the very same messages to the very same ClientApp as a deployment does.
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from fedlora.errors import SimulationError
from fedlora.names import META
from fedlora.simulation.host import Answered, NodeHost
from fedlora.simulation.identity import SERVER_NODE, assume_identity, make_run, number_message
from fedlora.simulation.messages import HEADER
from fedlora.simulation.node_spec import NodeSpec, Readiness
from fedlora.simulation.spending import Spending
from fedlora.simulation.terminations import check_stopped
from fedlora.training.charging import Grant

_LOG = logging.getLogger(__name__)
NODE_LOST = 5
"""Flower's error code for a node that went away."""
MAX_ATTEMPTS = 2
"""A message is given to a node at most so many times (a second time only if its worker died)."""


@dataclass
class Pending:
    """A message on its way: where it went, with which grants, how often, and the key of its clients' coins.

    Attributes:
        attempts: workers that took it up, at most `MAX_ATTEMPTS`.
        starts: workers that died before they could.
    """

    message: Message
    grants: Sequence[Grant]
    coins_key: bytes = field(default_factory=lambda: os.urandom(32), repr=False)
    attempts: int = 1
    starts: int = 0
    handle: Any = None
    pushed_at: float = field(default_factory=time.monotonic)


class HostedGrid(Grid):
    """What both grids share: message numbers, charging, bounded waiting, error replies by name.

    Args:
        specs: one per node.
        spending: the driver's ledger.
        default_timeout: bound of every wait that is not given one, in seconds.
    """

    works_meanwhile = False
    """Whether nodes work while this process does something else."""

    def __init__(self, specs: Sequence[NodeSpec], spending: Spending, default_timeout: float) -> None:
        """Take the part of the server's node in Flower's messages."""
        if not specs:
            raise SimulationError("grid: no nodes; a simulation needs at least one worker")
        self._specs = {spec.node_id: spec for spec in specs}
        self._spending = spending
        self._default_timeout = default_timeout
        self._pending: dict[str, Pending] = {}
        self._run = make_run(specs[0].run_number)
        self.replaced_workers = 0
        self.cohort: int | None = None
        """Clients that a worker trains together at most, as planned; set before the first message."""
        self.halved: dict[int, int] = {}
        """Worker to its cohort, where memory ran out all the same."""
        self.worker_seconds = {"passes": 0.0, "noise": 0.0}
        """Time of all workers in forward and backward passes and in drawing noise, so far."""
        self.meanwhile: Callable[[], None] | None = None
        """Called once, after the next messages have left and before their replies are waited for."""
        assume_identity(specs[0].run_number, SERVER_NODE)

    # -- Flower's interface ----------------------------------------------------------------------

    def set_run(self, run: Any) -> None:
        """Accept Flower's call; the run is fixed at construction."""
        del run

    @property
    def run(self) -> Any:
        """Flower's record of the run."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Make a message (Flower's older way)."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes' numbers."""
        return tuple(self._specs)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Reserve for all messages in one transaction, then send them."""
        check_stopped()
        self._ensure_ready()
        numbered = {}
        for message in messages:
            message_id = uuid.uuid4().hex
            numbered[message_id] = number_message(message, message_id)
        headers = {key: packet_header(message) for key, message in numbered.items()}
        grants = self._spending.reserve(headers)
        for key, message in numbered.items():
            self._pending[key] = pending = Pending(message, grants[key])
            self._submit(pending)
        return tuple(numbered)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there, without waiting."""
        return self._collect([key for key in message_ids if key in self._pending], 0.0)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send and wait, never longer than the bound; whoever is late gets an error reply by name."""
        bound = self._default_timeout if timeout is None else timeout
        keys = list(self.push_messages(messages))
        deadline = time.monotonic() + bound
        self._do_meanwhile()
        replies: list[Message] = self._collect(keys, 0.0)  # what came meanwhile is not late
        keys = [key for key in keys if key in self._pending]
        while keys:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            replies.extend(self._collect(keys, min(remaining, 1.0)))
            keys = [key for key in keys if key in self._pending]
        replies.extend(self._give_up(key, bound) for key in keys)
        return replies

    def _do_meanwhile(self) -> None:
        task, self.meanwhile = self.meanwhile, None
        if task is not None:
            task()

    def memory_per_worker(self) -> int | None:
        """Return the bytes that a worker may use where they are not this machine's; None where it is this machine."""
        return None

    # -- parts -----------------------------------------------------------------------------------

    def _cohort_of(self, node_id: int) -> int | None:
        return self.halved.get(node_id, self.cohort)

    def _took(self, node_id: int, answered: Answered) -> Message:
        """Record what a node's answer says, the ledger's part first, and return its message."""
        self._spending.commit(answered.commits)
        for name, value in answered.seconds.items():
            self.worker_seconds[name] = self.worker_seconds.get(name, 0.0) + value
        planned = self._cohort_of(node_id)
        if answered.cohort is not None and (planned is None or answered.cohort < planned):
            _LOG.warning("node %s: memory ran out; %d clients at once from now on", node_id, answered.cohort)
            self.halved[node_id] = answered.cohort
        return answered.message

    def _give_up(self, key: str, bound: float) -> Message:
        pending = self._pending.pop(key)
        node = pending.message.metadata.dst_node_id
        self._abandon(pending)
        return self._error_reply(pending.message, f"node {node}: no reply within {bound:.0f} s")

    @staticmethod
    def _error_reply(message: Message, reason: str) -> Message:
        _LOG.warning("%s", reason)
        return Message(Error(code=NODE_LOST, reason=reason), reply_to=message)

    @abstractmethod
    def _ensure_ready(self) -> None:
        """Wait (bounded) until the nodes have loaded their models; set the spending's event."""

    @abstractmethod
    def _submit(self, pending: Pending) -> None:
        """Hand a message to its node."""

    @abstractmethod
    def _collect(self, keys: Sequence[str], wait_seconds: float) -> list[Message]:
        """Return finished replies among `keys`, waiting at most so long for the first."""

    @abstractmethod
    def _abandon(self, pending: Pending) -> None:
        """Make the node usable again after a message was given up."""

    @abstractmethod
    def close(self) -> None:
        """Stop every node; safe to call twice."""


def packet_header(message: Message) -> Mapping[str, Any]:
    """Return the header of the packet in a message, or an empty one for foreign messages."""
    content = message.content
    if META not in content or HEADER not in content[META]:
        return {}
    header: Mapping[str, Any] = json.loads(str(content[META][HEADER]))
    return header


def agree_on_event(readiness: Sequence[Readiness]) -> Mapping[str, Any]:
    """Return the one event that all nodes derived.

    Raises:
        SimulationError: if they differ.
    """
    events = {json.dumps(one.event, sort_keys=True) for one in readiness}
    if len(events) != 1:
        raise SimulationError("workers derived different accounting events; all must run the same code")
    return readiness[0].event


class InProcessGrid(HostedGrid):
    """All nodes in the driver's process, one after the other."""

    def __init__(self, specs: Sequence[NodeSpec], spending: Spending, default_timeout: float) -> None:
        """Set the hosts up."""
        super().__init__(specs, spending, default_timeout)
        self._hosts = {spec.node_id: NodeHost(spec, own_process=False) for spec in specs}
        self._ready = False

    def _ensure_ready(self) -> None:
        if self._ready:
            return
        from fedlora.accounting import Event

        readiness = [host.prepare() for host in self._hosts.values()]
        self._spending.event = Event.from_json(agree_on_event(readiness))
        self._ready = True

    def _submit(self, pending: Pending) -> None:
        host = self._hosts[pending.message.metadata.dst_node_id]
        cohort = self._cohort_of(pending.message.metadata.dst_node_id)
        pending.handle = host.process(pending.message, pending.grants, cohort, pending.coins_key)

    def _collect(self, keys: Sequence[str], wait_seconds: float) -> list[Message]:
        del wait_seconds
        replies = []
        for key in keys:
            pending = self._pending.pop(key)
            replies.append(self._took(pending.message.metadata.dst_node_id, pending.handle))
        return replies

    def _abandon(self, pending: Pending) -> None:
        del pending

    def close(self) -> None:
        """Forget the hosts."""
        for host in self._hosts.values():
            host.close()
