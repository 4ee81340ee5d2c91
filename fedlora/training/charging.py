"""Charge before use: turn a round into ledger requests, and keep grants where the ledger is elsewhere.

The trainer speaks to a `BudgetKeeper`. In a deployment that is the site's own ledger
(`LedgerKeeper`); in a simulation the driver is the only writer: it reserves a whole cohort in one
transaction *before* the message reaches the worker, and the worker's trainer works on these grants
(`GrantKeeper`), whose commits travel back beside the reply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from fedlora.accounting import Event
from fedlora.config.schema import ClientPrivacy, FedLoraConfig, NoPrivacy, RecordPrivacy
from fedlora.errors import LedgerError, UnsupportedEventError
from fedlora.ledger import Ledger, person_event
from fedlora.ledger.types import Account, Budget, CommitRequest, Refusal, Reservation, ReserveRequest


@dataclass(frozen=True)
class Standing:
    """PUBLIC. Where an account stands after a round.

    Attributes:
        epsilon: upper bound of what is spent (reserved rounds included), in the budget's window.
        head: head of the ledger's hash chain.
    """

    epsilon: float
    head: str


@runtime_checkable
class BudgetKeeper(Protocol):
    """Durable spending: nothing may be released without a reservation."""

    def reserve(self, requests: Sequence[ReserveRequest]) -> Sequence[Reservation | Refusal]:
        """Reserve for a cohort in one durable transaction; one answer per request, in order."""

    def commit(self, commits: Sequence[CommitRequest]) -> None:
        """Record what really ran, in one transaction."""

    def standing(self, accounts: Sequence[Account], delta: float) -> Mapping[Account, Standing]:
        """Return where each account stands; every figure is recomputed from events."""


class LedgerKeeper:
    """Keeper over a ledger of this process."""

    def __init__(self, ledger: Ledger) -> None:
        """Wrap an open ledger; whoever opened it closes it."""
        self.ledger = ledger

    def reserve(self, requests: Sequence[ReserveRequest]) -> Sequence[Reservation | Refusal]:
        """Reserve for a cohort in one durable transaction; from here on the data may be touched."""
        answers = self.ledger.reserve(requests)
        self.ledger.mark_started(answer for answer in answers if isinstance(answer, Reservation))
        return answers

    def commit(self, commits: Sequence[CommitRequest]) -> None:
        """Record what really ran, in one transaction."""
        self.ledger.commit(commits)

    def standing(self, accounts: Sequence[Account], delta: float) -> Mapping[Account, Standing]:
        """Return where each account stands at its budget's delta."""
        del delta
        reports = self.ledger.reports(accounts)
        return {report.account: Standing(report.epsilon, report.head) for report in reports}


def charges(config: FedLoraConfig) -> bool:
    """Return whether clients' ledgers pay for rounds of this configuration.

    Under client-level privacy the noise is added to the sum, and whoever adds it pays (see the server).
    """
    return isinstance(config.privacy, RecordPrivacy)


def charged_event(config: FedLoraConfig, event: Event) -> Event:
    """Return what one step costs the unit of a configuration: a record, or a person with several records.

    Args:
        config: the configuration that runs.
        event: event of one step per record, from the mechanism that will run (or ran).

    Raises:
        UnsupportedEventError: if several records per person are used and no bound is known for them.
    """
    privacy = config.privacy
    if not isinstance(privacy, RecordPrivacy) or privacy.group_by is None:
        return event
    return person_event(event, privacy.max_records_per_group, adjacency=privacy.adjacency)


def budget_terms(config: FedLoraConfig) -> Budget:
    """Return the ledger's terms that a configuration asks for.

    Raises:
        UnsupportedEventError: if the configuration has no privacy (nothing to charge).
    """
    privacy = config.privacy
    if isinstance(privacy, NoPrivacy):
        raise UnsupportedEventError("privacy.unit: none has no budget; nothing can be charged")
    unit = "client"
    if isinstance(privacy, RecordPrivacy):
        unit = "record" if privacy.group_by is None else "person"
    return Budget(
        epsilon=privacy.budget.epsilon,
        delta=privacy.budget.delta,
        adjacency=privacy.adjacency,
        unit=unit,
        accountant=privacy.accountant,
        window=privacy.budget.window,
        on_exhausted=privacy.budget.on_exhausted,
    )


def plan_round(
    config: FedLoraConfig,
    clients: Sequence[str],
    *,
    run_id: str,
    server_round: int,
    event: Event,
    steps: int,
    budgets: Mapping[str, Budget] | None = None,
    dataset: str | None = None,
    notes: Mapping[str, str] | None = None,
    fingerprints: Mapping[str, str] | None = None,
) -> list[ReserveRequest]:
    """Build the reservations of one round, one per client.

    Args:
        config: the resolved configuration.
        clients: logical client ids, each its own account.
        run_id: unique name of the run.
        server_round: round number, >= 1.
        event: event of ONE step of ONE client, from the mechanism that will run.
        steps: optimiser steps per client, >= 1.
        budgets: a site's own terms per client; the configuration's otherwise.
        dataset: the site's own data-set name; the configuration's otherwise.
        notes: further conditions of single clients, which their reports must repeat.
        fingerprints: keyed fingerprints of clients' records, where they are known (evidence only).

    Returns:
        One request per client, in the given order.
    """
    name = config.data.name if dataset is None else dataset
    terms = budget_terms(config) if budgets is None else None
    common: tuple[str, ...] = ("noise source seeded for tests: NO PRIVACY",) if config.seeded_noise else ()
    if isinstance(config.privacy, RecordPrivacy) and config.privacy.group_by is not None:
        common += (f"at most {config.privacy.max_records_per_group} records of each person are used",)
    requests = []
    for client in clients:
        budget = terms if budgets is None else budgets[client]
        if budget is None:
            raise LedgerError(f"client {client}: no budget; state one before training")
        own = None if notes is None else notes.get(client)
        requests.append(
            ReserveRequest(
                account=Account(client, name),
                budget=budget,
                run_id=run_id,
                server_round=server_round,
                event=event,
                steps=steps,
                fingerprint=None if fingerprints is None else fingerprints.get(client),
                assumptions=common if own is None else (*common, own),
            )
        )
    return requests


def unit_of(config: FedLoraConfig) -> str:
    """Return the privacy unit in words: record, person, client or none."""
    if isinstance(config.privacy, NoPrivacy):
        return "none"
    return "client" if isinstance(config.privacy, ClientPrivacy) else budget_terms(config).unit


@dataclass(frozen=True)
class Grant:
    """What the driver hands a worker for one client: the reservation (or refusal) and the standing."""

    answer: Reservation | Refusal
    standing: Standing | None


class GrantKeeper:
    """Keeper inside a simulation's worker: it can only use up what the driver reserved.

    A grant serves once. What ran is collected in `take_commits` and travels back to the driver.
    """

    def __init__(self) -> None:
        """Start without any grant; until one is handed over, everything is refused."""
        self._grants: dict[tuple[Account, str, int], Grant] = {}
        self._standings: dict[Account, Standing] = {}
        self._commits: list[CommitRequest] = []

    def hand_over(self, grants: Sequence[Grant]) -> None:
        """Replace the open grants by those of the next message."""
        self._grants = {(g.answer.account, g.answer.run_id, g.answer.server_round): g for g in grants}
        self._standings = {g.answer.account: g.standing for g in grants if g.standing is not None}
        self._commits = []

    def reserve(self, requests: Sequence[ReserveRequest]) -> Sequence[Reservation | Refusal]:
        """Match requests with grants.

        Raises:
            LedgerError: if a request has no grant, or the grant's event or steps differ.
        """
        answers: list[Reservation | Refusal] = []
        for request in requests:
            grant = self._grants.pop((request.account, request.run_id, request.server_round), None)
            if grant is None:
                raise LedgerError(
                    f"client {request.account.client} round {request.server_round}: nothing was reserved by the "
                    "driver; nothing may be released"
                )
            answer = grant.answer
            if isinstance(answer, Reservation) and (
                answer.event.key() != request.event.key() or answer.steps > request.steps
            ):
                raise LedgerError(
                    f"client {request.account.client} round {request.server_round}: the reservation is for another "
                    "event or more steps than will run; driver and worker must run the same code"
                )
            answers.append(answer)
        return answers

    def commit(self, commits: Sequence[CommitRequest]) -> None:
        """Collect commits for the driver."""
        self._commits.extend(commits)

    def take_commits(self) -> list[CommitRequest]:
        """Return and forget the collected commits."""
        taken, self._commits = self._commits, []
        return taken

    def standing(self, accounts: Sequence[Account], delta: float) -> Mapping[Account, Standing]:
        """Return the standings that came with the grants (reserved rounds count as spent).

        The driver works exact figures out in some rounds only; accounts without one are left out.
        """
        del delta
        return {account: self._standings[account] for account in accounts if account in self._standings}
