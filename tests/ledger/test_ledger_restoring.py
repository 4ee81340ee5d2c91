"""A lost ledger comes back from a copy: complete, or with what is missing accepted and said in every report."""

from __future__ import annotations

from pathlib import Path

import pytest
from ledger_helpers import SECRET, SITE, spend

from fedlora.cli import main as frame
from fedlora.errors import LedgerError, LedgerIntegrityError
from fedlora.ledger import open_ledger
from fedlora.ledger.exporting import backup
from fedlora.ledger.restoring import restore


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """A used ledger that was copied and then lost (its anchor is still there)."""
    ledger, copy = tmp_path / "ledger.db", tmp_path / "copy.db"
    with open_ledger(ledger, secret=SECRET) as opened:
        for number in range(1, 4):
            spend(opened, number)
        backup(opened, copy)
    return ledger, copy


def lose(ledger: Path, more: int = 0, *, anchor: bool = False) -> None:
    with open_ledger(ledger, secret=SECRET) as opened:
        for number in range(10, 10 + more):
            spend(opened, number)
    ledger.unlink()
    if anchor:
        Path(f"{ledger}.anchor").unlink()


def test_the_newest_copy_comes_back_without_a_word(places: tuple[Path, Path]) -> None:
    ledger, copy = places
    lose(ledger)
    done = restore(copy, ledger, secret=SECRET)
    assert done.missing == 0
    with open_ledger(ledger, secret=SECRET) as opened:
        report = opened.report(SITE)
        assert report.num_events == 12
        assert not any("restored" in text for text in report.conditions)
        assert opened.head() == done.head
        spend(opened, 20)


@pytest.mark.parametrize(("more", "anchor"), [(2, False), (0, True), (2, True)])
def test_a_copy_that_may_lack_entries_needs_a_reason_that_reports_repeat(
    places: tuple[Path, Path], more: int, anchor: bool
) -> None:
    ledger, copy = places
    lose(ledger, more, anchor=anchor)
    with pytest.raises(LedgerIntegrityError, match="accept it with a reason"):
        restore(copy, ledger, secret=SECRET)
    assert not ledger.exists()
    done = restore(copy, ledger, secret=SECRET, reason="the disk died")
    assert done.missing == (None if anchor else 2 * more)
    for number in (30, 31):
        with open_ledger(ledger, secret=SECRET) as opened:
            said = [text for text in opened.report(SITE).conditions if "the disk died" in text]
            assert len(said) == 1
            assert ("unknown number" if anchor else f"{2 * more} later ones are missing") in said[0]
            opened.verify()
            spend(opened, number)


def test_a_head_that_the_server_knows_still_shows_what_is_missing(places: tuple[Path, Path]) -> None:
    ledger, copy = places
    with open_ledger(ledger, secret=SECRET) as opened:
        spend(opened, 10)
        newest = opened.head()
    ledger.unlink()
    restore(copy, ledger, secret=SECRET, reason="accepted")
    with open_ledger(ledger, secret=SECRET) as opened, pytest.raises(LedgerIntegrityError):
        opened.known_head_check(newest)


def test_a_ledger_that_is_there_is_never_replaced(places: tuple[Path, Path]) -> None:
    ledger, copy = places
    before = ledger.read_bytes()
    with pytest.raises(LedgerError, match="is there already"):
        restore(copy, ledger, secret=SECRET, reason="whatever")
    assert ledger.read_bytes() == before


def test_damaged_edited_and_foreign_copies_are_refused(places: tuple[Path, Path], tmp_path: Path) -> None:
    ledger, copy = places
    lose(ledger)
    good = copy.read_bytes()
    for number in range(4096, len(good), 4099):
        bad = bytearray(good)
        bad[number] ^= 0xFF
        copy.write_bytes(bytes(bad))
        try:
            done = restore(copy, ledger, secret=SECRET)
        except LedgerError:
            assert not ledger.exists()
            continue
        assert done.missing == 0  # a byte that nothing depends on
        with open_ledger(ledger, secret=SECRET) as opened:
            assert opened.report(SITE).num_events == 12
        ledger.unlink()
    copy.write_bytes(good)
    with pytest.raises(LedgerError):
        restore(copy, ledger, secret=b"another key of thirty-two bytes!")
    with open_ledger(tmp_path / "other.db", secret=SECRET) as opened:
        spend(opened)
        backup(opened, tmp_path / "other-copy.db")
    with pytest.raises(LedgerIntegrityError, match="another ledger"):
        restore(tmp_path / "other-copy.db", ledger, secret=SECRET, reason="no")
    assert not ledger.exists()
    assert not list(tmp_path.glob(".restore-*"))


def test_the_command_restores(places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    ledger, copy = places
    key = ledger.parent / "ledger.secret"
    key.write_bytes(SECRET)
    key.chmod(0o600)
    lose(ledger, 1)
    arguments = ["budget", "restore", str(copy), str(ledger)]
    assert frame.main(arguments) == LedgerIntegrityError.exit_code
    assert frame.main([*arguments, "--accept-loss", "disk died", "--json"]) == 0
    assert '"missing_entries": 2' in capsys.readouterr().out
    assert frame.main(["budget", "show", str(ledger)]) == 0
    assert "disk died" in capsys.readouterr().out
