"""Reserve, commit, report: what the ledger promises in ordinary operation."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import math
import pickle
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_helpers import BUDGET, EVENT, SECRET, SITE, ask, spend

from fedlora.accounting import (
    GaussianEvent,
    NonPrivateEvent,
    PaveEvent,
    PaveLayer,
    PoissonGaussianEvent,
    epsilon_of,
)
from fedlora.errors import (
    BudgetExceededError,
    DuplicateRoundError,
    LedgerError,
    LedgerIntegrityError,
    PrivacyParameterError,
    UnsupportedEventError,
)
from fedlora.ledger import Account, Budget, Ledger, Refusal, Reservation, load_or_create_secret, open_ledger
from fedlora.ledger.chain import make_mac

Open = Callable[..., Ledger]


@pytest.mark.parametrize(
    ("rounds", "steps", "sigma", "rate", "expected"),
    [(20, 4, 1.0, 0.25, 16.29), (10, 8, 1.0, 0.25, 16.29), (80, 1, 1.0, 0.25, 16.29)],
)
def test_h12_epsilon_accumulates_over_rounds(
    path: Path, rounds: int, steps: int, sigma: float, rate: float, expected: float
) -> None:
    event, budget = PoissonGaussianEvent(sigma, rate), Budget(20.0, 1e-5)
    for server_round in range(rounds):  # a new ledger object each round, as in a process started anew
        with open_ledger(path, secret=SECRET) as ledger:
            spend(ledger, server_round, event=event, steps=steps, budget=budget)
    with open_ledger(path, secret=SECRET) as ledger:
        report = ledger.report(SITE)
    assert report.epsilon == pytest.approx(expected, abs=0.01)
    assert report.num_events == rounds * steps
    assert report.epsilon > 1.5 * epsilon_of(event.times(steps), 1e-5).epsilon


def test_h12_another_process_object_serves_the_client(opened: Open) -> None:
    first, second = opened(), opened()
    for server_round in range(6):
        spend((first, second)[server_round % 2], server_round)
    assert first.report(SITE).num_events == second.report(SITE).num_events == 24


@pytest.mark.parametrize("draws", [[0, 0, 3, 0], [0, 0, 0, 0], [1, 2, 0, 4]])
def test_h16_empty_draws_are_charged(ledger: Ledger, draws: list[int]) -> None:
    reservation = ledger.reserve_one(ask(1, steps=len(draws)))
    counter = 0
    for _size in draws:
        counter += 1  # an empty draw is a noise-only optimiser step
    ledger.commit([(reservation, counter, EVENT, "")])
    assert ledger.report(SITE).num_events == len(draws)


@pytest.mark.parametrize(
    ("records", "batch", "epochs", "rounds"), [(100, 10, 2, 5), (7, 10, 2, 5), (100, 30, 1, 3)]
)
def test_h41_ledger_counts_optimiser_steps(
    ledger: Ledger, records: int, batch: int, epochs: int, rounds: int
) -> None:
    steps = epochs * math.ceil(records / batch)
    taken = 0
    for server_round in range(rounds):
        reservation = ledger.reserve_one(ask(server_round, steps=steps))
        for _ in range(steps):
            taken += 1
        ledger.commit([(reservation, steps, EVENT, "")])
    assert ledger.report(SITE).num_events == taken == rounds * steps


def test_h41_epoch_cut_short_commits_fewer(ledger: Ledger) -> None:
    reservation = ledger.reserve_one(ask(1, steps=20))
    ledger.commit([(reservation, 17, EVENT, "")])
    report = ledger.report(SITE)
    assert report.num_events == 17
    assert (report.rounds[0].steps_reserved, report.rounds[0].steps_charged) == (20, 17)


@pytest.mark.parametrize("extra", [1, 5, 1000])
def test_h41_more_steps_than_reserved_stop_the_run_and_are_charged(ledger: Ledger, extra: int) -> None:
    reservation = ledger.reserve_one(ask(1, steps=20))
    with pytest.raises(LedgerError, match="do not send"):
        ledger.commit([(reservation, 20 + extra, EVENT, "")])
    report = ledger.report(SITE)
    assert report.num_events == 20 + extra
    assert any("beyond what was reserved" in text for text in report.conditions)


@pytest.mark.parametrize("event", [GaussianEvent(5.0), PoissonGaussianEvent(10.0, 0.5), GaussianEvent(10.5)])
def test_h41_another_event_than_reserved_is_charged_on_top(ledger: Ledger, event: GaussianEvent) -> None:
    reservation = ledger.reserve_one(ask(1, steps=3))
    with pytest.raises(LedgerError, match="another event"):
        ledger.commit([(reservation, 3, event, "")])
    whole = epsilon_of([(EVENT, 3), (event, 3)], 1e-5).epsilon
    assert ledger.report(SITE).epsilon == pytest.approx(whole)


def test_an_event_without_protection_makes_epsilon_infinite(ledger: Ledger) -> None:
    reservation = ledger.reserve_one(ask(1))
    with pytest.raises(LedgerError):
        ledger.commit([(reservation, 4, NonPrivateEvent(), "")])
    assert ledger.report(SITE).epsilon == math.inf
    assert ledger.report(SITE).left == 0.0


@pytest.mark.parametrize("taken", [0, -1, True, 2.0, float("nan"), None])
def test_a_step_count_that_is_no_count_keeps_the_reservation_spent(ledger: Ledger, taken: object) -> None:
    reservation = ledger.reserve_one(ask(1))
    with pytest.raises(LedgerError, match="stays spent"):
        ledger.commit([(reservation, taken, EVENT, "")])  # type: ignore[list-item]
    assert ledger.report(SITE).num_events == 4


def test_a_refusal_never_affects_the_rest_of_a_cohort(ledger: Ledger) -> None:
    tight = Budget(0.01, 1e-5)
    requests = [ask(1, account=Account(f"c{i}", "d"), budget=tight if i % 2 else BUDGET) for i in range(10)]
    requests.append(ask(1, account=Account("x", "d"), steps=0))
    requests.append(ask(1, account=Account("y", "d"), event=PaveEvent((PaveLayer(8, 8, 0.01),))))
    outcomes = ledger.reserve(requests)
    assert [outcome.granted for outcome in outcomes] == [i % 2 == 0 for i in range(10)] + [False, False]
    reasons = [outcome.reason for outcome in outcomes if isinstance(outcome, Refusal)]
    assert reasons == ["budget-exceeded"] * 5 + ["invalid", "unsupported-event"]
    assert len(ledger.accounts()) == 5


def test_a_fault_in_one_commit_leaves_the_others_committed(ledger: Ledger) -> None:
    outcomes = ledger.reserve([ask(1, account=Account(f"c{i}", "d")) for i in range(3)])
    good = [outcome for outcome in outcomes if isinstance(outcome, Reservation)]
    with pytest.raises(LedgerError, match="5 steps of 4"):
        ledger.commit([(item, 5 if i == 1 else 4, EVENT, "") for i, item in enumerate(good)])
    states = [ledger.rounds(Account(f"c{i}", "d"))[0].state for i in range(3)]
    assert states == ["committed", "abandoned", "committed"]


def test_budget_is_never_passed_and_the_error_names_figures(ledger: Ledger) -> None:
    budget = Budget(1.0, 1e-5)
    granted = 0
    error: BudgetExceededError | None = None
    while error is None:
        try:
            spend(ledger, granted, budget=budget)
        except BudgetExceededError as refused:
            error = refused
        else:
            granted += 1
    assert granted > 0
    assert error.spent <= 1.0 < error.projected
    assert ledger.report(SITE).epsilon <= 1.0
    assert epsilon_of(EVENT.times(4 * granted + 4), 1e-5).epsilon > 1.0


def test_fewer_steps_grants_exactly_what_fits(ledger: Ledger) -> None:
    budget = Budget(1.0, 1e-5, on_exhausted="fewer_steps")
    reservation = ledger.reserve_one(ask(1, budget=budget, steps=10_000))
    assert reservation.steps_requested == 10_000
    assert epsilon_of(EVENT.times(reservation.steps), 1e-5).epsilon <= 1.0
    assert epsilon_of(EVENT.times(reservation.steps + 1), 1e-5).epsilon > 1.0
    with pytest.raises(BudgetExceededError):
        ledger.reserve_one(ask(2, budget=budget))


def test_several_runs_and_mechanisms_add_up(ledger: Ledger) -> None:
    other = PoissonGaussianEvent(2.0, 0.1)
    spend(ledger, 1, run_id="a")
    spend(ledger, 1, run_id="b")
    spend(ledger, 2, run_id="b", event=other, steps=7)
    expected = epsilon_of([(EVENT, 8), (other, 7)], 1e-5).epsilon
    assert ledger.report(SITE).epsilon == pytest.approx(expected)


def test_data_sets_and_clients_have_their_own_accounts(ledger: Ledger) -> None:
    spend(ledger, 1)
    spend(ledger, 1, account=Account("site-1", "other"))
    spend(ledger, 1, account=Account("site-2", "news-2026"))
    assert {account: ledger.report(account).num_events for account in ledger.accounts()} == {
        Account("site-1", "news-2026"): 4,
        Account("site-1", "other"): 4,
        Account("site-2", "news-2026"): 4,
    }


@pytest.mark.parametrize(
    "change",
    [
        {"delta": 1e-3},
        {"delta": 1e-9},
        {"unit": "person"},
        {"accountant": "rdp"},
        {"adjacency": "replace_one"},
        {"window": "calendar-month"},
        {"epsilon": 9.0},
    ],
)
def test_changed_terms_on_a_used_account_are_refused(ledger: Ledger, change: dict[str, object]) -> None:
    spend(ledger, 1)
    outcome = ledger.reserve([ask(2, budget=dataclasses.replace(BUDGET, **change))])[0]  # type: ignore[arg-type]
    assert isinstance(outcome, Refusal)
    assert outcome.reason == "terms-changed"
    assert ledger.report(SITE).num_events == 4


def test_a_smaller_epsilon_is_obeyed_at_once(ledger: Ledger) -> None:
    spend(ledger, 1)
    with pytest.raises(BudgetExceededError):
        ledger.reserve_one(ask(2, budget=dataclasses.replace(BUDGET, epsilon=0.1)))
    assert ledger.report(SITE).budget.epsilon == 8.0


def test_the_owner_amends_terms_and_all_events_are_recomputed(ledger: Ledger) -> None:
    spend(ledger, 1)
    before = ledger.report(SITE)
    ledger.amend_budget(SITE, Budget(20.0, 1e-9, "replace_one"), reason="board decision 12")
    after = ledger.report(SITE)
    assert after.epsilon == pytest.approx(epsilon_of(EVENT.times(4), 1e-9, adjacency="replace_one").epsilon)
    assert after.epsilon > before.epsilon
    assert any("board decision 12" in text for text in after.conditions)
    with pytest.raises(LedgerError, match="unit"):
        ledger.amend_budget(SITE, Budget(20.0, 1e-9, "replace_one", "client"), reason="x")


@pytest.mark.parametrize("delta", [1e-3, 1e-7, 1e-10])
def test_report_at_another_delta_recomputes(ledger: Ledger, delta: float) -> None:
    spend(ledger, 1)
    report = ledger.report(SITE, delta)
    assert report.epsilon == pytest.approx(epsilon_of(EVENT.times(4), delta).epsilon)
    assert report.left is None
    assert any("the budget is at delta 1e-05" in text for text in report.conditions)


@pytest.mark.parametrize("delta", [0.0, 1.0, float("nan"), -1e-5])
def test_report_refuses_a_delta_out_of_range(ledger: Ledger, delta: float) -> None:
    spend(ledger, 1)
    with pytest.raises(PrivacyParameterError):
        ledger.report(SITE, delta)


def test_report_states_what_the_figure_depends_on(ledger: Ledger) -> None:
    spend(ledger, 1, event=PoissonGaussianEvent(2.0, 0.1), assumptions=("seeded noise: NO PRIVACY",))
    report = ledger.report(SITE)
    assert (report.unit, report.adjacency, report.delta, report.num_events) == (
        "record",
        "add_or_remove",
        1e-5,
        4,
    )
    assert "Poisson" in report.sampling_assumption
    assert "server" in report.adversary
    assert report.accountant
    assert report.integrity == "full"
    assert "the guarantee is per record, not per person" in report.conditions
    assert "seeded noise: NO PRIVACY" in report.conditions


def test_a_repeated_round_is_refused_with_the_kept_reply(ledger: Ledger, opened: Open) -> None:
    reservation = ledger.reserve_one(ask(1))
    digest = ledger.store_reply(reservation, b"noised update")
    ledger.commit([(reservation, 4, EVENT, digest)])
    again = opened()  # also after a restart
    with pytest.raises(DuplicateRoundError) as caught:
        again.reserve_one(ask(1))
    assert caught.value.reply_digest == digest == hashlib.sha256(b"noised update").hexdigest()
    assert again.load_reply(SITE, "run-1", 1) == b"noised update"
    assert again.load_reply(SITE, "run-1", 2) is None
    assert again.report(SITE).num_events == 4


def test_a_round_without_commit_is_not_run_again(ledger: Ledger, opened: Open) -> None:
    ledger.reserve_one(ask(1))
    outcome = opened().reserve([ask(1)])[0]
    assert isinstance(outcome, Refusal)
    assert (outcome.reason, outcome.reply_digest) == ("duplicate-round", None)


def test_duplicates_inside_one_cohort(ledger: Ledger) -> None:
    outcomes = ledger.reserve([ask(1), ask(1), ask(2)])
    assert [outcome.granted for outcome in outcomes] == [True, False, True]


def test_changed_reply_bytes_are_not_sent(ledger: Ledger, path: Path) -> None:
    reservation = ledger.reserve_one(ask(1))
    digest = ledger.store_reply(reservation, b"noised update")
    ledger.commit([(reservation, 4, EVENT, digest)])
    file = next(Path(f"{path}.replies").iterdir())
    file.write_bytes(file.read_bytes().replace(b"noised", b"forged"))
    with pytest.raises(LedgerIntegrityError, match="digest"):
        ledger.load_reply(SITE, "run-1", 1)


def test_release_is_possible_only_before_data_is_touched(ledger: Ledger, opened: Open) -> None:
    first = ledger.reserve_one(ask(1))
    ledger.release_unused([first])
    assert ledger.report(SITE).num_events == 0
    second = ledger.reserve_one(ask(1))  # a released round may be asked for again
    ledger.mark_started([second])
    with pytest.raises(LedgerError, match="abandon"):
        ledger.release_unused([second])
    third = ledger.reserve_one(ask(2))
    with pytest.raises(LedgerError, match="another process"):
        opened().release_unused([third])
    ledger.abandon([second, third])
    assert ledger.report(SITE).num_events == 8
    with pytest.raises(LedgerError, match="not an open reservation"):
        ledger.abandon([second])


def test_commit_repeated_exactly_is_accepted_and_otherwise_refused(ledger: Ledger) -> None:
    reservation = ledger.reserve_one(ask(1))
    ledger.commit([(reservation, 3, EVENT, "d" * 64)])
    ledger.commit([(reservation, 3, EVENT, "d" * 64)])
    for other in ((reservation, 2, EVENT, "d" * 64), (reservation, 3, EVENT, "e" * 64)):
        with pytest.raises(LedgerError, match="already committed"):
            ledger.commit([other])
    assert ledger.report(SITE).num_events == 3


def test_a_forged_reservation_is_refused(ledger: Ledger) -> None:
    reservation = ledger.reserve_one(ask(1))
    for forged in (
        dataclasses.replace(reservation, seq=99),
        dataclasses.replace(reservation, account=Account("site-2", "news-2026")),
        dataclasses.replace(reservation, server_round=7),
    ):
        with pytest.raises(LedgerError):
            ledger.commit([(forged, 1, EVENT, "")])
    assert ledger.report(SITE).num_events == 4


def test_outcomes_and_errors_travel_between_processes(ledger: Ledger) -> None:
    outcomes = ledger.reserve([ask(1), ask(1), ask(2, budget=Budget(0.001, 1e-5), account=Account("z", "z"))])
    copies = pickle.loads(pickle.dumps(outcomes))
    assert copies[0] == outcomes[0]
    assert isinstance(copies[1].error, DuplicateRoundError)
    assert isinstance(copies[2].error, BudgetExceededError)
    assert copies[2].error.budget == 0.001
    ledger.commit([(copies[0], 4, copies[0].event, "")])


def test_changed_records_keep_the_spent_budget(ledger: Ledger) -> None:
    spend(ledger, 1, fingerprint="a" * 64)
    spend(ledger, 2, fingerprint="a" * 64)
    assert not any("records changed" in text for text in ledger.report(SITE).conditions)
    spend(ledger, 3, fingerprint="b" * 64)
    report = ledger.report(SITE)
    assert report.num_events == 12
    assert sum("records changed" in text for text in report.conditions) == 1


@pytest.mark.parametrize(
    ("window", "later_months", "fresh"),
    [
        ("lifetime", 120, False),
        ("calendar-year", 12, True),
        ("calendar-year", 1, False),
        ("calendar-month", 1, True),
        ("calendar-quarter", 1, False),
        ("calendar-quarter", 3, True),
    ],
)
def test_calendar_windows(opened: Open, window: str, later_months: int, fresh: bool) -> None:
    now = [1_767_225_600.0 + 10 * 86_400]  # 2026-01-11 UTC
    ledger = opened(clock=lambda: now[0])
    budget = Budget(1.0, 1e-5, window=window, on_exhausted="fewer_steps")
    spend(ledger, 1, budget=budget, steps=10_000)
    now[0] += later_months * 30.5 * 86_400
    outcome = ledger.reserve([ask(2, budget=budget, steps=10_000)])[0]
    assert outcome.granted is fresh
    report = ledger.report(SITE)
    assert report.epsilon <= 1.0
    assert (report.epsilon_lifetime > 1.0) is fresh


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epsilon", 0.0),
        ("epsilon", math.nan),
        ("epsilon", math.inf),
        ("delta", 0.0),
        ("delta", 1.0),
        ("delta", math.nan),
        ("adjacency", "x"),
        ("unit", "user"),
        ("accountant", ""),
        ("window", "week"),
        ("on_exhausted", "ask"),
    ],
)
def test_a_budget_out_of_range_is_refused(field: str, value: object) -> None:
    with pytest.raises(PrivacyParameterError, match=field):
        dataclasses.replace(BUDGET, **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "a\x1fb", "a\nb", "x" * 257])
def test_names_that_could_be_confused_are_refused(ledger: Ledger, name: str) -> None:
    with pytest.raises(LedgerError):
        Account(name, "d")
    with pytest.raises(LedgerError):
        ledger.reserve_one(ask(1, run_id=name))


def test_an_event_that_only_analyses_never_pays(ledger: Ledger) -> None:
    with pytest.raises(UnsupportedEventError):
        ledger.reserve_one(ask(1, event=PaveEvent((PaveLayer(8, 8, 0.01),))))
    with pytest.raises(BudgetExceededError):
        ledger.reserve_one(ask(1, event=NonPrivateEvent()))


def test_snapshots_shorten_opening_and_are_checked(
    opened: Open, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedlora.ledger.journal.SNAPSHOT_EVERY", 20)
    ledger = opened()
    for server_round in range(40):
        spend(ledger, server_round, account=Account(f"c{server_round % 3}", "d"), assumptions=("a",))
    ledger.reserve_one(ask(99, account=Account("c0", "d")))
    again = opened()
    reports = [again.report(account) for account in again.accounts()]
    assert [report.num_events for report in reports] == [60, 52, 52]
    assert all("since entry" in report.integrity for report in reports)
    assert len(again.pending()) == 1
    assert again.verify().entries == ledger.verify().entries
    with sqlite3.connect(path) as raw:
        raw.execute("DROP TRIGGER snapshots_no_update")
        raw.execute("UPDATE snapshots SET body = zeroblob(10) WHERE seq = (SELECT max(seq) FROM snapshots)")
    with pytest.raises(LedgerIntegrityError, match="snapshot"):
        opened()


def test_chain_mac_is_hmac_sha256() -> None:
    for key in (b"k" * 16, b"k" * 64, b"k" * 65):
        assert make_mac(key)(b"message") == hmac.digest(key, b"message", "sha256")


def test_secret_files(tmp_path: Path) -> None:
    file = tmp_path / "keys" / "ledger.secret"
    secret = load_or_create_secret(file)
    assert len(secret) == 32
    assert load_or_create_secret(file) == secret
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    with pytest.raises(LedgerError, match="0600"):
        load_or_create_secret(file)
    file.chmod(0o600)
    file.write_bytes(b"short")
    with pytest.raises(LedgerError, match="32"):
        load_or_create_secret(file)


def test_messages_hold_no_secret(ledger: Ledger, path: Path) -> None:
    with pytest.raises(LedgerIntegrityError) as caught:
        open_ledger(path, secret=b"another key of 32 bytes length!!")
    assert SECRET.decode() not in str(caught.value)
    assert "another key of" not in str(caught.value)
    with pytest.raises(LedgerIntegrityError, match="16"):
        open_ledger(path, secret=b"short")
