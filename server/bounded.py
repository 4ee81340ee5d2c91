"""Flower's grid with a deadline that holds: one node's half-sent reply must not hold up the others.

Flower 1.42 asks for all replies at once and then waits for every part of each. A reply whose upload has begun and
stopped blocks that for 180 s after its last part, whatever the timeout, and for ever if parts go on trickling in. Here
each reply is fetched by a thread of its own, and what is not there at the deadline is left behind.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterable
from typing import Any, Final

from flwr.app import Message
from flwr.serverapp import Grid

_LOG = logging.getLogger(__name__)
FASTEST_POLL: Final = 1.0
"""Least seconds between two questions for the same reply."""
POLLS_PER_SECOND: Final = 20.0
"""Most questions a second over all replies."""


class BoundedGrid(Grid):
    """Passes everything on to Flower's grid; `send_and_receive` ends at its timeout."""

    def __init__(self, inner: Grid) -> None:
        """Keep the grid that does the work."""
        self._inner = inner

    @property
    def run(self) -> Any:
        """Return the run."""
        return self._inner.run

    def set_run(self, run: Any) -> None:
        """Set the run."""
        self._inner.set_run(run)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Create a message as Flower's grid does."""
        return self._inner.create_message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes that are online."""
        return self._inner.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; return their ids."""
        return self._inner.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there."""
        return self._inner.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and return the replies that are complete within the timeout, in seconds.

        Raises:
            Exception: what Flower's grid raises while it asks for a reply.
        """
        if timeout is None:
            return self._inner.send_and_receive(messages)
        ids = list(dict.fromkeys(self._inner.push_messages(messages)))
        found: queue.SimpleQueue[Message | Exception] = queue.SimpleQueue()
        over = threading.Event()
        pause = max(FASTEST_POLL, len(ids) / POLLS_PER_SECOND)
        deadline = time.monotonic() + timeout
        for one in ids:
            arguments = (one, found, over, pause)
            threading.Thread(target=self._fetch, args=arguments, name="reply", daemon=True).start()
        try:
            return _collect(found, len(ids), deadline)
        finally:
            over.set()

    def _fetch(
        self,
        message_id: str,
        found: queue.SimpleQueue[Message | Exception],
        over: threading.Event,
        pause: float,
    ) -> None:
        """Ask for one reply until it is there or the round is over; a reply that comes later is dropped."""
        while not over.is_set():
            try:
                replies = list(self._inner.pull_messages([message_id]))
            except Exception as error:
                found.put(error)
                return
            if replies:
                if over.is_set():
                    _LOG.warning("a reply was complete only after the deadline; it is not used")
                else:
                    found.put(replies[0])
                return
            over.wait(pause)


def _collect(found: queue.SimpleQueue[Message | Exception], count: int, deadline: float) -> list[Message]:
    """Take up to `count` replies out of a queue before a monotonic deadline."""
    replies: list[Message] = []
    while len(replies) < count:
        try:
            one = found.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        if isinstance(one, Exception):
            raise one
        replies.append(one)
    return replies
