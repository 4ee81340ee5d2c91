"""A ledger that is lost is not begun anew unsaid: the key's register tells, and its owner has to accept it."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from ledger_helpers import EVENT, SITE, ask, spend

from fedlora.cli import main as frame
from fedlora.errors import LedgerError, LedgerIntegrityError
from fedlora.ledger import Ledger, load_or_create_secret, open_ledger, register_of
from fedlora.ledger.register import Register
from fedlora.ledger.restoring import accept, restore

SUFFIXES = ("", "-wal", "-shm", ".anchor")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """The key's file, away from the ledger."""
    file = tmp_path / "keys" / "ledger.secret"
    load_or_create_secret(file)
    return file


@pytest.fixture
def reopen(path: Path, key: Path) -> Callable[..., Ledger]:
    """Open the ledger with its key's register."""
    return lambda **more: open_ledger(
        path, secret=load_or_create_secret(key), register=register_of(key), **more
    )


def lose(path: Path) -> None:
    for suffix in SUFFIXES:
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def test_a_ledger_deleted_with_its_anchor_is_not_begun_anew_silently(
    path: Path, key: Path, reopen: Callable[..., Ledger]
) -> None:
    with reopen() as ledger:
        spend(ledger, 1)
    lose(path)
    for create in (True, False):
        with pytest.raises(LedgerIntegrityError, match="begun a ledger before"):
            reopen(create=create)
        assert not path.exists()
    done = accept(str(path), secret=load_or_create_secret(key), reason="disk died", register=register_of(key))
    assert done.missing is None
    with reopen() as ledger:
        spend(ledger, 1)
        report = ledger.report(SITE)
        assert report.num_events == 4
        assert any("begun anew" in text and "disk died" in text for text in report.conditions)
        ledger.verify()
    lose(path)
    with pytest.raises(LedgerIntegrityError, match="begun a ledger before"):
        reopen()


@pytest.mark.parametrize("emptied", [b"", None])
def test_an_emptied_ledger_is_not_begun_anew_silently(
    path: Path, reopen: Callable[..., Ledger], emptied: bytes | None, tmp_path: Path
) -> None:
    with reopen() as ledger:
        spend(ledger, 1)
    lose(path)
    if emptied is None:  # a fresh ledger's tables without an entry
        other = tmp_path / "other.db"
        with open_ledger(other, secret=b"x" * 32):
            pass
        raw = sqlite3.connect(other)
        raw.execute("DROP TRIGGER entries_no_delete")
        raw.execute("DELETE FROM entries")
        raw.commit()
        raw.close()
        shutil.copy(other, path)
    else:
        path.write_bytes(emptied)
    with pytest.raises(LedgerIntegrityError, match="begun a ledger before"):
        reopen()


def test_the_same_key_does_not_begin_a_second_ledger_elsewhere(
    path: Path, key: Path, tmp_path: Path, reopen: Callable[..., Ledger]
) -> None:
    with reopen() as ledger:
        spend(ledger, 1)
    secret, register = load_or_create_secret(key), register_of(key)
    with pytest.raises(LedgerIntegrityError, match="begun a ledger before"):
        open_ledger(tmp_path / "second.db", secret=secret, register=register)
    moved = tmp_path / "moved.db"
    for suffix in ("", ".anchor"):
        shutil.move(f"{path}{suffix}", f"{moved}{suffix}")
    with open_ledger(moved, secret=secret, register=register) as ledger:  # the same one, at another place
        assert ledger.report(SITE).num_events == 4


def test_a_ledger_that_its_key_has_not_begun_is_refused_and_said_to_a_reader(
    path: Path, key: Path, tmp_path: Path, reopen: Callable[..., Ledger]
) -> None:
    with reopen() as ledger:
        spend(ledger, 1)
    secret, other = load_or_create_secret(key), tmp_path / "other.db"
    with open_ledger(other, secret=secret) as ledger:
        spend(ledger, 5)
    with pytest.raises(LedgerIntegrityError, match="not a ledger that its key has begun"):
        open_ledger(other, secret=secret, register=register_of(key))
    with open_ledger(other, secret=secret, register=register_of(key), read_only=True) as ledger:
        assert any("begun another ledger too" in text for text in ledger.report(SITE).conditions)
    with pytest.raises(LedgerIntegrityError, match="no anchor tells"):
        restore(other, tmp_path / "put.db", secret=secret, register=register_of(key))
    accept(str(other), secret=secret, reason="both are used", register=register_of(key))
    with open_ledger(other, secret=secret, register=register_of(key)) as ledger:
        assert any("both are used" in text for text in ledger.report(SITE).conditions)


def test_a_missing_anchor_and_an_older_copy_are_accepted_with_a_reason(
    path: Path, key: Path, tmp_path: Path, reopen: Callable[..., Ledger]
) -> None:
    with reopen() as ledger:
        spend(ledger, 1)
    shutil.copy(path, tmp_path / "old.db")
    with reopen() as ledger:
        spend(ledger, 2)
    secret, register = load_or_create_secret(key), register_of(key)
    with pytest.raises(LedgerError, match="nothing is missing"):
        accept(str(path), secret=secret, reason="why not", register=register)
    Path(f"{path}.anchor").unlink()
    with pytest.raises(LedgerIntegrityError, match="budget accept"):
        reopen()
    assert accept(str(path), secret=secret, reason="anchor deleted", register=register).missing is None
    shutil.copy(tmp_path / "old.db", path)
    with pytest.raises(LedgerIntegrityError, match="older copy"):
        reopen()
    assert accept(str(path), secret=secret, reason="only this copy", register=register).missing == 3
    with reopen() as ledger:
        texts = " ".join(ledger.report(SITE).conditions)
        assert "only this copy" in texts
        assert "3 later ones are missing" in texts
        spend(ledger, 3)


def test_accepting_at_a_wrong_path_makes_no_file(path: Path, key: Path) -> None:
    with pytest.raises(LedgerError, match="nothing tells of an earlier one"):
        accept(
            str(path), secret=load_or_create_secret(key), reason="typed wrongly", register=register_of(key)
        )
    assert not path.exists()


def test_a_used_ledger_without_a_register_is_registered_when_it_is_opened(
    path: Path, key: Path, reopen: Callable[..., Ledger]
) -> None:
    with open_ledger(path, secret=load_or_create_secret(key)) as ledger:
        spend(ledger, 1)
        identity = ledger.ledger_id
    with reopen(read_only=True):
        assert not register_of(key).exists()
    for _ in range(2):
        with reopen():
            assert register_of(key).read_text().count(identity) == 1


@pytest.mark.parametrize("keep", [0, 1, 30, 60, -1])
def test_a_torn_register_never_stops_its_ledger_and_never_starts_another(
    path: Path, key: Path, reopen: Callable[..., Ledger], keep: int
) -> None:
    with reopen() as ledger:
        spend(ledger, 1)
    register = register_of(key)
    register.write_bytes(register.read_bytes()[:keep])
    with reopen() as ledger:
        assert Register(register, load_or_create_secret(key)).known() == (ledger.ledger_id,)
    lose(path)
    with pytest.raises(LedgerIntegrityError, match="begun a ledger before"):
        reopen()


def killed_at(where: str, what: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something in a child process that is killed by SIGKILL at its first write of one kind."""
    from fedlora.ledger.anchor import Anchor
    from fedlora.ledger.journal import Journal

    def die(*_values: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    places: dict[str, tuple[type, str]] = {
        "insert": (Journal, "_insert"), "register": (Register, "add"), "anchor": (Anchor, "write"),
    }  # fmt: skip
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(*places[where], staticmethod(die))
        try:
            what()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("where", ["insert", "register", "anchor"])
def test_killed_while_a_ledger_is_begun_it_goes_on(
    path: Path, key: Path, reopen: Callable[..., Ledger], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_at(where, reopen, monkeypatch)
    with reopen() as ledger:
        spend(ledger, 1)
        assert Register(register_of(key), load_or_create_secret(key)).known() == (ledger.ledger_id,)


@pytest.mark.parametrize("where", ["insert", "register", "anchor"])
def test_killed_while_a_loss_is_accepted_it_stays_refused_or_said(
    path: Path, key: Path, reopen: Callable[..., Ledger], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reopen() as ledger:
        spend(ledger, 1)
    lose(path)
    secret = load_or_create_secret(key)
    killed_at(
        where,
        lambda: accept(str(path), secret=secret, reason="gone", register=register_of(key)),
        monkeypatch,
    )
    try:
        ledger = reopen()
    except LedgerIntegrityError:
        accept(str(path), secret=secret, reason="gone", register=register_of(key))
        ledger = reopen()
    with ledger:
        spend(ledger, 1)
        assert any("gone" in text for text in ledger.report(SITE).conditions)


def test_a_key_in_a_read_only_folder_still_works(
    reopen: Callable[..., Ledger], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = os.open

    def read_only(name: object, flags: int, *more: int) -> int:
        if str(name).endswith(".ledgers"):
            raise PermissionError(13, "Permission denied")
        return opened(name, flags, *more)  # type: ignore[arg-type]

    monkeypatch.setattr("fedlora.ledger.register.os.open", read_only)
    with reopen() as ledger:
        spend(ledger, 1)
    assert "would not be noticed" in caplog.text


def test_the_moved_ledger_of_a_killed_process_is_restored_with_its_log(
    path: Path, key: Path, tmp_path: Path, reopen: Callable[..., Ledger]
) -> None:
    child = os.fork()
    if child == 0:
        ledger = reopen()
        for number in range(1, 4):
            spend(ledger, number)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert Path(f"{path}-wal").exists()
    for suffix in ("", "-wal"):
        shutil.move(f"{path}{suffix}", f"{tmp_path}/away.db{suffix}")
    done = restore(tmp_path / "away.db", path, secret=load_or_create_secret(key), register=register_of(key))
    assert done.missing == 0
    with reopen() as ledger:
        assert ledger.report(SITE).num_events == 12


def test_the_commands_refuse_and_accept_a_lost_ledger(
    path: Path, key: Path, reopen: Callable[..., Ledger], capsys: pytest.CaptureFixture[str]
) -> None:
    with reopen() as ledger:
        ledger.reserve_one(ask(1, event=EVENT))
    lose(path)
    named = ["--key", str(key)]
    assert frame.main(["budget", "show", str(path), *named]) == LedgerIntegrityError.exit_code
    assert "budget accept" in capsys.readouterr().err
    assert frame.main(["budget", "accept", str(path), *named, "--reason", "lost on Tuesday", "--json"]) == 0
    with reopen() as ledger:
        spend(ledger, 1)
    assert frame.main(["budget", "show", str(path), *named]) == 0
    assert "lost on Tuesday" in capsys.readouterr().out


def test_many_processes_begin_one_registered_ledger_together(
    path: Path, key: Path, reopen: Callable[..., Ledger]
) -> None:
    children = []
    for index in range(6):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with reopen() as ledger:
                    spend(ledger, index)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 6
    with reopen() as ledger:
        ledger.verify()
        assert ledger.report(SITE).num_events == 6 * 4
        assert set(Register(register_of(key), load_or_create_secret(key)).known()) == {ledger.ledger_id}
