"""Fixed-point numbers in the ring of integers modulo 2^bits, and shares of secrets.

A number x in [-limit, limit] becomes round(x * scale) with scale = floor((2^(bits-1) - 1) / clients) / limit,
so that the sum of `clients` of them cannot wrap. Rounding is stochastic (unbiased): the error of one client's
number is below 1 / scale = about limit * clients / 2^(bits-1). A uniform mask hides a ring element perfectly.

Secrets are shared by Shamir's scheme ("How to Share a Secret") over the prime field of 2^521 - 1.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from fedlora.errors import NonFinitePayloadError, PrivacyParameterError, TooFewRepliesError

PRIME: Final = 2**521 - 1
Ring = npt.NDArray[Any]


@dataclass(frozen=True)
class FixedPoint:
    """PUBLIC. Encoding of one round.

    Attributes:
        limit: largest magnitude of one number; larger ones are clipped to it.
        clients: most clients that can be in a sum.
        bits: 32 (as many bytes as float32) or 64.

    Raises:
        PrivacyParameterError: if a value is out of range, or 32 bits leave fewer than 8 bits of resolution.
    """

    limit: float
    clients: int
    bits: Literal[32, 64] = 32

    def __post_init__(self) -> None:
        """Refuse encodings without resolution."""
        if not (math.isfinite(self.limit) and self.limit > 0):
            raise PrivacyParameterError(f"secure aggregation: limit {self.limit}; allowed: finite, above 0")
        if self.bits not in (32, 64) or not 1 <= self.clients <= 2**23:
            raise PrivacyParameterError(
                f"secure aggregation: {self.clients} clients in {self.bits} bits; allowed: 1 to 2^23 in 32 or 64 bits"
            )

    @property
    def dtype(self) -> np.dtype[Any]:
        """Unsigned dtype of ring elements; numpy's arithmetic on it wraps modulo 2^bits."""
        return np.dtype(np.uint32 if self.bits == 32 else np.uint64)

    @property
    def levels(self) -> int:
        """Largest encoded magnitude of one client."""
        top = 2**31 - 1 if self.bits == 32 else 2**52
        return top // self.clients

    @property
    def scale(self) -> float:
        """Encoded units per unit."""
        return self.levels / self.limit

    @property
    def max_error(self) -> float:
        """Bound of one client's rounding error per number (unclipped)."""
        return 1.0 / self.scale

    def encode(self, values: npt.NDArray[np.float32], rng: np.random.Generator) -> Ring:
        """Encode one client's numbers.

        Args:
            values: SENSITIVE or noised; finite.
            rng: coins of the stochastic rounding.

        Raises:
            NonFinitePayloadError: if a number is not finite.
        """
        scaled = values.astype(np.float64)
        if not bool(np.isfinite(scaled).all()):
            raise NonFinitePayloadError(
                "secure aggregation: an update has non-finite numbers; nothing is sent"
            )
        scaled = np.clip(scaled, -self.limit, self.limit) * self.scale
        low = np.floor(scaled)
        whole = low + (rng.random(scaled.shape) < scaled - low)
        signed = np.clip(whole, -self.levels, self.levels).astype(np.int64)
        ring: Ring = signed.astype(self.dtype)
        return ring

    def decode(self, total: Ring) -> npt.NDArray[np.float64]:
        """Decode a sum of at most `clients` encoded vectors."""
        signed = total.view(np.int32 if self.bits == 32 else np.int64)
        return signed.astype(np.float64) / self.scale


def share_secret(secret: bytes, holders: Sequence[int], threshold: int) -> dict[int, int]:
    """Split a secret of at most 64 bytes so that any `threshold` shares give it back and fewer tell nothing.

    Args:
        secret: what is shared.
        holders: distinct positive numbers, the points of the polynomial.
        threshold: 1 <= threshold <= len(holders).

    Raises:
        PrivacyParameterError: if the numbers do not fit.
    """
    value = int.from_bytes(secret, "big")
    if not 1 <= threshold <= len(holders) or len(set(holders)) != len(holders) or min(holders) < 1:
        raise PrivacyParameterError(
            f"secret sharing: threshold {threshold} of {len(holders)} holders; need distinct holders, 1 <= threshold"
        )
    if len(secret) > 64:
        raise PrivacyParameterError("secret sharing: secrets of at most 64 bytes")
    terms = [value, *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    shares = {}
    for point in holders:
        total = 0
        for term in reversed(terms):
            total = (total * point + term) % PRIME
        shares[point] = total
    return shares


def combine_shares(shares: Mapping[int, int], threshold: int, length: int) -> bytes:
    """Give back a secret of `length` bytes from at least `threshold` shares.

    Raises:
        TooFewRepliesError: if there are fewer shares.
        PrivacyParameterError: if the shares do not belong together.
    """
    if len(shares) < threshold:
        raise TooFewRepliesError(
            f"secure aggregation: {len(shares)} shares of a secret, {threshold} needed; the sum stays hidden"
        )
    points = dict(sorted(shares.items())[:threshold])
    value = 0
    for point, share in points.items():
        top = bottom = 1
        for other in points:
            if other != point:
                top = top * other % PRIME
                bottom = bottom * (other - point) % PRIME
        value = (value + share * top * pow(bottom, -1, PRIME)) % PRIME
    if value >= 256**length:
        raise PrivacyParameterError(
            "secure aggregation: shares do not belong to one secret; the round is dropped"
        )
    return value.to_bytes(length, "big")
