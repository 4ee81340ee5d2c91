"""One tiny world for all simulation tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulation_helpers import make_world


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and rows."""
    return make_world(tmp_path_factory.mktemp("world"))
