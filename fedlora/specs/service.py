"""The dock over HTTP: bounded, authenticated, schema-checked.

| call | body | answers |
|---|---|---|
| `GET /healthz` | | 200, without authentication |
| `POST /v1/specifications` | an entry | 201; 409 name taken; 422 schema; 413 too large |
| `GET /v1/specifications/{name}` | | 200 metadata and privacy (no vector); 404 |
| `POST /v1/match` | an entry and `top_k` | 200, best first; 404 nothing comparable |

Every call but health needs `Authorization: Bearer TOKEN`; tokens are compared in constant time and only their
sha256 is kept in memory.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from fedlora.errors import DataError, FedLoraError
from fedlora.specs.dock import MAX_TOP_K, Dock
from fedlora.specs.types import MAX_DIMENSION, PrivacyStatement, Specification

MAX_BODY_BYTES = 64 * 1024
_VECTOR_TEXT = 4 * (4 * MAX_DIMENSION // 3 + 4)

Call = Callable[[Request], Awaitable[Response]]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)


class PrivacyBody(_Strict):
    """Privacy statement of an entry."""

    guarantee: Literal["dp", "none", "conditional"]
    epsilon: float | None = Field(default=None, gt=0)
    delta: float | None = Field(default=None, gt=0, lt=1)
    unit: str | None = Field(default=None, max_length=100)
    adjacency: str | None = Field(default=None, max_length=100)
    adversary: str | None = Field(default=None, max_length=500)
    accountant: str | None = Field(default=None, max_length=100)
    sampling: str | None = Field(default=None, max_length=500)
    num_events: int | None = Field(default=None, ge=0)
    conditions: list[Annotated[str, Field(max_length=500)]] = Field(default=[], max_length=20)


class EntryBody(_Strict):
    """One specification; `vector` is base64 of little-endian float32."""

    name: str = Field(min_length=1, max_length=200)
    vector: str = Field(max_length=_VECTOR_TEXT)
    kind: Literal["model", "task"]
    base_fingerprint: str = Field(min_length=1, max_length=200)
    recipe: str = Field(min_length=1, max_length=200)
    projection: str = Field(min_length=1, max_length=200)
    licence: str = Field(min_length=1, max_length=100)
    privacy: PrivacyBody
    metadata: dict[Annotated[str, Field(max_length=100)], str | int | float] = Field(
        default={}, max_length=50
    )

    def to_specification(self) -> Specification:
        """Decode and check.

        Raises:
            DataError: if the vector is not base64 of float32 numbers of unit norm.
        """
        try:
            raw = base64.b64decode(self.vector, validate=True)
        except binascii.Error as error:
            raise DataError("vector must be base64 of little-endian float32 numbers") from error
        if len(raw) % 4:
            raise DataError("vector must be base64 of little-endian float32 numbers")
        privacy = self.privacy.model_dump()
        return Specification(
            vector=np.frombuffer(raw, dtype="<f4").astype(np.float32),
            privacy=PrivacyStatement(**{**privacy, "conditions": tuple(privacy["conditions"])}),
            **self.model_dump(exclude={"vector", "privacy"}),
        )


class MatchBody(_Strict):
    """A query: an entry (it is not stored) and how many answers are wanted."""

    query: EntryBody
    top_k: int = Field(default=5, ge=1, le=MAX_TOP_K)
    kind: Literal["model", "task"] | None = "model"


def entry_json(specification: Specification) -> dict[str, Any]:
    """Encode a specification as the service's JSON entry."""
    fields = {name: getattr(specification, name) for name in EntryBody.model_fields if name != "vector"}
    fields["privacy"] = {
        **asdict(specification.privacy),
        "conditions": list(specification.privacy.conditions),
    }
    fields["metadata"] = dict(specification.metadata)
    fields["vector"] = base64.b64encode(specification.vector.astype("<f4").tobytes()).decode()
    return fields


def make_app(dock: Dock, tokens: tuple[str, ...]) -> FastAPI:
    """Build the service.

    Args:
        dock: the store; one process writes it.
        tokens: accepted bearer tokens, at least one of 16 or more characters.

    Raises:
        DataError: if no token, or too short a one, is given.
    """
    if not tokens or any(len(token) < 16 for token in tokens):
        raise DataError("the dock's service needs at least one token of 16 or more characters")
    digests = tuple(hashlib.sha256(token.encode()).digest() for token in tokens)
    app = FastAPI(title="fedlora dock", docs_url=None, redoc_url=None, openapi_url=None)
    app.middleware("http")(_bounded)
    app.exception_handler(FedLoraError)(_fedlora_error)
    app.exception_handler(RequestValidationError)(_invalid_body)

    def authenticated(request: Request) -> None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(token.encode("utf-8", "replace")).digest()
        known = [hmac.compare_digest(digest, accepted) for accepted in digests]
        if scheme.lower() != "bearer" or not any(known):
            raise HTTPException(401, "a valid bearer token is needed", {"WWW-Authenticate": "Bearer"})

    guard = [Depends(authenticated)]

    @app.get("/healthz")
    def health() -> dict[str, Any]:
        return {"status": "ok", "specifications": len(dock)}

    @app.post("/v1/specifications", status_code=201, dependencies=guard)
    def add(body: EntryBody) -> dict[str, Any]:
        return {"id": dock.add(body.to_specification()), "name": body.name}

    @app.get("/v1/specifications/{name:path}", dependencies=guard)
    def show(name: str) -> dict[str, Any]:
        fields = entry_json(dock.get(name))
        del fields["vector"]
        return fields

    @app.post("/v1/match", dependencies=guard)
    def match(body: MatchBody) -> dict[str, Any]:
        found = dock.match(body.query.to_specification(), body.top_k, kind=body.kind)
        return {"matches": [asdict(entry) for entry in found]}

    return app


async def _bounded(request: Request, call_next: Call) -> Response:
    """Refuse bodies that are too large before they are read, whether or not a length was declared."""
    declared = request.headers.get("content-length", "")
    if declared and (not declared.isdigit() or int(declared) > MAX_BODY_BYTES):
        return JSONResponse({"error": f"a body may have at most {MAX_BODY_BYTES} bytes"}, 413)
    if not declared and request.method in ("POST", "PUT", "PATCH"):
        return JSONResponse({"error": "a body needs a Content-Length"}, 411)
    return await call_next(request)


async def _fedlora_error(request: Request, error: Exception) -> Response:
    """Map the library's errors to status codes; messages hold no content."""
    text = str(error)
    status = 422
    if "already has a specification" in text:
        status = 409
    elif "no specification named" in text or "nothing in the dock is comparable" in text:
        status = 404
    return JSONResponse({"error": text, "class": type(error).__name__}, status)


async def _invalid_body(request: Request, error: Exception) -> Response:
    """Name the fields that do not fit, without echoing what was sent."""
    problems = error.errors() if isinstance(error, RequestValidationError) else []
    listed = [
        {"field": ".".join(str(part) for part in p["loc"]), "problem": str(p["type"])} for p in problems
    ]
    return JSONResponse({"error": "the body does not fit the schema", "problems": listed[:20]}, 422)
