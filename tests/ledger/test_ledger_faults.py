"""Faults: after each, the reported epsilon is never below the true one, and no noise is drawn twice for a round."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ledger_child import POINTS, STEPS, main
from ledger_helpers import BUDGET, EVENT, SECRET, SITE, ask, spend

from fedlora.accounting import PoissonGaussianEvent, epsilon_of
from fedlora.errors import LedgerError, LedgerIntegrityError
from fedlora.ledger import Account, Ledger, Refusal, open_ledger
from fedlora.ledger.exporting import backup

Open = Callable[..., Ledger]
CHILD = Path(__file__).with_name("ledger_child.py")


def start_child(
    ledger: Path, log: Path, rounds: int, point: str = "-", at_round: int = 0
) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(CHILD.parent), *sys.path])}
    command = [sys.executable, str(CHILD), str(ledger), str(log), str(rounds), point, str(at_round)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run_child(ledger: Path, log: Path, rounds: int, point: str = "-", at_round: int = 0) -> int:
    """Run the client in a forked child (its modules are loaded already); return its exit status."""

    def play() -> int:
        main(str(ledger), str(log), str(rounds), point, str(at_round))
        return 0

    code = forked(play)
    assert code in (0, -signal.SIGKILL)
    return code


def forked(work: Callable[[], int]) -> int:
    """Run something in a forked child and return its exit status (negative: the signal that killed it)."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Releases:
    """What the log outside the ledger says."""

    def __init__(self, log: Path) -> None:
        lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        self.noise = [line for line in lines if line[0] == "noise"]
        self.sent: dict[int, set[str]] = {}
        for line in lines:
            if line[0] == "send":
                self.sent.setdefault(int(line[1]), set()).add(line[3])

    def check(self, ledger: Ledger) -> None:
        """The ledger's epsilon is at least the true one, and each round's noise was drawn at most once."""
        drawn = Counter((line[1], line[2]) for line in self.noise)
        assert all(count == 1 for count in drawn.values()), "a round drew fresh noise a second time"
        assert all(len(replies) == 1 for replies in self.sent.values()), "two replies of one round"
        if not self.noise:
            return
        true = epsilon_of(EVENT.times(len(self.noise)), BUDGET.delta).epsilon
        report = ledger.report(SITE)
        assert report.epsilon >= true
        assert report.num_events >= len(self.noise)


def assert_survives(path: Path, log: Path, rounds: int) -> None:
    with open_ledger(path, secret=SECRET) as ledger:
        ledger.verify()
        Releases(log).check(ledger)
    assert run_child(path, log, rounds) == 0
    with open_ledger(path, secret=SECRET) as ledger:
        ledger.verify()
        releases = Releases(log)
        releases.check(ledger)
        charged = ledger.report(SITE).num_events
        assert charged <= len(releases.noise) + STEPS  # one interrupted round at most is charged for nothing
        assert charged <= rounds * STEPS


@pytest.mark.parametrize("point", POINTS)
def test_h13_kill_at_every_boundary(tmp_path: Path, point: str) -> None:
    path, log = tmp_path / "ledger.db", tmp_path / "releases"
    assert run_child(path, log, 4, point, 3) == -signal.SIGKILL
    assert_survives(path, log, 4)


@pytest.mark.parametrize("point", ["reserve:before-anchor", "noise-1", "commit:before-insert"])
def test_h13_kill_in_the_first_round(tmp_path: Path, point: str) -> None:
    path, log = tmp_path / "ledger.db", tmp_path / "releases"
    assert run_child(path, log, 2, point, 1) == -signal.SIGKILL
    assert_survives(path, log, 2)


@pytest.mark.long
@pytest.mark.parametrize("milliseconds", range(0, 200, 10))
def test_h13_kill_at_any_moment(tmp_path: Path, milliseconds: int) -> None:
    path, log = tmp_path / "ledger.db", tmp_path / "releases"
    child = start_child(path, log, 60)
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(milliseconds / 1000)
    child.kill()
    child.communicate(timeout=60)
    assert_survives(path, log, 60)


@pytest.mark.parametrize(
    ("point", "charged"), [("reply:before", True), ("after-commit", True), ("after-send", True)]
)
def test_h20_a_reply_lost_on_the_way_is_charged_and_sent_again_unchanged(
    tmp_path: Path, point: str, charged: bool
) -> None:
    path, log = tmp_path / "ledger.db", tmp_path / "releases"
    run_child(path, log, 2, point, 2)
    with open_ledger(path, secret=SECRET) as ledger:
        assert (ledger.report(SITE).num_events == 2 * STEPS) is charged
    run_child(path, log, 2)
    releases = Releases(log)
    assert len(releases.noise) == 2 * STEPS
    if point != "reply:before":
        drawn = "".join(line[3] for line in releases.noise if line[1] == "2")
        assert releases.sent[2] == {drawn}


@pytest.mark.parametrize("rounds", [1, 4, 10])
def test_h35_a_restarted_run_charges_at_most_one_round_more(tmp_path: Path, rounds: int) -> None:
    path, log = tmp_path / "ledger.db", tmp_path / "releases"
    run_child(path, log, rounds, "noise-2", max(1, rounds // 2))
    run_child(path, log, rounds)
    with open_ledger(path, secret=SECRET) as ledger:
        assert ledger.report(SITE).num_events <= (rounds + 1) * STEPS
        assert len(ledger.pending("run-1")) == 1


def grow(path: Path, rounds: int, start: int = 1) -> str:
    with open_ledger(path, secret=SECRET) as ledger:
        for number in range(start, start + rounds):
            spend(ledger, number)
        return ledger.head()


@pytest.mark.parametrize("keep", [0, 100, 4096, 6000, 9000])
def test_truncated_file_is_detected(path: Path, keep: int) -> None:
    grow(path, 5)
    with path.open("r+b") as stream:
        stream.truncate(keep)
    with pytest.raises(LedgerIntegrityError):
        open_ledger(path, secret=SECRET)


@pytest.mark.parametrize("cut", [0, 31, 32, 2000, 0.5, 0.9, -1, -4000])
def test_torn_write_ahead_log_is_detected_or_complete(tmp_path: Path, cut: float) -> None:
    path = tmp_path / "ledger.db"
    ledger = open_ledger(path, secret=SECRET)
    for number in range(6):
        spend(ledger, number)
    torn = tmp_path / "torn" / "ledger.db"
    torn.parent.mkdir()
    for suffix in ("", "-wal", ".anchor"):
        shutil.copy(f"{path}{suffix}", f"{torn}{suffix}")
    ledger.close()
    wal = Path(f"{torn}-wal")
    size = wal.stat().st_size
    with wal.open("r+b") as stream:
        stream.truncate(int(cut * size) if isinstance(cut, float) else cut if cut >= 0 else size + cut)
    with pytest.raises(LedgerIntegrityError):
        open_ledger(torn, secret=SECRET)


@pytest.mark.parametrize("page", [2, 3, 4, 5])
@pytest.mark.parametrize("fill", [0, 255, 65])
def test_corrupted_page_is_never_read_as_less(path: Path, page: int, fill: int) -> None:
    grow(path, 12)
    with contextlib.closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        size = raw.execute("PRAGMA page_size").fetchone()[0]
    with path.open("r+b") as stream:
        stream.seek((page - 1) * size + 40)
        stream.write(bytes([fill]) * (size - 40))
    with pytest.raises(LedgerError):
        read_whole(path)


def read_whole(path: Path) -> None:
    with open_ledger(path, secret=SECRET) as ledger:
        assert ledger.report(SITE).num_events == 48
        ledger.verify()


EDITS = {
    "steps": "UPDATE entries SET steps = 1, charge = 1 WHERE seq = 5",
    "kind": "UPDATE entries SET kind = 'N' WHERE seq = 5",
    "delete": "DELETE FROM entries WHERE seq = 5",
    "swap": "UPDATE entries SET seq = 5000 - seq WHERE seq > 3",
    "event": "UPDATE events SET json = replace(json, '10.0', '99.0') WHERE id = 1",
    "account": "UPDATE accounts SET dataset = 'other' WHERE id = 1",
    "budget": "UPDATE entries SET detail = replace(detail, '8.0', '9.0') WHERE kind = 'B'",
    "time": "UPDATE entries SET at = at + 1, period = period - 12 WHERE seq = 5",
    "link": "UPDATE entries SET mac = zeroblob(32) WHERE seq = 5",
    "insert": "INSERT INTO entries SELECT 15, 'C', account_id, run_id, server_round, 0, event_id, 1, -3, 5, period, "
    "at, '', '', mac FROM entries WHERE seq = 14",
    "all": "DELETE FROM entries",
    "tail": "DELETE FROM entries WHERE seq > 9",
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_ledger_is_detected(path: Path, edit: str) -> None:
    grow(path, 6)
    with contextlib.closing(sqlite3.connect(path)) as raw:
        for table in ("accounts", "events", "entries"):
            for verb in ("update", "delete"):
                raw.execute(f"DROP TRIGGER {table}_no_{verb}")
        raw.execute(EDITS[edit])
        raw.commit()
    with pytest.raises(LedgerIntegrityError):
        open_ledger(path, secret=SECRET)


@pytest.mark.parametrize(
    "statement", ["UPDATE entries SET steps = 0", "DELETE FROM entries", "DELETE FROM events"]
)
def test_accidental_edits_fail(path: Path, statement: str) -> None:
    grow(path, 1)
    with contextlib.closing(sqlite3.connect(path)) as raw, pytest.raises(sqlite3.Error, match="append-only"):
        raw.execute(statement)


def test_an_edit_while_the_ledger_is_open_is_detected(ledger: Ledger, path: Path) -> None:
    spend(ledger, 1)
    with contextlib.closing(sqlite3.connect(path)) as raw:
        raw.execute("DROP TRIGGER entries_no_delete")
        raw.execute("DELETE FROM entries WHERE seq > 2")
        raw.commit()
    for _ in range(2):
        with pytest.raises(LedgerIntegrityError, match="known to exist"):
            ledger.reserve_one(ask(2))


@pytest.mark.parametrize("revision", ["0002", "9999", "later"])
def test_schema_from_the_future_is_refused(path: Path, revision: str) -> None:
    grow(path, 1)
    with contextlib.closing(sqlite3.connect(path)) as raw:
        raw.execute("UPDATE alembic_version SET version_num = ?", (revision,))
        raw.commit()
    with pytest.raises(LedgerIntegrityError, match="update fedlora"):
        open_ledger(path, secret=SECRET)


def test_another_kind_of_database_is_refused(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as raw:
        raw.execute("CREATE TABLE something (x)")
        raw.commit()
    with pytest.raises(LedgerIntegrityError, match="no ledger tables"):
        open_ledger(path, secret=SECRET, create=False)
    path.write_text("this is a text file, longer than the header of a database" * 40)
    with pytest.raises(LedgerIntegrityError, match="not a database"):
        open_ledger(path, secret=SECRET)


def test_an_old_copy_put_back_is_detected_by_the_anchor(path: Path, tmp_path: Path) -> None:
    grow(path, 3)
    shutil.copy(path, tmp_path / "old.db")
    grow(path, 3, start=10)
    shutil.copy(tmp_path / "old.db", path)
    with pytest.raises(LedgerIntegrityError, match="older copy"):
        open_ledger(path, secret=SECRET)


def test_an_old_copy_with_its_old_anchor_is_detected_by_a_head_known_elsewhere(
    path: Path, tmp_path: Path
) -> None:
    old = grow(path, 3)
    for suffix in ("", ".anchor"):
        shutil.copy(f"{path}{suffix}", tmp_path / f"old{suffix}")
    newest = grow(path, 3, start=10)
    for suffix in ("", ".anchor"):
        shutil.copy(tmp_path / f"old{suffix}", f"{path}{suffix}")
    with open_ledger(path, secret=SECRET) as ledger:  # this alone cannot be seen from inside
        ledger.known_head_check(old)
        with pytest.raises(LedgerIntegrityError, match="older copy"):
            ledger.known_head_check(newest)
        for number in range(20, 26):
            spend(ledger, number)
        with pytest.raises(LedgerIntegrityError, match="another way"):
            ledger.known_head_check(newest)


def test_a_missing_anchor_must_be_accepted_and_is_said(path: Path) -> None:
    grow(path, 3)
    Path(f"{path}.anchor").unlink()
    with pytest.raises(LedgerIntegrityError, match="accept_lost_anchor"):
        open_ledger(path, secret=SECRET)
    with open_ledger(path, secret=SECRET, accept_lost_anchor=True) as ledger:
        assert any(
            "rollback before that cannot be excluded" in text for text in ledger.report(SITE).conditions
        )
    grow(path, 1, start=9)


@pytest.mark.parametrize("damage", [b"", b"\0" * 512, b"x" * 512])
def test_a_damaged_anchor_is_not_taken_for_none(path: Path, damage: bytes) -> None:
    grow(path, 3)
    Path(f"{path}.anchor").write_bytes(damage)
    with pytest.raises(LedgerIntegrityError, match="anchor"):
        open_ledger(path, secret=SECRET)


@pytest.mark.parametrize("slot", [0, 256])
def test_a_torn_anchor_slot_leaves_the_other(path: Path, slot: int) -> None:
    grow(path, 3)
    anchor = Path(f"{path}.anchor")
    with anchor.open("r+b") as stream:
        stream.seek(slot + 60)
        stream.write(b"torn")
    grow(path, 1, start=9)
    with open_ledger(path, secret=SECRET) as ledger:
        ledger.verify()
        assert sum(len(ledger.rounds(account)) for account in ledger.accounts()) == 4


def test_a_missing_ledger_beside_its_anchor_is_not_started_anew(path: Path) -> None:
    grow(path, 3)
    path.unlink()
    with pytest.raises(LedgerIntegrityError, match="missing"):
        open_ledger(path, secret=SECRET)


def test_a_ledger_exchanged_while_open_is_detected(ledger: Ledger, path: Path, tmp_path: Path) -> None:
    spend(ledger, 1)
    shutil.copy(path, tmp_path / "copy.db")
    os.replace(tmp_path / "copy.db", path)
    with pytest.raises(LedgerIntegrityError, match="exchanged"):
        ledger.reserve_one(ask(2))


def test_another_ledger_with_the_same_key_beside_the_anchor(path: Path, tmp_path: Path) -> None:
    grow(path, 1)
    other = tmp_path / "other.db"
    grow(other, 9)
    path.unlink()
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    shutil.copy(other, path)
    with pytest.raises(LedgerIntegrityError):
        open_ledger(path, secret=SECRET)


@pytest.mark.parametrize("back", [60.0, 86_400.0, 10 * 365 * 86_400.0])
def test_clock_set_back(opened: Open, back: float) -> None:
    now = [1_800_000_000.0]
    ledger = opened(clock=lambda: now[0])
    spend(ledger, 1)
    now[0] -= back
    spend(ledger, 2)
    report = ledger.report(SITE)
    assert report.num_events == 8
    assert report.rounds[0].at <= report.rounds[1].at
    assert any("clock" in text for text in report.conditions) is (back > 3600)
    ledger.verify()


def test_clock_set_back_does_not_open_an_old_window(opened: Open) -> None:
    from fedlora.ledger import Budget

    now = [1_800_000_000.0]
    ledger = opened(clock=lambda: now[0])
    monthly = Budget(1.0, 1e-5, window="calendar-month", on_exhausted="fewer_steps")
    spend(ledger, 1, budget=monthly, steps=10_000)
    now[0] -= 40 * 86_400
    assert ledger.reserve([ask(2, budget=monthly)])[0].granted is False


def test_two_writers_are_serialised(path: Path, tmp_path: Path) -> None:
    logs = [tmp_path / "log-0", tmp_path / "log-1"]
    with open_ledger(path, secret=SECRET):
        pass
    children = [start_child(path, log, 15) for log in logs]
    for child in children:
        _, errors = child.communicate(timeout=120)
        assert child.returncode == 0, errors
    with open_ledger(path, secret=SECRET) as ledger:
        ledger.verify()
        assert ledger.report(SITE).num_events == 15 * STEPS
        assert all(row.state == "committed" for row in ledger.rounds(SITE))
    noise = [
        line.split() for log in logs for line in log.read_text().splitlines() if line.startswith("noise")
    ]
    assert len(noise) == 15 * STEPS
    assert len({(line[1], line[2]) for line in noise}) == len(noise)


def test_two_writers_never_pass_the_budget_together(opened: Open) -> None:
    from fedlora.ledger import Budget

    ledgers, budget = [opened(), opened(), opened()], Budget(1.0, 1e-5)
    outcomes = [
        ledgers[number % 3].reserve([ask(number, budget=budget, run_id=f"r{number % 3}")])[0].granted
        for number in range(400)
    ]
    assert True in outcomes
    assert outcomes[-1] is False
    assert ledgers[0].report(SITE).epsilon <= 1.0


def test_a_forked_process_is_refused(ledger: Ledger) -> None:
    spend(ledger, 1)

    def reserve() -> int:
        with contextlib.suppress(LedgerError):
            ledger.reserve_one(ask(2))
            return 1
        return 0

    assert forked(reserve) == 0
    spend(ledger, 2)
    assert ledger.report(SITE).num_events == 8


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full_disk_refuses_and_recovers(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        path = disk / "ledger.db"
        with open_ledger(path, secret=SECRET) as ledger:
            spend(ledger, 1)
            ballast = disk / "ballast"
            with contextlib.suppress(OSError), ballast.open("wb") as stream:
                while True:
                    stream.write(b"\0" * 4096)
                    stream.flush()
            granted, caught = 0, None
            for number in range(2, 400):
                try:
                    spend(ledger, number)
                except LedgerError as error:
                    caught = error
                    break
                granted += 1
            assert caught is not None
            assert "full" in str(caught) or "cannot be" in str(caught)
            assert not isinstance(caught, LedgerIntegrityError)
            assert ledger.report(SITE).num_events >= 4 * (granted + 1)
            ballast.unlink()
            spend(ledger, 1000)
            assert ledger.report(SITE).num_events >= 4 * (granted + 2)
            ledger.verify()
        with open_ledger(path, secret=SECRET) as ledger:
            ledger.verify()


def test_file_size_limit_refuses_and_recovers(tmp_path: Path) -> None:
    path, count = tmp_path / "ledger.db", tmp_path / "count"
    grow(path, 1)

    def fill() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        ledger = open_ledger(path, secret=SECRET)
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
        done = 0
        try:
            for number in range(2, 500):
                spend(ledger, number)
                done += 1
        except LedgerIntegrityError:
            return 2
        except LedgerError:
            count.write_text(str(done))
            return 0
        return 1

    assert forked(fill) == 0
    with open_ledger(path, secret=SECRET) as ledger:
        ledger.verify()
        assert ledger.report(SITE).num_events >= 4 * (1 + int(count.read_text()))
        spend(ledger, 1000)


def test_read_only_file_refuses_to_reserve() -> None:
    folder = Path(tempfile.mkdtemp(prefix="fedlora-read-only-"))
    path = folder / "ledger.db"
    grow(path, 1)
    for file in folder.iterdir():
        file.chmod(0o444)
    folder.chmod(0o555)

    def reserve() -> int:
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        try:
            with open_ledger(path, secret=SECRET) as ledger:
                ledger.reserve_one(ask(2))
        except LedgerIntegrityError:
            return 2
        except LedgerError:
            return 0
        return 1

    assert forked(reserve) == 0
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)
    with open_ledger(path, secret=SECRET) as ledger:
        assert ledger.report(SITE).num_events == 4
        spend(ledger, 2)
    shutil.rmtree(folder)


def test_opened_read_only_writes_nothing(path: Path) -> None:
    grow(path, 2)
    with open_ledger(path, secret=SECRET, read_only=True) as ledger:
        assert ledger.report(SITE).num_events == 8
        ledger.verify()
        with pytest.raises(LedgerError, match="read-only"):
            ledger.reserve_one(ask(9))


def test_a_failing_anchor_leaves_the_reservation_spent(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    spend(ledger, 1)

    def fail(*_values: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(LedgerError, match="stays spent"):
            ledger.reserve_one(ask(2))
    assert ledger.report(SITE).num_events == 8


def test_a_failing_commit_leaves_nothing_half_done(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    spend(ledger, 1)
    other = Account("site-9", "later")

    def fail(*_values: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr("fedlora.ledger.journal.Journal._insert", fail)
        with pytest.raises(LedgerError, match="nothing may be released"):
            ledger.reserve_one(ask(2, account=other))
    assert ledger.accounts() == (SITE,)
    spend(ledger, 2, account=other)
    assert ledger.report(other).num_events == 4
    ledger.verify()


def test_event_numbers_of_a_failed_transaction_are_not_reused_for_another_figure(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedlora.accounting import GaussianEvent

    weak, strong = GaussianEvent(100.0), GaussianEvent(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(
            "fedlora.ledger.journal.Journal._insert", lambda *_: (_ for _ in ()).throw(OSError("x"))
        )
        with pytest.raises(LedgerError):
            ledger.reserve_one(ask(1, event=weak, steps=1))
    spend(ledger, 1, event=strong, steps=1)
    assert ledger.report(SITE).epsilon == pytest.approx(epsilon_of(strong, 1e-5).epsilon)


def test_backup_is_consistent_and_putting_it_back_is_refused(
    ledger: Ledger, path: Path, tmp_path: Path
) -> None:
    spend(ledger, 1)
    head = backup(ledger, tmp_path / "backup.db")
    assert head == ledger.head()
    with pytest.raises(LedgerError, match="new file"):
        backup(ledger, tmp_path / "backup.db")
    spend(ledger, 2)
    ledger.close()
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    shutil.copy(tmp_path / "backup.db", path)
    with pytest.raises(LedgerIntegrityError, match="older copy"):
        open_ledger(path, secret=SECRET)


def test_a_lost_write_ahead_log_is_detected(tmp_path: Path) -> None:
    path, log = tmp_path / "ledger.db", tmp_path / "releases"
    run_child(path, log, 4, "after-send", 4)
    Path(f"{path}-wal").unlink()
    with pytest.raises(LedgerIntegrityError):
        open_ledger(path, secret=SECRET)


def test_many_processes_begin_one_ledger_together(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    children = []
    for index in range(4):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with open_ledger(path, secret=SECRET) as ledger:
                    for number in range(3):
                        spend(ledger, number, run_id=f"run-{index}")
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    with open_ledger(path, secret=SECRET) as ledger:
        ledger.verify()
        assert ledger.report(SITE).num_events == 4 * 3 * 4


@pytest.mark.parametrize(("steps", "tight"), [(1, 8.0), (3, 8.0), (2, 1e-3)])
def test_a_refused_event_does_not_stop_the_other_writer(opened: Open, steps: int, tight: float) -> None:
    """A refusal leaves an event's row without an entry; the other process must see it before it numbers its own."""
    first, second = opened(), opened()
    spend(first, 1)
    assert second.report(SITE).num_events == 4
    costly, cheap = PoissonGaussianEvent(0.2, 0.5), PoissonGaussianEvent(9.0, 0.01)
    budget = dataclasses.replace(BUDGET, epsilon=tight)
    assert isinstance(first.reserve([ask(2, event=costly, steps=500, budget=budget)])[0], Refusal)
    spend(second, 3, event=cheap, steps=steps)
    spend(first, 4, event=cheap, steps=1)
    assert first.report(SITE).num_events == second.report(SITE).num_events == 5 + steps
    assert first.verify().head == second.head()
