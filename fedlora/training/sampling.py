"""Poisson sampling: every record flips its own coin in every step.

Coins come from operating-system entropy (or, in tests, from a seeded generator that marks the run
"no privacy"); never from the experiment's seed. Batch sizes are SENSITIVE: they stay in the trainer.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedlora.errors import PrivacyParameterError

_FULL: Final = 2.0**64


class CoinSource(Protocol):
    """A source of uniform 64-bit words."""

    private: bool
    """True if nobody can repeat the draws (cryptographic, unseeded)."""

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        """Return `count` independent uniform 64-bit words."""


class OsCoins:
    """Coins from the operating system's cryptographic generator."""

    private = True

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        """Return `count` words of `os.urandom`."""
        return np.frombuffer(os.urandom(8 * count), dtype=np.uint64)


class KeptCoins:
    """Coins that whoever holds a round's key can draw again: a simulation's driver, for a worker that died.

    A second draw under the same reservation would depend on why the first worker died: memory runs out for large
    draws, and the sample that is released would be no Poisson sample any more. AES-256 in counter mode under
    HMAC-SHA256(key, client, round).

    Args:
        key: 32 bytes of the operating system's entropy, made for one message and never written down. SENSITIVE.
        client: logical client id.
        server_round: round number.
    """

    private = True

    def __init__(self, key: bytes, client: str, server_round: int) -> None:
        """Derive the client's own stream."""
        if len(key) != 32:
            raise PrivacyParameterError(f"coins: got a key of {len(key)} bytes; needed 32")
        own = hmac.digest(key, f"{server_round}|{client}".encode(), "sha256")
        self._stream = Cipher(algorithms.AES(own), modes.CTR(bytes(16))).encryptor()

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        """Return the next `count` words of the stream."""
        return np.frombuffer(self._stream.update(bytes(8 * count)), dtype=np.uint64)


class SeededCoins:
    """TEST ONLY. Repeatable coins per (seed, client, round); runs that use them have no privacy."""

    private = False

    def __init__(self, seed: int, client: str, server_round: int) -> None:
        """Derive an own Philox stream from the three names."""
        digest = hashlib.sha256(f"fedlora-test-coins|{seed}|{client}|{server_round}".encode()).digest()
        self._generator = np.random.Generator(np.random.Philox(int.from_bytes(digest[:16], "little")))

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        """Return the next `count` words of the stream."""
        return self._generator.integers(0, 2**64, size=count, dtype=np.uint64)


class PoissonSampler:
    """Independent inclusion of each record with probability `sample_rate`.

    The realised probability is floor(sample_rate * 2^64) / 2^64: never above the stated rate.

    Args:
        num_records: SENSITIVE. Number of the client's records, >= 0.
        sample_rate: PUBLIC. In (0, 1].
        source: where the coins come from.

    Raises:
        PrivacyParameterError: if the rate is not finite or not in (0, 1], or num_records < 0.

    Example:
        >>> PoissonSampler(3, 1.0, OsCoins()).draw().tolist()
        [0, 1, 2]
    """

    def __init__(self, num_records: int, sample_rate: float, source: CoinSource) -> None:
        """Check the rate and keep the source."""
        if not math.isfinite(sample_rate) or not (0.0 < sample_rate <= 1.0):
            raise PrivacyParameterError(f"sample_rate: got {sample_rate}; allowed (0, 1]")
        if num_records < 0:
            raise PrivacyParameterError("num_records: must not be negative; count the client's records again")
        self._num_records = num_records
        self._source = source
        self._everyone = sample_rate == 1.0
        self._threshold = np.uint64(0) if self._everyone else np.uint64(math.floor(sample_rate * _FULL))

    @property
    def private(self) -> bool:
        """True if the coins cannot be repeated."""
        return self._source.private

    def draw(self) -> npt.NDArray[np.int64]:
        """Draw one batch.

        Returns:
            SENSITIVE. Indices of the included records, ascending, int64, possibly empty.
        """
        if self._everyone:
            return np.arange(self._num_records, dtype=np.int64)
        coins = self._source.words(self._num_records) < self._threshold
        return np.flatnonzero(coins).astype(np.int64)


class ShuffleSampler:
    """Passes over shuffled records in batches of a fixed size; for runs WITHOUT privacy only.

    Its batches are not independent inclusions, so no amplification may be claimed for them: under a
    privacy unit the trainer refuses `training.sampling: shuffle`.

    Args:
        num_records: number of the client's records.
        batch_size: records per batch, >= 1; the last batch of a pass may be smaller.
        generator: source of the shuffles (the experiment seed is fine here).
    """

    private = False

    def __init__(self, num_records: int, batch_size: int, generator: np.random.Generator) -> None:
        """Start before the first pass."""
        self._num_records, self._batch_size = num_records, batch_size
        self._generator = generator
        self._pending: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def draw(self) -> npt.NDArray[np.int64]:
        """Return the next batch's indices; empty only for a client without records."""
        if len(self._pending) == 0:
            self._pending = self._generator.permutation(self._num_records).astype(np.int64)
        batch, self._pending = self._pending[: self._batch_size], self._pending[self._batch_size :]
        return batch
