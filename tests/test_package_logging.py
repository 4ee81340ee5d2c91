"""Tests do not hand their logging on to the tests after them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

TESTS = """
import io
import logging
import sys

import pytest

from fedlora.cli.common import setup_logging


def command(monkeypatch):
    stream = io.StringIO()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", stream)
        setup_logging(level="error")
    stream.close()


@pytest.fixture(scope="module")
def shared():
    with pytest.MonkeyPatch.context() as patched:
        command(patched)


def test_a_command(monkeypatch):
    command(monkeypatch)


def test_later(caplog, capfd):
    logging.getLogger("fedlora.somewhere").warning("heard by the later test")
    assert "heard by the later test" in caplog.text
    assert "Logging error" not in capfd.readouterr().err


def test_after_a_fixture_of_the_module(shared, caplog):
    logging.getLogger("fedlora.somewhere").warning("heard all the same")
    assert "heard all the same" in caplog.text
"""


def test_a_commands_logging_ends_with_its_test(tmp_path: Path) -> None:
    """Its handler holds the stderr of the call, which is closed by then, and it stops what `caplog` listens to."""
    for name in ("conftest.py", "allowed_skips.txt"):
        shutil.copy(Path(__file__).with_name(name), tmp_path)
    (tmp_path / "test_order.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
