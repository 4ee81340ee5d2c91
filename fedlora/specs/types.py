"""Records of the dock: a compact specification and what is promised about its privacy."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedlora.accounting import Event, epsilon_of
from fedlora.accounting.accountant import parts_of, require_chargeable
from fedlora.errors import DataError, PrivacyParameterError

Vector = npt.NDArray[np.float32]

NAME_PATTERN = re.compile(r"^[\w][\w.:@/+-]{0,199}$")
MAX_DIMENSION = 1024
TARGET = "target"
"""Key of the metadata that says what a specification was trained towards."""
MAX_WHOLE = 2**53
"""Whole numbers of metadata lie within this, so that every reader of JSON gets the same number."""
_ADJACENCIES = ("add_or_remove", "replace_one")
_TEXTS = ("unit", "adversary", "accountant", "sampling")


class NameTakenError(DataError):
    """A dock has an entry of that name already."""


class NotInDockError(DataError):
    """A dock has no such entry, or nothing that may be compared."""


class DockFullError(DataError):
    """A dock holds as many entries as it may."""


class DockDamagedError(DataError):
    """A dock's file holds what no dock writes."""


class DockBusyError(DataError):
    """A dock's file cannot be written now: another process holds it, or the disk is full."""


@dataclass(frozen=True)
class PrivacyStatement:
    """What a specification's release guarantees, with everything needed to read the number.

    `guarantee` is "dp" (a mechanism that adds noise and was charged), "none" (no privacy is claimed),
    or "conditional" (a noise-free analysis under conditions nobody can verify from outside).

    Raises:
        PrivacyParameterError: if a "dp" statement lacks a field or a number is not finite and positive.
    """

    guarantee: Literal["dp", "none", "conditional"]
    epsilon: float | None = None
    delta: float | None = None
    unit: str | None = None
    adjacency: str | None = None
    adversary: str | None = None
    accountant: str | None = None
    sampling: str | None = None
    num_events: int | None = None
    conditions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a statement that would print an epsilon without its meaning."""
        if self.guarantee not in ("dp", "none", "conditional"):
            raise PrivacyParameterError(f"guarantee must be dp, none or conditional; got {self.guarantee!r}")
        for text in self.conditions:
            require_text("a condition of a privacy statement", text)
        if self.guarantee == "dp":
            self._check_numbers()
            self._check_meaning()
        elif self.guarantee == "none" and not (self.epsilon is None and self.delta is None):
            raise PrivacyParameterError("a statement that claims no privacy has no epsilon and no delta")

    def _check_numbers(self) -> None:
        for name in ("epsilon", "delta"):
            value = getattr(self, name)
            if not isinstance(value, float) or not math.isfinite(value) or not value > 0:
                raise PrivacyParameterError(f"{name} of a dp statement must be finite and > 0")
        if not isinstance(self.delta, float) or not self.delta < 1:
            raise PrivacyParameterError("delta of a dp statement must lie below 1")
        events = self.num_events
        if isinstance(events, bool) or not isinstance(events, int) or not 1 <= events <= MAX_WHOLE:
            raise PrivacyParameterError("num_events of a dp statement must be a whole number >= 1")

    def _check_meaning(self) -> None:
        missing = [name for name in (*_TEXTS, "adjacency") if not str(getattr(self, name) or "").strip()]
        if missing:
            raise PrivacyParameterError(f"a dp statement needs {', '.join(missing)}; give each or use 'none'")
        for name in _TEXTS:
            require_text(f"{name} of a privacy statement", getattr(self, name))
        if self.adjacency not in _ADJACENCIES:
            raise PrivacyParameterError(f"adjacency of a dp statement must be {' or '.join(_ADJACENCIES)}")


def require_text(what: str, value: object) -> None:
    """Require printable text in one line: entries come from strangers and are shown on terminals.

    Raises:
        DataError: for anything else, control characters and changes of writing direction included.
    """
    if not isinstance(value, str) or not value.isprintable():
        raise DataError(f"{what} must be printable text in one line")


def require_name(name: object) -> None:
    """Require a name that means one entry and no other place, in an address, a path or on a screen.

    Raises:
        DataError: if it does not fit the pattern, has an empty, "." or ".." part, or is not in Unicode's form NFKC
            (characters that only look like others).
    """
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        raise DataError(f"specification name {name!r:.80} must match {NAME_PATTERN.pattern}")
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise DataError(
            f"specification name {name!r:.80} must have no empty, '.' or '..' part between slashes"
        )
    if unicodedata.normalize("NFKC", name) != name:
        raise DataError(f"specification name {name!r:.80} must be in Unicode's form NFKC")


@dataclass(frozen=True)
class Specification:
    """A compact LoRA specification: the direction in which a task moves a shared base model.

    Attributes:
        name: unique name in a dock.
        vector: (dimension,) float32, unit norm; at most 1024 dimensions.
        kind: "model" (Eq. 1, describes a trained model) or "task" (Eq. 2, describes a data set).
        base_fingerprint: sha256 of the base model; only equal bases are comparable.
        recipe: sha256 of the frozen lora_A recipe; only equal recipes are comparable.
        projection: name of the public projection that made the vector ("none" if it did not).
        privacy: what the release guarantees.
        licence: SPDX name of the licence under which the entry may be used.
        metadata: public strings and numbers.

    Source: "PAVE Specifications of Learnwares Yield Intrinsic Privacy-Preserving Capabilities",
        Eqs. 1, 2 and 6.
    """

    name: str
    vector: Vector
    kind: Literal["model", "task"]
    base_fingerprint: str
    recipe: str
    projection: str
    privacy: PrivacyStatement
    licence: str
    metadata: Mapping[str, str | int | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check shape, norm, names and texts; a specification that cannot be compared is refused."""
        require_name(self.name)
        if self.kind not in ("model", "task"):
            raise DataError(
                f"kind of specification {self.name!r} must be model or task; got {self.kind!r:.40}"
            )
        self._check_vector()
        self._check_facts()

    def _check_vector(self) -> None:
        vector = self.vector
        if vector.dtype != np.float32 or vector.ndim != 1 or not 1 <= vector.size <= MAX_DIMENSION:
            raise DataError(
                f"vector of specification {self.name!r} must be float32 with 1 to {MAX_DIMENSION} entries; "
                f"got {vector.dtype} {vector.shape}. Use PublicProjection for longer ones"
            )
        norm = float(np.linalg.norm(vector.astype(np.float64)))
        if not abs(norm - 1.0) < 1e-3:
            raise DataError(f"vector of specification {self.name!r} must have unit norm; got {norm:.6g}")

    def _check_facts(self) -> None:
        for what in ("licence", "base_fingerprint", "recipe", "projection"):
            require_text(f"{what} of specification {self.name!r}", getattr(self, what))
            if not getattr(self, what).strip():
                raise DataError(f"specification {self.name!r} needs a {what.replace('_', ' ')}")
        for key, value in self.metadata.items():
            what = f"metadata of specification {self.name!r}"
            require_text(f"a key in {what}", key)
            if isinstance(value, str):
                require_text(what, value)
            elif isinstance(value, bool) or not isinstance(value, int | float):
                raise DataError(f"{what} must be texts and numbers")
            elif abs(value) > MAX_WHOLE if isinstance(value, int) else not math.isfinite(value):
                raise DataError(f"{what} must be finite numbers, whole ones at most 2^53")


def other_target(asked: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Return whether two specifications state different targets: their directions then have little in common."""
    mine, theirs = asked.get(TARGET), found.get(TARGET)
    return mine is not None and theirs is not None and mine != theirs


def statement_from_event(
    event: Event, delta: float, *, adjacency: str, accountant: str, unit: str, adversary: str, sampling: str
) -> PrivacyStatement:
    """Account for one release and return the statement that travels with a specification.

    Args:
        event: what the whole release is, from the objects that ran.
        delta: in (0, 1).
        adjacency: neighbouring relation.
        accountant: tool, or "best".
        unit: "record", "person" or "client".
        adversary: against whom the figure holds.
        sampling: how batches were drawn.

    Raises:
        UnsupportedEventError: if the event cannot pay for a release (a noise-free, conditional analysis).
    """
    require_chargeable(parts_of(event))
    report = epsilon_of(event, delta, adjacency=adjacency, accountant=accountant, unit=unit)
    return PrivacyStatement(
        guarantee="dp",
        epsilon=float(report.epsilon),
        delta=float(report.delta),
        unit=unit,
        adjacency=str(getattr(report.adjacency, "value", report.adjacency)),
        adversary=adversary,
        accountant=report.accountant,
        sampling=sampling,
        num_events=int(report.num_events),
        conditions=tuple(report.conditions),
    )
