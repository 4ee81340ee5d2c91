"""Fixtures that every test may use."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
"""The same examples for the same test, whoever runs it, and none that a busy machine is too slow for."""
settings.register_profile("explore", parent=settings.get_profile("same"), derandomize=False)
"""Others every time: `pytest --hypothesis-profile explore`, after the code under a property has changed."""
settings.load_profile("same")


def _listening_to_signals() -> None:
    """Let SIGINT and SIGTERM act as in a process that a terminal started.

    Whoever started this one may have left it deaf to Ctrl-C: a script's background job ignores it, a supervisor's child
    may have it blocked, and programs that tests start inherit either.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


_listening_to_signals()


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Give every test the handlers of a fresh process: what serves until it is told to stop sets its own for good."""
    _listening_to_signals()
    yield
    _listening_to_signals()


def _as_imported(logger: logging.Logger) -> None:
    """Put a logger into the state that importing the package leaves it in."""
    logger.handlers[:] = []
    logger.propagate, logger.disabled = True, False
    logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def package_logging() -> Iterator[None]:
    """Give every test the package's logger as a fresh process has it.

    A command binds it to the stderr of its call and stops its propagation: later tests would write to a stream that is
    closed, and `caplog` would hear them or not by their order.
    """
    logger = logging.getLogger("fedlora")
    _as_imported(logger)  # a module's fixture may have run a command too
    yield
    _as_imported(logger)


@pytest.fixture(autouse=True)
def torchs_own_generator() -> None:
    """Let every test begin with the same numbers of torch's global generator, whichever tests ran before it."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The optional folder of reference values and text beside the checkout."""
    root = Path(__file__).resolve().parents[1]
    for candidate in (os.environ.get("FEDLORA_SHARED_DIR"), root.parent / "shared"):
        if candidate and (Path(candidate) / "reference").is_dir():
            return Path(candidate)
    pytest.skip("the optional folder of reference data is not here (set FEDLORA_SHARED_DIR)")


ALLOWED_SKIPS = Path(__file__).with_name("allowed_skips.txt")


def _allowed_skips() -> dict[str, str]:
    """Test id prefix to reason, for tests that may be skipped even in CI."""
    lines = [line.strip() for line in ALLOWED_SKIPS.read_text(encoding="utf-8").splitlines()]
    return dict(line.split("  ", 1) for line in lines if line and not line.startswith("#"))


def _unexpected_skips(config) -> list[str]:
    """Ids of skipped tests that do not stand in allowed_skips.txt."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", []) if reporter else []
    allowed = _allowed_skips()
    return [r.nodeid for r in reports if not any(r.nodeid.startswith(prefix) for prefix in allowed)]


def pytest_sessionfinish(session, exitstatus) -> None:
    """Under CI=true a skipped test fails the run unless it stands in allowed_skips.txt."""
    if os.environ.get("CI") == "true" and exitstatus == 0 and _unexpected_skips(session.config):
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter, exitstatus, config) -> None:
    """Name the skipped tests that fail the run."""
    if os.environ.get("CI") == "true" and (skips := _unexpected_skips(config)):
        terminalreporter.write_sep("=", "skipped, but not in tests/allowed_skips.txt")
        for nodeid in skips:
            terminalreporter.write_line(nodeid)
