"""Accounting events: frozen records of what a mechanism did, whose meaning never changes.

Rules. An event says what ran, not what it costs. `noise_multiplier` is always noise standard deviation over
clipping norm, so that the add-or-remove sensitivity is 1; the neighbouring relation is an argument of the
accountant and no part of an event. A kind's meaning and JSON form are fixed once released: another meaning gets
another kind. Conditional kinds (`chargeable is False`) are analyses that hold under conditions nobody can verify in
training; they can be evaluated, and never pay for a release.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from fedlora.accounting import _checks
from fedlora.errors import PrivacyParameterError, UnsupportedEventError

_KINDS: dict[str, type[Event]] = {}
_MAX_COUNT = 10**12


@dataclass(frozen=True)
class Event:
    """Base of every event; not used itself.

    Attributes:
      kind: the name in JSON; PUBLIC.
      chargeable: whether a ledger may let the event pay for a release.
    """

    kind: ClassVar[str] = ""
    chargeable: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        """Enrol a kind under its name."""
        super().__init_subclass__()
        if cls.kind:
            _KINDS[cls.kind] = cls

    @property
    def conditions(self) -> tuple[str, ...]:
        """What must hold for the event's epsilon to be a guarantee, one sentence each."""
        return ()

    def to_json(self) -> dict[str, Any]:
        """Return the event as JSON-ready values; `Event.from_json` is the inverse."""
        raise UnsupportedEventError(
            f"event {type(self).__name__}: has no JSON form; use one of {sorted(_KINDS)}"
        )

    @classmethod
    def _parse(cls, fields: Mapping[str, Any]) -> Event:
        return cls(**fields)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Event:
        """Rebuild an event.

        Args:
          data: what `to_json` returned.

        Raises:
          UnsupportedEventError: if the kind is unknown.
          PrivacyParameterError: if a field is missing, unknown or out of range.
        """
        if not isinstance(data, Mapping) or not isinstance(data.get("kind"), str):
            raise UnsupportedEventError(
                "event JSON: got no 'kind'; allowed is an object made by Event.to_json"
            )
        kind = data["kind"]
        if kind not in _KINDS:
            raise UnsupportedEventError(
                f"event kind: got {kind!r}, allowed are {sorted(_KINDS)}; update fedlora or refuse the release"
            )
        fields = {name: value for name, value in data.items() if name != "kind"}
        try:
            return _KINDS[kind]._parse(fields)
        except (TypeError, KeyError) as error:
            raise PrivacyParameterError(
                f"event {kind}: fields do not fit ({error}); use Event.to_json"
            ) from None

    def key(self) -> str:
        """Return the canonical text of the event, equal exactly for equal events."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), allow_nan=False)

    def times(self, count: int) -> Event:
        """Return the event composed `count` times with itself (adaptively), count >= 1."""
        number = _checks.integer("count", count, at_most=_MAX_COUNT)
        return self if number == 1 else SelfComposedEvent(self, number)

    def leaves(self) -> Iterator[tuple[Event, int]]:
        """Yield the basic events with their counts, in order, not merged."""
        yield self, 1


def _set(event: Event, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(event, name, value)


@dataclass(frozen=True)
class NonPrivateEvent(Event):
    """A release without protection: epsilon is infinite under every accountant."""

    kind: ClassVar[str] = "non_private"

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"kind": self.kind}


@dataclass(frozen=True)
class GaussianEvent(Event):
    """One Gaussian mechanism on the whole data set.

    Attributes:
      noise_multiplier: noise standard deviation / clipping norm, >= 0; 0 means no noise, epsilon = infinity. PUBLIC.
    """

    noise_multiplier: float
    kind: ClassVar[str] = "gaussian"

    def __post_init__(self) -> None:
        """Validate."""
        _set(self, noise_multiplier=_checks.real("noise_multiplier", self.noise_multiplier, at_least=0.0))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"kind": self.kind, "noise_multiplier": self.noise_multiplier}


@dataclass(frozen=True)
class PoissonGaussianEvent(Event):
    """A Gaussian mechanism on a Poisson sample: each record takes part independently with `sample_rate`.

    Attributes:
      noise_multiplier: noise standard deviation / clipping norm, >= 0. PUBLIC.
      sample_rate: in (0, 1]. PUBLIC.
    """

    noise_multiplier: float
    sample_rate: float
    kind: ClassVar[str] = "poisson_gaussian"

    def __post_init__(self) -> None:
        """Validate."""
        _set(
            self,
            noise_multiplier=_checks.real("noise_multiplier", self.noise_multiplier, at_least=0.0),
            sample_rate=_checks.real("sample_rate", self.sample_rate, above=0.0, at_most=1.0),
        )

    @property
    def conditions(self) -> tuple[str, ...]:
        """The sampling assumption."""
        return ("records are Poisson-sampled and the divisor is public",)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"kind": self.kind, "noise_multiplier": self.noise_multiplier, "sample_rate": self.sample_rate}


@dataclass(frozen=True)
class ProjectionGroup:
    """One group of weights under a noisy projection.

    Attributes:
      name: for messages and reports.
      width: in-width d of the projected layer; None for a group that is released without projection.
      rank: rank r of the fresh projection, 1 <= r <= width; None exactly if width is None.
      kappa: clip / (weight * noise): the group's add-or-remove sensitivity over its noise's standard deviation, > 0;
        for one layer with weight 1 it is 1 / noise_multiplier. PUBLIC.
      out_width: out-width of the layer; only the published bound (its union over directions) needs it.
    """

    name: str
    width: int | None
    rank: int | None
    kappa: float
    out_width: int | None = None

    def __post_init__(self) -> None:
        """Validate."""
        if not isinstance(self.name, str) or not self.name:
            raise PrivacyParameterError(f"group name: got {self.name!r}, allowed is a non-empty text")
        set_ = object.__setattr__
        set_(self, "kappa", _checks.real(f"group {self.name} kappa", self.kappa, above=0.0))
        if (self.width is None) != (self.rank is None):
            raise PrivacyParameterError(f"group {self.name}: width and rank are given together or not at all")
        if self.width is not None:
            set_(self, "width", _checks.integer(f"group {self.name} width", self.width))
            set_(self, "rank", _checks.integer(f"group {self.name} rank", self.rank, at_most=self.width))
        if self.out_width is not None:
            set_(self, "out_width", _checks.integer(f"group {self.name} out_width", self.out_width))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        names = ("name", "width", "rank", "kappa", "out_width")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class NoisyProjectionEvent(Event):
    """One step of the noisy projection mechanism M2 with a fresh Gaussian projection for each projected group.

    "LoRA and Privacy: When Random Projections Help (and When They Don't)", Definition 3 (M2).

    Attributes:
      groups: every group that is released, projected or not; all of them enter the bound.
      sample_rate: Poisson rate in (0, 1], or None for the whole data set. PUBLIC.
      clip: "shared" when one clipping norm covers all groups, "separate" when each group has its own.
      projection_source: "client" when the data owner draws the projection from its own entropy, "shared" when it
        comes from a recipe of another party.
    """

    groups: tuple[ProjectionGroup, ...]
    sample_rate: float | None = None
    clip: str = "shared"
    projection_source: str = "client"
    kind: ClassVar[str] = "noisy_projection"

    def __post_init__(self) -> None:
        """Validate."""
        groups = tuple(self.groups)
        if not groups or not all(isinstance(group, ProjectionGroup) for group in groups):
            raise PrivacyParameterError(
                "groups: got none or other types, allowed is at least one ProjectionGroup"
            )
        if len({group.name for group in groups}) != len(groups):
            raise PrivacyParameterError("groups: names repeat; give every group its own name")
        rate = self.sample_rate
        if rate is not None:
            rate = _checks.real("sample_rate", rate, above=0.0, at_most=1.0)
        _checks.choice("clip", self.clip, ("shared", "separate"))
        _checks.choice("projection_source", self.projection_source, ("client", "shared"))
        _set(self, groups=groups, sample_rate=rate)

    @classmethod
    def single(
        cls,
        width: int,
        rank: int,
        noise_multiplier: float,
        sample_rate: float | None = None,
        out_width: int | None = None,
    ) -> Self:
        """Return the event of one projected layer (or of equal layers under one clip).

        Args:
          width: in-width d.
          rank: rank r of the fresh projection.
          noise_multiplier: noise standard deviation / clipping norm, > 0. PUBLIC.
          sample_rate: Poisson rate, or None. PUBLIC.
          out_width: only for the published bound.
        """
        sigma = _checks.real("noise_multiplier", noise_multiplier, above=0.0)
        return cls((ProjectionGroup("layer", width, rank, 1.0 / sigma, out_width),), sample_rate)

    @property
    def conditions(self) -> tuple[str, ...]:
        """Freshness of the projection, who draws it, and sampling."""
        drawn = (
            "each projection is drawn by the data owner from fresh entropy and released with its step only"
            if self.projection_source == "client"
            else "the party that draws the shared projection does so honestly, from fresh entropy, after the "
            "weights are fixed"
        )
        sampling = (
            ("records are Poisson-sampled and the divisor is public",) if self.sample_rate is not None else ()
        )
        return (
            "one gradient step for each projection, taken at the weights that were fixed before it",
            drawn,
            *sampling,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "kind": self.kind,
            "groups": [group.to_json() for group in self.groups],
            "sample_rate": self.sample_rate,
            "clip": self.clip,
            "projection_source": self.projection_source,
        }

    @classmethod
    def _parse(cls, fields: Mapping[str, Any]) -> Event:
        rest = {name: value for name, value in fields.items() if name != "groups"}
        return cls(groups=tuple(ProjectionGroup(**group) for group in fields["groups"]), **rest)


@dataclass(frozen=True)
class SelfComposedEvent(Event):
    """One event, `count` times, adaptively; chargeable only if the event is."""

    event: Event
    count: int = field(default=1)
    kind: ClassVar[str] = "self_composed"

    def __post_init__(self) -> None:
        """Validate."""
        if not isinstance(self.event, Event):
            raise PrivacyParameterError(f"event: got {type(self.event).__name__}, allowed is an Event")
        _set(self, count=_checks.integer("count", self.count, at_most=_MAX_COUNT))

    @property
    def chargeable(self) -> bool:  # type: ignore[override]
        """True if the repeated event is chargeable."""
        return self.event.chargeable

    @property
    def conditions(self) -> tuple[str, ...]:
        """The repeated event's conditions."""
        return self.event.conditions

    def leaves(self) -> Iterator[tuple[Event, int]]:
        """Yield the basic events with multiplied counts."""
        for event, count in self.event.leaves():
            yield event, count * self.count

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"kind": self.kind, "event": self.event.to_json(), "count": self.count}

    @classmethod
    def _parse(cls, fields: Mapping[str, Any]) -> Event:
        rest = {name: value for name, value in fields.items() if name != "event"}
        return cls(event=Event.from_json(fields["event"]), **rest)


@dataclass(frozen=True)
class ComposedEvent(Event):
    """Several events on the same data, in order, adaptively; chargeable only if every part is."""

    events: tuple[Event, ...]
    kind: ClassVar[str] = "composed"

    def __post_init__(self) -> None:
        """Validate."""
        events = tuple(self.events)
        if not all(isinstance(event, Event) for event in events):
            raise PrivacyParameterError("events: got another type, allowed are Events only")
        _set(self, events=events)

    @property
    def chargeable(self) -> bool:  # type: ignore[override]
        """True if every part is chargeable."""
        return all(event.chargeable for event in self.events)

    @property
    def conditions(self) -> tuple[str, ...]:
        """Every part's conditions, each once."""
        return tuple(dict.fromkeys(text for event in self.events for text in event.conditions))

    def leaves(self) -> Iterator[tuple[Event, int]]:
        """Yield the basic events of all parts."""
        for event in self.events:
            yield from event.leaves()

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"kind": self.kind, "events": [event.to_json() for event in self.events]}

    @classmethod
    def _parse(cls, fields: Mapping[str, Any]) -> Event:
        rest = {name: value for name, value in fields.items() if name != "events"}
        return cls(events=tuple(Event.from_json(event) for event in fields["events"]), **rest)
