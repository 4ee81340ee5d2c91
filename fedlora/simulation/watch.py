"""After kill -9 of the driver nobody stops Ray's own agents, which wait a minute and more for their head.

A guard is a small process that is started before Ray is. What Ray starts, at whatever moment and from whatever
process, inherits a mark in its environment. If the driver dies without a good-bye, the guard kills all that bear
the mark: there is no list of processes that could be too old, and no moment of the start that is not covered.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

MARK: Final = "FEDLORA_RAY_OWNER"
GRACE_SECONDS: Final = 2
"""Time that Ray's processes have to end by themselves."""
_KEEP_ENVIRONMENT: Final = "SPT_NOENV"
"""setproctitle's own switch: without it, agents and workers write their titles over what /proc shows of their marks."""
_BYE: Final = b"bye"
_PASSES: Final = 20
_PROGRAM: Final = """
import os, select, signal, sys, time
mark, parent, grace = sys.argv[1].encode(), int(sys.argv[2]), float(sys.argv[3])
def bears(pid):
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            return mark in stream.read().split(b"\\0")
    except OSError:
        return False
said = b""
while os.getppid() == parent:
    if select.select([0], [], [], 1.0)[0]:
        part = os.read(0, 16)
        said += part
        if not part:
            break
if said != b"bye":
    time.sleep(grace)
    calm, passes = 0, 0
    while calm < 3 and passes < 300:
        passes += 1
        found = [pid for pid in os.listdir("/proc") if pid.isdigit() and bears(pid)]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in found:
                try:
                    os.kill(int(pid), number)
                except OSError:
                    pass
        calm = 0 if found else calm + 1
        time.sleep(0.2)
"""


def marked(mark: str) -> list[int]:
    """Return the processes whose environment holds a mark ("name=value"); none where there is no /proc."""
    sought, found = mark.encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if sought in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


class Guard:
    """Kills what bears its mark some seconds after this process's death; `close` calls it off.

    Attributes:
        environment: what everything that must end with this process inherits.
    """

    def __init__(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """Start watching; where there is no /proc nothing is found and nothing killed."""
        self._mark = f"{MARK}={secrets.token_hex(16)}"
        name, value = self._mark.split("=")
        self.environment = {name: value, _KEEP_ENVIRONMENT: "1"}
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, self._mark, str(os.getpid()), str(grace_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def abort(self) -> None:
        """Kill what bears the mark, now; the guard looks again a moment later, for what had not begun to run."""
        for _ in range(_PASSES):
            found = marked(self._mark)
            if not found:
                break
            for number in (signal.SIGSTOP, signal.SIGKILL):  # what is stopped starts nothing meanwhile
                for pid in found:
                    with suppress(OSError):
                        os.kill(pid, number)
            time.sleep(0.05)
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()

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
