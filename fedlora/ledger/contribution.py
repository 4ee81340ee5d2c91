"""Contribution bounding: what one person can add, and what it costs to protect the person.

The unit of an ordinary ledger is a record. With a `group_by` column at most `max_records` records
of each person are kept, chosen by a keyed hash so that one person's records never decide about
another's, and each step's event is replaced by one that covers the whole person.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from fedlora.accounting import Event, GaussianEvent, PoissonGaussianEvent
from fedlora.errors import DataError, UnsupportedCombinationError, UnsupportedEventError
from fedlora.ledger import chain

PER_RECORD = "per record, not per person"


@dataclass(frozen=True)
class ContributionBound:
    """Which records may be used, and how the person is protected.

    Attributes:
        kept: positions of the kept records, ascending (SENSITIVE).
        max_records: most records of one person.
        unit: "person".
        statement: for the report (PUBLIC).
    """

    kept: tuple[int, ...]
    max_records: int
    unit: str
    statement: str


def bound_contributions(
    groups: Sequence[Hashable], *, max_records: int, secret: bytes, adjacency: str = "add_or_remove"
) -> ContributionBound:
    """Choose at most `max_records` records of each person.

    Formal guarantee: adding or removing all records of one person changes `kept` by that person's
    records only, at most `max_records` of them.

    Args:
        groups: the person of each record, in record order, SENSITIVE (compared by `person_key`).
        max_records: >= 1.
        secret: the client's key; makes the choice unpredictable and repeatable, SENSITIVE.
        adjacency: neighbouring relation of the guarantee, on persons.

    Raises:
        DataError: if a record has no person.
        UnsupportedCombinationError: if max_records > 1 under replace-one (no bound is implemented).
    """
    if isinstance(max_records, bool) or not isinstance(max_records, int) or not max_records >= 1:
        raise DataError(f"max_records_per_group: got {max_records!r}; allowed: a whole number >= 1; use 1")
    if max_records > 1 and adjacency != "add_or_remove":
        raise UnsupportedCombinationError(
            f"max_records_per_group: got {max_records} with adjacency {adjacency}; allowed: 1, or add_or_remove; "
            "set max_records_per_group to 1"
        )
    members: dict[str, list[int]] = {}
    for position, person in enumerate(groups):
        members.setdefault(person_key(person, position), []).append(position)
    key = chain.derive_key(secret, "contribution")
    kept: list[int] = []
    for person, positions in members.items():
        # Ranks within the person, not positions, so that other people's records do not matter.
        label = person.encode("utf-8", "surrogatepass")
        ranked = sorted(
            range(len(positions)), key=lambda rank: hmac.digest(key, label + b"\x1f%d" % rank, "sha256")
        )
        kept.extend(positions[rank] for rank in ranked[:max_records])
    return ContributionBound(tuple(sorted(kept)), max_records, "person", _statement(max_records))


def person_key(value: object, position: int) -> str:
    """Return the text by which a person is known: 7, 7.0, "7" and " 7 " are one person.

    Args:
        value: a record's entry in the `group_by` column, SENSITIVE.
        position: the record's place, for the message.

    Raises:
        DataError: if the value is missing, empty or NaN: records without a person cannot be bounded.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = "" if value is None or value != value else str(value).strip()
    if not text:
        raise DataError(
            f"group_by: record {position} has no value; required: a person for each; fill or drop it"
        )
    return text


def _statement(max_records: int) -> str:
    if max_records == 1:
        return "per person: one record of each person is used"
    return (
        f"per person: at most {max_records} records of each person are used; a step counts as if all of them "
        "were used whenever one is"
    )


def person_event(event: Event, max_records: int, *, adjacency: str = "add_or_remove") -> Event:
    """Return the event of one step that covers a whole person with at most `max_records` records.

    With one record it is the event itself. With k records, each sampled with rate q and clipped to
    C: given that at least one was sampled (probability 1 - (1 - q)^k) the sum moves by at most
    k C. For any fixed set of sampled records the pair of outputs is a Poisson-sampled Gaussian of
    that probability and sensitivity at most k C, and the hockey-stick divergence is jointly convex
    in the pair, so PoissonGaussian(sigma / k, 1 - (1 - q)^k) dominates the mixture over sets.

    Args:
        event: event of one step per record.
        max_records: k >= 1, from `bound_contributions`.
        adjacency: neighbouring relation, on persons.

    Raises:
        UnsupportedEventError: if k > 1 and the bound is not known for the event or the relation.
    """
    if max_records == 1:
        return event
    if isinstance(max_records, bool) or not isinstance(max_records, int) or not max_records > 1:
        raise UnsupportedEventError(f"max_records: got {max_records!r}; allowed: a whole number >= 1; use 1")
    if adjacency == "add_or_remove" and type(event) is GaussianEvent:
        return GaussianEvent(event.noise_multiplier / max_records)
    if adjacency == "add_or_remove" and type(event) is PoissonGaussianEvent:
        return PoissonGaussianEvent(
            event.noise_multiplier / max_records, _any_rate(event.sample_rate, max_records)
        )
    raise UnsupportedEventError(
        f"event {event.kind} with {max_records} records per person under {adjacency}: no bound is known; "
        "allowed: one record per person, or Gaussian steps under add_or_remove; set max_records_per_group to 1"
    )


def _any_rate(rate: float, count: int) -> float:
    """Return an upper bound on 1 - (1 - rate)^count (rounded up, at most 1)."""
    if not rate < 1.0:
        return 1.0
    return min(1.0, -math.expm1(count * math.log1p(-rate)) * (1.0 + 1e-12))
