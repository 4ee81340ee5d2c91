"""Fixtures of the ledger's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ledger_helpers import SECRET

from fedlora.ledger import Ledger, open_ledger


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def opened(path: Path) -> Iterator[Callable[..., Ledger]]:
    """Open ledgers that are closed after the test."""
    ledgers: list[Ledger] = []

    def make(where: Path = path, **options: Any) -> Ledger:
        ledger = open_ledger(where, **{"secret": SECRET, **options})
        ledgers.append(ledger)
        return ledger

    yield make
    for ledger in ledgers:
        ledger.close()


@pytest.fixture
def ledger(opened: Callable[..., Ledger]) -> Ledger:
    return opened()
