"""Fixtures that every test may use."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import pytest


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The optional folder of reference values and text beside the checkout."""
    root = Path(__file__).resolve().parents[1]
    for candidate in (os.environ.get("FEDLORA_SHARED_DIR"), root.parent / "shared"):
        if candidate and (Path(candidate) / "reference").is_dir():
            return Path(candidate)
    pytest.skip("the optional folder of reference data is not here (set FEDLORA_SHARED_DIR)")
