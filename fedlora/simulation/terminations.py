"""SIGTERM unwinds like Ctrl-C, so that no worker is left behind and whoever asked is told with Ctrl-C's exit code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def terminations() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt inside; does nothing outside the main thread."""
    with kept_handler():
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _stop)
        yield


@contextmanager
def kept_handler() -> Iterator[None]:
    """Give SIGTERM back the handler that it has now: starting Ray sets one that aborts the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _stop(number: int, frame: object) -> None:
    del number, frame
    raise KeyboardInterrupt
