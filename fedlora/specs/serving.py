"""The service's connections, bounded before a request exists: heads in size and time, answers in time.

uvicorn gives a connection that sends nothing, or a head a few bytes at a time, as long as it likes, and its default
parser takes heads of any size. A stranger could so hold every connection, or the memory, without a token. Here a head
has at most 16 KiB and 10 seconds, a request with its answer at most 60 seconds, and connections far above the limit
are closed at once.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_BYTES: Final = 16 * 1024
HEAD_SECONDS: Final = 10.0
"""From the connection, or the last answer, to the end of the next request's head."""
WHOLE_SECONDS: Final = 60.0
"""From a request's head to the end of its answer."""
_LOOK_SECONDS: Final = 0.5
_SPARE: Final = 64


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 on one connection; one that takes too long is closed."""

    head_seconds: float = HEAD_SECONDS
    whole_seconds: float = WHOLE_SECONDS
    _since: float = 0.0
    _known: Any = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock; close at once where twice the allowed connections, and some, are open."""
        super().connection_made(transport)
        allowed = self.limit_concurrency
        if allowed is not None and len(self.connections) > 2 * allowed + _SPARE:
            transport.abort()
            return
        self._since = self.loop.time()
        self._look()

    def data_received(self, data: bytes) -> None:
        """Start the clock again where a request's head is complete."""
        super().data_received(data)
        if self.cycle is not self._known:
            self._known, self._since = self.cycle, self.loop.time()

    def on_response_complete(self) -> None:
        """Start the clock again for the next head."""
        self._since = self.loop.time()
        super().on_response_complete()

    def _look(self) -> None:
        if self not in self.connections:
            return
        busy = self.cycle is not None and not self.cycle.response_complete
        if self.loop.time() - self._since > (self.whole_seconds if busy else self.head_seconds):
            self.transport.abort()
            return
        self.loop.call_later(_LOOK_SECONDS, self._look)


def service_config(
    app: Any, host: str, port: int, max_connections: int, *, http: type[BoundedProtocol] = BoundedProtocol
) -> Config:
    """Return the server's settings.

    Args:
        app: an ASGI application.
        host: address to listen on.
        port: port.
        max_connections: connections at once; requests beyond get 503.
        http: the protocol of a connection.
    """
    return Config(
        app,
        host=host,
        port=port,
        http=http,
        ws="none",
        lifespan="off",
        h11_max_incomplete_event_size=HEAD_BYTES,
        log_level="error",
        access_log=False,
        server_header=False,
        limit_concurrency=max_connections,
        timeout_keep_alive=5,
    )


def run_service(app: Any, host: str, port: int, max_connections: int) -> None:
    """Serve an application until it is told to end (SIGINT, SIGTERM)."""
    Server(service_config(app, host, port, max_connections)).run()
