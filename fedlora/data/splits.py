"""Training and validation records inside one client."""

from __future__ import annotations

import hashlib

import numpy as np

from fedlora.data.rows import Index


def split_validation(index: Index, fraction: float, seed: int, client: str) -> tuple[Index, Index]:
    """Split one client's records into (training, validation); the same for the same seed.

    A share that rounds down to no record gives an empty validation part: the client then has
    no metric, and training records are never evaluated in its place.

    Args:
        index: the client's positions.
        fraction: validation share in [0, 1).
        seed: the experiment seed.
        client: the client's id.
    """
    count = int(len(index) * fraction)
    if count == 0:
        return index, np.empty(0, dtype=np.int64)
    digest = hashlib.sha256(f"validation|{seed}|{client}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    order = generator.permutation(len(index))
    return np.sort(index[order[count:]]), np.sort(index[order[:count]])
