"""Records that are kept out of training."""

from __future__ import annotations

import hashlib

import numpy as np

from fedlora.data.rows import Index


def split_validation(index: Index, fraction: float, seed: int) -> tuple[Index, Index]:
    """Split one client's records into (training, validation) by a public coin of each record's own place.

    A record that is there or not changes no other's coin. A share of exact size, drawn from a client's number of
    records, would train on other records throughout once one is missing, and no epsilon of one record would hold.

    Args:
        index: the client's positions in the source.
        fraction: expected validation share in [0, 1); small clients may have none, or nothing else.
        seed: the experiment seed; the same seed gives the same coins.
    """
    coins = np.array([_coin(seed, int(place)) for place in index], dtype=np.float64)
    held = coins < fraction
    return index[~held], index[held]


def _coin(seed: int, place: int) -> float:
    digest = hashlib.sha256(f"validation|{seed}|{place}".encode()).digest()
    return int.from_bytes(digest[:6], "little") / 2.0**48
