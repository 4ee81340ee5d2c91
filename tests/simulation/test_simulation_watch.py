"""The guard ends what bears its mark once its process is dead, and nothing else; nothing after a good-bye."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedlora.errors import SimulationError
from fedlora.procfs import descendants
from fedlora.simulation import cluster
from fedlora.simulation.watch import Guard, marked

PARENT = """
import os, subprocess, sys, time
from fedlora.simulation.watch import Guard
foreign = subprocess.Popen(["sleep", "600"], start_new_session=True)
guard = Guard(0.2)
child = subprocess.Popen(["sleep", "600"], start_new_session=True, env={**os.environ, **guard.environment})
if sys.argv[1] == "bye":
    guard.close()
if sys.argv[1] == "forked" and os.fork() == 0:
    time.sleep(600)
print(child.pid, foreign.pid, flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


@pytest.mark.parametrize("how", ["bye", "killed", "forked"])
def test_h32_children_of_a_killed_process_end_unless_the_guard_was_called_off(how: str) -> None:
    """A forked child that lives on holds the guard's pipe open; the guard sees its parent's death all the same."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, how], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child, foreign = (int(one) for one in parent.stdout.readline().split())
    left = set(descendants(parent.pid)) - {child}
    try:
        parent.kill()
        parent.wait()
        assert gone(child, 1.5 if how == "bye" else 60.0) == (how != "bye")
        assert alive(foreign), "what bears no mark is none of the guard's"
    finally:
        for pid in {child, *left}:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_h32_what_starts_while_its_owner_dies_ends_too(tmp_path: Path) -> None:
    """A daemon of a daemon, begun after the owner's death, has no living ancestor that anybody could have noted.

    The guard looks seconds after the death, so that the daemon has begun by then on a busy machine too.
    """
    script = f"""
import os, subprocess, sys, time
from fedlora.simulation.watch import Guard
guard = Guard(4.0)
late = "(sleep 0.3; setsid sh -c 'echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/late; exec sleep 600') &"
subprocess.Popen(["sh", "-c", late], start_new_session=True, env={{**os.environ, **guard.environment}})
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while not (tmp_path / "late").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(int((tmp_path / "late").read_text()), 60.0)


def test_a_guard_leaves_no_process_of_its_own() -> None:
    before = set(descendants(os.getpid()))  # another test's may be on their way out
    child = subprocess.Popen(["sleep", "600"])
    try:
        guard = Guard()
        assert len(set(descendants(os.getpid())) - before) == 2
        guard.close()
        guard.close()
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
    old = subprocess.Popen(["sleep", "600"])
    guard = Guard(0.1)
    new = subprocess.Popen([sys.executable, "-c", FAMILY], env={**os.environ, **guard.environment})
    (mark,) = [f"{name}={value}" for name, value in guard.environment.items() if name.startswith("FEDLORA")]
    try:
        while len(marked(mark)) < 3:
            time.sleep(0.05)
        guard.abort()
        assert marked(mark) == []
        assert new.wait(timeout=10) == -signal.SIGKILL
        assert old.poll() is None
    finally:
        old.kill()
        old.wait()


def test_what_ray_starts_inherits_the_mark_and_the_guard_is_there_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a start that fails leaves neither marks in this process's environment nor a guard that waits."""
    import ray

    seen: list[tuple[str | None, str | None, int]] = []
    before = set(descendants(os.getpid()))

    def broken(**options: object) -> None:
        new = set(descendants(os.getpid())) - before
        seen.append((os.environ.get("FEDLORA_RAY_OWNER"), os.environ.get("SPT_NOENV"), len(new)))
        raise RuntimeError("no port")

    monkeypatch.setattr(ray, "init", broken)
    with pytest.raises(SimulationError, match="no port"):
        cluster._start(1, 0.0, {})
    ((owner, keep, guards),) = seen
    assert owner is not None
    assert len(owner) == 32
    assert (keep, guards) == ("1", 1)
    assert "FEDLORA_RAY_OWNER" not in os.environ
    deadline = time.monotonic() + 30
    while set(descendants(os.getpid())) - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not set(descendants(os.getpid())) - before
