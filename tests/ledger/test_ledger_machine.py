"""Random interleavings of rounds, crashes, retries, resumes and two writers, against a log kept outside the ledger."""

from __future__ import annotations

import functools
import logging
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from dp_accounting import dp_event
from dp_accounting.pld import pld_privacy_accountant
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from ledger_helpers import SECRET

from fedlora.accounting import Event, GaussianEvent, PoissonGaussianEvent
from fedlora.errors import LedgerError
from fedlora.ledger import Account, Budget, Ledger, Refusal, Reservation, ReserveRequest, open_ledger
from fedlora.ledger.anchor import Anchor
from fedlora.ledger.journal import Journal
from fedlora.ledger.reserving import Reserver
from fedlora.ledger.state import LedgerState

EVENTS: tuple[Event, ...] = (GaussianEvent(8.0), PoissonGaussianEvent(2.0, 0.1), GaussianEvent(20.0))
ACCOUNTS = (Account("a", "d"), Account("b", "d"))
STEPS = st.one_of(st.integers(1, 3), st.integers(1, 40))
BUDGET = Budget(epsilon=3.0, delta=1e-5, on_exhausted="fewer_steps")


@functools.lru_cache(maxsize=100_000)
def true_epsilon(released: tuple[tuple[int, int], ...]) -> float:
    """Return the PLD epsilon of a multiset, by a library and code that the ledger does not use here."""
    accountant = pld_privacy_accountant.PLDAccountant(value_discretization_interval=1e-3)
    level = logging.getLogger("absl").level
    logging.getLogger("absl").setLevel(logging.ERROR)
    for number, steps in released:
        event = EVENTS[number]
        plain = dp_event.GaussianDpEvent(event.noise_multiplier)  # type: ignore[attr-defined]
        if isinstance(event, PoissonGaussianEvent):
            plain = dp_event.PoissonSampledDpEvent(event.sample_rate, plain)
        accountant.compose(plain, steps)
    logging.getLogger("absl").setLevel(level)
    return float(accountant.get_epsilon(BUDGET.delta))


MEMORY = (
    "/dev/shm" if Path("/dev/shm").is_dir() else None
)  # crashes here are exceptions, so the disk only costs time


class Crash(Exception):
    """The process dies here."""


class Machine(RuleBasedStateMachine):
    """Two processes may hold the ledger; each open round is a (reservation, steps noised, started)."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="fedlora-machine-", dir=MEMORY))
        self.path = self.folder / "ledger.db"
        self.ledgers: list[Ledger] = []
        self.log: dict[Account, Counter[int]] = {account: Counter() for account in ACCOUNTS}
        self.noised_rounds: set[tuple[Account, int]] = set()
        self.replies: dict[tuple[Account, int], bytes] = {}
        self.open: list[dict[str, Any]] = []
        self.restart()

    def restart(self) -> None:
        for ledger in self.ledgers:
            ledger.close()
        self.ledgers = [open_ledger(self.path, secret=SECRET) for _ in range(2)]
        self.open = []

    def teardown(self) -> None:
        for ledger in self.ledgers:
            ledger.verify()
            ledger.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def request(self, account: Account, number: int, event: int, steps: int) -> ReserveRequest:
        return ReserveRequest(account, BUDGET, "run", number, EVENTS[event], steps)

    @rule(
        who=st.integers(0, 1),
        both=st.booleans(),
        number=st.integers(1, 12),
        event=st.integers(0, 2),
        steps=STEPS,
    )
    def reserve(self, who: int, both: bool, number: int, event: int, steps: int) -> None:
        accounts = ACCOUNTS if both else ACCOUNTS[:1]
        outcomes = self.ledgers[who].reserve([self.request(a, number, event, steps) for a in accounts])
        for outcome in outcomes:
            if isinstance(outcome, Refusal):
                self.check_refusal(self.ledgers[who], outcome)
            else:
                self.take(who, outcome, event)

    def check_refusal(self, ledger: Ledger, refusal: Refusal) -> None:
        key = (refusal.account, refusal.server_round)
        if refusal.reason == "duplicate-round" and refusal.reply_digest:
            kept = ledger.load_reply(refusal.account, "run", refusal.server_round)
            assert kept is None or kept == self.replies[key]

    def take(self, who: int, reservation: Reservation, event: int) -> None:
        key = (reservation.account, reservation.server_round)
        assert key not in self.noised_rounds, "a round that drew noise was granted again"
        self.open.append({"who": who, "reservation": reservation, "event": event, "noised": 0, "bytes": b""})

    @precondition(lambda self: self.open)
    @rule(data=st.data(), steps=STEPS)
    def draw_noise(self, data: st.DataObject, steps: int) -> None:
        item = data.draw(st.sampled_from(self.open))
        reservation = item["reservation"]
        self.ledgers[item["who"]].mark_started([reservation])
        self.noised_rounds.add((reservation.account, reservation.server_round))
        for _ in range(min(steps, reservation.steps - item["noised"])):
            self.log[reservation.account][item["event"]] += 1
            item["noised"] += 1
            item["bytes"] += secrets.token_bytes(2)

    @precondition(lambda self: any(item["noised"] for item in self.open))
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from([item for item in self.open if item["noised"]]))
        reservation = item["reservation"]
        ledger = self.ledgers[item["who"]]
        digest = ledger.store_reply(reservation, item["bytes"])
        self.replies[(reservation.account, reservation.server_round)] = item["bytes"]
        ledger.commit([(reservation, item["noised"], EVENTS[item["event"]], digest)])
        self.open.remove(item)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), other=st.integers(0, 2), extra=st.integers(0, 3))
    def commit_what_was_not_reserved(self, data: st.DataObject, other: int, extra: int) -> None:
        item = data.draw(st.sampled_from(self.open))
        reservation = item["reservation"]
        ran = reservation.steps + extra
        if other == item["event"] and extra == 0:
            return
        self.noised_rounds.add((reservation.account, reservation.server_round))
        # A report counts all noised steps of the round, those that were seen being drawn among them.
        self.log[reservation.account][other] += ran - (item["noised"] if other == item["event"] else 0)
        with pytest.raises(LedgerError):
            self.ledgers[item["who"]].commit([(reservation, ran, EVENTS[other], "")])
        self.open.remove(item)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.open))
        self.ledgers[item["who"]].abandon([item["reservation"]])
        self.open.remove(item)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.open))
        reservation = item["reservation"]
        if (reservation.account, reservation.server_round) in self.noised_rounds:
            with pytest.raises(LedgerError):
                self.ledgers[item["who"]].release_unused([reservation])
            return
        self.ledgers[item["who"]].release_unused([reservation])
        self.open.remove(item)

    @rule()
    def crash(self) -> None:
        self.restart()

    @rule(
        where=st.sampled_from(["before", "after", "anchor"]),
        number=st.integers(1, 12),
        event=st.integers(0, 2),
    )
    def crash_while_reserving(self, where: str, number: int, event: int) -> None:
        insert = Journal._insert

        def torn(*values: Any) -> None:
            if where == "after":
                insert(*values)
            raise Crash

        target, name = (Anchor, "write") if where == "anchor" else (Journal, "_insert")
        replacement: Any = mock.Mock(side_effect=Crash) if where == "anchor" else staticmethod(torn)
        with mock.patch.object(target, name, replacement):
            try:
                self.ledgers[0].reserve([self.request(ACCOUNTS[0], number, event, 3)])
            except Crash:
                self.restart()

    @precondition(lambda self: any(item["noised"] for item in self.open))
    @rule(data=st.data())
    def crash_while_committing(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from([item for item in self.open if item["noised"]]))
        with (
            mock.patch.object(Journal, "_insert", staticmethod(mock.Mock(side_effect=Crash))),
            pytest.raises(Crash),
        ):
            self.ledgers[item["who"]].commit(
                [(item["reservation"], item["noised"], EVENTS[item["event"]], "")]
            )
        self.restart()

    @invariant()
    def epsilon_is_never_below_the_true_one(self) -> None:
        for account, counter in self.log.items():
            if not counter:
                continue
            report = self.ledgers[0].report(account, with_rounds=False)
            charged = self.ledgers[1].report(account, with_rounds=False).num_events
            assert charged == report.num_events >= sum(counter.values())
            released = tuple(sorted((number, steps) for number, steps in counter.items() if steps))
            assert report.epsilon >= true_epsilon(released) * (1 - 2e-3) - 2e-3


QUICK = settings(
    max_examples=8,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
    phases=[Phase.generate],
)
TestLedgerMachine = Machine.TestCase
TestLedgerMachine.settings = QUICK


@pytest.mark.long
@pytest.mark.timeout(3600)
class TestLedgerMachineLong(Machine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(
        max_examples=200,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=False,
        database=None,
    )


def _forgets_small_reservations(monkeypatch: pytest.MonkeyPatch) -> None:
    charge = LedgerState._charge
    monkeypatch.setattr(
        LedgerState, "_charge", lambda self, entry: None if entry.steps < 3 else charge(self, entry)
    )


def _grants_abandoned_rounds_again(monkeypatch: pytest.MonkeyPatch) -> None:
    check = Reserver._check_duplicate

    def forgiving(self: Reserver, request: ReserveRequest, account_id: int) -> int:
        earlier = self._earlier.get((request.run_id, request.server_round, account_id))
        if earlier is not None and earlier.state == "A":
            return earlier.attempt + 1
        return check(self, request, account_id)

    monkeypatch.setattr(Reserver, "_check_duplicate", forgiving)


def _forgets_the_excess(monkeypatch: pytest.MonkeyPatch) -> None:
    charge = LedgerState._charge
    monkeypatch.setattr(
        LedgerState, "_charge", lambda self, entry: None if entry.kind == "X" else charge(self, entry)
    )


def _releases_started_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "mark_started", lambda self, reservations: None)


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [
        _forgets_small_reservations,
        _grants_abandoned_rounds_again,
        _forgets_the_excess,
        _releases_started_rounds,
    ],
)
def test_the_machine_sees_planted_faults(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    fault(monkeypatch)
    many = settings(QUICK, max_examples=60, stateful_step_count=30)
    with pytest.raises((AssertionError, BaseExceptionGroup, pytest.fail.Exception)):
        run_state_machine_as_test(Machine, settings=many)
