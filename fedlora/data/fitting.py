"""Do the records of a simulated federation fit the task? Found out before the first round, not at a chance draw."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Final

import numpy as np

from fedlora.data.rows import Index, Rows
from fedlora.data.tasks.base import Task, encode_rows

SECONDS: Final = 5.0
"""Time that the check may take; records that it does not reach are checked when they are drawn."""

_LOG = logging.getLogger(__name__)


def check_records(task: Task, rows: Rows, parts: Mapping[str, Index], *, seconds: float = SECONDS) -> int:
    """Encode every client's training records once, in the order of the source, for a bounded time.

    For simulations, whose records are the user's own. A site checks its own records after its first reservation.

    Args:
        task: bound to its tokenizer.
        rows: SENSITIVE. All rows.
        parts: client to positions in `rows`.
        seconds: after this time the rest is left to the draws.

    Returns:
        How many records were checked.

    Raises:
        DataError: naming file and row of the first record that does not fit, never its content.
    """
    places = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *parts.values()]))
    end = time.perf_counter() + seconds
    encoded = encode_rows(task, rows, places.tolist())
    for count in range(len(places)):
        if time.perf_counter() > end:
            _LOG.info("checked %d of %d records; the others are checked when drawn", count, len(places))
            return count
        next(encoded)
    next(encoded, None)  # the look at the file after the pass
    return len(places)
