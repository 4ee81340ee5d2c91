"""What an accountant returns, and parallel composition over clients."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedlora.accounting.conditional import VectorProjectionEvent  # noqa: F401  (enrols the conditional kinds)
from fedlora.accounting.events import ComposedEvent, Event, SelfComposedEvent
from fedlora.errors import PrivacyParameterError


class Adjacency(enum.StrEnum):
    """The neighbouring relation of data sets."""

    ADD_OR_REMOVE = "add_or_remove"
    REPLACE_ONE = "replace_one"

    @classmethod
    def parse(cls, value: object) -> Adjacency:
        """Return the relation for a member or its text ('-' and '_' alike), or raise PrivacyParameterError."""
        text: Any = value.replace("-", "_") if isinstance(value, str) else value
        try:
            return cls(text)
        except ValueError:
            allowed = " | ".join(cls)
            raise PrivacyParameterError(f"adjacency: got {value!r}, allowed is {allowed}") from None


@dataclass(frozen=True)
class EpsilonReport:
    """An upper bound on epsilon, with everything it depends on; PUBLIC.

    Attributes:
      epsilon: valid upper bound, >= 0, possibly infinity.
      delta: in (0, 1).
      accountant: tool or bound that gave the figure.
      adjacency: neighbouring relation.
      conditions: assumptions, one sentence each.
      num_events: basic events composed.
      unit: what a neighbour differs in ("record" or "client"), if known to the caller.
      alternatives: other bounds on the same quantity, by name.
    """

    epsilon: float
    delta: float
    accountant: str
    adjacency: Adjacency
    conditions: tuple[str, ...] = ()
    num_events: int = 1
    unit: str | None = None
    alternatives: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready values; an infinite epsilon becomes the text "inf"."""
        return {
            "epsilon": json_number(self.epsilon),
            "delta": self.delta,
            "accountant": self.accountant,
            "adjacency": str(self.adjacency),
            "unit": self.unit,
            "conditions": list(self.conditions),
            "num_events": self.num_events,
            "alternatives": {name: json_number(value) for name, value in self.alternatives.items()},
        }


def json_number(value: float) -> float | str:
    """Return a finite number as it is and an infinite or undefined one as text (strict JSON has no infinity)."""
    return value if math.isfinite(value) else str(value)


def merge(parts: Iterable[tuple[Event, int]]) -> tuple[tuple[Event, int], ...]:
    """Flatten events with counts into basic events, equal ones added up, in canonical (key) order."""
    counts: dict[str, tuple[Event, int]] = {}
    for event, count in parts:
        if not isinstance(event, Event):
            raise PrivacyParameterError(f"event: got {type(event).__name__}, allowed is an Event")
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise PrivacyParameterError(f"count: got {count!r}, allowed is an integer >= 0")
        for leaf, inner in event.leaves():
            if count == 0:
                continue
            key = leaf.key()
            known = counts.get(key, (leaf, 0))[1]
            counts[key] = (leaf, known + count * inner)
    return tuple(counts[key] for key in sorted(counts))


def compose(events: Iterable[tuple[Event, int]]) -> Event:
    """Compose events on the same data, adaptively; equal events are merged.

    Args:
      events: pairs of an event and how often it ran (0 is allowed and drops out).

    Returns:
      One event; its key depends only on the multiset of basic events.
    """
    parts = tuple(event.times(count) for event, count in merge(events))
    return parts[0] if len(parts) == 1 else ComposedEvent(parts)


def parallel(reports: Iterable[EpsilonReport]) -> EpsilonReport:
    """Compose in parallel over clients with disjoint records: the maximum, with its assumptions.

    The guarantee of the run is the largest epsilon of a client, also when each client's steps depend on the others'
    released values: one record touches one client only.

    Args:
      reports: one for each client, all with the same delta, adjacency and unit.

    Raises:
      PrivacyParameterError: if there is none, or they do not speak of the same delta, adjacency and unit.
    """
    known = tuple(reports)
    if not known:
        raise PrivacyParameterError("reports: got none, allowed is at least one client's report")
    if len({(report.delta, report.adjacency, report.unit) for report in known}) != 1:
        raise PrivacyParameterError("reports: delta, adjacency or unit differ; account all clients alike")
    worst = max(known, key=lambda report: report.epsilon)
    assumed = (
        "every record belongs to one client and the partition does not depend on the data (a person whose records lie "
        "with several clients is not covered by the maximum)",
        "sampling rates, noise, step counts and weights are public, and every client adds its full noise",
        "no other private value crosses clients",
    )
    extra = ("replace-one holds within a client only",) if worst.adjacency is Adjacency.REPLACE_ONE else ()
    texts = dict.fromkeys(text for report in known for text in report.conditions)
    return EpsilonReport(
        epsilon=worst.epsilon,
        delta=worst.delta,
        accountant=f"parallel maximum over {len(known)} clients of {worst.accountant}",
        adjacency=worst.adjacency,
        conditions=(*texts, *assumed, *extra),
        num_events=sum(report.num_events for report in known),
        unit=worst.unit,
    )


__all__ = ["Adjacency", "ComposedEvent", "EpsilonReport", "SelfComposedEvent", "compose", "merge", "parallel"]
