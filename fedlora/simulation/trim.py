"""Keep a worker's resident memory flat: give freed pages back to the system when they have piled up.

Every Poisson draw has another size, so freed tensors leave gaps that the next ones do not fit; glibc keeps the pages.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any, Final

GROWTH: Final = 1.1
"""Pages are given back once resident memory exceeds its last level by so much."""


class Trimmer:
    """Calls glibc's `malloc_trim` where resident memory has grown; does nothing elsewhere."""

    def __init__(self, growth: float = GROWTH) -> None:
        """Find the function."""
        self._growth, self._level = growth, 0
        try:
            self._trim: Any = ctypes.CDLL(None).malloc_trim
        except (OSError, AttributeError, TypeError):
            self._trim = None

    def __call__(self) -> None:
        """Give pages back if there is reason to."""
        if self._trim is None or resident_bytes() < self._growth * self._level:
            return
        self._trim(0)
        self._level = resident_bytes()


def resident_bytes() -> int:
    """Return this process's resident memory; 0 where the system does not tell."""
    try:
        fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
