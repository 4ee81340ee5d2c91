"""The dock over HTTP: bounded, authenticated, schema-checked.

| call | body | answers |
|---|---|---|
| `GET /healthz` | | 200, without authentication |
| `POST /v1/specifications` | an entry | 201; 409 name taken; 422 schema; 507 the dock is full |
| `GET /v1/specifications/{name}` | | 200 metadata and privacy (no vector); 404 |
| `POST /v1/match` | an entry and `top_k` | 200, best first; 404 nothing comparable |

Every call but health needs `Authorization: Bearer TOKEN`; tokens are compared in constant time and only their sha256 is
kept in memory. Before a byte of a body is read: 401 without a valid token, 411 without a Content-Length, 413 above
64 KiB. A body that does not arrive in time gets 408. Numbers of an entry's privacy statement are its submitter's claim.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import asdict
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from fedlora.errors import DataError, FedLoraError
from fedlora.specs.dock import Dock
from fedlora.specs.entries import MAX_ENTRY_BYTES, EntryBody, MatchBody, entry_json
from fedlora.specs.types import DockBusyError, DockDamagedError, DockFullError, NameTakenError, NotInDockError

MAX_BODY_BYTES: Final = MAX_ENTRY_BYTES
BODY_SECONDS: Final = 10.0
"""A body has to be complete within this time."""
MIN_TOKEN: Final = 16
_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})
_OPEN_PATHS: Final = frozenset({"/healthz"})
_SHOWN: Final = 80
"""Characters of a field's name that an error message repeats."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


def make_app(dock: Dock, tokens: tuple[str, ...], *, body_seconds: float = BODY_SECONDS) -> FastAPI:
    """Build the service.

    Args:
        dock: the store.
        tokens: accepted bearer tokens, at least one, each of 16 or more characters.
        body_seconds: how long a body may take to arrive.

    Raises:
        DataError: if no token, or too short a one, is given.
    """
    if not tokens or any(len(token) < MIN_TOKEN for token in tokens):
        raise DataError(f"the dock's service needs at least one token of {MIN_TOKEN} or more characters")
    digests = tuple(hashlib.sha256(token.encode()).digest() for token in tokens)
    app = FastAPI(title="fedlora dock", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_Gate, digests=digests, seconds=body_seconds)
    app.exception_handler(FedLoraError)(_fedlora_error)
    app.exception_handler(RequestValidationError)(_invalid_body)

    @app.get("/healthz")
    def health() -> dict[str, Any]:
        return {"status": "ok", "specifications": len(dock)}

    @app.post("/v1/specifications", status_code=201)
    def add(body: EntryBody) -> dict[str, Any]:
        return {"id": dock.add(body.to_specification()), "name": body.name}

    @app.get("/v1/specifications/{name:path}")
    def show(name: str) -> dict[str, Any]:
        fields = entry_json(dock.get(name))
        del fields["vector"]
        return fields

    @app.post("/v1/match")
    def match(body: MatchBody) -> dict[str, Any]:
        found = dock.match(body.query.to_specification(), body.top_k, kind=body.kind)
        return {"matches": [asdict(entry) for entry in found]}

    return app


class _Gate:
    """Refuses strangers and large or slow bodies before anything of a body is read or parsed."""

    def __init__(self, app: AsgiApp, *, digests: tuple[bytes, ...], seconds: float) -> None:
        self._app, self._digests, self._seconds = app, digests, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {bytes(name).lower(): bytes(value) for name, value in scope["headers"]}
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        body = await self._read(receive)
        if isinstance(body, JSONResponse):
            await body(scope, receive, send)
            return
        parts = [body]

        async def replay() -> MutableMapping[str, Any]:
            if parts:
                return {"type": "http.request", "body": parts.pop(), "more_body": False}
            return await receive()

        await self._app(scope, replay, send)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> JSONResponse | None:
        if scope["path"] not in _OPEN_PATHS and not self._known(headers.get(b"authorization", b"")):
            text = "a valid bearer token is needed"
            return JSONResponse({"error": text}, 401, {"WWW-Authenticate": "Bearer", **_CLOSE})
        length = headers.get(b"content-length")
        if length is not None and (not length.isdigit() or len(length) > 15 or int(length) > MAX_BODY_BYTES):
            return JSONResponse({"error": f"a body may have at most {MAX_BODY_BYTES} bytes"}, 413, _CLOSE)
        if b"transfer-encoding" in headers or (length is None and scope["method"] in _WITH_BODY):
            return JSONResponse({"error": "a body needs a Content-Length"}, 411, _CLOSE)
        return None

    def _known(self, header: bytes) -> bool:
        scheme, _, token = header.partition(b" ")
        digest = hashlib.sha256(token).digest()
        known = [hmac.compare_digest(digest, accepted) for accepted in self._digests]
        return scheme.lower() == b"bearer" and any(known)

    async def _read(self, receive: Receive) -> bytes | JSONResponse:
        """Read the whole body, within its size and time."""
        body, deadline = bytearray(), time.monotonic() + self._seconds
        while True:
            try:
                message = await asyncio.wait_for(receive(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                return JSONResponse({"error": "the body did not arrive in time"}, 408, _CLOSE)
            if message["type"] == "http.disconnect":  # what came so far is not the request
                return JSONResponse({"error": "the body is not complete"}, 400, _CLOSE)
            body += message.get("body", b"")
            if len(body) > MAX_BODY_BYTES:
                return JSONResponse({"error": f"a body may have at most {MAX_BODY_BYTES} bytes"}, 413, _CLOSE)
            if not message.get("more_body", False):
                return bytes(body)


_CODES: Final = {
    NameTakenError: 409,
    NotInDockError: 404,
    DockFullError: 507,
    DockBusyError: 503,
    DockDamagedError: 500,
}
_CLOSE: Final = {"Connection": "close"}


async def _fedlora_error(request: Request, error: Exception) -> JSONResponse:
    """Map the library's errors to status codes; messages hold no content."""
    del request
    status = next((code for kind, code in _CODES.items() if isinstance(error, kind)), 422)
    return JSONResponse({"error": str(error), "class": type(error).__name__}, status)


async def _invalid_body(request: Request, error: Exception) -> JSONResponse:
    """Name the fields that do not fit, without echoing what was sent."""
    del request
    problems = error.errors() if isinstance(error, RequestValidationError) else []
    listed = [
        {"field": ".".join(str(part)[:_SHOWN] for part in p["loc"][:6]), "problem": str(p["type"])}
        for p in problems[:20]
    ]
    return JSONResponse({"error": "the body does not fit the schema", "problems": listed}, 422)
