"""Tests do not hand their logging or their signal handlers on to the tests after them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LOGGING = """
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


SIGNALS = """
import os
import signal

import pytest

from fedlora.cli.processes import StopSignals


@pytest.fixture(scope="module")
def shared():
    StopSignals()


def test_a_server():
    StopSignals()


def test_later():
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_after_a_fixture_of_the_module(shared):
    pass


def test_after_that():
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
"""

DEAF = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def run(folder: Path, tests: str, *before: str) -> str:
    for name in ("conftest.py", "allowed_skips.txt"):
        shutil.copy(Path(__file__).with_name(name), folder)
    (folder / "test_order.py").write_text(tests)
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", str(folder)]
    done = subprocess.run(
        [sys.executable, *before, *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_commands_logging_ends_with_its_test(tmp_path: Path) -> None:
    """Its handler holds the stderr of the call, which is closed by then, and it stops what `caplog` listens to."""
    assert "3 passed" in run(tmp_path, LOGGING)


@pytest.mark.parametrize("before", [(), ("-c", DEAF)], ids=["plain", "started deaf"])
def test_ctrl_c_reaches_each_test_whatever_ran_before(tmp_path: Path, before: tuple[str, ...]) -> None:
    """What serves until it is told to stop keeps its handlers; a script's background job ignores Ctrl-C."""
    assert "4 passed" in run(tmp_path, SIGNALS, *before)
