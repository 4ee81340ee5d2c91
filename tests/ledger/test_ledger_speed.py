"""Speed: 10 000 clients and 100 rounds below 0.2 ms per client and round, single reservations below 50 ms.

Run with `pytest tests/ledger/test_ledger_speed.py -m "long or not long" -s`; CPU time is compared where the
machine may be busy with other work.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ledger_helpers import ask, spend

from fedlora.accounting import Event, PoissonGaussianEvent
from fedlora.ledger import Account, Budget, Ledger, load_or_create_secret, open_ledger

TERMS = Budget(8.0, 1e-5)


def simulate(path: Path, clients: int, rounds: int, events: list[Event]) -> float:
    """Return CPU milliseconds per client and round for reserve, projected epsilon and commit."""
    accounts = [Account(f"client-{number:05d}", "news-2026") for number in range(clients)]
    with open_ledger(path, secret=load_or_create_secret(f"{path}.key")) as ledger:
        started, wall = time.process_time(), time.perf_counter()
        for server_round in range(1, rounds + 1):
            play(ledger, accounts, server_round, events)
        cpu, wall = time.process_time() - started, time.perf_counter() - wall
    sys.stderr.write(f"\n{clients} x {rounds}: {cpu / clients / rounds * 1e3:.4f} ms CPU, ")
    sys.stderr.write(f"{wall / clients / rounds * 1e3:.4f} ms wall per client and round\n")
    return cpu / clients / rounds * 1e3


def play(ledger: Ledger, accounts: list[Account], server_round: int, events: list[Event]) -> None:
    requests = [
        ask(server_round, account=account, event=events[index % len(events)], budget=TERMS)
        for index, account in enumerate(accounts)
    ]
    outcomes = ledger.reserve(requests)
    assert all(outcome.granted for outcome in outcomes)
    ledger.commit(
        [(outcome, 4, request.event, "d" * 64) for outcome, request in zip(outcomes, requests, strict=True)]
    )  # type: ignore[misc]


def process_seconds(*arguments: str) -> float:
    """Return CPU seconds of one Python process, start and imports included."""
    before = os.times()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


def show_is_fast(path: Path) -> None:
    """Check `fedlora budget show` against 2 s of CPU time, Python's start and all imports included."""
    started = time.perf_counter()
    shown = process_seconds("-m", "fedlora.cli.main", "budget", "show", str(path), "--json")
    sys.stderr.write(f"show: {shown:.2f} s CPU, {time.perf_counter() - started:.2f} s wall\n")
    assert shown < 2.0


def test_showing_a_ledger_is_fast_and_loads_no_statistics(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    simulate(path, 40, 3, [PoissonGaussianEvent(2.0, 0.05), PoissonGaussianEvent(1.5, 0.02)])
    show_is_fast(path)
    code = (
        "import sys\n"
        "from fedlora.cli.main import main\n"
        "try:\n"
        "    main(['budget', 'show', sys.argv[1], '--json'])\n"
        "finally:\n"
        "    assert 'dp_accounting' in sys.modules\n"
        "    assert not {'scipy.stats', 'scipy.signal', 'scipy.optimize', 'torch', 'flwr'} & sys.modules.keys()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
    )
    assert "AssertionError" not in done.stderr
    assert done.stdout.startswith("{")


def test_a_cohort_costs_less_than_a_fifth_of_a_millisecond_each(tmp_path: Path) -> None:
    assert simulate(tmp_path / "ledger.db", 2000, 5, [PoissonGaussianEvent(2.0, 0.05)]) < 0.2


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ten_thousand_clients_and_a_hundred_rounds(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    assert simulate(path, 10_000, 100, [PoissonGaussianEvent(2.0, 0.05)]) < 0.2
    sys.stderr.write(f"{path.stat().st_size / 1e6:.0f} MB\n")
    show_is_fast(path)
    started = time.process_time()
    with open_ledger(path, secret=load_or_create_secret(f"{path}.key")) as ledger:
        report = ledger.report(Account("client-00007", "news-2026"))
        assert report.num_events == 400
        assert len(report.rounds) == 100
        sys.stderr.write(f"open and one account with its rounds: {time.process_time() - started:.2f} s CPU\n")
        started = time.process_time()
        assert ledger.verify().accounts == 10_000
        sys.stderr.write(f"verify: {time.process_time() - started:.2f} s CPU\n")


@pytest.mark.long
def test_clients_with_different_events(tmp_path: Path) -> None:
    events: list[Event] = [PoissonGaussianEvent(2.0, 0.01 + 0.0001 * number) for number in range(200)]
    assert simulate(tmp_path / "ledger.db", 5000, 20, events) < 0.2


def test_a_single_durable_reservation_is_fast(ledger: Ledger) -> None:
    spend(ledger, 0)
    seconds = []
    for number in range(1, 31):
        started = time.process_time(), time.perf_counter()
        ledger.reserve_one(ask(number, budget=Budget(8.0, 1e-5)))
        seconds.append((time.process_time() - started[0], time.perf_counter() - started[1]))
    cpu, wall = (statistics.median(values) for values in zip(*seconds, strict=True))
    sys.stderr.write(
        f"\none durable reservation: {cpu * 1e3:.2f} ms CPU, {wall * 1e3:.2f} ms wall (median)\n"
    )
    assert cpu < 0.05
