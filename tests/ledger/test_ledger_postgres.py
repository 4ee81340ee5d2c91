"""The same ledger on a real PostgreSQL server (`FEDLORA_TEST_POSTGRES`, or a private one where it is installed)."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from ledger_helpers import BUDGET, EVENT, SECRET, SITE, ask, spend

from fedlora.accounting import epsilon_of
from fedlora.errors import DuplicateRoundError, LedgerError, LedgerIntegrityError
from fedlora.ledger import Account, Budget, Ledger, open_ledger
from fedlora.ledger.exporting import backup, export_rows

pytestmark = pytest.mark.postgres
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "ci-postgres"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Return the URL of a server: the given one, or a private one that is stopped afterwards."""
    given = os.environ.get("FEDLORA_TEST_POSTGRES", "")
    pytest.importorskip("psycopg")
    if given:
        yield given
        return
    if not list(Path("/usr/lib/postgresql").glob("*/bin/initdb")) or shutil.which("runuser") is None:
        pytest.skip("no PostgreSQL server is installed (set FEDLORA_TEST_POSTGRES)")
    started = subprocess.run([SCRIPT, "start"], capture_output=True, text=True, check=False)
    if started.returncode != 0:
        pytest.skip(f"a private PostgreSQL server does not start: {started.stderr.strip().splitlines()[-1:]}")
    url = started.stdout.strip()
    try:
        yield url
    finally:
        subprocess.run([SCRIPT, "stop", url.rpartition("host=")[2]], capture_output=True, check=True)


@pytest.fixture
def url(server: str) -> Iterator[str]:
    """Return the URL of a fresh database."""
    name = f"ledger_{secrets.token_hex(6)}"
    engine = sa.create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    yield sa.make_url(server).set(database=name).render_as_string(hide_password=False)
    with engine.connect() as connection:
        connection.execute(sa.text(f"DROP DATABASE {name} WITH (FORCE)"))
    engine.dispose()


def test_order_of_things(url: str, tmp_path: Path) -> None:
    with open_ledger(url, secret=SECRET, replies=tmp_path) as ledger:
        first = ledger.reserve_one(ask(1))
        digest = ledger.store_reply(first, b"update")
        ledger.commit([(first, 3, EVENT, digest)])
        ledger.release_unused([ledger.reserve_one(ask(2))])
        ledger.abandon([ledger.reserve_one(ask(3))])
        spend(ledger, 4, account=Account("site-2", "news"), fingerprint="a" * 64, assumptions=("x",))
        head = ledger.head()
    with open_ledger(url, secret=SECRET, replies=tmp_path) as ledger:
        assert ledger.head() == head
        ledger.known_head_check(head)
        assert ledger.verify().entries == len(list(export_rows(ledger)))
        report = ledger.report(SITE)
        assert report.epsilon == pytest.approx(epsilon_of(EVENT.times(7), BUDGET.delta).epsilon)
        assert [row.state for row in report.rounds] == ["committed", "released", "abandoned"]
        with pytest.raises(DuplicateRoundError) as caught:
            ledger.reserve_one(ask(1))
        assert caught.value.reply_digest == digest
        assert ledger.load_reply(SITE, "run-1", 1) == b"update"
        with pytest.raises(LedgerError, match="server's own backup"):
            backup(ledger, tmp_path / "copy")


def test_the_server_refuses_edits_and_the_chain_shows_them(url: str) -> None:
    with open_ledger(url, secret=SECRET) as ledger:
        spend(ledger, 1)
    engine = sa.create_engine(url)
    for statement in ("UPDATE entries SET steps = 1", "DELETE FROM entries", "TRUNCATE entries CASCADE"):
        with pytest.raises(sa.exc.DBAPIError, match="append-only"), engine.begin() as connection:
            connection.execute(sa.text(statement))
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE entries DISABLE TRIGGER USER"))
        connection.execute(sa.text("UPDATE entries SET charge = 1, steps = 1 WHERE kind = 'R'"))
    engine.dispose()
    with pytest.raises(LedgerIntegrityError):
        open_ledger(url, secret=SECRET)


def test_an_anchor_detects_a_restored_database(url: str, tmp_path: Path) -> None:
    anchor = tmp_path / "anchor"
    with open_ledger(url, secret=SECRET, anchor=anchor) as ledger:
        spend(ledger, 1)
        spend(ledger, 2)
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE entries DISABLE TRIGGER USER"))
        connection.execute(sa.text("DELETE FROM entries WHERE seq > 4"))
    engine.dispose()
    with pytest.raises(LedgerIntegrityError, match="older copy"):
        open_ledger(url, secret=SECRET, anchor=anchor)


def test_writers_are_serialised(url: str) -> None:
    budget = Budget(1.0, 1e-5)
    granted: list[bool] = []
    with open_ledger(url, secret=SECRET):
        pass

    def work(name: str) -> None:
        with open_ledger(url, secret=SECRET) as ledger:
            for number in range(25):
                outcome = ledger.reserve([ask(number, budget=budget, run_id=name, steps=2)])[0]
                granted.append(outcome.granted)

    threads = [threading.Thread(target=work, args=(f"run-{index}",)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    with open_ledger(url, secret=SECRET) as ledger:
        ledger.verify()
        report = ledger.report(SITE)
        assert report.num_events == 2 * sum(granted)
        assert report.epsilon <= 1.0
        assert len(granted) == 75


def test_a_killed_writer_leaves_a_whole_ledger(url: str) -> None:
    wide = Budget(1000.0, 1e-5)  # more than a fast machine spends before the kill
    with open_ledger(url, secret=SECRET) as ledger:
        spend(ledger, 0, budget=wide)
    child = os.fork()
    if child == 0:
        try:
            own = open_ledger(url, secret=SECRET)
            for number in range(1, 10_000):
                spend(own, number, budget=wide)
        finally:
            os._exit(1)
    time.sleep(1.0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with open_ledger(url, secret=SECRET) as ledger:
        ledger.verify()
        rows = ledger.rounds(SITE)
        assert [row.server_round for row in rows] == list(range(len(rows)))
        assert sum(row.state != "committed" for row in rows) <= 1
        assert ledger.report(SITE).num_events == 4 * len(rows)
        spend(ledger, 20_000, budget=wide)


def test_schema_from_the_future_and_missing_tables(url: str) -> None:
    with pytest.raises(LedgerIntegrityError, match="no ledger tables"):
        open_ledger(url, secret=SECRET, create=False)
    with open_ledger(url, secret=SECRET):
        pass
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(LedgerIntegrityError, match="update fedlora"):
        open_ledger(url, secret=SECRET)


def test_a_server_that_is_gone_is_named_without_its_password() -> None:
    with pytest.raises(LedgerError) as caught:
        open_ledger("postgresql+psycopg://u:hidden-word@localhost:1/none", secret=SECRET)
    assert "hidden-word" not in str(caught.value)


def test_a_cohort_is_one_transaction(url: str) -> None:
    make: Callable[[int], Account] = lambda number: Account(f"client-{number:04d}", "d")  # noqa: E731
    with open_ledger(url, secret=SECRET) as ledger:
        cohort(ledger, make, 1)
        cohort(ledger, make, 2)
        assert {report.num_events for report in ledger.reports(ledger.accounts())} == {8}


def cohort(ledger: Ledger, make: Callable[[int], Account], server_round: int) -> None:
    outcomes = ledger.reserve([ask(server_round, account=make(number)) for number in range(500)])
    assert all(outcome.granted for outcome in outcomes)
    ledger.commit([(outcome, 4, EVENT, "") for outcome in outcomes])  # type: ignore[misc]
