"""What every section of the schema is made of: strict types of values and the sections' base."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(gt=0, le=1)]
Delta = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1, le=10**12)]
Tokens = Annotated[int, Field(ge=1, le=10_000_000)]
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[\w][\w.:@/+-]*$")]


class Section(BaseModel):
    """Base of every section: frozen, strict, no unknown keys, finite numbers only."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
