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


FAMILY = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"])
time.sleep(600)
"""


def test_what_an_interrupted_start_leaves_is_killed_and_what_was_there_stays() -> None:
    script = f"""
import os, subprocess, sys, time
from fedlora.procfs import descendants
from fedlora.simulation.watch import kill_new_descendants
old = subprocess.Popen(["sleep", "600"])
kept = descendants(os.getpid())
new = subprocess.Popen([sys.executable, "-c", {FAMILY!r}])
while len(descendants(os.getpid())) < 4:
    time.sleep(0.05)
kill_new_descendants(kept)
new.wait()
left = descendants(os.getpid())
while len(left) > 1:
    time.sleep(0.05)
    left = descendants(os.getpid())
print(list(left) == [old.pid])
old.kill()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "True"
