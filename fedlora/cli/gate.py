"""The gate in front of Flower's SuperLink: who may reach which of its interfaces.

Flower 1.42 serves three interfaces on one TLS port: Fleet (for SuperNodes, authenticated by their keys),
Control (starts runs, registers nodes; open to anyone who trusts the CA) and Runtime (hands out server
tasks). Everything is closed here unless it is listed:

| path | who |
|---|---|
| /v1/fleet/... | anyone, once the allowed keys are registered; Flower checks each node's signature |
| /v1/control/... | this machine only, and only with the operator's token |
| /v1/runtime/... | this machine only (the server's own processes) |
| /health... | this machine only |
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_LOG = logging.getLogger(__name__)
FLEET, CONTROL, RUNTIME = "/v1/fleet/", "/v1/control/", "/v1/runtime/"
DEFAULT_MAX_BODY = 64 * 1024 * 1024
"""Largest body of one fleet request; Flower sends payloads in chunks of 5 MiB."""


class BodyTooLargeError(Exception):
    """A request's body passed the limit while it was being read."""


class Gate:
    """ASGI middleware: closed by default."""

    def __init__(
        self, app: App, *, token: str, max_body: int = DEFAULT_MAX_BODY, open_file: str | None = None
    ) -> None:
        """Keep the inner application, the operator's token and the limit.

        Until `open_file` exists, nodes are asked to come back: the allowed keys are not registered yet.
        """
        self._app, self._max_body = app, max_body
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
        await self._bounded(scope, receive, send)

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
        if path.startswith(FLEET):
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

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, counting the body's bytes."""
        limit = self._max_body if str(scope["path"]).startswith(FLEET) else None
        if limit is not None and _announced(scope) > limit:
            self._count("body too large", scope)
            await _refuse(send, 413, f"body above {limit} bytes")
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if limit is not None and seen > limit:
                raise BodyTooLargeError
            return message

        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, counted, watched)
        except BodyTooLargeError:
            self._count("body too large", scope)
            if not started:
                await _refuse(send, 413, f"body above {limit} bytes")

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
