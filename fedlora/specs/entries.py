"""The JSON form of specifications: what files and the service hold, checked before anything is used."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedlora.errors import DataError
from fedlora.files import write_durably
from fedlora.specs.types import MAX_DIMENSION, PrivacyStatement, Specification

MAX_ENTRY_BYTES = 64 * 1024
MAX_TOP_K = 1_000
MAX_SERVED_TOP_K = 100
"""Of one answer of the service: an entry's metadata and statement may have tens of kilobytes."""
_VECTOR_TEXT = 4 * (4 * MAX_DIMENSION // 3 + 4)


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
    top_k: int = Field(default=5, ge=1, le=MAX_SERVED_TOP_K)
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


def read_entry(path: Path) -> Specification:
    """Read a specification from its JSON file.

    Raises:
        DataError: if the file is missing, too large, not JSON or not a specification.
    """
    try:
        if path.stat().st_size > MAX_ENTRY_BYTES:
            raise DataError(f"{path} has more than {MAX_ENTRY_BYTES} bytes; it is not a specification")
        return EntryBody.model_validate_json(path.read_bytes()).to_specification()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        fields = ", ".join(
            ".".join(str(part) for part in problem["loc"]) or "JSON" for problem in error.errors()
        )
        raise DataError(f"{path} is not a specification; look at: {fields}") from error


def write_entry(path: Path, specification: Specification) -> None:
    """Write a specification as its JSON file; a crash leaves the old file or the new one."""
    text = json.dumps(entry_json(specification), indent=1, sort_keys=True, allow_nan=False)
    write_durably(path, f"{text}\n".encode())
