"""The tiny world of the simulation tests serves here too; every test draws the same numbers each time."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedlora.adapters import projection_recipe
from fedlora.mechanisms import noise
from fedlora.training.sampling import OsCoins

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "simulation"))


@pytest.fixture(autouse=True)
def same_draws(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a key of the test's own in the place of the operating system's entropy.

    An audit's verdict is right with high probability only; whether a test passes must not hang on a draw. The noise
    itself comes out of the very code that draws real noise, one call after the other gives other numbers, and what
    must not be seeded still says so by itself.
    """
    digest = hashlib.sha512(request.node.nodeid.encode()).digest()
    stream, coins = noise._Keystream(), np.random.default_rng(list(digest[48:]))
    stream._context = Cipher(algorithms.AES(digest[:32]), modes.CTR(digest[32:48])).encryptor()
    stream._left, stream._pid = noise._REKEY_BYTES, os.getpid()
    fresh = np.random.default_rng
    monkeypatch.setattr(noise, "_STREAM", stream)
    monkeypatch.setattr(
        OsCoins, "words", lambda self, count: coins.integers(0, 2**64, count, dtype=np.uint64)
    )
    monkeypatch.setattr(projection_recipe, "new_projection_seed", lambda: coins.bytes(32).hex())
    monkeypatch.setattr(
        np.random,
        "default_rng",
        lambda seed=None: fresh(int(coins.integers(2**63)) if seed is None else seed),
    )
