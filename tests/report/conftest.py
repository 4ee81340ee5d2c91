"""The tiny world of the simulation tests serves here too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "simulation"))


@pytest.fixture(scope="session")
def tiny_world(tmp_path_factory):
    """A random model and rows on disk."""
    from simulation_helpers import make_world

    return make_world(tmp_path_factory.mktemp("world"))
