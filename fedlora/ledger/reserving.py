"""Reservations: terms, duplicates, projected epsilon; one outcome per request."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from fedlora.accounting import Event
from fedlora.errors import (
    BudgetExceededError,
    DuplicateRoundError,
    FedLoraError,
    LedgerError,
    UnsupportedEventError,
)
from fedlora.figures import at_least
from fedlora.ledger import chain
from fedlora.ledger.chain import canonical_json
from fedlora.ledger.draft import Draft
from fedlora.ledger.projection import Multiset, Projector, add_steps, first_period, multiset_of
from fedlora.ledger.schema import entries
from fedlora.ledger.state import LedgerState
from fedlora.ledger.types import (
    Account,
    AccountState,
    Budget,
    Refusal,
    Reservation,
    ReserveRequest,
    check_name,
    check_new_name,
    is_name,
)

MAX_STEPS = 10**9

_BOUND_TERMS = ("delta", "adjacency", "unit", "accountant", "window")


@dataclasses.dataclass(frozen=True)
class Earlier:
    """What the ledger already has for one account and round."""

    attempt: int
    state: str
    digest: str


class RefusedError(Exception):
    """Carries one refusal out of the checks of one request."""

    def __init__(self, reason: str, error: FedLoraError, reply_digest: str | None = None) -> None:
        """Keep reason, error and digest."""
        super().__init__(reason)
        self.reason, self.error, self.reply_digest = reason, error, reply_digest


class Reserver:
    """Handles one cohort inside one write transaction."""

    def __init__(self, draft: Draft, projector: Projector) -> None:
        """Take the transaction's draft and the ledger's projector."""
        self._draft = draft
        self._projector = projector
        self._connection = draft.connection
        self._earlier: dict[tuple[str, int, int], Earlier] = {}
        self._merged: dict[tuple[Budget, Budget], Budget] = {}
        self._first: dict[str, int | None] = {}
        self._good_events: set[int] = set()

    def run(self, requests: Sequence[ReserveRequest]) -> list[Reservation | Refusal]:
        """Return one outcome per request, in order."""
        pairs = {(request.run_id, request.server_round) for request in requests if _is_plain(request)}
        for run_id, server_round in sorted(pair for pair in pairs if is_name(pair[0])):
            self._load_earlier(run_id, server_round)
        outcomes: list[Reservation | Refusal] = []
        for request in requests:
            try:
                outcomes.append(self._reserve(request))
            except RefusedError as refused:
                outcomes.append(
                    Refusal(
                        request.account,
                        request.run_id,
                        request.server_round,
                        refused.reason,
                        refused.error,
                        refused.reply_digest,
                    )
                )
        return outcomes

    def _load_earlier(self, run_id: str, server_round: int) -> None:
        columns = (entries.c.account_id, entries.c.attempt, entries.c.seq)
        rows = self._connection.execute(
            sa.select(*columns)
            .where(entries.c.kind == chain.RESERVE)
            .where(entries.c.run_id == run_id)
            .where(entries.c.server_round == server_round)
            .order_by(entries.c.attempt)
        ).all()
        if not rows:
            return
        settled: dict[int, tuple[str, str]] = {}
        seqs = [int(row.seq) for row in rows]
        for start in range(0, len(seqs), 500):
            query = sa.select(entries.c.ref, entries.c.kind, entries.c.digest).where(
                entries.c.ref.in_(seqs[start : start + 500]) & (entries.c.ref > 0)
            )
            for ref, kind, digest in self._connection.execute(query):
                if kind in (chain.COMMIT, chain.ABANDON, chain.RELEASE):
                    settled[int(ref)] = (kind, digest)
        for account_id, attempt, seq in rows:
            kind, digest = settled.get(int(seq), (chain.RESERVE, ""))
            self._earlier[(run_id, server_round, account_id)] = Earlier(attempt, kind, digest)

    def _reserve(self, request: ReserveRequest) -> Reservation:
        self._check_request(request)
        draft = self._draft
        account_id = draft.state.account_ids.get(request.account, 0)
        if account_id == 0:
            _check_new_account(request.account)
        attempt = self._check_duplicate(request, account_id)
        state = draft.state.accounts[account_id] if account_id else AccountState(request.account)
        terms, fresh = self._terms(state, request.budget)
        event_id = draft.event(request.event)
        steps = self._fit(state, terms, event_id, request)
        account_id = draft.account(request.account)
        state = draft.state.accounts[account_id]
        if fresh:
            draft.add(chain.BUDGET, account_id, detail=canonical_json(dataclasses.asdict(request.budget)))
        if request.fingerprint is not None and request.fingerprint != state.fingerprint:
            draft.add(chain.FINGERPRINT, account_id, digest=request.fingerprint)
        news = [text for text in request.assumptions if text not in state.conditions]
        seq = draft.add(
            chain.RESERVE,
            account_id,
            run_id=request.run_id,
            server_round=request.server_round,
            attempt=attempt,
            event_id=event_id,
            steps=steps,
            charge=steps,
            detail=canonical_json({"conditions": news}) if news else "",
        )
        self._earlier[(request.run_id, request.server_round, account_id)] = Earlier(
            attempt, chain.RESERVE, ""
        )
        return Reservation(
            seq,
            request.account,
            request.run_id,
            request.server_round,
            request.event,
            steps,
            request.steps,
        )

    def _check_request(self, request: ReserveRequest) -> None:
        problem = _request_problem(request)
        if problem is not None:
            raise RefusedError("invalid", LedgerError(problem))
        if id(request.event) in self._good_events:
            return
        if request.event.chargeable is not True:
            error = UnsupportedEventError(
                f"event {request.event.kind}: a conditional analysis cannot pay for a release; "
                "allowed: events whose bound holds without assumptions on the data; use a mechanism with noise"
            )
            raise RefusedError("unsupported-event", error)
        self._good_events.add(id(request.event))

    def _check_duplicate(self, request: ReserveRequest, account_id: int) -> int:
        earlier = self._earlier.get((request.run_id, request.server_round, account_id))
        if earlier is None:
            return 0
        if earlier.state == chain.RELEASE:
            return earlier.attempt + 1
        state = chain.KIND_NAMES[earlier.state]
        error = DuplicateRoundError(
            f"round {request.server_round} of run {request.run_id!r}: already {state} for this account; "
            "allowed: one release per round; send the kept reply again or skip the round",
            reply_digest=earlier.digest or None,
        )
        raise RefusedError("duplicate-round", error, earlier.digest or None)

    def _terms(self, state: AccountState, asked: Budget) -> tuple[Budget, bool]:
        known = state.terms
        if known is None or (known != asked and not any(state.spend.values())):
            return asked, True
        merged = self._merged.get((known, asked))
        if merged is None:
            merged = self._merged[(known, asked)] = _merge(known, asked)
        return merged, False

    def _first_period(self, window: str) -> int | None:
        if window not in self._first:
            self._first[window] = first_period(window, self._draft.period)
        return self._first[window]

    def _fit(self, state: AccountState, terms: Budget, event_id: int, request: ReserveRequest) -> int:
        base = multiset_of(state.spend, self._first_period(terms.window))
        try:
            whole = add_steps(base, event_id, request.steps)
            if self._projector.fits(whole, terms):
                self._projector.expect(add_steps(whole, event_id, request.steps), terms)
                return request.steps
            if terms.on_exhausted == "fewer_steps":
                steps = self._projector.most_steps(base, event_id, request.steps, terms)
                if steps >= 1:
                    return steps
            spent, projected = self._figures(base, event_id, request.steps, terms)
        except FedLoraError as error:
            raise RefusedError("unsupported-event", error) from error
        message = (
            f"budget of data set {request.account.dataset!r}: {request.steps} more steps would spend epsilon "
            f"{at_least(projected)} of {terms.epsilon:g} at delta {terms.delta:g} (spent {at_least(spent)}, "
            f"{terms.window}; unit {terms.unit}, {terms.adjacency}, accountant {terms.accountant}); allowed: at most "
            "the budget; take fewer steps, more noise, or let the owner raise the budget"
        )
        error_out = BudgetExceededError(message, spent=spent, projected=projected, budget=terms.epsilon)
        raise RefusedError("budget-exceeded", error_out)

    def _figures(self, base: Multiset, event_id: int, steps: int, terms: Budget) -> tuple[float, float]:
        def value(multiset: Multiset) -> float:
            if not multiset:
                return 0.0
            return self._projector.epsilon(multiset, terms.delta, terms.adjacency, terms.accountant).epsilon

        return value(base), value(add_steps(base, event_id, steps))


def _merge(known: Budget, asked: Budget) -> Budget:
    """Return the terms in force: the known ones, tightened by a smaller epsilon; refuse anything else."""
    changed = [name for name in _BOUND_TERMS if getattr(known, name) != getattr(asked, name)]
    if asked.epsilon > known.epsilon:
        changed.append("epsilon")
    if changed:
        details = ", ".join(
            f"{name}: got {getattr(asked, name)!r}, ledger has {getattr(known, name)!r}" for name in changed
        )
        raise RefusedError(
            "terms-changed",
            LedgerError(
                f"budget terms of a used account: {details}; allowed: the ledger's own terms or a smaller epsilon; "
                "the owner can change them with 'fedlora budget amend' (all events are kept and recomputed)"
            ),
        )
    return dataclasses.replace(known, epsilon=asked.epsilon, on_exhausted=asked.on_exhausted)


def _check_new_account(account: Account) -> None:
    try:
        check_new_name("account client", account.client)
        check_new_name("account dataset", account.dataset)
    except LedgerError as error:
        raise RefusedError("invalid", error) from error


def _is_plain(request: ReserveRequest) -> bool:
    return _is_count(request.server_round, 0) and isinstance(request.run_id, str)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_STEPS


def _request_problem(request: ReserveRequest) -> str | None:
    if not _is_count(request.steps, 1):
        return f"steps: got {request.steps!r}; allowed: a whole number from 1 to {MAX_STEPS}; give the planned steps"
    if not _is_count(request.server_round, 0):
        return f"server_round: got {request.server_round!r}; allowed: a whole number from 0 to {MAX_STEPS}; give it"
    event: Any = request.event
    if not isinstance(event, Event):
        return (
            f"event: got {type(event).__name__}; allowed: an accounting Event; derive it from the mechanism"
        )
    try:
        check_name("run id", request.run_id)
        if request.fingerprint is not None:
            check_name("fingerprint", request.fingerprint)
    except LedgerError as error:
        return str(error)
    if request.fingerprint is not None and len(request.fingerprint) > 64:
        return "fingerprint: got more than 64 characters; allowed: what fingerprint_records returned"
    return None


def amend(draft: Draft, account: Account, budget: Budget, reason: str) -> None:
    """Append new terms to an account.

    Raises:
        LedgerError: if the account is unknown, its unit would change, or there is no reason.
    """
    account_id = draft.state.account_ids.get(account)
    if account_id is None:
        raise LedgerError(f"account {account.client}/{account.dataset}: not in this ledger; check both names")
    check_name("reason", reason)
    state = draft.state.accounts[account_id]
    if state.terms is not None and state.terms.unit != budget.unit and any(state.spend.values()):
        raise LedgerError(
            f"budget unit: got {budget.unit!r}, ledger has {state.terms.unit!r}; events of one unit say nothing about "
            "another; allowed: the same unit; use another data-set name only for other data"
        )
    detail = {**dataclasses.asdict(budget), "reason": reason}
    draft.add(chain.BUDGET, account_id, detail=canonical_json(detail))


def known_fingerprint(state: LedgerState, account: Account) -> str | None:
    """Return the last fingerprint of an account's records, None if there is none."""
    number = state.account_ids.get(account)
    return None if number is None else state.accounts[number].fingerprint


def note_fingerprint(draft: Draft, account: Account, fingerprint: str) -> None:
    """Append the fingerprint of an account's records.

    Raises:
        LedgerError: if it is not what `fingerprint_records` returns.
    """
    if len(check_name("fingerprint", fingerprint)) > 64:
        raise LedgerError(
            "fingerprint: got more than 64 characters; allowed: what fingerprint_records returned"
        )
    if account not in draft.state.account_ids:
        check_new_name("account client", account.client)
        check_new_name("account dataset", account.dataset)
    draft.add(chain.FINGERPRINT, draft.account(account), digest=fingerprint)
