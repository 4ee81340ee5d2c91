"""Receipts and the server's mirror: recomputed, compared, never lowered."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from ledger_helpers import BUDGET, EVENT, SECRET, SITE, ask, spend

from fedlora.accounting import GaussianEvent, epsilon_of
from fedlora.errors import AuthenticationError, LedgerError
from fedlora.ledger import Ledger, open_ledger
from fedlora.ledger.mirror import Mirror
from fedlora.ledger.receipts import (
    Receipt,
    SignedReceipt,
    make_receipt,
    make_receipts,
    sign_receipt,
    verify_receipt,
)

Open = Callable[..., Ledger]
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw().hex()


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    return Mirror(tmp_path / "mirror.db", keys={"site-1": PUBLIC})


def signed(ledger: Ledger, server_round: int, run_id: str = "run-1", **changes: Any) -> SignedReceipt:
    receipt = make_receipt(ledger, SITE, run_id, server_round)
    return sign_receipt(dataclasses.replace(receipt, **changes), KEY)


def test_a_receipt_survives_json_and_proves_its_origin(ledger: Ledger) -> None:
    spend(ledger, 1, digest="d" * 64)
    receipt = signed(ledger, 1)
    again = SignedReceipt.from_json(json.loads(json.dumps(receipt.to_json())))
    assert again == receipt
    assert verify_receipt(again, PUBLIC).steps == 4
    assert verify_receipt(again).epsilon == ledger.report(SITE).epsilon


@pytest.mark.parametrize(
    "change",
    [{"epsilon": 0.1}, {"steps": 1}, {"client": "site-2"}, {"reply_digest": "e" * 64}, {"head": "0" * 80}],
)
def test_a_changed_receipt_is_refused(ledger: Ledger, mirror: Mirror, change: dict[str, Any]) -> None:
    spend(ledger, 1)
    good = signed(ledger, 1)
    bad = dataclasses.replace(good, receipt=dataclasses.replace(good.receipt, **change))
    with pytest.raises(AuthenticationError):
        verify_receipt(bad)
    assert [flag.code for flag in mirror.record(bad)] == ["bad-signature"]
    assert mirror.receipts(SITE) == []


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon": "1"},
        {"steps": 1.0},
        {"steps": True},
        {"delta": 2.0},
        {"epsilon": float("nan")},
        {"head": "xx"},
        {"event": "{}"},
        {"entry": 0},
    ],
)
def test_an_unreadable_receipt_is_flagged_and_not_taken(
    ledger: Ledger, mirror: Mirror, change: dict[str, Any]
) -> None:
    spend(ledger, 1)
    data = signed(ledger, 1).to_json()
    data["receipt"].update(change)
    with pytest.raises(LedgerError):
        SignedReceipt.from_json(data)
    assert [flag.code for flag in mirror.record(data)] == ["unreadable"]
    with pytest.raises(LedgerError):
        Receipt.from_json({"client": "x"})


def test_another_key_is_refused(ledger: Ledger, mirror: Mirror) -> None:
    spend(ledger, 1)
    other = sign_receipt(make_receipt(ledger, SITE, "run-1", 1), Ed25519PrivateKey.generate())
    assert [flag.code for flag in mirror.record(other)] == ["key-changed"]
    assert mirror.record(signed(ledger, 1)) == []


def test_a_key_is_pinned_on_first_use_and_after_a_restart(ledger: Ledger, tmp_path: Path) -> None:
    spend(ledger, 1)
    mirror = Mirror(tmp_path / "m.db")
    assert mirror.record(signed(ledger, 1)) == []
    mirror.close()
    other = sign_receipt(make_receipt(ledger, SITE, "run-1", 1), Ed25519PrivateKey.generate())
    assert [flag.code for flag in Mirror(tmp_path / "m.db").record(other)] == ["key-changed"]


def test_the_mirror_agrees_and_survives_a_restart(ledger: Ledger, mirror: Mirror, tmp_path: Path) -> None:
    for number in range(5):
        mirror.asked(SITE, "run-1", number, EVENT, 4)
        spend(ledger, number, digest=f"{number}" * 64)
        assert mirror.record(signed(ledger, number)) == []
    mirror.close()
    report = Mirror(tmp_path / "mirror.db").report(SITE)
    assert report.epsilon == report.claimed == pytest.approx(ledger.report(SITE).epsilon)
    assert report.recomputed == pytest.approx(report.claimed)
    assert report.flags == ()
    assert report.head == ledger.head()


@pytest.mark.parametrize("elsewhere", [1, 3, 10])
def test_a_clients_higher_figure_stands(ledger: Ledger, mirror: Mirror, elsewhere: int) -> None:
    for number in range(elsewhere):
        spend(ledger, number, run_id="another server's run")
    spend(ledger, 1)
    assert mirror.record(signed(ledger, 1)) == []
    report = mirror.report(SITE)
    assert report.epsilon == report.claimed == ledger.report(SITE).epsilon
    assert report.recomputed < report.claimed


@pytest.mark.parametrize("factor", [0.0, 0.5, 0.999])
def test_a_lower_claim_is_flagged_and_does_not_count(ledger: Ledger, mirror: Mirror, factor: float) -> None:
    spend(ledger, 1)
    low = signed(ledger, 1, epsilon=factor * ledger.report(SITE).epsilon)
    assert [flag.code for flag in mirror.record(low)] == ["lower-epsilon"]
    assert mirror.report(SITE).epsilon == pytest.approx(ledger.report(SITE).epsilon)
    assert [flag.code for flag in mirror.report(SITE).flags] == ["lower-epsilon"]


def test_differences_from_what_was_asked_are_flagged(ledger: Ledger, mirror: Mirror) -> None:
    mirror.asked(SITE, "run-1", 1, GaussianEvent(20.0), 4)
    mirror.asked(SITE, "run-1", 2, EVENT, 3)
    spend(ledger, 1)
    assert [flag.code for flag in mirror.record(signed(ledger, 1))] == ["event-differs"]
    spend(ledger, 2)
    assert [flag.code for flag in mirror.record(signed(ledger, 2))] == ["steps-differ"]


def test_a_second_release_of_one_round_is_flagged_and_charged(ledger: Ledger, mirror: Mirror) -> None:
    spend(ledger, 1, digest="a" * 64)
    mirror.record(signed(ledger, 1))
    codes = [flag.code for flag in mirror.record(signed(ledger, 1, reply_digest="b" * 64))]
    assert codes == ["second-release", "missing-events", "lower-epsilon"]
    assert mirror.report(SITE).recomputed == pytest.approx(epsilon_of(EVENT.times(8), BUDGET.delta).epsilon)


def test_the_same_receipt_twice_counts_once(ledger: Ledger, mirror: Mirror) -> None:
    reservation = ledger.reserve_one(ask(1))
    assert mirror.record(signed(ledger, 1)) == []  # reserved
    ledger.commit([(reservation, 3, EVENT, "d" * 64)])
    for _ in range(2):
        assert mirror.record(signed(ledger, 1)) == []
    assert mirror.report(SITE).recomputed == pytest.approx(epsilon_of(EVENT.times(3), BUDGET.delta).epsilon)


def test_a_rolled_back_ledger_is_detected_at_the_server(path: Path, mirror: Mirror, tmp_path: Path) -> None:
    with open_ledger(path, secret=SECRET) as ledger:
        spend(ledger, 1)
        mirror.record(signed(ledger, 1))
    for suffix in ("", ".anchor"):
        shutil.copy(f"{path}{suffix}", tmp_path / f"old{suffix}")
    with open_ledger(path, secret=SECRET) as ledger:
        for number in (2, 3):
            spend(ledger, number)
            mirror.record(signed(ledger, number))
    truth = mirror.report(SITE).epsilon
    for suffix in ("", ".anchor"):
        shutil.copy(tmp_path / f"old{suffix}", f"{path}{suffix}")
    with open_ledger(path, secret=SECRET) as ledger:
        spend(ledger, 4)
        codes = [flag.code for flag in mirror.record(signed(ledger, 4))]
        assert codes == ["rollback", "missing-events", "lower-epsilon"]
        with pytest.raises(LedgerError):
            ledger.known_head_check(mirror.known_head(SITE.client))
    assert mirror.report(SITE).epsilon > truth


def test_a_new_ledger_does_not_reset_the_servers_figure(path: Path, mirror: Mirror, tmp_path: Path) -> None:
    with open_ledger(path, secret=SECRET) as ledger:
        for number in range(4):
            spend(ledger, number)
            mirror.record(signed(ledger, number))
    with open_ledger(tmp_path / "fresh.db", secret=SECRET) as ledger:
        spend(ledger, 9)
        codes = [flag.code for flag in mirror.record(signed(ledger, 9))]
    assert codes == ["another-ledger", "missing-events", "lower-epsilon"]
    assert mirror.report(SITE).epsilon == pytest.approx(epsilon_of(EVENT.times(20), BUDGET.delta).epsilon)


@pytest.mark.parametrize("lost_rounds", [[2], [2, 3], [1, 3]])
def test_h20_unanswered_rounds_count_until_the_client_says_otherwise(
    ledger: Ledger, mirror: Mirror, lost_rounds: list[int]
) -> None:
    for number in (1, 2, 3):
        mirror.asked(SITE, "run-1", number, EVENT, 4)
        spend(ledger, number, digest=f"{number}" * 64)  # trained and charged, reply perhaps lost
        if number not in lost_rounds:
            mirror.record(signed(ledger, number))
    report = mirror.report(SITE, delta=BUDGET.delta)
    assert [number for _, number in report.unanswered] == lost_rounds
    assert report.epsilon == pytest.approx(ledger.report(SITE).epsilon)
    for receipt in make_receipts(ledger, SITE, "run-1"):  # after reconnecting
        assert mirror.record(sign_receipt(receipt, KEY)) == []
    after = mirror.report(SITE)
    assert after.unanswered == ()
    assert after.epsilon == after.claimed == pytest.approx(ledger.report(SITE).epsilon)


def test_h20_a_declined_round_costs_nothing(ledger: Ledger, mirror: Mirror) -> None:
    mirror.asked(SITE, "run-1", 1, EVENT, 4)
    assert mirror.report(SITE, delta=1e-5).epsilon > 0
    mirror.declined(SITE.client, "run-1", 1)
    assert mirror.report(SITE, delta=1e-5).epsilon == 0.0
    with pytest.raises(LedgerError, match="delta"):
        mirror.report(SITE)
    assert mirror.accounts() == []


def test_changed_terms_are_flagged(ledger: Ledger, mirror: Mirror) -> None:
    spend(ledger, 1)
    mirror.record(signed(ledger, 1))
    spend(ledger, 2)
    codes = [flag.code for flag in mirror.record(signed(ledger, 2, delta=1e-3))]
    assert codes == ["terms-changed"]


def test_no_receipt_for_a_round_that_charged_nothing(ledger: Ledger) -> None:
    ledger.release_unused([ledger.reserve_one(ask(1))])
    with pytest.raises(LedgerError, match="nothing was charged"):
        make_receipt(ledger, SITE, "run-1", 1)


def test_a_mirror_that_cannot_be_opened_says_so(tmp_path: Path) -> None:
    (tmp_path / "mirror.db").write_bytes(b"no database at all" * 100)
    with pytest.raises(LedgerError, match="mirror"):
        Mirror(tmp_path / "mirror.db")


HOSTILE: list[dict[str, Any]] = [
    {"dataset": ""},
    {"dataset": "a\x1fb"},
    {"dataset": "x" * 100_000},
    {"run_id": ""},
    {"ledger_id": "\x00"},
    {"server_round": -1},
    {"server_round": 2**70},
    {"entry": 2**63},
    {"steps": 10**40},
    {"num_events": 2**70},
    {"accountant": "cheap"},
    {"adjacency": "none"},
    {"unit": "row"},
    {"state": "maybe"},
    {"event": "[" * 50_000},
    {"event": "{}"},
    {"event": '{"kind":"gaussian","noise_multiplier":1e999}'},
    {"event": '{"kind":"gaussian","noise_multiplier":1e-300}'},
    {"event": '{"kind":"non_private"}'},
    {"delta": 5e-324},
    {"epsilon": math.inf},
    {"head": "f" * 80},
    {"reply_digest": "e" * 1000},
]


@pytest.mark.parametrize("change", HOSTILE)
def test_no_signed_receipt_stops_the_server(ledger: Ledger, mirror: Mirror, change: dict[str, Any]) -> None:
    """A site may sign what it likes: it is flagged, or its figure is at least as high, and the next one is taken."""
    spend(ledger, 1, digest="d" * 64)
    spend(ledger, 2, digest="d" * 64)
    mirror.record(signed(ledger, 1))
    before = mirror.report(SITE).epsilon
    hostile = sign_receipt(dataclasses.replace(make_receipt(ledger, SITE, "run-1", 2), **change), KEY)
    flags = mirror.record(hostile.to_json())
    taken = hostile.receipt in [one for account in mirror.accounts() for one in mirror.receipts(account)]
    assert flags or taken
    for account in mirror.accounts():
        assert mirror.report(account).epsilon >= (before if account == SITE else 0.0)
    mirror.record(signed(ledger, 2))
    assert signed(ledger, 2).receipt in mirror.receipts(SITE)


def test_an_infinite_spend_is_told_to_the_server(ledger: Ledger, mirror: Mirror) -> None:
    reservation = ledger.reserve_one(ask(1))
    with pytest.raises(LedgerError, match="excess"):
        ledger.commit([(reservation, 4, None, "")])  # type: ignore[list-item]
    assert ledger.report(SITE).epsilon == math.inf
    for receipt in make_receipts(ledger, SITE, "run-1"):
        data = json.loads(json.dumps(sign_receipt(receipt, KEY).to_json(), allow_nan=False))
        assert mirror.record(data) == []
    assert mirror.report(SITE).epsilon == math.inf


def test_two_servers_on_one_mirror_see_each_others_receipts(ledger: Ledger, tmp_path: Path) -> None:
    first, second = Mirror(tmp_path / "mirror.db"), Mirror(tmp_path / "mirror.db")
    for number in range(1, 5):
        spend(ledger, number, digest="d" * 64)
        (first, second)[number % 2].record(signed(ledger, number))
        assert len(first.receipts(SITE)) == len(second.receipts(SITE)) == number
        assert first.report(SITE).epsilon == second.report(SITE).epsilon


def test_receipts_of_one_reply_are_taken_together_or_not_at_all(
    ledger: Ledger, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 4):
        spend(ledger, number, digest="d" * 64)
    items = [signed(ledger, number) for number in range(1, 4)]
    compare = Mirror._compare

    def full(self: Mirror, receipt: Receipt) -> Any:
        if receipt.server_round == 3:
            raise sqlite3.OperationalError("database or disk is full")
        return compare(self, receipt)

    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "_compare", full)
        with pytest.raises(LedgerError, match="cannot be written"):
            mirror.record_all(items)
        assert mirror.receipts(SITE) == []
    mirror.record_all(items)
    assert len(mirror.receipts(SITE)) == 3


def test_the_thousandth_receipt_costs_no_more_than_the_first_ones(ledger: Ledger, mirror: Mirror) -> None:
    spend(ledger, 1, digest="d" * 64)
    receipt = make_receipt(ledger, SITE, "run-1", 1)

    def take(first: int, last: int) -> float:
        items = [
            sign_receipt(dataclasses.replace(receipt, server_round=number, steps=0), KEY)
            for number in range(first, last)
        ]
        started = time.process_time()
        for item in items:
            mirror.record_all([item])
        return time.process_time() - started

    early = take(2, 52)
    mirror.record_all(
        sign_receipt(dataclasses.replace(receipt, server_round=number, steps=0), KEY)
        for number in range(100, 1100)
    )
    assert take(2000, 2050) < 3.0 * early + 0.1
