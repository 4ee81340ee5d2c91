"""After kill -9 of the driver nobody stops Ray's own agents, which wait a minute and more for their head.

The watcher is a small process that holds the other end of a pipe. If the pipe closes without a good-bye, the
driver is dead, and what it had started is killed, each process only if it is still the one that was noted.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from fedlora.procfs import descendants, process_start

GRACE_SECONDS: Final = 5
"""Time that Ray's processes have to end by themselves."""
_BYE: Final = b"bye"
_PASSES: Final = 20
_PROGRAM: Final = """
import os, signal, sys, time
if sys.stdin.buffer.read() != b"bye":
    time.sleep(float(sys.argv[1]))
    for one in sys.argv[2:]:
        pid, _, begun = one.partition(":")
        try:
            with open("/proc/" + pid + "/stat") as stream:
                if stream.read().rsplit(")", 1)[1].split()[19] == begun:
                    os.kill(int(pid), signal.SIGKILL)
        except (OSError, IndexError):
            pass
"""


def kill_new_descendants(kept: Mapping[int, str]) -> None:
    """Kill every process below this one but those that are kept (process id to start time).

    Each is stopped before any is killed: none of them can start another, which would lose its parent and stay.
    """
    stopped: dict[int, str] = {}
    for _ in range(_PASSES):
        found = {pid: begun for pid, begun in descendants(os.getpid()).items() if kept.get(pid) != begun}
        if found.keys() <= stopped.keys():
            break
        for pid, begun in found.items():
            _signal(pid, begun, signal.SIGSTOP)
        stopped |= found
    for pid, begun in stopped.items():
        _signal(pid, begun, signal.SIGKILL)


def _signal(pid: int, begun: str, number: signal.Signals) -> None:
    if process_start(pid) == begun:
        with suppress(OSError):
            os.kill(pid, number)


class Watcher:
    """Kills this process's present descendants some seconds after its death; `close` calls it off."""

    def __init__(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """Note the descendants and start watching; does nothing where there is no /proc."""
        self._process: subprocess.Popen[bytes] | None = None
        noted = [f"{pid}:{begun}" for pid, begun in sorted(descendants(os.getpid()).items())]
        if noted:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, str(grace_seconds), *noted],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def close(self) -> None:
        """Say good-bye; safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.communicate(_BYE, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            process.kill()
            process.wait()
