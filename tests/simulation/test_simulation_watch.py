"""The watcher ends what a killed process leaves behind, and nothing after a good-bye."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedlora.simulation.watch import Watcher, descendants

PARENT = """
import subprocess, sys, time
from fedlora.simulation.watch import Watcher
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
watcher = Watcher(0.2)
if sys.argv[1] == "bye":
    watcher.close()
print(child.pid, flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("bye", [True, False])
def test_h32_children_of_a_killed_process_end_unless_the_watcher_was_called_off(bye: bool) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, "bye" if bye else "watch"], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + (1.5 if bye else 120.0)
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(child) == bye
    if bye:
        os.kill(child, 9)


def test_a_watcher_leaves_no_process_of_its_own() -> None:
    before = set(descendants(os.getpid()))  # another test's may be on their way out
    child = subprocess.Popen(["sleep", "600"])
    try:
        watcher = Watcher()
        assert child.pid in descendants(os.getpid())
        watcher.close()
        watcher.close()
        assert set(descendants(os.getpid())) - before == {child.pid}
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
