"""The gate in front of Flower's SuperLink: who may reach which of its interfaces.

Flower 1.42 serves three interfaces on one TLS port: Fleet (for SuperNodes, authenticated by their keys),
Control (starts runs, registers nodes; open to anyone who trusts the CA) and Runtime (hands out server
tasks). Everything is closed here unless it is listed; what a node pushes is looked at as well, because Flower
checks who sends a request and not in whose name the messages in it are:

| path | who |
|---|---|
| /v1/fleet/NAME | anyone, once the allowed keys are registered; Flower checks each node's signature |
| /v1/control/... | this machine only, and only with the operator's token |
| /v1/runtime/... | this machine only (the server's own processes) |
| /health... | this machine only |
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Inspect = Callable[[bytes], str | None]
"""Looks at the whole body of a request; returns why it is refused, or None."""

_LOG = logging.getLogger(__name__)
FLEET, CONTROL, RUNTIME = "/v1/fleet/", "/v1/control/", "/v1/runtime/"
DEFAULT_MAX_BODY = 64 * 1024 * 1024
"""Largest body of one fleet request; Flower sends payloads in chunks of 5 MiB."""
DEFAULT_MAX_HELD = 512 * 1024 * 1024
"""Bytes of all fleet requests at once: Flower reads bodies before it looks at signatures."""
BODY_SECONDS = 600.0
"""Bound of one body's arrival."""
_FLEET_NAME = re.compile(r"/v1/fleet/[a-z-]+")
_HOST = re.compile(rb"[A-Za-z0-9.:_%\[\]-]*")
"""Web frameworks build URLs from this header; what is more than a name could show them another path."""


class RefusedBodyError(Exception):
    """A request is refused for its body."""

    def __init__(self, status: int, reason: str) -> None:
        """Keep the HTTP status and the reason."""
        super().__init__(reason)
        self.status, self.reason = status, reason


class Gate:
    """ASGI middleware: closed by default."""

    def __init__(
        self,
        app: App,
        *,
        token: str,
        max_body: int = DEFAULT_MAX_BODY,
        max_held: int = DEFAULT_MAX_HELD,
        open_file: str | None = None,
        inspect: Mapping[str, Inspect] | None = None,
    ) -> None:
        """Keep the inner application, the operator's token, the limits and what looks at bodies, by path.

        Until `open_file` exists, nodes are asked to come back: the allowed keys are not registered yet.
        """
        self._app, self._max_body, self._max_held, self._held = app, max_body, max_held, 0
        self._inspect = dict(inspect or {})
        self._open_file = open_file
        self._expected = f"Bearer {token}".encode()
        self.refused: dict[str, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it here."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            self._count("not http", scope)
            await send({"type": "websocket.close", "code": 1008})
            return
        reason = self._reason(scope)
        if reason is not None:
            self._count(reason, scope)
            await _refuse(send, 403, reason)
            return
        if not self._is_open(str(scope["path"])):
            await _refuse(send, 503, "starting; come back in a moment")
            return
        if str(scope["path"]).startswith(FLEET):
            await self._fleet(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        if self._open_file is None or not path.startswith(FLEET):
            return True
        if not os.path.exists(self._open_file):
            return False
        self._open_file = None
        return True

    def _reason(self, scope: Scope) -> str | None:
        """Return why a request is refused, or None."""
        path = str(scope["path"])
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) > 1 or not all(_HOST.fullmatch(value) for value in hosts):
            return "malformed host"
        if _FLEET_NAME.fullmatch(path):
            return None
        local = is_local(scope.get("client"))
        if path.startswith(CONTROL):
            if not local:
                return "control interface: closed to other machines"
            given = [value for name, value in scope["headers"] if name == b"authorization"]
            if len(given) != 1 or not hmac.compare_digest(given[0], self._expected):
                return "control interface: the operator's token is needed"
            return None
        if path.startswith((RUNTIME, "/health")):
            return None if local else "closed to other machines"
        return "no such interface"

    async def _fleet(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the whole body, as Flower does, but bounded; pass it on unless it is refused."""
        taken = [0]
        try:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    body = await self._body(scope, receive, taken)
            except (RefusedBodyError, TimeoutError) as error:
                refused = (
                    error if isinstance(error, RefusedBodyError) else RefusedBodyError(408, "body too slow")
                )
                self._count(refused.reason, scope)
                await _refuse(send, refused.status, refused.reason)
                return
            if body is None:
                return
            whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

            async def once() -> Message:
                return whole.pop() if whole else await receive()

            await self._app(scope, once, send)
        finally:
            self._held -= taken[0]

    async def _body(self, scope: Scope, receive: Receive, taken: list[int]) -> bytes | None:
        """Return a request's body, None if its sender has gone; `taken` counts the bytes that it holds.

        Raises:
            RefusedBodyError: if it is too large, too much at once, or refused for what is in it.
        """
        if _announced(scope) > self._max_body:
            raise RefusedBodyError(413, f"body above {self._max_body} bytes")
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return None
            piece, more = message.get("body", b""), message.get("more_body", False)
            taken[0] += len(piece)
            self._held += len(piece)
            if taken[0] > self._max_body:
                raise RefusedBodyError(413, f"body above {self._max_body} bytes")
            if self._held > self._max_held:
                raise RefusedBodyError(503, "too much at once; come back in a moment")
            body += piece
        inspect = self._inspect.get(str(scope["path"]))
        reason = None if inspect is None else inspect(bytes(body))
        if reason is not None:
            raise RefusedBodyError(403, reason)
        return bytes(body)

    def _count(self, reason: str, scope: Scope) -> None:
        known = self.refused.get(reason, 0) + 1
        self.refused[reason] = known
        if known <= 20 or known % 1000 == 0:
            peer = (scope.get("client") or ("unknown",))[0]
            _LOG.warning("refused %s from %s: %s (%s so far)", str(scope["path"])[:80], peer, reason, known)


def is_local(client: object) -> bool:
    """Return whether a peer's address is this machine's loopback."""
    if not isinstance(client, tuple | list) or not client:
        return False
    try:
        address = ipaddress.ip_address(str(client[0]))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _announced(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length":
            try:
                return int(value)
            except ValueError:
                return 0
    return 0


async def _refuse(send: Send, status: int, reason: str) -> None:
    body = json.dumps({"detail": reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
