"""Keys, masks and sealed shares, from `cryptography`'s primitives only.

X25519 key agreement, HKDF-SHA256 to one key per use, ChaCha20 as the mask's keystream, ChaCha20-Poly1305
around shares in transit. Every derived key is bound to run, round and both clients.
"""

from __future__ import annotations

import os
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedlora.errors import AuthenticationError

KEY_BYTES: Final = 32
_PIECE: Final = 1 << 22


def new_private() -> bytes:
    """Return a fresh X25519 private key (raw) from the operating system's entropy."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_of(private: bytes) -> bytes:
    """Return the raw public key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes, context: bytes) -> bytes:
    """Return a 32-byte key that only both holders can compute, bound to `context`.

    Raises:
        AuthenticationError: if the other key is not a usable X25519 public key.
    """
    try:
        secret = X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(public)
        )
    except ValueError:
        raise AuthenticationError(
            "secure aggregation: a peer's public key is not usable; the round is dropped"
        ) from None
    return derive(secret, context)


def usable(private: bytes, public: bytes) -> bool:
    """Whether a raw public key gives a secret at all (points of low order give none, whatever the private key)."""
    try:
        agree(private, public, b"usable")
    except AuthenticationError:
        return False
    return True


def derive(secret: bytes, context: bytes) -> bytes:
    """Return a 32-byte key from a secret, bound to `context` (HKDF-SHA256)."""
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=context).derive(secret)


def mask_of(key: bytes, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return `count` uniform ring elements: the ChaCha20 keystream of a key that is used once.

    Args:
        key: 32 bytes, for one mask of one round.
        count: numbers.
        dtype: uint32 or uint64.
    """
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    out = np.empty(count, dtype=dtype)
    view = memoryview(cast(Any, out)).cast("B") if count else memoryview(b"")
    zeros = bytes(min(_PIECE, len(view)))
    for start in range(0, len(view), _PIECE):
        piece = view[start : start + _PIECE]
        stream.update_into(zeros[: len(piece)], piece)
    return out


def seal(key: bytes, plain: bytes, context: bytes) -> bytes:
    """Encrypt and authenticate; the random nonce travels in front."""
    nonce = os.urandom(12)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, plain, context)


def unseal(key: bytes, sealed: bytes, context: bytes) -> bytes:
    """Decrypt what `seal` made.

    Raises:
        AuthenticationError: if it was altered or belongs elsewhere.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:12], sealed[12:], context)
    except (InvalidTag, ValueError):
        raise AuthenticationError(
            "secure aggregation: a sealed share was altered or belongs to another round; it is not used"
        ) from None
