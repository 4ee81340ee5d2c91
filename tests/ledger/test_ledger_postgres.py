"""The same ledger on a real PostgreSQL server (`FEDLORA_TEST_POSTGRES`, or a private one where it is installed)."""

from __future__ import annotations

import contextlib
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
from fedlora.ledger import Account, Budget, Ledger, load_or_create_secret, open_ledger, register_of
from fedlora.ledger.exporting import backup, export_rows
from fedlora.ledger.restoring import accept

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


def test_an_old_database_put_back_is_detected_beside_the_key(url: str, tmp_path: Path) -> None:
    """Without any setting: the anchor of a ledger behind a URL is `<key>.anchor`."""
    key = tmp_path / "ledger.secret"
    secret, register = load_or_create_secret(key), register_of(key)
    with open_ledger(url, secret=secret, register=register) as ledger:
        spend(ledger, 1)
    old = copy_of(url)
    with open_ledger(url, secret=secret, register=register) as ledger:
        spend(ledger, 2)
    with pytest.raises(LedgerIntegrityError, match="older copy"):
        open_ledger(old, secret=secret, register=register)
    assert accept(old, secret=secret, reason="disk died", register=register).missing == 2
    with open_ledger(old, secret=secret, register=register) as ledger:
        spend(ledger, 3)
        assert any("disk died" in text for text in ledger.report(SITE).conditions)
    drop(old)


def test_dropped_tables_are_not_begun_anew_silently(url: str, tmp_path: Path) -> None:
    key = tmp_path / "ledger.secret"
    secret, register = load_or_create_secret(key), register_of(key)
    with open_ledger(url, secret=secret, register=register) as ledger:
        spend(ledger, 1)
    execute(url, "DROP TABLE snapshots, entries, events, accounts, alembic_version CASCADE")
    for _ in range(2):
        with pytest.raises(LedgerIntegrityError):
            open_ledger(url, secret=secret, register=register)
    accept(url, secret=secret, reason="dropped", register=register)
    with open_ledger(url, secret=secret, register=register) as ledger:
        spend(ledger, 1)
        assert any("begun anew" in text for text in ledger.report(SITE).conditions)


def test_a_key_used_on_another_machine_opens_a_database_in_use(url: str, tmp_path: Path) -> None:
    key, copy = tmp_path / "ledger.secret", tmp_path / "elsewhere" / "ledger.secret"
    secret = load_or_create_secret(key)
    copy.parent.mkdir()
    shutil.copy(key, copy)
    for file in (key, copy, key, copy):
        with open_ledger(url, secret=secret, register=register_of(file)) as ledger:
            spend(ledger)
    assert Path(f"{copy}.anchor").exists()


def test_a_connection_lost_while_writing_leaves_at_least_what_was_spent(url: str) -> None:
    wide, drawn = Budget(1000.0, 1e-5), 0
    done = threading.Event()
    with open_ledger(url, secret=SECRET) as ledger:
        spend(ledger, 0, budget=wide)

    def cut() -> None:
        while not done.wait(0.05):
            execute(
                url.replace(sa.make_url(url).database or "", "postgres"),
                f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{sa.make_url(url).database}'",
            )

    cutter = threading.Thread(target=cut)
    cutter.start()
    errors, number = 0, 0
    try:
        begun = time.monotonic()
        ledger = open_ledger(url, secret=SECRET)
        while (passed := time.monotonic() - begun) < 3.0 or (errors == 0 and passed < 120.0):
            number += 1
            try:
                reservation = ledger.reserve_one(ask(number, budget=wide))
                drawn += 4
                ledger.commit([(reservation, 4, EVENT, "")])
            except DuplicateRoundError:
                continue
            except LedgerError:
                errors += 1
        ledger.close()
    except LedgerError:
        errors += 1
    finally:
        done.set()
        cutter.join()
    assert errors > 0
    with open_ledger(url, secret=SECRET) as ledger:
        ledger.verify()
        assert ledger.report(SITE).num_events >= drawn + 4


def test_an_index_that_misses_a_round_is_found_when_the_ledger_is_opened(url: str) -> None:
    """A spent round that the index does not find would be granted again."""
    with open_ledger(url, secret=SECRET) as ledger:
        for number in range(1, 6):
            spend(ledger, number)
    with open_ledger(url, secret=SECRET) as ledger:
        ledger.verify()
    columns = "entries (run_id, server_round, account_id, attempt) WHERE kind = 'R'"
    execute(url, "DROP INDEX uq_entries_round")
    execute(url, f"CREATE UNIQUE INDEX uq_entries_round ON {columns} AND server_round <> 3")
    execute(url, f"CREATE INDEX whole ON {columns}")
    try:  # now the index believes that it has every round
        execute(
            url,
            "UPDATE pg_index SET indpred = (SELECT indpred FROM pg_index WHERE indexrelid = 'whole'::regclass) "
            "WHERE indexrelid = 'uq_entries_round'::regclass",
        )
    except sa.exc.ProgrammingError:
        pytest.skip("no PostgreSQL server is installed (this one does not let its catalogue be changed)")
    execute(url, "DROP INDEX whole")
    with pytest.raises(LedgerIntegrityError, match="misses round 3"):
        open_ledger(url, secret=SECRET)
    execute(url, "REINDEX INDEX uq_entries_round")
    with open_ledger(url, secret=SECRET) as ledger, pytest.raises(DuplicateRoundError):
        ledger.reserve_one(ask(3))


def test_a_stopped_writer_does_not_hold_the_others_up_for_ever(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedlora.ledger.store.BUSY_TIMEOUT_SECONDS", 1.0)
    with open_ledger(url, secret=SECRET) as ledger, open_ledger(url, secret=SECRET) as stopped:
        spend(ledger, 1)
        with stopped._journal.store.write(), pytest.raises(LedgerError, match="lock timeout"):
            ledger.reserve_one(ask(2))
        spend(ledger, 2)
        monkeypatch.setattr("fedlora.ledger.store.IDLE_TIMEOUT_SECONDS", 1.0)

        def stop() -> None:
            with stopped._journal.store.write() as connection:
                for _ in range(60):  # until the server has ended the stopped one's transaction
                    with contextlib.suppress(LedgerError):
                        spend(ledger, 3)
                        break
                connection.execute(sa.text("SELECT 1"))

        with pytest.raises(LedgerError, match="cannot be used"):
            stop()
        assert ledger.report(SITE).num_events == 12
        ledger.verify()


def test_a_server_that_does_not_sync_is_refused(url: str) -> None:
    with open_ledger(url, secret=SECRET) as ledger:
        spend(ledger, 1)
    try:
        execute(url, "ALTER SYSTEM SET fsync = off")
    except sa.exc.ProgrammingError:
        pytest.skip("no PostgreSQL server is installed (this one does not let its settings be changed)")
    try:
        reload_until(url, "off")
        with open_ledger(url, secret=SECRET) as ledger:
            with pytest.raises(LedgerError, match="fsync off"):
                ledger.reserve_one(ask(2))
            assert ledger.report(SITE).num_events == 4
    finally:
        execute(url, "ALTER SYSTEM RESET fsync")
        reload_until(url, "on")


def reload_until(url: str, fsync: str) -> None:
    """Have the server read its settings again, and wait until new connections get them: it tells nobody when."""
    execute(url, "SELECT pg_reload_conf()")
    for _ in range(600):
        engine = sa.create_engine(url)
        with engine.connect() as connection:
            found = connection.execute(sa.text("SHOW fsync")).scalar_one()
        engine.dispose()
        if found == fsync:
            return
        time.sleep(0.1)
    raise AssertionError(f"fsync is still {found}")


def execute(url: str, statement: str) -> None:
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    try:
        with engine.connect() as connection:
            connection.execute(sa.text(statement))
    finally:
        engine.dispose()


def copy_of(url: str) -> str:
    """Copy a database as a backup would, and return the copy's URL."""
    name = f"ledger_{secrets.token_hex(6)}"
    parsed = sa.make_url(url)
    execute(
        parsed.set(database="postgres").render_as_string(hide_password=False),
        f"CREATE DATABASE {name} TEMPLATE {parsed.database}",
    )
    return parsed.set(database=name).render_as_string(hide_password=False)


def drop(url: str) -> None:
    parsed = sa.make_url(url)
    execute(
        parsed.set(database="postgres").render_as_string(hide_password=False),
        f"DROP DATABASE {parsed.database} WITH (FORCE)",
    )


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
    spent, note = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            own = open_ledger(url, secret=SECRET)
            for number in range(1, 10_000):
                spend(own, number, budget=wide)
                os.write(note, b"x")
        finally:
            os._exit(1)
    os.close(note)
    assert all(os.read(spent, 1) == b"x" for _ in range(5))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(spent)
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
