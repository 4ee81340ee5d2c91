"""SIGTERM unwinds like Ctrl-C, so that no worker is left behind and whoever asked is told with Ctrl-C's exit code.

An exception that a handler raises can be lost: Python swallows it in finalisers, and Ray in places of its start. So
that somebody asked is also remembered, and every round looks (`check_stopped`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_ASKED: Final = threading.Event()


@contextmanager
def terminations() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt inside; does nothing outside the main thread."""
    if not _in_main_thread():
        yield
        return
    _ASKED.clear()
    interrupt, before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, _stop)
        if interrupt is signal.default_int_handler:
            signal.signal(signal.SIGINT, _stop)
        yield
    finally:
        _set(signal.SIGINT, interrupt)
        _set(signal.SIGTERM, before)


def check_stopped() -> None:
    """Raise KeyboardInterrupt if SIGTERM or Ctrl-C came inside `terminations` and was swallowed."""
    if _ASKED.is_set() and _in_main_thread():
        _ASKED.clear()
        raise KeyboardInterrupt


@contextmanager
def kept_handlers() -> Iterator[None]:
    """Give SIGTERM back the handler that it has now, and raise KeyboardInterrupt if it (or Ctrl-C) came inside.

    Starting Ray sets handlers of its own. One of them fails while Ray's node is half made, with an AttributeError that
    Ray takes for a missing feature: the signal is lost. What the interpreter writes about each signal is not.
    """
    if not _in_main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    ours = {signal.SIGTERM} if before is _stop else set()
    if signal.getsignal(signal.SIGINT) in (_stop, signal.default_int_handler):
        ours.add(signal.SIGINT)
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    told = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(told)
        _set(signal.SIGTERM, before)
        came = b""
        with contextlib.suppress(BlockingIOError):
            came = os.read(read, 4096)
        os.close(read)
        os.close(write)
        if ours.intersection(came):
            raise KeyboardInterrupt


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _set(number: signal.Signals, handler: object) -> None:
    """Set a handler again; one that was not set from Python is the default one."""
    signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]


def _stop(number: int, frame: object) -> None:
    del number, frame
    _ASKED.set()
    raise KeyboardInterrupt
