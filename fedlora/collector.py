"""Hold Python's garbage collector while much is imported or loaded: all of it stays, so looking for garbage is in vain.

Importing torch, transformers and PEFT makes a million objects; the collector walks them again and again, for a quarter
of the time that the imports take.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_collector() -> Iterator[None]:
    """Do not collect inside; what is alive afterwards is never looked at again (`gc.freeze`).

    For processes of our own only: in somebody's notebook freezing would keep garbage that is not ours.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
