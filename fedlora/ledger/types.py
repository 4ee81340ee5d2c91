"""Plain records of the ledger: accounts, budgets, requests, outcomes and reports (all PUBLIC).

Nothing in here is computed from records of a data set, except the keyed fingerprint, which
only whoever holds the ledger's secret can relate to content.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from fedlora.accounting import Event
from fedlora.errors import FedLoraError, LedgerError, PrivacyParameterError

UNITS: Final = ("record", "person", "client")
ADJACENCIES: Final = ("add_or_remove", "replace_one")
WINDOWS: Final = ("lifetime", "calendar-year", "calendar-quarter", "calendar-month")
ON_EXHAUSTED: Final = ("refuse", "fewer_steps")
ACCOUNTANTS: Final = ("best", "pld", "rdp", "prv")

_NAME = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,256}\Z")


def is_name(value: object) -> bool:
    """Return whether `value` may be an identifier: a text of 1 to 256 characters without control characters."""
    return isinstance(value, str) and _NAME.match(value) is not None


def check_name(what: str, value: str) -> str:
    """Return `value` if it may be an identifier in the ledger.

    Raises:
        LedgerError: if it is not 1 to 256 characters without control characters.
    """
    if not is_name(value):
        raise LedgerError(
            f"{what}: got a name that is empty, longer than 256 or with control characters; "
            "allowed: 1 to 256 printable characters; choose another name"
        )
    return value


def check_new_name(what: str, value: str) -> str:
    """Return `value` if a new account may have it: a name that no other name looks like by invisible characters.

    Names of accounts that a ledger already has are not checked again.

    Raises:
        LedgerError: if it begins or ends with a space, holds an invisible character, or is not in Unicode's form NFC.
    """
    check_name(what, value)
    plain = unicodedata.normalize("NFC", value)
    if value != plain or value != value.strip() or not value.isprintable():
        raise LedgerError(
            f"{what}: got {value!a}, which looks like another name (spaces at an end, invisible characters or "
            f"decomposed letters); allowed: printable characters in Unicode's form NFC; write {plain.strip()!a} "
            "or choose another name"
        )
    return value


def _check_choice(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise PrivacyParameterError(
            f"{what}: got {value!r}; allowed: {', '.join(allowed)}; choose one of them"
        )


@dataclass(frozen=True, order=True)
class Account:
    """Key of what was spent: the trainer's own identity and the declared data-set name.

    Raises:
        LedgerError: if a name is empty, too long or has control characters.
    """

    client: str
    dataset: str

    def __post_init__(self) -> None:
        """Check both names."""
        check_name("account client", self.client)
        check_name("account dataset", self.dataset)


@dataclass(frozen=True)
class Budget:
    """What one account may spend.

    Attributes:
        epsilon: bound, > 0 and finite.
        delta: in (0, 1).
        adjacency: "add_or_remove" or "replace_one".
        unit: "record", "person" (contributions bounded per person) or "client".
        accountant: "best", "pld", "rdp" or "prv".
        window: "lifetime" or a calendar window in UTC; lifetime spend is reported in any case.
        on_exhausted: "refuse", or "fewer_steps" (grant as many steps as still fit).

    Raises:
        PrivacyParameterError: if a value is out of its range.
    """

    epsilon: float
    delta: float
    adjacency: str = "add_or_remove"
    unit: str = "record"
    accountant: str = "best"
    window: str = "lifetime"
    on_exhausted: str = "refuse"

    def __post_init__(self) -> None:
        """Check every field; NaN and infinity are refused."""
        if not (self.epsilon > 0 and math.isfinite(self.epsilon)):
            raise PrivacyParameterError(
                f"budget epsilon: got {self.epsilon!r}; allowed: finite and > 0; set the bound you can accept"
            )
        if not (0 < self.delta < 1):
            raise PrivacyParameterError(
                f"budget delta: got {self.delta!r}; allowed: 0 < delta < 1; use at most 1 / records"
            )
        _check_choice("budget adjacency", self.adjacency, ADJACENCIES)
        _check_choice("budget unit", self.unit, UNITS)
        _check_choice("budget accountant", self.accountant, ACCOUNTANTS)
        _check_choice("budget window", self.window, WINDOWS)
        _check_choice("budget on_exhausted", self.on_exhausted, ON_EXHAUSTED)


@dataclass(frozen=True)
class ReserveRequest:
    """Ask to spend `steps` times `event` (the event of ONE step) in one round of one run.

    Attributes:
        account: who pays.
        budget: terms the caller believes in; they must agree with the ledger's own.
        run_id: unique name of the run.
        server_round: round number, >= 0.
        event: accounting event of one step, derived from the object that will run.
        steps: optimiser steps, >= 1.
        fingerprint: keyed fingerprint of the records (evidence, not the key of the account).
        assumptions: further conditions that the report must repeat.
    """

    account: Account
    budget: Budget
    run_id: str
    server_round: int
    event: Event
    steps: int
    fingerprint: str | None = None
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reservation:
    """A granted, durable reservation: it counts as spent from here on, whatever happens.

    Attributes:
        seq: sequence number of the ledger entry.
        account: who pays.
        run_id: run.
        server_round: round.
        event: event of one step.
        steps: steps granted (fewer than asked for only under `on_exhausted: fewer_steps`).
        steps_requested: steps asked for.
        projected_epsilon_fits: always True; kept so that a reader of a dump sees what was checked.
    """

    seq: int
    account: Account
    run_id: str
    server_round: int
    event: Event
    steps: int
    steps_requested: int
    projected_epsilon_fits: bool = True

    granted = True


@dataclass(frozen=True)
class Refusal:
    """A refused request; `error` is what a single-client caller raises.

    Attributes:
        account: who would have paid.
        run_id: run.
        server_round: round.
        reason: "budget-exceeded", "duplicate-round", "terms-changed", "unsupported-event" or "invalid".
        error: the matching error, with its exit code.
        reply_digest: for a duplicate round that was committed: sha256 of the reply that was sent.
    """

    account: Account
    run_id: str
    server_round: int
    reason: str
    error: FedLoraError
    reply_digest: str | None = None

    granted = False

    @property
    def message(self) -> str:
        """The error's text."""
        return str(self.error)


@dataclass(frozen=True)
class RoundRow:
    """One reservation as the report shows it; `state` is reserved, committed, abandoned or released."""

    seq: int
    run_id: str
    server_round: int
    event_key: str
    event_json: str
    steps_reserved: int
    steps_charged: int
    state: str
    reply_digest: str
    at: str


@dataclass(frozen=True)
class LedgerReport:
    """What one account spent, recomputed from its events, with everything the figure depends on.

    Attributes:
        account: whose spend it is.
        epsilon: spend in the budget's window at `delta` (an upper bound).
        delta: the delta of `epsilon`.
        budget: the ledger's terms.
        left: budget epsilon minus epsilon, at least 0; None if `delta` is not the budget's.
        epsilon_lifetime: spend over all time at `delta`.
        accountant: accountant whose bound is reported.
        adjacency: neighbouring relation.
        unit: what one record of the guarantee is.
        adversary: against whom the guarantee holds.
        sampling_assumption: how records must have been drawn for it to hold.
        num_events: noised steps charged (lifetime).
        conditions: everything else a reader must know.
        integrity: "full" (the whole chain was checked) or "since-snapshot".
        head: chain head the report was made at.
        rounds: one row per reservation, in order (empty if not asked for).
    """

    account: Account
    epsilon: float
    delta: float
    budget: Budget
    left: float | None
    epsilon_lifetime: float
    accountant: str
    adjacency: str
    unit: str
    adversary: str
    sampling_assumption: str
    num_events: int
    conditions: tuple[str, ...]
    integrity: str
    head: str
    rounds: tuple[RoundRow, ...] = ()


@dataclass(frozen=True)
class CommitRequest:
    """What really happened under one reservation.

    Attributes:
        reservation: what was granted.
        steps_taken: the optimiser's own counter.
        event: event of one step, derived from the object that ran.
        reply_digest: sha256 (hex) of the reply's bytes, or "" if nothing was sent.
    """

    reservation: Reservation
    steps_taken: int
    event: Event
    reply_digest: str = ""


Clock = Callable[[], float]
"""Seconds since the epoch."""


@dataclass(frozen=True)
class Pending:
    """A reservation that is neither committed, abandoned nor released (spent all the same)."""

    seq: int
    account_id: int
    event_id: int
    steps: int
    run_id: str
    server_round: int
    period: int


@dataclass
class AccountState:
    """Mutable working state of one account; always a function of its entries.

    Attributes:
        account: key.
        terms: last budget entry, or None.
        spend: (event id, period) -> charged steps; period is year * 12 + month - 1 in UTC.
        fingerprint: last fingerprint seen.
        conditions: texts that reports must repeat.
    """

    account: Account
    terms: Budget | None = None
    spend: dict[tuple[int, int], int] = field(default_factory=dict)
    fingerprint: str | None = None
    conditions: dict[str, None] = field(default_factory=dict)
