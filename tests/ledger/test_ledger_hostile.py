"""Damaged cells and bytes, misused reservations, lookalike names and starved writers: refused, never free."""

from __future__ import annotations

import math
import random
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_helpers import BUDGET, EVENT, SECRET, SITE, ask, spend
from typer.testing import CliRunner

from fedlora.accounting import GaussianEvent, NonPrivateEvent
from fedlora.cli.budget import app
from fedlora.errors import FedLoraError, LedgerError, LedgerIntegrityError
from fedlora.ledger import Account, Ledger, open_ledger, reserving
from fedlora.ledger.projection import Projector

Open = Callable[..., Ledger]
WEAK = GaussianEvent(5.0)


def charged(ledger: Ledger) -> int:
    return sum(row.steps_charged for row in ledger.rounds(SITE))


def test_a_released_or_settled_reservation_cannot_start(ledger: Ledger) -> None:
    first, second, third = (ledger.reserve_one(ask(number)) for number in range(3))
    ledger.release_unused([first])
    ledger.abandon([second])
    ledger.mark_started([third])
    ledger.mark_started([third])
    ledger.commit([(third, 4, EVENT, "")])
    for closed in (first, second, third):
        with pytest.raises(LedgerError, match="not open"):
            ledger.mark_started([closed])


def test_a_reservation_of_another_process_can_start_while_it_is_open(opened: Open) -> None:
    one, two = opened(), opened()
    reservation = one.reserve_one(ask(1))
    two.mark_started([reservation])
    one.abandon([reservation])
    with pytest.raises(LedgerError, match="not open"):
        opened().mark_started([reservation])


@pytest.mark.parametrize(
    ("close", "taken", "event", "extra"),
    [
        ("release", 4, EVENT, 4),
        ("release", 1, EVENT, 1),
        ("release", 9, WEAK, 9),
        ("abandon", 4, EVENT, 0),
        ("abandon", 9, EVENT, 5),
        ("abandon", 4, WEAK, 4),
        ("commit", 4, EVENT, 0),
        ("commit", 7, EVENT, 3),
        ("commit 2", 4, EVENT, 2),
        ("commit", 3, WEAK, 3),
    ],
)
def test_steps_reported_for_a_closed_reservation_are_charged_once(
    ledger: Ledger, close: str, taken: int, event: GaussianEvent, extra: int
) -> None:
    reservation = ledger.reserve_one(ask(1))
    if close == "release":
        ledger.release_unused([reservation])
    elif close == "abandon":
        ledger.abandon([reservation])
    else:
        ledger.commit([(reservation, 2 if close == "commit 2" else 4, EVENT, "a" * 64)])
    before = charged(ledger)
    for _ in range(2):
        with pytest.raises(LedgerError, match="already"):
            ledger.commit([(reservation, taken, event, "b" * 64)])
        assert charged(ledger) == before + extra
    assert ledger.verify().entries > 0


@pytest.mark.parametrize("taken", [0, -3, 2.5, None, True])
@pytest.mark.parametrize("event", [EVENT, None, "gaussian"])
def test_nonsense_for_a_closed_reservation_is_an_error_and_charges_nothing(
    ledger: Ledger, taken: object, event: object
) -> None:
    reservation = spend(ledger, 1)
    before = ledger.head()
    with pytest.raises(LedgerError, match="already"):
        ledger.commit([(reservation, taken, event, "")])  # type: ignore[list-item]
    assert ledger.head() == before


def test_noise_free_steps_reported_after_a_release_cost_everything(ledger: Ledger) -> None:
    reservation = ledger.reserve_one(ask(1))
    ledger.release_unused([reservation])
    with pytest.raises(LedgerError, match="already released"):
        ledger.commit([(reservation, 1, NonPrivateEvent(), "")])
    assert math.isinf(ledger.report(SITE).epsilon)


LOOKALIKES = ["news-2026 ", " news-2026", "news\u200b-2026", "news\u202e-2026", "news\u00a0x", "cafe\u0301"]


@pytest.mark.parametrize("name", LOOKALIKES)
def test_a_new_account_needs_a_name_that_looks_like_no_other(
    ledger: Ledger, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for account in (Account("site-1", name), Account(name, "news-2026")):
        with pytest.raises(LedgerError, match="looks like another name"):
            ledger.reserve_one(ask(1, account=account))
        with pytest.raises(LedgerError, match="looks like another name"):
            ledger.note_fingerprint(account, "f" * 64)
    assert ledger.accounts() == ()
    monkeypatch.setattr(reserving, "_check_new_account", lambda account: None)
    old = Account("site-1", name)  # from a ledger that knew no such rule: it stays readable and is charged
    spend(ledger, 1, account=old)
    monkeypatch.undo()
    spend(ledger, 2, account=old)
    assert ledger.report(old).num_events == 8


@pytest.mark.parametrize("name", ["\ud800", "a\udfff", "", "x" * 257, "a\0", "a\nb", "a\x1fb"])
def test_names_that_cannot_be_stored_are_refused(ledger: Ledger, name: str) -> None:
    with pytest.raises(LedgerError):
        Account(name, "news-2026")
    with pytest.raises(LedgerError):
        ledger.reserve_one(ask(1, run_id=name))


@pytest.mark.parametrize("name", ["Krankenhaus Süd", "病院-1", "site 1/α", "o'hare_№5"])
def test_ordinary_names_of_any_script_are_accepted(ledger: Ledger, name: str) -> None:
    spend(ledger, 1, account=Account(name, name))


COLUMNS = [
    "kind",
    "account_id",
    "run_id",
    "steps",
    "charge",
    "ref",
    "period",
    "at",
    "digest",
    "detail",
    "mac",
]
CELLS = ["7", "-1", "'text'", "x'ff00'", "1e300", "CAST(x'c328' AS TEXT)", "9223372036854775807", "''"]


def edit(path: Path, statement: str) -> None:
    """Run SQL past the triggers and constraints."""
    with sqlite3.connect(path) as connection:
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='trigger'").fetchall():
            connection.execute(f"DROP TRIGGER {name}")
        connection.execute(statement)
    connection.close()


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_of_another_type_is_damage_and_never_a_crash(path: Path, column: str, cell: str) -> None:
    with open_ledger(path, secret=SECRET) as ledger:
        spend(ledger, 1, digest="d" * 64, assumptions=("a condition",))
        spend(ledger, 2)
    edit(path, f"UPDATE entries SET {column} = {cell} WHERE seq = {4 if column == 'digest' else 3}")
    with pytest.raises(LedgerIntegrityError), open_ledger(path, secret=SECRET) as ledger:
        ledger.report(SITE)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE accounts SET client = CAST(x'c328' AS TEXT)",
        "UPDATE accounts SET client = 5",
        "UPDATE accounts SET dataset = ''",
        "UPDATE events SET json = CAST(x'c328' AS TEXT)",
        "UPDATE events SET json = x'00'",
        "UPDATE events SET hash = 3 WHERE id = 1",
        "UPDATE entries SET mac = 2000000000 WHERE seq = (SELECT max(seq) FROM entries)",
        "UPDATE entries SET mac = 'x' WHERE seq = (SELECT max(seq) FROM entries)",
    ],
)
def test_damaged_tables_end_commands_with_the_code_for_damage(path: Path, statement: str) -> None:
    with open_ledger(path, secret=SECRET) as ledger:
        spend(ledger, 1)
    edit(path, statement)
    with pytest.raises(FedLoraError), open_ledger(path, secret=SECRET) as ledger:
        ledger.report(SITE)
    result = CliRunner().invoke(app, ["verify", str(path), "--key", str(key_file(path))])
    assert isinstance(result.exception, FedLoraError | SystemExit)
    assert getattr(result.exception, "exit_code", result.exit_code) in (27, 28)


def key_file(path: Path) -> Path:
    file = path.parent / "ledger.secret"
    file.write_bytes(SECRET)
    file.chmod(0o600)
    return file


def flip(path: Path, whole: bytes, rng: random.Random) -> None:
    """Change one to eight bytes, or overwrite a stretch."""
    data = bytearray(whole)
    if rng.random() < 0.8:
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    else:
        start, length = rng.randrange(len(data)), rng.randrange(1, 600)
        data[start : start + length] = rng.randbytes(len(data[start : start + length]))
    path.write_bytes(data)


def damage_many(path: Path, seeds: range) -> int:
    """Damage copies of a ledger; return how many were refused."""
    with open_ledger(path, secret=SECRET) as ledger:
        for number in range(1, 9):
            spend(ledger, number, digest="d" * 64)
        true = ledger.report(SITE).epsilon
    whole, anchor = path.read_bytes(), Path(f"{path}.anchor").read_bytes()
    refused = 0
    for seed in seeds:
        folder = path.parent / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        copy = folder / "ledger.db"
        flip(copy, whole, random.Random(seed))
        Path(f"{copy}.anchor").write_bytes(anchor)
        try:
            with open_ledger(copy, secret=SECRET) as ledger:
                assert ledger.report(SITE).epsilon >= true
                ledger.rounds(SITE)
                with pytest.raises(FedLoraError):
                    spend(ledger, 3)
                ledger.verify()
        except FedLoraError:
            refused += 1
    return refused


def test_any_changed_bytes_are_refused_or_harmless(path: Path) -> None:
    assert damage_many(path, range(100)) > 4


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_any_changed_bytes_are_refused_or_harmless_many(path: Path) -> None:
    assert damage_many(path, range(100, 8000)) > 400


def test_four_writers_with_long_compositions_all_get_their_turn(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds the write lock for long and pauses for next to nothing: nobody starves while 100 turns are taken.

    Who polls first takes the next turn. With a fifth of the turns or more for each, one of the four gets fewer than two
    of a hundred with probability 2e-8. Where the database's own handler waited, longer each time, one got a single turn
    in two of six tries.
    """

    def slow(*_: object) -> bool:
        time.sleep(0.05)
        return True

    monkeypatch.setattr(Projector, "fits", slow)
    open_ledger(path, secret=SECRET).close()
    granted = [0] * 4
    together = threading.Barrier(4)

    def write(index: int) -> None:
        with open_ledger(path, secret=SECRET) as own:
            together.wait(120)
            while sum(granted) < 100:
                spend(own, granted[index], run_id=f"run-{index}", budget=BUDGET)
                granted[index] += 1

    threads = [threading.Thread(target=write, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert min(granted) >= 2, granted
